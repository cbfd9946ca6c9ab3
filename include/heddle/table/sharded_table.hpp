// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/table/detail/gathered_push.hpp>
#include <heddle/table/detail/hot_rows.hpp>
#include <heddle/table/detail/table_requests.hpp>
#include <heddle/table/sparse_table.hpp>

#include <atomic>
#include <chrono>
#include <limits>
#include <map>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief A worker's view of a sparse table that is spread over servers, with the interface of a `sparse_table`.
///
/// Rows are made by pushes alone, which are repeated where a server has lost them: a key without a row that a pull
/// would give one reads how that row would begin.
/// A batch's duplicates, and the pushes of the worker's threads where `gather` says so, are summed before they travel;
/// each server gets one message. Pushes are numbered per server and kept until the server's last save covers them;
/// requests are repeated, ever more seldom, until they are answered. So any message may be lost, repeated or overtaken,
/// and a server may start again from its save: the table is the same. A pull sees all pushes that this worker made
/// before, but for cached rows. `erase`, `advance` and `evict` are numbered as pushes are, and count as pushes where
/// workers must push equally often: the others push nothing meanwhile, `push({}, {})`.
///
/// Wire:   see `table_server`; keys of a batch once each, one message per server and call.
/// State:  up to `log_bytes` per server; `cached_rows` rows.
/// Sync:   any thread may call any member. push returns when the message is handed over, and waits while a log is full;
///         advance too; all others wait for the servers. A thread of its own receives.
/// Throws: argument_error; comm_error naming the server if it doesn't answer within `patience`, or refuses, or says
///         that a worker has died; then this object is of no more use, but what its log holds stays until it ends.
/// @tparam Table The servers' `sparse_table` type. @tparam Messenger Any messenger.
template <class Table, messenger Messenger> class sharded_table {
  using key_type = typename Table::key_type;
  using tag = detail::table_tag;
  using op = detail::table_op;
  using Guard = decltype(Table::settings::guard);
  using clock = std::chrono::steady_clock;
  static constexpr std::size_t dim = Table::dim;

 public:
  /// @brief A pull that is under way. Its rows come by `sharded_table::finish_pull`.
  /// It is moved, not copied; one that isn't finished gives its answers up. It must not outlive its sharded_table.
  class pending {
   public:
    pending(pending&& o) noexcept { *this = std::move(o); }  ///< The other one can't be finished.
    /// Swaps both.
    pending& operator=(pending&& o) noexcept {
      std::swap(net_, o.net_), std::swap(as_of_, o.as_of_);
      calls_.swap(o.calls_), places_.swap(o.places_), keys_.swap(o.keys_), rows_.swap(o.rows_);
      found_.swap(o.found_);
      return *this;
    }
    ~pending() {
      if (net_) net_->forget(calls_);
    }

   private:
    friend class sharded_table;
    pending() = default;
    detail::table_requests<Messenger>* net_ = nullptr;  // null: there is nothing to finish
    std::uint64_t as_of_ = 0;                           // pushes of this worker that were sent before
    std::vector<std::uint64_t> calls_;
    std::vector<std::uint32_t> places_;  // of each item, among the distinct keys
    std::vector<key_type> keys_;         // distinct
    std::vector<float> rows_;            // of those, in the end
    std::vector<std::uint8_t> found_;    // of a read, in the end: whether they have a row
  };

  /// @param s Settings of the table, all shards. @param m The messenger; this rank is a worker's. It outlives this
  /// object.
  /// @param o Settings.
  sharded_table(const typename Table::settings& s, Messenger& m, const worker_options& o)
      : settings_(s),
        options_(checked(s, m, o)),
        cache_(o.cached_rows),
        gathered_(s.guard, o.half),
        net_(m, o, Table(s).layout_number(), dim) {
    net_.start([this](clock::time_point now) {
      if (gathered_.pushes() != 0 && now - gathered_since_ >= options_.gather_for) send_gathered();
    });
  }
  sharded_table(const sharded_table&) = delete;
  sharded_table& operator=(const sharded_table&) = delete;
  /// Ends without a word: call `finish` before, or the servers hold this worker for dead when its messenger leaves.
  ~sharded_table() { net_.stop(); }

  /// @brief Reads rows as `sparse_table::preview` does. @param keys Any. @param out `dim` floats for each.
  void pull(std::span<const key_type> keys, std::span<float> out) { finish_pull(start_pull(keys), out); }
  /// @brief Reads rows and makes none. @param keys Any. @param out `dim` floats for each; 0 for a key without a row.
  /// @param found Empty, or room for a number for each: whether it has a row. @return Keys without a row.
  std::size_t read(std::span<const key_type> keys, std::span<float> out, std::span<std::uint8_t> found = {}) {
    if (!found.empty() && found.size() != keys.size())
      detail::throw_sizes("sharded_table: read", keys.size(), found.size(), "marks");
    pending p = begin(keys, tag::read);
    collect(p, out);
    std::size_t missing = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::uint8_t has = p.found_[p.places_[i]];
      missing += has == 0;
      if (!found.empty()) found[i] = has;
    }
    return missing;
  }

  /// @brief Asks for rows and returns at once: for the next batch, while this one computes. What is pushed meanwhile
  /// may or may not be in them; where servers are `ordered` with a staleness of 0, nothing of it is, and what this
  /// worker pushes waits in its log until they have answered. @param keys Any.
  pending start_pull(std::span<const key_type> keys) { return begin(keys, tag::pull); }
  /// @brief Waits for the rows of a pull. @param p What `start_pull` returned. @param out `dim` floats for each key.
  /// Throws: argument_error for one that is finished, or of another object.
  void finish_pull(pending&& p, std::span<float> out) {
    if (p.net_ != &net_)
      throw argument_error("heddle::sharded_table: finish_pull: the pull is finished, moved away, or another object's");
    collect(p, out);
  }

  /// @brief Moves rows as `sparse_table::push` does; sent at once, or when enough is gathered.
  /// @param keys Any. @param gradients `dim` floats for each. @param o What comes with it; worker and sequence are
  /// ours.
  void push(std::span<const key_type> keys, std::span<const float> gradients, const push_options& o = {}) {
    detail::check_sizes("sharded_table: push", keys.size(), gradients.size(), dim, "floats of gradients");
    detail::check_sightings("sharded_table: push", keys.size(), {o.shows, o.clicks, o.times});
    if (!std::isfinite(o.lr)) throw argument_error("heddle::sharded_table: push: lr is " + std::to_string(o.lr));
    std::unique_lock lock(net_.mutex());
    net_.check_alive();
    net_.wait_for_room(lock);  // meanwhile other threads may have gathered, with another rate
    if (gathered_.pushes() != 0 && gathered_.lr() != o.lr) send_gathered();
    rejected_ += gathered_.add(keys, gradients, o);
    if (gathered_.pushes() == 1) gathered_since_ = clock::now();
    if (options_.gather <= 1 || gathered_.keys() >= options_.gather) send_gathered();
  }

  /// @brief Drops rows. @param keys Any. @return How many there were.
  std::size_t erase(std::span<const key_type> keys) {
    std::vector<std::vector<key_type>> of(static_cast<std::size_t>(options_.servers));
    for (const key_type k : keys)
      of[static_cast<std::size_t>(server_of(detail::mix(detail::widen_key(k))))].push_back(k);
    return change(op::erase, "erase", of).size;
  }
  /// Lets a tick pass on every server, as `sparse_table::advance` does.
  void advance() { change(op::advance, "advance"); }
  /// @brief Drops the rows that have expired on all servers. @return Their keys.
  std::vector<key_type> evict() {
    static_assert(expiring_eviction<decltype(Table::settings::eviction)>,
                  "heddle::sharded_table: evict() needs an Eviction whose rows expire");
    return change(op::evict, "evict").keys;
  }

  /// @brief f(row_view) for each row, a server and a shard after the other; f may call this object. A shard is as of
  /// one moment. @param f Any function.
  template <class Function> void for_each(Function f) {
    const auto servers = static_cast<std::uint32_t>(options_.servers);
    for (std::uint32_t k = 0; k < servers; ++k) {
      const std::uint32_t last = detail::first_shard_of(k + 1, servers, settings_.shard_bits);
      for (std::uint32_t at = detail::first_shard_of(k, servers, settings_.shard_bits); at < last;) {
        const auto said = command(op::rows, "for_each", std::as_bytes(std::span(&at, 1)), static_cast<int>(k));
        detail::byte_reader in(said[0].data(), said[0].size(), "rows of server " + std::to_string(k));
        const auto next = in.template get<std::uint32_t>();
        for (; at < next && at < last; ++at) detail::table_service<Table>::take_rows(in, f);
      }
    }
  }
  /// Rows, of all servers.
  std::size_t size() { return sum(op::size, "size"); }
  /// What the servers' tables hold: `sparse_table::bytes` of each.
  std::size_t bytes() { return sum(op::bytes, "bytes"); }
  /// `sparse_table::checksum` of the whole.
  std::uint64_t checksum() { return sum(op::checksum, "checksum"); }

  /// @name Files
  /// Every server writes its part, with all that this worker has pushed, beside training, where it runs: the names are
  /// those of `files_of_servers(path, servers)`, which `sparse_table::load` takes together, on any number of servers.
  /// Throws: file_error, argument_error: a server can't; others may have written their parts.
  /// @{

  /// See `sparse_table::save`.
  void save(const std::string& path) {
    write(op::full, "save", path);
    whole_delta_ = false;
  }
  /// See `sparse_table::save_delta`; by one worker at a time. A delta holds all rows, and is loaded in its place like
  /// any other, where this object has saved neither the full file nor a delta behind it; behind one that has failed;
  /// and of a server that has started again.
  void save_delta(const std::string& path) {
    const bool whole = whole_delta_.exchange(true);
    write(op::delta, "save_delta", std::string(whole, '\0') + path);
    whole_delta_ = false;
  }
  /// See `sparse_table::save_serving`.
  template <class Weight = float> void save_serving(const std::string& path) {
    write(op::serving, "save_serving", row<dim, Weight>::type_name() + std::string(1, '\0') + path);
  }
  /// See `sparse_table::export_text`; the files one after the other are the whole.
  void export_text(const std::string& path) { write(op::text, "export_text", path); }
  /// @}

  /// Sends what was gathered, and waits until the servers have it all.
  void flush() {
    std::unique_lock lock(net_.mutex());
    if (gathered_.pushes() != 0) send_gathered();
    net_.settle(lock, "flush");
  }
  /// Lets every server save its part where it keeps it, with all that this worker has pushed.
  void save() {
    std::unique_lock lock(net_.mutex());
    if (gathered_.pushes() != 0) send_gathered();
    net_.ask_all(lock, tag::save, "save");
  }
  /// @brief Pushes what was gathered and tells the servers that this worker pushes no more; waits until they have saved
  /// that. Where servers apply in order, this is when the others have pushed as often, or have finished.
  void finish() {
    std::unique_lock lock(net_.mutex());
    if (gathered_.pushes() != 0) send_gathered();
    std::vector<std::vector<std::byte>> bodies;
    for (int k = 0; k < options_.servers; ++k) {
      detail::table_request h = net_.head(k);
      h.last = true;
      bodies.push_back(net_.bytes_of(h, {}));
    }
    net_.post(std::move(bodies));
    net_.leave();
    net_.send_posted();
    net_.ask_all(lock, tag::save, "finish");
  }
  /// @brief Where servers say `worker_death::reassign`, after `finish`: waits until a worker has died whose data is
  /// nobody's, or all data is done. A worker makes one push per batch of a deterministic order, so that its pushes tell
  /// its place: whoever gets its number ends this object, makes one with `.resumes` and `.stands_for`, and goes on with
  /// that worker's batches behind `pushed_before()`. Each is then pushed exactly once, whoever dies.
  /// @return The dead worker; -1: there is none, and none can come. Throws: argument_error before `finish`.
  int next_orphan() {
    std::unique_lock lock(net_.mutex());
    if (!net_.leaving()) throw argument_error("heddle::sharded_table: next_orphan: it is for after finish");
    for (int k = 0; k < options_.servers;) {  // one after the other: of a worker that has left the first, the next may
      const std::uint32_t said = net_.ask_orphan(lock, k);  // not have heard
      if (said < detail::no_orphan) return static_cast<int>(said);
      if (said == detail::no_orphan) {
        ++k;
      } else {
        k = 0;
        net_.pause(lock);
      }
    }
    return -1;
  }
  /// Gradients left out or edited since they weren't finite; and sums of finite ones that weren't, or don't fit what
  /// travels, which are left out, also by `guard::raise`, as they may be found when others push.
  std::uint64_t rejected() const {
    const std::lock_guard lock(net_.mutex());
    return rejected_;
  }
  /// Pushes of this worker that all servers had when this object was made: of its former lives, and of former objects.
  std::uint64_t pushed_before() const noexcept { return net_.sent_before(); }
  /// Requests sent again since no reply came.
  std::uint64_t retries() const {
    const std::lock_guard lock(net_.mutex());
    return net_.retries();
  }
  /// Rows that the cache had.
  std::uint64_t cache_hits() const {
    const std::lock_guard lock(net_.mutex());
    return cache_hits_;
  }

 private:
  static const worker_options& checked(const typename Table::settings& s, const Messenger& m, const worker_options& o) {
    o.check();
    detail::check_shards(s);
    if (o.servers < 1 || m.rank() < o.servers || o.servers > (1 << s.shard_bits))
      throw argument_error("heddle::sharded_table: rank " + std::to_string(m.rank()) + " with " +
                           std::to_string(o.servers) + " servers; allowed are workers' ranks, behind at most " +
                           std::to_string(1 << s.shard_bits) + " servers");
    return o;
  }
  int server_of(std::uint64_t mixed) const noexcept {
    return static_cast<int>(detail::server_of(detail::shard_of(mixed, settings_.shard_bits),
                                              static_cast<std::uint32_t>(options_.servers), settings_.shard_bits));
  }
  // Everything that was pushed goes first. @param server Whom to ask; -1: all.
  std::vector<std::vector<std::byte>> command(op what, const char* name, std::span<const std::byte> body,
                                              int server = -1) {
    std::unique_lock lock(net_.mutex());
    net_.check_alive();
    if (gathered_.pushes() != 0) send_gathered();
    return net_.command(lock, what, name, server < 0 ? 0 : server, server < 0 ? options_.servers : server + 1, body);
  }
  std::uint64_t sum(op what, const char* name) {
    std::uint64_t all = 0;
    for (const auto& said : command(what, name, {}))
      all += detail::byte_reader(said.data(), said.size(), "a sum").template get<std::uint64_t>();
    return all;
  }
  void write(op what, const char* name, const std::string& path) {
    command(what, name, std::as_bytes(std::span(path.data(), path.size())));
  }
  struct changed {
    std::size_t size = 0;
    std::vector<key_type> keys;
  };
  // A change of the table, behind all pushes, with keys for each server or none.
  changed change(op what, const char* name, const std::vector<std::vector<key_type>>& of = {}) {
    std::unique_lock lock(net_.mutex());
    net_.check_alive();
    net_.wait_for_room(lock);
    if (gathered_.pushes() != 0) send_gathered();
    std::vector<std::vector<std::byte>> bodies;
    for (int k = 0; k < options_.servers; ++k) {
      detail::table_request h = net_.head(k);
      h.op = what;
      detail::byte_writer out;
      out.put(net_.next_id() + static_cast<std::uint64_t>(k));  // of the command below
      if (!of.empty()) {
        const auto& mine = of[static_cast<std::size_t>(k)];
        h.items = mine.size();
        out.put(mine.data(), mine.size() * sizeof(key_type));
      }
      bodies.push_back(net_.bytes_of(h, {out.data(), out.size()}));
    }
    net_.post(std::move(bodies));
    ++pushes_;
    cache_.clear();
    net_.send_posted();
    changed out;
    if (what == op::advance) return out;
    for (const auto& said : net_.command(lock, op::outcome, name, 0, options_.servers)) {
      detail::byte_reader in(said.data(), said.size(), "what a change has done");
      out.size += in.template get<std::uint64_t>();
      while (in.left() != 0) out.keys.push_back(in.template get<key_type>());
    }
    return out;
  }

  pending begin(std::span<const key_type> keys, tag t) {
    if (keys.size() >> 31 != 0)
      throw argument_error("heddle::sharded_table: pull: " + std::to_string(keys.size()) +
                           " keys; allowed are fewer than 2^31");
    pending p;
    p.places_.resize(keys.size());
    const std::lock_guard lock(net_.mutex());
    if (gathered_.pushes() != 0) send_gathered();  // a pull sees what was pushed before
    p.net_ = &net_;
    p.as_of_ = pushes_;
    std::map<int, std::vector<std::uint32_t>> of;
    place_of_.clear();
    std::size_t slots = 16;
    while (slots < 2 * keys.size()) slots *= 2;
    place_of_.resize(slots);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::uint64_t mixed = detail::mix(detail::widen_key(keys[i]));
      std::size_t at = mixed & (slots - 1);
      while (place_of_[at] != 0 && p.keys_[place_of_[at] - 1] != keys[i]) at = (at + 1) & (slots - 1);
      if (place_of_[at] == 0) {
        p.keys_.push_back(keys[i]);
        place_of_[at] = static_cast<std::uint32_t>(p.keys_.size());
        p.rows_.resize(p.keys_.size() * dim);
        const bool kept =
            t != tag::read && cache_.recall(keys[i], pushes_, p.rows_.data() + (p.keys_.size() - 1) * dim);
        cache_hits_ += kept;
        if (!kept) of[server_of(mixed)].push_back(static_cast<std::uint32_t>(p.keys_.size() - 1));
      }
      p.places_[i] = place_of_[at] - 1;
    }
    if (t == tag::read) p.found_.resize(p.keys_.size());
    std::vector<key_type> sent;
    for (auto& [server, items] : of) {
      sent.clear();
      for (const std::uint32_t i : items) sent.push_back(p.keys_[i]);
      detail::table_request h = net_.head(server);
      h.items = sent.size();
      p.calls_.push_back(net_.ask(server, t, h, std::as_bytes(std::span(sent)), std::move(items)));
    }
    return p;
  }

  // Waits for the rows of a pull, and puts them in the caller's order.
  void collect(pending& p, std::span<float> out) {
    if (out.size() != p.places_.size() * dim)
      throw argument_error("heddle::sharded_table: pull: " + std::to_string(p.places_.size()) + " keys and " +
                           std::to_string(out.size()) + " floats of room; allowed is as much for each");
    std::unique_lock lock(net_.mutex());
    p.net_ = nullptr;
    net_.wait(lock, p.calls_, "pull");
    for (const std::uint64_t id : p.calls_) {
      const auto c = net_.take(id);
      detail::byte_reader in(c.rows.data(), c.rows.size(), "a reply of server " + std::to_string(c.server));
      for (const std::uint32_t i : c.items) {
        detail::take_floats(in, p.rows_.data() + std::size_t{i} * dim, dim, c.half);
        if (c.tag == static_cast<std::uint32_t>(tag::pull))
          cache_.remember(p.keys_[i], p.rows_.data() + std::size_t{i} * dim, p.as_of_, pushes_, options_.cached_for);
      }
      if (c.tag != static_cast<std::uint32_t>(tag::read)) continue;
      for (const std::uint32_t i : c.items) p.found_[i] = in.get<std::uint8_t>();
    }
    lock.unlock();
    for (std::size_t i = 0; i < p.places_.size(); ++i)
      std::memcpy(out.data() + i * dim, p.rows_.data() + std::size_t{p.places_[i]} * dim, dim * sizeof(float));
  }

  // Sums what was gathered key by key, and posts a message to each server.
  void send_gathered() {
    std::size_t overflows = 0;
    net_.post(gathered_.bodies(
        options_.servers, [this](std::uint64_t mixed) { return server_of(mixed); },
        [this](int k) { return net_.head(k); }, overflows));
    gathered_.clear();
    rejected_ += overflows;
    ++pushes_;
    net_.send_posted();
  }

  typename Table::settings settings_;
  worker_options options_;
  std::uint64_t pushes_ = 0, rejected_ = 0, cache_hits_ = 0;
  std::atomic<bool> whole_delta_{true};  // the last one has failed, or may have: of a former object
  detail::hot_rows<key_type, dim> cache_;
  std::vector<std::uint32_t> place_of_;
  detail::gathered_push<key_type, dim, Guard> gathered_;
  clock::time_point gathered_since_{};
  detail::table_requests<Messenger> net_;  // last: its thread uses the others
};

}  // namespace v0
}  // namespace heddle
