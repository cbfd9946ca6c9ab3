// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/table/detail/server_worker.hpp>
#include <heddle/table/settings.hpp>
#include <heddle/table/sparse_table.hpp>

#include <chrono>
#include <deque>
#include <functional>
#include <utility>

#include <unistd.h>

namespace heddle {
inline namespace v0 {

/// @brief The part of a table's settings that is for one server: an equal run of virtual shards.
/// @param s Settings of the table. @param server Rank. @param servers How many.
template <class Settings> Settings settings_of_server(Settings s, int server, int servers) {
  if (s.shard_bits > 20 || servers < 1 || server < 0 || server >= servers || servers > (1 << s.shard_bits))
    throw argument_error("heddle::settings_of_server: server " + std::to_string(server) + " of " +
                         std::to_string(servers) + " with shard_bits " + std::to_string(s.shard_bits) +
                         "; allowed are at most 2^shard_bits servers");
  s.first_shard =
      detail::first_shard_of(static_cast<std::uint32_t>(server), static_cast<std::uint32_t>(servers), s.shard_bits);
  s.last_shard =
      detail::first_shard_of(static_cast<std::uint32_t>(server) + 1, static_cast<std::uint32_t>(servers), s.shard_bits);
  return s;
}

/// @brief A parameter server: answers the workers' `sharded_table`s for one part of a sparse table.
///
/// Each worker numbers its pushes, from 1 on; the server takes them in order, whatever is lost, repeated or reordered
/// on the way, and notes in each shard what was applied, so that a saved table carries it. A server that starts again
/// loads what it has saved; workers see it fall behind and repeat what is not in it. Before a worker's next
/// `sharded_table` is answered for the first time, what its former one has pushed is saved.
///
/// Wire:   per row pulled 8 bytes and its weights, 1 more where it is read; per row pushed 8 bytes, a gradient, and 12 of
///         sightings where there are.
/// State:  besides the table, pushes that came early or wait for their step.
/// Sync:   serve() and run() work on the caller's thread, one at a time; the table may be read meanwhile. A save stops
///         the service until it is written.
/// Throws: argument_error; file_error if a save of `save_every` fails (one that a worker has asked for fails that
///         worker's call); comm_error from run() if a worker has died and `on_death` isn't `go_on`, when all have gone.
/// @tparam Table The `sparse_table`. @tparam Messenger Any messenger.
template <class Table, messenger Messenger> class table_server {
  using key_type = typename Table::key_type;
  using tag = detail::table_tag;
  using status = detail::reply_status;
  using worker = detail::server_worker;
  using request = detail::server_request;
  using clock = std::chrono::steady_clock;
  static constexpr std::size_t dim = Table::dim;
  // Worker w + whole numbers the pushes of w that have taken effect in all shards: a table saved while a push is under
  // way may have it in some. Worker w + presence numbers how often w has left and come back.
  static constexpr std::uint32_t whole = 0x4000, presence = 0x8000;

 public:
  /// @param table This server's part, see `settings_of_server`. @param m The messenger. @param o Settings. Both outlive
  /// it. If a save is there, it is loaded.
  table_server(Table& table, Messenger& m, const server_options& o)
      : table_(&table), messenger_(&m), options_(o), layout_(table.layout_number()) {
    if (o.servers < 1 || o.workers < 1 || o.workers > 0x3fff || m.rank() >= o.servers ||
        m.size() < o.servers + o.workers)
      throw argument_error("heddle::table_server: " + std::to_string(o.servers) + " servers and " +
                           std::to_string(o.workers) + " workers; allowed are up to 16383 workers and together " +
                           std::to_string(m.size()) + " ranks, of which this is " + std::to_string(m.rank()));
    const auto part = settings_of_server(table.options(), m.rank(), o.servers);
    if (part.first_shard != table.options().first_shard || part.last_shard != table.options().last_shard)
      throw argument_error("heddle::table_server: the table doesn't hold this server's shards; use settings_of_server");
    if (!o.path.empty() && ::access(o.path.c_str(), F_OK) == 0) table.load(o.path);
    workers_.resize(static_cast<std::size_t>(o.workers));
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      worker& x = workers_[w];
      x.taken = table.sequence_of(static_cast<std::uint32_t>(w) + whole);
      // None, if the shards were another server's: that one's pushes.
      if (x.taken == 0) x.taken = table.sequence_of(static_cast<std::uint32_t>(w));
      x.applied = x.saved = x.taken;
      x.voice = o.servers + static_cast<int>(w);
      all_applied_ += x.applied;
      x.presence = table.sequence_of(static_cast<std::uint32_t>(w) + presence);
    }
    for (worker& w : workers_) w.read_at = all_applied_ - w.applied;
  }

  /// @brief Serves what has come and comes within a time. @param longest How long to wait for something.
  /// @return Whether anything has come.
  bool serve(std::chrono::nanoseconds longest) {
    int came = 0;
    for (std::optional<message> m = messenger_->receive(longest); m; m = messenger_->receive({})) {
      heed(*m);
      if (!options_.path.empty() && options_.save_every != 0 && since_save_ >= options_.save_every) save();
      answer_waiting();
      if (++came == 1000) break;  // so that the caller also has a say
    }
    return came != 0;
  }
  /// @brief Serves until every worker has left or died, and then until nobody can be waiting for an answer any more.
  void run() {
    const auto start = clock::now();
    for (auto quiet = start; !all_gone() || (workers_.anyone_here() && clock::now() - quiet < options_.linger);) {
      if (serve(std::chrono::milliseconds(20)) || !all_gone()) quiet = clock::now();
      if (clock::now() - start >= options_.join) give_up_absent();
    }
    if (const worker* const w = workers_.died(options_)) {
      const int rank = options_.servers + static_cast<int>(w - workers_.data());
      throw comm_error("table_server::run", messenger_->rank(), rank, w->epitaph);
    }
  }
  /// Saves this server's part now; from then on the workers needn't repeat what is in it.
  void save() {
    if (options_.path.empty()) throw argument_error("heddle::table_server: save: no path was given");
    table_->save(options_.path);
    for (worker& w : workers_) w.saved = w.applied;
    since_save_ = 0;
  }
  /// @brief Who is told the keys of rows that a push has dropped for a bound, as `table_report::gone` says.
  /// @param f Called with some keys behind such a push, on the thread that serves; it must not throw. A server that has
  /// started again repeats pushes, and names keys again that went since the save.
  void on_gone(std::function<void(std::span<const key_type>)> f) { tell_gone_ = std::move(f); }
  /// Whether every worker has left or died.
  bool all_gone() const noexcept {
    for (const worker& w : workers_)
      if (!w.left() && !workers_.lost(w, options_)) return false;
    return true;
  }
  /// Pushes of a worker that have taken effect.
  std::uint64_t applied(int number) const { return workers_.at(static_cast<std::size_t>(number)).applied; }
  /// How old the rows were by which pushes were made, since this object was.
  const table_staleness& staleness() const noexcept { return staleness_; }

 private:
  void heed(message& m) {
    const int rank = m.from.rank - options_.servers;
    if (rank < 0 || rank >= options_.workers) return;  // another server's news
    worker& w = workers_[static_cast<std::size_t>(rank)];
    w.heard = w.heard || m.kind == message_kind::joined || m.kind == message_kind::data;
    switch (m.kind) {
      case message_kind::joined:
        w.here = true;
        for (worker& x : workers_)
          if (x.voice == m.from.rank) x.dead = false;
        return;
      case message_kind::died:
      case message_kind::left:  // without a word to this server: as good as dead
        std::erase_if(waiting_, [&](const request& r) { return r.from.rank == m.from.rank; });
        w.here = false;
        for (worker& x : workers_) {
          if (x.voice != m.from.rank || x.left()) continue;
          x.dead = true;
          x.died_at = clock::now();
          x.epitaph = m.body.text();
        }
        apply_ready();
        return;
      case message_kind::refused: messenger_->renew(); return;
      case message_kind::gap: return;  // the worker repeats what isn't answered
      case message_kind::data: break;
    }
    const detail::table_request head = detail::head_of(m.body);
    request r{m.tag, m.id, m.from, std::move(m.body), static_cast<std::size_t>(rank), head};
    if (head.stands_for > workers_.size())
      return fail(r, "this rank stands for worker " + std::to_string(head.stands_for - 1) + ", which there isn't");
    if (head.stands_for != 0) r.worker = head.stands_for - 1u;
    worker& of = workers_[r.worker];
    if (head.object < of.object) {  // late, of a former sharded_table; or of a new one by a clock behind that one's
      if (static_cast<tag>(r.tag) == tag::hello) return reply(of, r, status::outdated);
      if (of.voice != r.from.rank) fail(r, "its data was given to rank " + std::to_string(of.voice));
      return;
    }
    attempt(r, [&] { take(of, std::move(r)); });
  }
  // Who has sent a request learns that it was refused.
  template <class Function> void attempt(const request& r, Function f) {
    try {
      f();
    } catch (const argument_error& e) {
      fail(r, e.what());
    } catch (const file_error& e) {
      fail(r, e.what());
    }
  }

  void take(worker& w, request&& r) {
    const detail::table_request& head = r.head;
    detail::byte_reader in(r.body.data(), r.body.size(), "a request of worker " + std::to_string(r.worker));
    in.take(sizeof head);
    if (head.layout != layout_) in.refuse("its table has other rows than the server's");
    const tag what = static_cast<tag>(r.tag);
    // A server that has started again may not have heard the greeting. What was said before a save that it has doesn't
    // count for one.
    const bool is_push = what == tag::push;
    if (what == tag::hello || (head.object != w.object && (is_push ? r.id > w.taken : head.pushes >= w.taken)))
      greet(w, r, in);
    switch (what) {
      case tag::hello: return reply(w, r, status::done);
      case tag::push:
        w.put(r.id, std::move(r.body));
        if (r.id <= w.applied && head.last && !w.left()) {
          // A former life left with this push; its replacement, which had to repeat it for another server, leaves too.
          turn(w, workers_.number_of(w));
          w.saved = (std::min)(w.saved, w.applied - 1);  // the save that it asks for now shall have this
        }
        apply_ready();
        // Where the log begins before what is saved, the worker doesn't know of the save yet.
        if (head.crowded && !options_.path.empty() && head.first > w.saved && w.applied > w.saved) save();
        return reply(w, r, status::done);
      case tag::pull:
      case tag::read:
      case tag::save:
        if (head.pushes > w.taken) return reply(w, r, status::behind);
        if (std::none_of(waiting_.begin(), waiting_.end(),
                         [&](const request& q) { return q.from.rank == r.from.rank && q.id == r.id; }))
          waiting_.push_back(std::move(r));
        return;
      case tag::orphan: return reply(w, r, status::done, orphan_for(r.from.rank, in));
      default: in.refuse("its tag is " + std::to_string(r.tag));
    }
  }

  // A new sharded_table, which goes on behind what was taken.
  void greet(worker& w, const request& r, detail::byte_reader& in) {
    if (r.head.gathers && (options_.ordered || options_.staleness != server_options::unbounded ||
                           options_.on_death == worker_death::reassign))
      in.refuse("it gathers pushes, which servers that count them (ordered, staleness, reassign) don't allow");
    if (w.object == r.head.object) return;
    // The former one's log is gone, and the new one's begins behind what it is told now: a save must have all that.
    if (!options_.path.empty() && w.saved < w.applied) save();
    w.object = r.head.object;
    w.voice = r.from.rank;
    w.dead = false;
    w.read_at = all_applied_ - w.applied;
    // What waits for its step can be in no save. Who resumes makes it again; behind another one it would be lost.
    if (!options_.path.empty() && r.head.resumes) w.taken = w.applied;
    w.kept.erase(w.kept.upper_bound(w.taken), w.kept.end());
    std::erase_if(waiting_, [&](const request& q) { return q.from.rank == r.from.rank; });
    if (w.left() && !r.head.last) turn(w, workers_.number_of(w));
  }
  // A dead worker whose data goes to this rank: the one that it had before, if it hasn't finished that.
  std::uint32_t orphan_for(int rank, const detail::byte_reader& in) {
    if (options_.on_death != worker_death::reassign)
      in.refuse("it asks for a dead worker's data, which the server gives to nobody; see worker_death::reassign");
    std::uint32_t said = detail::no_orphan;
    for (std::uint32_t i = 0; i < workers_.size(); ++i) {
      worker& w = workers_[i];
      if (w.left()) continue;
      const bool had = w.voice == rank && rank != options_.servers + static_cast<int>(i);
      said = detail::no_orphan_yet;
      if (!had && !w.dead) continue;
      w.voice = rank;
      w.dead = false;
      return i;
    }
    return said;
  }
  // Holds those for dead who were never heard of.
  void give_up_absent() {
    for (worker& w : workers_) {
      if (workers_[static_cast<std::size_t>(w.voice - options_.servers)].heard || w.left() || w.dead) continue;
      w.dead = true;
      w.died_at = clock::now() - options_.join;
      w.epitaph = "rank " + std::to_string(w.voice) + " has not come";
      apply_ready();
      answer_waiting();
    }
  }

  void answer_waiting() {
    for (std::size_t i = 0; i < waiting_.size();) {
      request& r = waiting_[i];
      worker& w = workers_[r.worker];
      const detail::table_request& head = r.head;
      const worker* const dead = workers_.died(options_);
      const bool saving = static_cast<tag>(r.tag) == tag::save;
      const bool own =
          w.applied >= head.pushes || (!saving && options_.ordered && head.pushes - w.applied <= options_.staleness);
      if (!dead && (!own || (!saving && workers_.laggard(head.pushes, options_)))) {
        ++i;
        continue;
      }
      request now = std::move(r);
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
      if (dead) {
        fail(now, dead->epitaph);
        continue;
      }
      attempt(now, [&] { answer(w, now); });
    }
  }

  void answer(worker& w, const request& r) {
    if (static_cast<tag>(r.tag) == tag::save) {
      if (!options_.path.empty() && w.saved < w.applied) save();
      return reply(w, r, status::done);
    }
    detail::byte_reader in(r.body.data(), r.body.size(), "a pull");
    in.take(sizeof r.head);
    take_keys(in, r.head);
    floats_.resize(keys_.size() * dim);
    found_.resize(keys_.size());
    if (static_cast<tag>(r.tag) == tag::pull)
      table_->preview(keys_, floats_);  // makes no rows, as after this server's death nobody pulls again
    else
      table_->read(keys_, floats_, found_);
    w.read_at = all_applied_ - w.applied;
    reply(w, r, status::done);
  }

  void take_keys(detail::byte_reader& in, const detail::table_request& head) {
    if (head.items > in.left() / sizeof(key_type)) in.refuse("it ends early");
    keys_.resize(static_cast<std::size_t>(head.items));
    const std::byte* const from = in.take(keys_.size() * sizeof(key_type));
    if (!keys_.empty()) std::memcpy(keys_.data(), from, keys_.size() * sizeof(key_type));
  }

  // Applies what may be applied now.
  void apply_ready() {
    if (!options_.ordered) {
      for (std::size_t i = 0; i < workers_.size(); ++i)
        while (workers_[i].applied < workers_[i].taken) apply(workers_[i], static_cast<std::uint32_t>(i));
      return;
    }
    for (;;) {
      const auto over = [&](const worker& w) {
        return w.applied == w.taken && (w.left() || workers_.passed_over(w, options_));
      };
      std::uint64_t step = server_options::unbounded;
      for (const worker& w : workers_)
        if (!over(w)) step = (std::min)(step, w.applied);
      // A step takes effect as a whole, so that whoever still reads for it sees none of it.
      for (const worker& w : workers_)
        if (!over(w) && w.taken <= step) return;
      if (step == server_options::unbounded) return;
      for (std::size_t i = 0; i < workers_.size(); ++i)
        if (workers_[i].applied == step && workers_[i].taken > step) apply(workers_[i], static_cast<std::uint32_t>(i));
    }
  }

  void apply(worker& w, std::uint32_t number) {
    const auto found = w.kept.find(w.applied + 1);
    const request r{
        .tag = 0, .id = 0, .from = w.voice, .body = {}, .worker = number, .head = detail::head_of(found->second)};
    attempt(r, [&] { apply(w, number, found->second); });  // its own worker learns it, whoever's message set it off
    w.kept.erase(found);                                  // not after std::bad_alloc: it is still to be applied
    if (!r.head.last) {
      const std::uint64_t others = all_applied_ - w.applied - w.read_at;
      ++staleness_.pushes;
      staleness_.sum += others;
      staleness_.most = (std::max)(staleness_.most, others);
    }
    ++w.applied;
    ++all_applied_;
    ++since_save_;
  }
  void apply(worker& w, std::uint32_t number, const payload& body) {
    detail::byte_reader in(body.data(), body.size(), "a push of worker " + std::to_string(number));
    const auto head = in.get<detail::table_request>();
    take_keys(in, head);
    const std::size_t n = keys_.size();
    std::vector<float> sight[3];
    if (head.sightings) {
      for (auto& s : sight) {
        s.resize(n);
        detail::take_floats(in, s.data(), n, false);
      }
    }
    floats_.resize(n * dim);
    detail::take_floats(in, floats_.data(), floats_.size(), head.half != 0);
    const push_options o{.lr = head.lr,
                         .shows = sight[1],
                         .clicks = sight[2],
                         .times = sight[0],
                         .worker = number,
                         .sequence = w.applied + 1,
                         .summed = true};
    const auto report = table_->push(keys_, floats_, o);
    table_->note_sequence(number, o.sequence);  // also of a push that touched no shard
    table_->note_sequence(number + whole, o.sequence);
    if (head.last && !w.left()) turn(w, number);
    if (tell_gone_ && !report.gone.empty()) tell_gone_(report.gone);
  }
  // It leaves, or comes back.
  void turn(worker& w, std::uint32_t number) {
    table_->note_sequence(number + presence, w.presence + 1);
    ++w.presence;
  }

  void reply(const worker& w, const request& r, status s, std::uint32_t said = 0) {
    const tag what = static_cast<tag>(r.tag);
    detail::table_reply head{.next = w.taken + 1,
                             .covered = options_.path.empty() ? w.applied : w.saved,
                             .object = r.head.object,
                             .status = s,
                             .in_steps = options_.ordered && options_.staleness == 0};
    const bool rows = s == status::done && (what == tag::pull || what == tag::read);
    if (rows) head.half = r.head.half;
    out_.clear();
    out_.put(head);
    if (rows) detail::put_floats(out_, floats_.data(), floats_.size(), head.half != 0);
    if (rows && what == tag::read) out_.put(found_.data(), found_.size());
    if (what == tag::orphan) out_.put(said);
    if (s == status::outdated) out_.put(w.object);
    send(r.from, r.id, what == tag::push);
  }
  void fail(const request& r, const std::string& why) {
    out_.clear();
    out_.put(detail::table_reply{.object = r.head.object, .status = status::failed});
    out_.put(why.data(), why.size());
    send(r.from, r.id, false);
  }
  // Without waiting: who gets no reply asks again.
  void send(address to, std::uint64_t id, bool push) {
    try {
      (void)messenger_->try_send(to, static_cast<std::uint32_t>(tag::reply), push ? 0 : id,
                                 payload(std::span<const std::byte>(out_.data(), out_.size())));
    } catch (const peer_error&) {
    } catch (const congestion_error&) {
    }
  }

  Table* table_;
  Messenger* messenger_;
  server_options options_;
  std::uint64_t layout_, since_save_ = 0, all_applied_ = 0;
  table_staleness staleness_;
  detail::server_workers workers_;
  std::deque<request> waiting_;
  std::vector<key_type> keys_;
  std::vector<float> floats_;
  std::vector<std::uint8_t> found_;  // of keys_, whether they have a row
  std::function<void(std::span<const key_type>)> tell_gone_;
  detail::byte_writer out_;
};

}  // namespace v0
}  // namespace heddle
