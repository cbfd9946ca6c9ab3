// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/table/detail/server_part.hpp>
#include <heddle/table/detail/server_worker.hpp>
#include <heddle/table/settings.hpp>
#include <heddle/table/sparse_table.hpp>

#include <chrono>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief A parameter server: answers the workers' `sharded_table`s for one part of a sparse table.
///
/// Each worker numbers its pushes, from 1 on; the server takes them in order, whatever is lost, repeated or reordered
/// on the way, and notes in each shard what was applied, so that a saved table carries it. A server that starts again
/// loads what it has saved; workers see it fall behind and repeat what is not in it. Before a worker's next
/// `sharded_table` is answered for the first time, what its former one has pushed is saved.
///
/// Wire:   per row pulled 8 bytes and its weights, 1 more where it is read; per row pushed 8 bytes, a gradient, and 12
///         of sightings where there are; per row visited, key, statistics, state and weights.
/// State:  besides the table, pushes that came early or wait for their step; with `path`, what the last erase and evict
///         of each worker's threads have done, in the table, and in its saves there.
/// Sync:   serve() and run() work on the caller's thread, one at a time; the table may be read meanwhile. Files are
///         written by a thread of its own, one at a time, while it serves; save() waits.
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
  using op = detail::table_op;

 public:
  /// @param table This server's part, see `settings_of_server`. @param m The messenger. @param o Settings. Both outlive
  /// it. If a save is there, it is loaded.
  table_server(Table& table, Messenger& m, const server_options& o)
      : table_(detail::checked_server(table, m, o), o.path),
        messenger_(&m),
        options_(o),
        layout_(table.layout_number()) {
    workers_.resize(static_cast<std::size_t>(o.workers));
    table_.recall(workers_);
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      workers_[w].voice = o.servers + static_cast<int>(w);
      all_applied_ += workers_[w].applied;
    }
    for (worker& w : workers_) w.read_at = all_applied_ - w.applied;
  }

  /// @brief Serves what has come and comes within a time. @param longest How long to wait for something.
  /// @return Whether anything has come.
  bool serve(std::chrono::nanoseconds longest) {
    int came = 0;
    if (table_.writes()) longest = (std::min)(longest, std::chrono::nanoseconds(1'000'000));
    for (std::optional<message> m = messenger_->receive(longest); m; m = messenger_->receive({})) {
      heed(*m);
      tend();
      if (++came == 1000) break;  // so that the caller also has a say
    }
    tend();
    return came != 0;
  }
  /// @brief Serves until every worker has left or died, and then until nobody can be waiting for an answer any more.
  void run() {
    const auto start = clock::now();
    // Who has left may still wait to hear it, also of a life of this server that was killed, until its messenger ends.
    const auto waited_for = [&] {
      return std::any_of(workers_.begin(), workers_.end(),
                         [](const worker& w) { return w.here || (w.left() && !w.parted); });
    };
    for (auto quiet = start; !all_gone() || (waited_for() && clock::now() - quiet < options_.linger);) {
      if (serve(std::chrono::milliseconds(20)) || !all_gone()) quiet = clock::now();
      if (clock::now() - start >= options_.join) give_up_absent();
    }
    while (table_.writes()) end_writing();
    if (const worker* const w = workers_.died(options_)) {
      const int rank = options_.servers + static_cast<int>(w - workers_.data());
      throw comm_error("table_server::run", messenger_->rank(), rank, w->epitaph);
    }
  }
  /// Saves this server's part now, whole, and apart from files of which there are deltas; from then on the workers
  /// needn't repeat what is in it.
  void save() {
    if (options_.path.empty()) throw argument_error("heddle::table_server: save: no path was given");
    while (table_.writes()) end_writing();
    begin_save();
    const std::string why = end_writing();
    if (!why.empty()) throw file_error(why);
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
        w.parted = false;
        for (worker& x : workers_)
          if (x.voice == m.from.rank) x.dead = false;
        return;
      case message_kind::died:
      case message_kind::left:  // without a word to this server: as good as dead
        std::erase_if(waiting_, [&](const request& r) { return r.from.rank == m.from.rank; });
        w.here = false;
        w.parted = true;
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
          table_.turn(w, workers_.number_of(w));
          w.saved = (std::min)(w.saved, w.applied - 1);  // the save that it asks for now shall have this
          w.in_save = (std::min)(w.in_save, w.saved);
        }
        apply_ready();
        // Where the log begins before what is saved, the worker doesn't know of the save yet.
        save_due_ = save_due_ || (head.crowded && !saves() && head.first > w.saved && w.applied > w.saved);
        return reply(w, r, status::done);
      case tag::pull:
      case tag::read:
      case tag::save:
      case tag::command:
        if (head.pushes > w.taken) return reply(w, r, status::behind);
        if (told(w, r, in)) return;
        if (asked_ && asked_->from.rank == r.from.rank && asked_->id == r.id) return reply(w, r, status::working);
        for (const request& q : waiting_) {
          if (q.from.rank != r.from.rank || q.id != r.id) continue;
          if (table_.writes() && what != tag::pull && what != tag::read) reply(w, r, status::working);
          return;
        }
        waiting_.push_back(std::move(r));
        return;
      case tag::orphan:
        if (options_.on_death != worker_death::reassign)
          in.refuse("it asks for a dead worker's data, which the server gives to nobody; see worker_death::reassign");
        return reply(w, r, status::done, workers_.orphan_for(r.from.rank, options_));
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
    w.answers.clear();
    w.open = 0;
    w.voice = r.from.rank;
    w.dead = false;
    w.read_at = all_applied_ - w.applied;
    // What waits for its step can be in no save. Who resumes makes it again; behind another one it would be lost.
    if (!options_.path.empty() && r.head.resumes) w.taken = w.applied;
    w.kept.erase(w.kept.upper_bound(w.taken), w.kept.end());
    std::erase_if(waiting_, [&](const request& q) { return q.from.rank == r.from.rank; });
    if (w.left() && !r.head.last) table_.turn(w, workers_.number_of(w));
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
      const tag what = static_cast<tag>(r.tag);
      // What says nothing of the rows needn't wait for others; what isn't rows of some keys is never as of less.
      const bool own = what == tag::save || (what == tag::command && head.op == op::outcome);
      const bool slack = (what == tag::pull || what == tag::read) && options_.ordered;
      const bool applied = w.applied >= head.pushes || (slack && head.pushes - w.applied <= options_.staleness);
      const bool free = applied && (own || !workers_.laggard(head.pushes, options_));
      if (!dead && (!free || must_wait(w, r))) {
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

  // Whether what else it asks for isn't possible now.
  bool must_wait(const worker& w, const request& r) {
    if (static_cast<tag>(r.tag) == tag::save) {
      const bool has = options_.path.empty() || w.saved >= r.head.pushes;
      save_due_ = save_due_ || (!has && !(saves() && w.in_save >= r.head.pushes));
      return !has;
    }
    return static_cast<tag>(r.tag) == tag::command && r.head.op >= op::full && table_.writes();
  }
  // Whether a command was answered before, and needn't be or is now, again.
  bool told(worker& w, const request& r, detail::byte_reader& in) {
    if (static_cast<tag>(r.tag) != tag::command) return false;
    w.open = (std::max)(w.open, in.get<std::uint64_t>());
    w.answers.erase(w.answers.begin(), w.answers.lower_bound(w.open));
    if (r.id < w.open) return true;
    const auto found = w.answers.find(r.id);
    if (found == w.answers.end()) return false;
    reply(w, r, found->second.status, found->second.body);
    return true;
  }

  void answer(worker& w, request& r) {
    if (static_cast<tag>(r.tag) == tag::save) return reply(w, r, status::done);
    if (static_cast<tag>(r.tag) == tag::command) return obey(w, r);
    detail::byte_reader in(r.body.data(), r.body.size(), "a pull");
    in.take(sizeof r.head);
    detail::byte_writer rows;
    table_.put_keys_rows(r.head, in, static_cast<tag>(r.tag) == tag::read, rows);
    w.read_at = all_applied_ - w.applied;
    reply(w, r, status::done, {rows.data(), rows.size()});
  }
  void obey(worker& w, request& r) {
    detail::byte_reader in(r.body.data(), r.body.size(), "a command of worker " + std::to_string(r.worker));
    in.take(sizeof r.head);
    if (told(w, r, in)) return;
    if (r.head.op >= op::full) {
      table_.begin_file(r.head.op, in, messenger_->rank(), options_.servers);
      asked_ = std::move(r);
      return;
    }
    detail::byte_writer said;
    table_.put_answer(r.head.op, in, {.worker = workers_.number_of(w), .object = r.head.object, .command = r.id}, said);
    reply(w, r, status::done, {said.data(), said.size()});
  }
  void begin_save() {
    save_due_ = false;
    since_save_ = 0;
    table_.begin_save(workers_);
  }
  // A file is there, or not: who has waited for it learns it, or it throws. Returns why a save isn't there.
  std::string end_writing() {
    detail::server_answer a = table_.end_writing();
    if (!asked_) {
      if (a.status == status::refused)
        return save_failed({reinterpret_cast<const char*>(a.body.data()) + 1, a.body.size() - 1});
      for (worker& w : workers_) w.saved = w.in_save;
      return {};
    }
    const request r = std::move(*asked_);
    asked_.reset();
    worker& w = workers_[r.worker];
    if (w.object != r.head.object) return {};
    reply(w, r, a.status, a.body);
    w.answers[r.id] = std::move(a);
    return {};
  }
  std::string save_failed(std::string why) {
    const auto told = std::erase_if(waiting_, [&](const request& q) {
      if (static_cast<tag>(q.tag) != tag::save) return false;
      fail(q, why);
      return true;
    });
    if (told == 0) throw file_error(why);
    return why;
  }
  bool saves() const noexcept { return table_.writes() && !asked_; }
  // What isn't anybody's message.
  void tend() {
    if (table_.has_written()) end_writing();
    save_due_ = save_due_ || (options_.save_every != 0 && since_save_ >= options_.save_every);
    answer_waiting();
    if (save_due_ && !table_.writes() && !options_.path.empty()) begin_save();
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
    attempt(r, [&] {  // its own worker learns it, whoever's message set it off
      const auto gone = table_.apply(w, number, found->second);
      if (tell_gone_ && !gone.empty()) tell_gone_(gone);
    });
    w.kept.erase(found);  // not after std::bad_alloc: it is still to be applied
    if (!r.head.last && r.head.op == op::gradients) {
      const std::uint64_t others = all_applied_ - w.applied - w.read_at;
      ++staleness_.pushes;
      staleness_.sum += others;
      staleness_.most = (std::max)(staleness_.most, others);
    }
    ++w.applied;
    ++all_applied_;
    ++since_save_;
  }
  void reply(const worker& w, const request& r, status s, std::uint32_t said) {
    reply(w, r, s, std::as_bytes(std::span(&said, 1)));
  }
  void reply(const worker& w, const request& r, status s, std::span<const std::byte> said = {}) {
    const tag what = static_cast<tag>(r.tag);
    detail::table_reply head{.next = w.taken + 1,
                             .covered = options_.path.empty() ? w.applied : w.saved,
                             .object = r.head.object,
                             .status = s,
                             .in_steps = options_.ordered && options_.staleness == 0};
    if (what == tag::pull || what == tag::read) head.half = r.head.half;
    out_.clear();
    out_.put(head);
    out_.put(said.data(), said.size());
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

  detail::server_part<Table> table_;
  Messenger* messenger_;
  server_options options_;
  std::uint64_t layout_, since_save_ = 0, all_applied_ = 0;
  table_staleness staleness_;
  detail::server_workers workers_;
  std::deque<request> waiting_;
  bool save_due_ = false;
  std::optional<request> asked_;  // the command whose file is being written; none: a save of this server's part
  std::function<void(std::span<const key_type>)> tell_gone_;
  detail::byte_writer out_;
};

}  // namespace v0
}  // namespace heddle
