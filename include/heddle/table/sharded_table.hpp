// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/table/detail/table_wire.hpp>
#include <heddle/table/sparse_table.hpp>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <thread>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief Settings of a worker's side of a sharded table.
struct worker_options {
  int servers = 1;  ///< Servers have ranks 0 .. servers - 1.
  /// Keys pushed by this worker's threads that are gathered before they are sent; 0 and 1: each push goes at once.
  std::size_t gather = 0;
  std::chrono::nanoseconds gather_for{10'000'000};  ///< And how long at most.
  bool half = false;                                ///< Weights and gradients travel as bfloat16.
  std::size_t log_bytes = std::size_t{64} << 20;  ///< Pushes kept per server until it has saved them; then push waits.
  std::size_t cached_rows = 0;                    ///< Rows kept from former pulls, a power of two, or 0.
  std::uint64_t cached_for = 1;                   ///< For how many pushes of this worker they may be used.
  std::chrono::nanoseconds retry{50'000'000};     ///< First wait for a reply; it doubles up to a second.
  std::chrono::nanoseconds patience{30'000'000'000};  ///< After so long a call without an answer fails.
};

/// @brief A worker's view of a sparse table that is spread over servers: the same calls as `sparse_table`.
///
/// A batch's duplicates, and the pushes of the worker's threads where `gather` says so, are summed before they travel;
/// each server gets one message. Pushes are numbered per server and kept until the server's last save covers them;
/// requests are repeated, ever more seldom, until they are answered. So any message may be lost, repeated or overtaken,
/// and a server may start again from its save: the table is the same. A pull sees all pushes that this worker made
/// before, but for cached rows.
///
/// Wire:   see `table_server`; keys of a batch once each, one message per server and call.
/// State:  up to `log_bytes` per server; `cached_rows` rows.
/// Sync:   any thread may call any member. push returns when the message is handed over, and waits while a log is full;
///         pull, flush, save, finish wait for the servers. A thread of its own receives.
/// Throws: argument_error; comm_error naming the server if it doesn't answer within `patience`, or refuses, or says
///         that a worker has died; then this object is of no more use, but what its log holds stays until it ends.
/// @tparam Table The servers' `sparse_table` type. @tparam Messenger Any messenger.
template <class Table, messenger Messenger> class sharded_table {
  using key_type = typename Table::key_type;
  using tag = detail::table_tag;
  using clock = std::chrono::steady_clock;
  static constexpr std::size_t dim = Table::dim;

  // A request until it is answered.
  struct call {
    int server = 0;
    std::uint32_t tag = 0;
    std::vector<std::byte> body;
    std::vector<std::uint32_t> items;  // whose rows these are
    std::vector<std::byte> rows;       // the answer
    clock::time_point due{};           // when to ask again
    std::chrono::nanoseconds wait{};
    bool half = false, answered = false;
  };
  struct link {
    std::uint64_t sent = 0;   // pushes numbered
    std::uint64_t next = 1;   // what the server expects
    std::uint64_t first = 1;  // of the log
    std::deque<std::vector<std::byte>> log;
    std::size_t bytes = 0;
    clock::time_point due{};
    std::chrono::nanoseconds wait{};
  };

 public:
  /// @brief A pull that is under way. Its rows come by `sharded_table::finish_pull`.
  class pending {
    friend class sharded_table;
    std::vector<std::uint64_t> calls_;
    std::vector<std::uint32_t> places_;  // of each item, among the distinct keys
    std::vector<key_type> keys_;         // distinct
    std::vector<float> rows_;            // of those that were cached
    std::vector<std::uint8_t> cached_;
  };

  /// @param s Settings of the table, all shards. @param m The messenger; this rank is a worker's. It outlives this
  /// object.
  /// @param o Settings.
  sharded_table(const typename Table::settings& s, Messenger& m, const worker_options& o)
      : settings_(s), messenger_(&m), options_(o), layout_(Table(s).layout_number()) {
    if (o.servers < 1 || m.rank() < o.servers || o.servers > (1 << s.shard_bits))
      throw argument_error("heddle::sharded_table: rank " + std::to_string(m.rank()) + " with " +
                           std::to_string(o.servers) + " servers; allowed are workers' ranks, behind at most " +
                           std::to_string(1 << s.shard_bits) + " servers");
    if (o.cached_rows != 0 && !std::has_single_bit(o.cached_rows))
      throw argument_error("heddle::sharded_table: cached_rows is " + std::to_string(o.cached_rows) +
                           ", allowed is 0 or a power of two");
    links_.resize(static_cast<std::size_t>(o.servers));
    cache_.resize(o.cached_rows);
    for (int k = 0; k < o.servers; ++k) messenger_->connect(k);
    receiver_ = std::thread([this] { receive(); });
    try {
      std::unique_lock lock(mutex_);
      std::vector<std::uint64_t> calls;  // a worker that has restarted goes on where its former life was
      for (int k = 0; k < o.servers; ++k) calls.push_back(ask(k, tag::hello, head(k), {}));
      wait(lock, calls, "hello");
      for (const std::uint64_t id : calls) calls_.erase(id);
      for (link& l : links_) {
        l.sent = l.next - 1;
        l.first = l.next;
      }
    } catch (...) {
      stop();
      throw;
    }
  }
  sharded_table(const sharded_table&) = delete;
  sharded_table& operator=(const sharded_table&) = delete;
  /// Ends without a word: call `finish` before, or the servers hold this worker for dead when its messenger leaves.
  ~sharded_table() { stop(); }

  /// @brief Reads rows as `sparse_table::pull` does. @param keys Any. @param out `dim` floats for each.
  void pull(std::span<const key_type> keys, std::span<float> out) { finish_pull(start_pull(keys), out); }
  /// @brief Reads rows and makes none. @param keys Any. @param out `dim` floats for each; 0 for a key without a row.
  void read(std::span<const key_type> keys, std::span<float> out) { finish_pull(begin(keys, tag::read), out); }

  /// @brief Asks for rows and returns at once: for the next batch, while this one computes. What is pushed meanwhile
  /// may or may not be in them. @param keys Any.
  pending start_pull(std::span<const key_type> keys) { return begin(keys, tag::pull); }
  /// @brief Waits for the rows of a pull. @param p What `start_pull` returned. @param out `dim` floats for each key.
  void finish_pull(pending&& p, std::span<float> out) {
    if (out.size() != p.places_.size() * dim)
      throw argument_error("heddle::sharded_table: pull: " + std::to_string(p.places_.size()) + " keys and " +
                           std::to_string(out.size()) + " floats of room; allowed is as much for each");
    std::unique_lock lock(mutex_);
    wait(lock, p.calls_, "pull");
    for (const std::uint64_t id : p.calls_) {
      const auto found = calls_.find(id);
      const call c = std::move(found->second);
      calls_.erase(found);
      detail::byte_reader in(c.rows.data(), c.rows.size(), "a reply of server " + std::to_string(c.server));
      for (const std::uint32_t i : c.items) {
        detail::take_floats(in, p.rows_.data() + std::size_t{i} * dim, dim, c.half);
        if (c.tag == static_cast<std::uint32_t>(tag::pull)) remember(p.keys_[i], p.rows_.data() + std::size_t{i} * dim);
      }
    }
    lock.unlock();
    for (std::size_t i = 0; i < p.places_.size(); ++i)
      std::memcpy(out.data() + i * dim, p.rows_.data() + std::size_t{p.places_[i]} * dim, dim * sizeof(float));
  }

  /// @brief Moves rows as `sparse_table::push` does; sent at once, or when enough is gathered.
  /// @param keys Any. @param gradients `dim` floats for each. @param o What comes with it; worker and sequence are
  /// ours.
  void push(std::span<const key_type> keys, std::span<const float> gradients, const push_options& o = {}) {
    for (const std::size_t size : {gradients.size() / dim, o.shows.size(), o.clicks.size(), o.times.size()})
      if ((size != keys.size() && size != 0) || gradients.size() != keys.size() * dim || keys.size() >> 31 != 0)
        throw argument_error("heddle::sharded_table: push: " + std::to_string(keys.size()) + " keys and " +
                             std::to_string(gradients.size()) + " floats of gradients; allowed is as much for each");
    if (!std::isfinite(o.lr)) throw argument_error("heddle::sharded_table: push: lr is " + std::to_string(o.lr));
    std::unique_lock lock(mutex_);
    check_alive();
    if (!keys_.empty() && lr_ != o.lr) send_gathered(lock);
    wait_for_room(lock);
    if (keys_.empty()) gathered_since_ = clock::now();
    lr_ = o.lr;
    keys_.insert(keys_.end(), keys.begin(), keys.end());
    gradients_.insert(gradients_.end(), gradients.begin(), gradients.end());
    const bool sightings = !o.shows.empty() || !o.clicks.empty() || !o.times.empty();
    sightings_ = sightings_ || sightings;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const float times = o.times.empty() ? 1.0f : o.times[i];
      seen_.push_back({times, o.shows.empty() ? times : o.shows[i], o.clicks.empty() ? 0.0f : o.clicks[i]});
    }
    if (options_.gather <= 1 || keys_.size() >= options_.gather) send_gathered(lock);
  }

  /// Sends what was gathered, and waits until the servers have it all.
  void flush() {
    std::unique_lock lock(mutex_);
    if (!keys_.empty()) send_gathered(lock);
    settle(lock, "flush");
  }
  /// Lets every server save its part, with all that this worker has pushed.
  void save() {
    std::unique_lock lock(mutex_);
    if (!keys_.empty()) send_gathered(lock);
    save_all(lock, "save");
  }
  /// @brief Pushes what was gathered and tells the servers that this worker pushes no more; waits until they have saved
  /// that. Where servers apply in order, this is when the others have pushed as often, or have finished.
  void finish() {
    std::unique_lock lock(mutex_);
    if (!keys_.empty()) send_gathered(lock);
    for (int k = 0; k < options_.servers; ++k) {
      detail::table_request h = head(k);
      h.last = 1;
      post(k, h, {});
    }
    save_all(lock, "finish");
  }
  /// Gradients left out or edited since they weren't finite.
  std::uint64_t rejected() const {
    std::lock_guard lock(mutex_);
    return rejected_;
  }
  /// Requests sent again since no reply came.
  std::uint64_t retries() const {
    std::lock_guard lock(mutex_);
    return retries_;
  }
  /// Rows that the cache had.
  std::uint64_t cache_hits() const {
    std::lock_guard lock(mutex_);
    return cache_hits_;
  }

 private:
  struct cached_row {
    key_type key{};
    std::uint64_t until = 0;  // of pushes_; 0: nothing is here
    std::uint32_t uses = 0;   // a row that is used isn't given up for one that may not be
    std::vector<float> row;
  };

  int server_of(std::uint64_t mixed) const noexcept {
    return static_cast<int>(detail::server_of(detail::shard_of(mixed, settings_.shard_bits),
                                              static_cast<std::uint32_t>(options_.servers), settings_.shard_bits));
  }
  detail::table_request head(int server) const {
    const link& l = links_[static_cast<std::size_t>(server)];
    return {.layout = layout_,
            .pushes = l.sent,
            .first = l.first,
            .half = options_.half,
            .crowded = l.bytes > options_.log_bytes / 2};
  }

  // ---- Under the lock.

  // Sends a request that will be repeated until it is answered.
  std::uint64_t ask(int server, tag t, const detail::table_request& h, std::span<const key_type> keys) {
    call c;
    c.server = server;
    c.tag = static_cast<std::uint32_t>(t);
    c.body = bytes_of(h, keys);
    c.wait = options_.retry;
    c.due = clock::now() + c.wait;
    const std::uint64_t id = ++last_id_;
    transmit(server, c.tag, id, c.body);
    calls_.emplace(id, std::move(c));
    return id;
  }
  static std::vector<std::byte> bytes_of(const detail::table_request& h, std::span<const key_type> keys) {
    std::vector<std::byte> b(sizeof h + keys.size_bytes());
    std::memcpy(b.data(), &h, sizeof h);
    if (!keys.empty()) std::memcpy(b.data() + sizeof h, keys.data(), keys.size_bytes());
    return b;
  }
  // Numbers a push, keeps it, and sends it.
  void post(int server, const detail::table_request& h, std::span<const std::byte> body) {
    link& l = links_[static_cast<std::size_t>(server)];
    std::vector<std::byte> all(sizeof h + body.size());
    std::memcpy(all.data(), &h, sizeof h);
    if (!body.empty()) std::memcpy(all.data() + sizeof h, body.data(), body.size());
    l.bytes += all.size();
    l.log.push_back(std::move(all));
    const std::uint64_t number = ++l.sent;
    if (l.next == number) {  // nothing else is unanswered
      l.wait = options_.retry;
      l.due = clock::now() + l.wait;
    }
    transmit(server, static_cast<std::uint32_t>(tag::push), number, l.log.back());
  }
  void transmit(int server, std::uint32_t t, std::uint64_t id, const std::vector<std::byte>& body) {
    try {
      (void)messenger_->try_send(address(server), t, id, payload(std::span<const std::byte>(body)));
    } catch (const peer_error&) {  // it may start again: the request is repeated
    } catch (const congestion_error&) {
    }
  }

  pending begin(std::span<const key_type> keys, tag t) {
    if (keys.size() >> 31 != 0)
      throw argument_error("heddle::sharded_table: pull: " + std::to_string(keys.size()) +
                           " keys; allowed are fewer than 2^31");
    pending p;
    p.places_.resize(keys.size());
    std::unique_lock lock(mutex_);
    if (!keys_.empty()) send_gathered(lock);  // a pull sees what was pushed before
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
        if (!recall(keys[i], p.rows_.data() + (p.keys_.size() - 1) * dim))
          of[server_of(mixed)].push_back(static_cast<std::uint32_t>(p.keys_.size() - 1));
      }
      p.places_[i] = place_of_[at] - 1;
    }
    std::vector<key_type> sent;
    for (auto& [server, items] : of) {
      sent.clear();
      for (const std::uint32_t i : items) sent.push_back(p.keys_[i]);
      detail::table_request h = head(server);
      h.items = sent.size();
      p.calls_.push_back(ask(server, t, h, sent));
      calls_.at(p.calls_.back()).items = std::move(items);
    }
    return p;
  }

  bool recall(key_type key, float* to) {
    if (cache_.empty()) return false;
    cached_row& c = cache_[detail::mix(detail::widen_key(key)) & (cache_.size() - 1)];
    if (c.until < pushes_ + 1 || c.key != key) return false;
    c.uses += c.uses < 255;
    ++cache_hits_;
    std::memcpy(to, c.row.data(), dim * sizeof(float));
    return true;
  }
  void remember(key_type key, const float* row) {
    if (cache_.empty()) return;
    cached_row& c = cache_[detail::mix(detail::widen_key(key)) & (cache_.size() - 1)];
    if (c.until >= pushes_ + 1 && c.key != key && c.uses > 0) {
      --c.uses;
      return;
    }
    if (c.key != key) c.uses = 0;
    c.key = key;
    c.until = pushes_ + options_.cached_for;
    c.row.assign(row, row + dim);
  }

  // Sums what was gathered key by key, and posts a message to each server that is concerned, or to all.
  void send_gathered(std::unique_lock<std::mutex>&) {
    detail::batch b;
    const auto n = static_cast<std::uint32_t>(keys_.size());
    b.entries.resize(n);
    for (std::uint32_t i = 0; i < n; ++i) b.entries[i] = {detail::mix(detail::widen_key(keys_[i])), i, 0};
    const auto gradient = [&](std::uint32_t i) {
      return i < n ? gradients_.data() + std::size_t{i} * dim : b.sums.data() + std::size_t{i - n} * dim;
    };
    const auto sight = [&](std::uint32_t i) { return i < n ? seen_[i] : b.seen[i - n]; };
    rejected_ += detail::guard_batch<dim>(settings_.guard, b, n, gradient, sight);
    b.merge(dim, n, gradient, sight);
    std::vector<std::vector<detail::batch_entry>> of(links_.size());
    for (const detail::batch_entry& e : b.entries) of[static_cast<std::size_t>(server_of(e.mixed))].push_back(e);
    detail::byte_writer out;
    std::vector<float> floats;
    for (int k = 0; k < options_.servers; ++k) {
      const auto& mine = of[static_cast<std::size_t>(k)];
      detail::table_request h = head(k);
      h.items = mine.size();
      h.lr = lr_;
      h.sightings = sightings_ || n != b.entries.size();
      out.clear();
      for (const auto& e : mine) out.put(static_cast<key_type>(detail::unmix(e.mixed)));
      if (h.sightings) {
        for (float sighting::* field : {&sighting::times, &sighting::show, &sighting::click})
          for (const auto& e : mine) out.put(sight(e.item).*field);
      }
      floats.clear();
      for (const auto& e : mine) floats.insert(floats.end(), gradient(e.item), gradient(e.item) + dim);
      detail::put_floats(out, floats.data(), floats.size(), options_.half);
      post(k, h, {out.data(), out.size()});
    }
    keys_.clear(), gradients_.clear(), seen_.clear();
    sightings_ = false;
    ++pushes_;
  }

  // ---- Waiting.

  void check_alive() const {
    if (failed_by_ >= 0) throw comm_error("sharded_table", messenger_->rank(), failed_by_, failure_);
    if (broken_) std::rethrow_exception(broken_);
  }
  template <class Ready> void wait_until(std::unique_lock<std::mutex>& lock, const char* what, int peer, Ready ready) {
    const auto end = clock::now() + options_.patience;
    while (!ready()) {
      check_alive();
      if (clock::now() >= end)
        throw comm_error("sharded_table::" + std::string(what), messenger_->rank(), peer,
                         "no answer within " + std::to_string(options_.patience.count() / 1'000'000) + " ms");
      // A system-clock wait, since ThreadSanitizer knows it.
      changed_.wait_until(lock, std::chrono::system_clock::now() + std::chrono::milliseconds(20));
    }
  }
  void wait(std::unique_lock<std::mutex>& lock, const std::vector<std::uint64_t>& calls, const char* what) {
    for (const std::uint64_t id : calls) {
      try {
        wait_until(lock, what, calls_.at(id).server, [&] { return calls_.at(id).answered; });
      } catch (...) {
        for (const std::uint64_t other : calls) calls_.erase(other);
        throw;
      }
    }
  }
  void save_all(std::unique_lock<std::mutex>& lock, const char* what) {
    std::vector<std::uint64_t> calls;
    for (int k = 0; k < options_.servers; ++k) calls.push_back(ask(k, tag::save, head(k), {}));
    wait(lock, calls, what);
    for (const std::uint64_t id : calls) calls_.erase(id);
  }
  void wait_for_room(std::unique_lock<std::mutex>& lock) {
    for (int k = 0; k < options_.servers; ++k) {
      const link& l = links_[static_cast<std::size_t>(k)];
      while (l.bytes > options_.log_bytes) {
        detail::table_request h = head(k);
        h.pushes = l.first + l.log.size() / 2;  // a save that covers half of it
        const std::vector<std::uint64_t> id{ask(k, tag::save, h, {})};
        wait(lock, id, "push");
        calls_.erase(id[0]);
      }
    }
  }
  void settle(std::unique_lock<std::mutex>& lock, const char* what) {
    for (int k = 0; k < options_.servers; ++k) {
      const link& l = links_[static_cast<std::size_t>(k)];
      const std::uint64_t last = l.sent;
      wait_until(lock, what, k, [&] { return l.next > last; });
    }
  }

  // ---- The thread that receives.

  void receive() {
    try {
      while (!stopping_) {
        std::optional<message> m = messenger_->receive(std::chrono::milliseconds(5));
        std::unique_lock lock(mutex_);
        for (; m; m = messenger_->receive({})) heed(*m);
        const auto now = clock::now();
        if (!keys_.empty() && now - gathered_since_ >= options_.gather_for) send_gathered(lock);
        repeat(now);
        changed_.notify_all();
      }
    } catch (...) {
      std::lock_guard lock(mutex_);
      broken_ = std::current_exception();
      changed_.notify_all();
    }
  }
  void stop() {
    stopping_ = true;
    if (receiver_.joinable()) receiver_.join();
  }

  void heed(message& m) {
    if (m.kind == message_kind::refused) return messenger_->renew();
    if (m.from.rank >= options_.servers) return;
    if (m.kind == message_kind::joined) {  // perhaps another life, which has to be brought up: ask what it has
      for (auto& [id, c] : calls_)
        if (c.server == m.from.rank) c.due = {};
      links_[static_cast<std::size_t>(m.from.rank)].due = {};
    }
    if (m.kind != message_kind::data || m.tag != static_cast<std::uint32_t>(tag::reply)) return;
    detail::byte_reader in(m.body.data(), m.body.size(), "a reply of server " + std::to_string(m.from.rank));
    const auto r = in.get<detail::table_reply>();
    link& l = links_[static_cast<std::size_t>(m.from.rank)];
    if (r.status == detail::reply_status::failed) {
      failed_by_ = m.from.rank;
      failure_ = std::string(reinterpret_cast<const char*>(in.take(in.left())), m.body.size() - sizeof r);
      return;
    }
    if (m.from.life > life_of_[m.from.rank]) {
      // A server that has started again may have less than before.
      life_of_[m.from.rank] = m.from.life;
      if (r.next < l.first && l.sent != 0) {
        failed_by_ = m.from.rank;
        failure_ = "it has started again without pushes that it had saved: its file is gone or an older one";
        return;
      }
      l.next = r.next;
      l.due = {};
      l.wait = options_.retry;
    } else if (r.next > l.next) {  // replies may come out of order: within a life the number only grows
      l.next = r.next;
      l.wait = options_.retry;
      l.due = clock::now() + l.wait;
    }
    while (l.first <= r.covered && !l.log.empty() && l.first < l.next) {
      l.bytes -= l.log.front().size();
      l.log.pop_front();
      ++l.first;
    }
    const auto found = calls_.find(m.id);
    if (m.id == 0 || found == calls_.end() || found->second.answered) return;
    call& c = found->second;
    if (r.status == detail::reply_status::behind) {
      c.due = clock::now() + options_.retry / 4;  // after what is missing, which goes now
      l.due = {};
      return;
    }
    c.answered = true;
    c.half = r.half != 0;
    const std::size_t left = in.left();
    const std::byte* const rows = in.take(left);
    c.rows.assign(rows, rows + left);
    if (left != c.items.size() * dim * (c.half ? 2 : 4)) in.refuse("it has another number of rows than were asked for");
  }

  // Sends again what is due.
  void repeat(clock::time_point now) {
    const auto later = [&](auto& x) {
      x.wait = (std::min<std::chrono::nanoseconds>)(2 * x.wait, std::chrono::seconds(1));
      x.due = now + x.wait;
      ++retries_;
    };
    for (std::size_t k = 0; k < links_.size(); ++k) {
      link& l = links_[k];
      if (l.next > l.sent || now < l.due) continue;
      for (std::uint64_t n = (std::max)(l.next, l.first); n <= l.sent && n < l.next + detail::most_early; ++n)
        transmit(static_cast<int>(k), static_cast<std::uint32_t>(tag::push), n, l.log[n - l.first]);
      later(l);
    }
    for (auto& [id, c] : calls_) {
      if (c.answered || now < c.due) continue;
      transmit(c.server, c.tag, id, c.body);
      later(c);
    }
  }

  typename Table::settings settings_;
  Messenger* messenger_;
  worker_options options_;
  std::uint64_t layout_, last_id_ = 0, pushes_ = 0, rejected_ = 0, retries_ = 0, cache_hits_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<link> links_;
  std::map<int, std::uint64_t> life_of_;
  std::map<std::uint64_t, call> calls_;
  std::vector<cached_row> cache_;
  std::vector<std::uint32_t> place_of_;
  std::vector<key_type> keys_;  // gathered
  std::vector<float> gradients_;
  std::vector<sighting> seen_;
  float lr_ = 0.0f;
  bool sightings_ = false;
  clock::time_point gathered_since_{};
  int failed_by_ = -1;
  std::string failure_;
  std::exception_ptr broken_;
  std::atomic<bool> stopping_{false};
  std::thread receiver_;
};

}  // namespace v0
}  // namespace heddle
