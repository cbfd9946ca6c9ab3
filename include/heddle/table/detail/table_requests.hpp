// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/numbered.hpp>
#include <heddle/table/detail/table_wire.hpp>
#include <heddle/table/settings.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

namespace heddle {
inline namespace v0 {
namespace detail {

// A worker's conversation with its servers: requests that are repeated until they are answered, and pushes that are
// kept until a server has saved them. Members are called under mutex(), which waiting releases, but for start and stop.
template <class Messenger> class table_requests {
  using tag = table_tag;
  using clock = std::chrono::steady_clock;
  static constexpr std::uint64_t all = (std::numeric_limits<std::uint64_t>::max)();
  static constexpr std::size_t any = (std::numeric_limits<std::size_t>::max)();

  // A request until it is answered.
  struct call {
    int server = 0;
    std::uint32_t tag = 0;
    std::vector<std::byte> body;
    std::vector<std::uint32_t> items;  // whose rows these are
    std::vector<std::byte> rows;       // the answer
    std::size_t bytes = 0;             // that it must have, or any
    std::uint64_t reads_behind = all;  // rows as of so many pushes
    repetition again;
    clock::time_point at_work{};  // when the server last said so
    bool half = false, answered = false, refused = false;
  };
  struct link : numbered_log<std::vector<std::byte>> {  // pushes that the server's last save doesn't cover
    repetition again;
  };

 public:
  table_requests(Messenger& m, const worker_options& o, std::uint64_t layout, std::size_t width)
      : messenger_(&m), options_(o), layout_(layout), width_(width), links_(static_cast<std::size_t>(o.servers)) {
    object_ = o.object;
    if (object_ == 0)
      object_ =
          static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
    step_ = 1 + (mix(object_ + m.life()) >> 32);
  }
  ~table_requests() { stop(); }
  std::mutex& mutex() const noexcept { return mutex_; }

  // Greets the servers; a worker that has restarted goes on where its former life was. From then on late(now) is called
  // every few milliseconds.
  template <class Late> void start(Late late) {
    for (int k = 0; k < options_.servers; ++k) messenger_->connect(k);
    receiver_ = std::thread([this, late] { receive(late); });
    std::unique_lock lock(mutex_);
    for (std::uint64_t as = 0; as != object_;) {
      as = object_;
      ask_all(lock, tag::hello, "hello");
    }
    const std::uint64_t least = std::min_element(links_.begin(), links_.end(), [](const link& a, const link& b) {
                                  return a.next < b.next;
                                })->next;
    for (link& l : links_) {
      l.first = options_.resumes ? least : l.next;
      l.sent = l.first - 1;
    }
    sent_before_ = least - 1;
  }
  // Pushes that all servers had when this began.
  std::uint64_t sent_before() const noexcept { return sent_before_; }
  void stop() {
    stopping_ = true;
    if (receiver_.joinable()) receiver_.join();
  }
  std::uint64_t retries() const noexcept { return retries_; }

  table_request head(int server) const {
    const link& l = links_[static_cast<std::size_t>(server)];
    return {.layout = layout_,
            .pushes = l.sent,
            .first = l.first,
            .object = object_,
            .stands_for = static_cast<std::uint16_t>(options_.stands_for + 1),
            .half = options_.half,
            .crowded = l.bytes > options_.log_bytes / 2,
            .last = leaving_,
            .gathers = options_.gather > 1,
            .resumes = options_.resumes};
  }
  // Sends a request that will be repeated until it is answered.
  std::uint64_t ask(int server, tag t, const table_request& h, std::span<const std::byte> keys,
                    std::vector<std::uint32_t> items = {}) {
    call c;
    c.server = server;
    c.tag = static_cast<std::uint32_t>(t);
    c.body = bytes_of(h, keys);
    c.bytes = t == tag::orphan ? sizeof(std::uint32_t) : items.size() * (width_ * (h.half ? 2 : 4) + (t == tag::read));
    c.items = std::move(items);
    if (t == tag::command) c.bytes = any;
    if (t == tag::pull || t == tag::read || (t == tag::command && h.op != table_op::outcome)) c.reads_behind = h.pushes;
    c.again.begin(options_.retry);
    const std::uint64_t id = ++last_id_;
    transmit(server, c.tag, id, c.body);
    calls_.emplace(id, std::move(c));
    return id;
  }
  // The id of the next request, and the lowest of those whose answers haven't been taken.
  std::uint64_t next_id() const noexcept { return last_id_ + 1; }
  std::uint64_t oldest_id() const noexcept { return calls_.empty() ? next_id() : calls_.begin()->first; }
  // Asks servers [first, last) and waits; what they say.
  std::vector<std::vector<std::byte>> command(std::unique_lock<std::mutex>& lock, table_op op, const char* what,
                                              int first, int last, std::span<const std::byte> body = {}) {
    std::vector<std::uint64_t> ids;
    for (int k = first; k < last; ++k) {
      byte_writer b;
      b.put(oldest_id());
      b.put(body.data(), body.size());
      table_request h = head(k);
      h.op = op;
      ids.push_back(ask(k, tag::command, h, {b.data(), b.size()}));
    }
    wait(lock, ids, what);
    std::vector<std::vector<std::byte>> said;
    for (const std::uint64_t id : ids) said.push_back(take(id).rows);
    return said;
  }
  static std::vector<std::byte> bytes_of(const table_request& h, std::span<const std::byte> body) {
    std::vector<std::byte> b(sizeof h + body.size());
    std::memcpy(b.data(), &h, sizeof h);
    if (!body.empty()) std::memcpy(b.data() + sizeof h, body.data(), body.size());
    return b;
  }
  // Numbers and keeps a push to each server: all or, where it throws, none.
  void post(std::vector<std::vector<std::byte>>&& bodies) {
    std::size_t k = 0;
    try {
      for (; k < links_.size(); ++k) links_[k].post(std::move(bodies[k]));
    } catch (...) {
      while (k > 0) links_[--k].take_back();
      throw;
    }
    for (link& l : links_)
      if (l.next == l.sent) l.again.begin(options_.retry);  // nothing else is unanswered
  }
  // Sends what was posted last.
  void send_posted() {
    for (int k = 0; k < options_.servers; ++k)
      if (last_to(k) >= of(k).sent) send_push(k, of(k).sent);
  }
  // Calls that nobody waits for any more.
  void forget(const std::vector<std::uint64_t>& calls) {
    const std::lock_guard lock(mutex_);
    for (const std::uint64_t id : calls) calls_.erase(id);
  }
  // The answer of a call that was waited for.
  auto take(std::uint64_t id) {
    const auto found = calls_.find(id);
    call c = std::move(found->second);
    calls_.erase(found);
    return c;
  }

  void check_alive() const {
    if (failed_by_ >= 0) throw comm_error("sharded_table", messenger_->rank(), failed_by_, failure_);
    if (broken_) std::rethrow_exception(broken_);
  }
  // @param at_work When the server last said that it is at it, if it says so.
  template <class Ready>
  void wait_until(std::unique_lock<std::mutex>& lock, const char* what, int peer, Ready ready,
                  const clock::time_point* at_work = nullptr) {
    const auto start = clock::now();
    while (!ready()) {
      check_alive();
      if (clock::now() - (at_work ? (std::max)(*at_work, start) : start) >= options_.patience)
        throw comm_error("sharded_table::" + std::string(what), messenger_->rank(), peer,
                         "no answer within " + std::to_string(options_.patience.count() / 1'000'000) + " ms");
      // A system-clock wait, since ThreadSanitizer knows it.
      changed_.wait_until(lock, std::chrono::system_clock::now() + std::chrono::milliseconds(20));
    }
  }
  void wait(std::unique_lock<std::mutex>& lock, const std::vector<std::uint64_t>& calls, const char* what) {
    for (const std::uint64_t id : calls) {
      try {
        const call& c = calls_.at(id);
        wait_until(lock, what, c.server, [&] { return c.answered; }, &c.at_work);
        if (c.refused) {
          const std::string why(reinterpret_cast<const char*>(c.rows.data()) + 1, c.rows.size() - 1);
          if (c.rows[0] != std::byte{0}) throw file_error(why);
          throw argument_error(why);
        }
      } catch (...) {
        for (const std::uint64_t other : calls) calls_.erase(other);
        throw;
      }
    }
  }
  // Waits until every server has answered, and forgets what they said.
  void ask_all(std::unique_lock<std::mutex>& lock, tag t, const char* what) {
    std::vector<std::uint64_t> calls;
    for (std::size_t k = 0; k < links_.size(); ++k)
      calls.push_back(ask(static_cast<int>(k), t, head(static_cast<int>(k)), {}));
    wait(lock, calls, what);
    for (const std::uint64_t id : calls) calls_.erase(id);
  }
  // What a server says of a dead worker.
  std::uint32_t ask_orphan(std::unique_lock<std::mutex>& lock, int server) {
    const std::vector<std::uint64_t> id{ask(server, tag::orphan, head(server), {})};
    wait(lock, id, "next_orphan");
    std::uint32_t said;
    std::memcpy(&said, take(id[0]).rows.data(), sizeof said);
    return said;
  }
  // From now on requests say that the last push was made.
  void leave() noexcept { leaving_ = true; }
  bool leaving() const noexcept { return leaving_; }
  // A moment for others.
  void pause(std::unique_lock<std::mutex>& lock) {
    check_alive();
    changed_.wait_until(lock, std::chrono::system_clock::now() + options_.retry);
  }
  void wait_for_room(std::unique_lock<std::mutex>& lock) {
    for (int k = 0; k < options_.servers; ++k) {
      const link& l = links_[static_cast<std::size_t>(k)];
      while (l.bytes > options_.log_bytes) {
        table_request h = head(k);
        h.pushes = l.first + l.kept.size() / 2;  // a save that covers half of it
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

 private:
  link& of(int server) noexcept { return links_[static_cast<std::size_t>(server)]; }
  // The last push that may go to a server now: a server that takes steps would show it to a pull that it overtakes.
  std::uint64_t last_to(int server) const noexcept {
    std::uint64_t last = all;
    for (const auto& [id, c] : calls_)
      if (in_steps_ && c.server == server && !c.answered) last = (std::min)(last, c.reads_behind);
    return last;
  }
  void send_push(int server, std::uint64_t number) {
    transmit(server, static_cast<std::uint32_t>(tag::push), number, of(server)[number]);
  }
  void transmit(int server, std::uint32_t t, std::uint64_t id, const std::vector<std::byte>& body) {
    try {
      (void)messenger_->try_send(address(server), t, id, payload(std::span<const std::byte>(body)));
    } catch (const peer_error&) {  // it may start again: the request is repeated
    } catch (const congestion_error&) {
    } catch (const std::bad_alloc&) {
    }
  }

  // ---- The thread that receives.

  template <class Late> void receive(Late late) {
    try {
      while (!stopping_) {
        std::optional<message> m = messenger_->receive(std::chrono::milliseconds(5));
        std::unique_lock lock(mutex_);
        for (; m; m = messenger_->receive({})) heed(*m);
        const auto now = clock::now();
        late(now);
        repeat(now);
        changed_.notify_all();
      }
    } catch (...) {
      std::lock_guard lock(mutex_);
      broken_ = std::current_exception();
      changed_.notify_all();
    }
  }
  void heed(message& m) {
    if (m.kind == message_kind::refused) return messenger_->renew();
    if (m.from.rank >= options_.servers) return;
    if (m.kind == message_kind::joined) {  // perhaps another life, which has to be brought up: ask what it has
      for (auto& [id, c] : calls_)
        if (c.server == m.from.rank) c.again.due = {};
      links_[static_cast<std::size_t>(m.from.rank)].again.due = {};
    }
    if (m.kind != message_kind::data || m.tag != static_cast<std::uint32_t>(tag::reply)) return;
    byte_reader in(m.body.data(), m.body.size(), "a reply of server " + std::to_string(m.from.rank));
    const auto r = in.get<table_reply>();
    if (r.object != object_) return;  // to a former object of this rank
    link& l = links_[static_cast<std::size_t>(m.from.rank)];
    if (r.status == reply_status::failed) {
      failed_by_ = m.from.rank;
      failure_ = std::string(reinterpret_cast<const char*>(in.take(in.left())), m.body.size() - sizeof r);
      return;
    }
    if (r.status == reply_status::outdated) {  // all are greeted anew, with a number above the one that this server has
      if (!calls_.contains(m.id)) return;      // greeted long ago
      object_ = in.get<std::uint64_t>() + step_;
      for (auto& [id, c] : calls_) c.answered = true;
      return;
    }
    in_steps_ = r.in_steps != 0;
    if (m.from.life < life_of_[m.from.rank]) return;
    if (m.from.life > life_of_[m.from.rank]) {
      // A server that has started again may have less than before.
      life_of_[m.from.rank] = m.from.life;
      if (r.next < l.first && l.sent != 0) {
        failed_by_ = m.from.rank;
        failure_ =
            "it has started again without pushes that no log has any more: its file is gone or an older one, or "
            "they waited for others when a former object of this worker ended without finish";
        return;
      }
      l.next = r.next;
      l.again = {{}, options_.retry};
    } else if (r.next > l.next) {  // replies may come out of order: within a life the number only grows
      l.next = r.next;
      l.again.begin(options_.retry);
    }
    l.drop((std::min)(r.covered, l.next - 1));
    const auto found = calls_.find(m.id);
    if (m.id == 0 || found == calls_.end() || found->second.answered) return;
    call& c = found->second;
    if (r.status == reply_status::behind) {
      c.again.due = clock::now() + options_.retry / 4;  // after what is missing, which goes now
      l.again.due = {};
      return;
    }
    if (r.status == reply_status::working) {
      c.at_work = clock::now();
      return;
    }
    c.answered = true;
    const std::uint64_t last = (std::min)(last_to(c.server), l.sent);  // what has waited for this may go
    if (c.reads_behind < last) l.again.begin(options_.retry);
    for (std::uint64_t n = c.reads_behind; n < last && n - c.reads_behind < most_early; ++n) send_push(c.server, n + 1);
    c.half = r.half != 0;
    const std::size_t left = in.left();
    const std::byte* const rows = in.take(left);
    c.rows.assign(rows, rows + left);
    c.refused = r.status == reply_status::refused && left != 0;
    if (c.bytes != any && left != c.bytes) in.refuse("it has another number of rows than were asked for");
  }

  // Sends again what is due.
  void repeat(clock::time_point now) {
    const auto due = [&](repetition& r) {
      if (now < r.due) return false;
      r.later(now, std::chrono::seconds(1));
      ++retries_;
      return true;
    };
    for (int k = 0; k < options_.servers; ++k) {
      link& l = of(k);
      const std::uint64_t last = (std::min)(last_to(k), l.sent);
      if (l.next > last || !due(l.again)) continue;
      for (std::uint64_t n = (std::max)(l.next, l.first); n <= last && n < l.next + most_early; ++n) send_push(k, n);
    }
    for (auto& [id, c] : calls_)
      if (!c.answered && due(c.again)) transmit(c.server, c.tag, id, c.body);
  }

  Messenger* messenger_;
  worker_options options_;
  std::uint64_t layout_, object_, last_id_ = 0, retries_ = 0, sent_before_ = 0;
  std::uint64_t step_;  // above a former object: another one for each life, lest two of them take the same number
  std::size_t width_;   // floats of a row
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<link> links_;
  std::map<int, std::uint64_t> life_of_;
  std::map<std::uint64_t, call> calls_;
  int failed_by_ = -1;
  bool leaving_ = false, in_steps_ = false;
  std::string failure_;
  std::exception_ptr broken_;
  std::atomic<bool> stopping_{false};
  std::thread receiver_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle
