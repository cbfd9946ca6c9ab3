// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/detail/tell_ranks.hpp>
#include <heddle/mode/detail/row_server.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

namespace heddle {
inline namespace v0 {
namespace detail {

// A rank's end of a messenger: the requests of its worker, and its server if it has one, which a thread of its own
// serves. Requests and replies may be lost, repeated and reordered.
template <class Messenger, class Server> class row_node {
  using clock = std::chrono::steady_clock;

 public:
  // who: named in errors. server: this rank's, or null. All ranks below `servers` have one.
  row_node(const char* who, std::unique_ptr<Messenger> m, std::unique_ptr<Server> server, int servers)
      : who_(who), messenger_(std::move(m)), server_(std::move(server)), links_(static_cast<std::size_t>(servers)) {
    for (int k = 0; k < servers; ++k) messenger_->connect(k);
    thread_ = std::thread([this] { attend(); });
  }
  row_node(const row_node&) = delete;
  row_node& operator=(const row_node&) = delete;
  // Sends the replies that are left, waits for those who haven't heard that all have joined, and leaves; while an
  // exception is on its way, at once. Who has died or left isn't waited for.
  ~row_node() {
    hurries_ = std::uncaught_exceptions() > unwinding_;
    stopping_ = true;
    try {
      (void)messenger_->try_send(messenger_->rank(), static_cast<std::uint32_t>(row_tag::reply), 0, payload(0));
    } catch (const std::exception&) {  // it was to wake the thread, which wakes by itself soon
    }
    thread_.join();
  }

  // Waits until this rank and every server have heard of each other: from then on a server that leaves is missed.
  // Throws comm_error if that takes half a minute.
  void meet() {
    const auto end = clock::now() + std::chrono::seconds(30);
    for (int k = 0; k < static_cast<int>(links_.size()); ++k) {
      std::unique_lock lock(mutex_);
      while (messenger_->life_of(k) == 0 && links_[static_cast<std::size_t>(k)].gone.empty()) {
        if (broken_) std::rethrow_exception(broken_);
        if (clock::now() >= end) throw comm_error(who_, messenger_->rank(), k, "no messenger there within 30 s");
        changed_.wait_until(lock, std::chrono::system_clock::now() + std::chrono::milliseconds(2));
      }
    }
  }

  // Calls f with the server, which nobody else touches meanwhile.
  template <class Function> void with_server(Function&& f) {
    const std::lock_guard lock(serving_);
    if (server_) f(*server_);
  }

  // Hands a request to a server over; waits for nobody. Before a push or a join the reply to the one before must have
  // been taken.
  void post(int k, row_tag tag, std::vector<std::byte>&& body) {
    const std::lock_guard lock(mutex_);
    link& l = links_[static_cast<std::size_t>(k)];
    ++requests_;
    sent_bytes_ += body.size();
    const std::uint64_t number = l.post({tag, std::move(body)});
    if (tag != row_tag::part) {
      l.asked = number;
      l.open = true;
      l.answered = false;
      l.joins = tag == row_tag::join;
    }
    transmit(k, l);
  }
  // Whether a request is posted and its reply not taken.
  bool open(int k) const noexcept { return links_[static_cast<std::size_t>(k)].open; }
  // Whether the reply is there. Throws comm_error if none will come.
  bool answered(int k) {
    const std::lock_guard lock(mutex_);
    const link& l = links_[static_cast<std::size_t>(k)];
    if (!l.answered) check(k);
    return l.answered;
  }
  // Waits for the reply, for as long as the server lives, and takes it.
  payload take(int k) {
    std::unique_lock lock(mutex_);
    link& l = links_[static_cast<std::size_t>(k)];
    while (!l.answered) {
      check(k);
      // A system-clock wait, since ThreadSanitizer knows it.
      changed_.wait_until(lock, std::chrono::system_clock::now() + std::chrono::milliseconds(100));
    }
    l.open = l.answered = false;
    return std::move(l.reply);
  }

  struct counts {
    std::uint64_t requests = 0, bytes = 0;  // messages with rows that a worker sent; bytes of all, replies too
  };
  counts sent() const {
    const std::lock_guard lock(mutex_);
    return {requests_, sent_bytes_};
  }

 private:
  // Probes are small, so those who wait long for others ask often enough to find a loss soon.
  static constexpr std::chrono::milliseconds first_wait{5}, longest_wait{200};

  static constexpr std::uint64_t never = (std::numeric_limits<std::uint64_t>::max)();

  struct request {
    row_tag tag;
    std::vector<std::byte> body;
    std::uint64_t repeated = never;  // how many probes were sent before its last repetition
    std::size_t size() const noexcept { return body.size(); }
  };
  struct link : numbered_log<request> {
    std::uint64_t asked = 0;  // the last request with a reply
    payload packed;           // a copy of the one to send next, until there is room
    std::uint64_t packed_number = 0;
    std::deque<std::uint64_t> repeats;  // requests to send again
    std::uint64_t probes = 0;           // sent
    std::uint64_t again = never;        // how many were sent before the last `again`
    payload reply;
    bool open = false, answered = false, joins = false;
    std::string gone;  // why the server can't answer any more
    int gone_by = -1;  // whose fault that is
    repetition probe;
  };
  struct letter {
    int to;
    std::uint64_t id;
    payload body;
  };

  void check(int k) const {
    if (broken_) std::rethrow_exception(broken_);
    const link& l = links_[static_cast<std::size_t>(k)];
    if (!l.gone.empty()) throw comm_error(who_, messenger_->rank(), l.gone_by, l.gone);
  }

  // With the lock. Sends requests, first what is missing, as far as there is room; else the thread does. What is sent
  // isn't expected again.
  void transmit(int k, link& l) {
    while (unsent(l)) {
      const bool repeats = !l.repeats.empty();
      const std::uint64_t number = repeats ? l.repeats.front() : l.next;
      const request& r = l[number];
      if (l.packed_number != number) l.packed = payload(std::span<const std::byte>(r.body));
      l.packed_number = number;
      if (!put(k, r.tag, number, std::move(l.packed))) break;  // it stays
      l.packed_number = 0;
      if (repeats) {
        l.repeats.pop_front();
        ++requests_;
        sent_bytes_ += r.size();
      } else {
        ++l.next;
      }
    }
    l.probe.begin(first_wait);
  }
  static bool unsent(const link& l) noexcept { return !l.repeats.empty() || l.next <= l.sent; }
  // Whether a probe, or 0, was sent after that many.
  static bool newer(std::uint64_t probe, std::uint64_t probes) noexcept { return probes == never || probe > probes; }
  bool put(int to, row_tag tag, std::uint64_t id, payload&& body) {
    try {
      return messenger_->try_send(to, static_cast<std::uint32_t>(tag), id, std::move(body));
    } catch (const peer_error&) {  // news of it are on their way
      return true;
    }
  }

  void attend() {
    clock::time_point again{};
    const auto finished = [&] {
      if (!stopping_) return false;
      if (hurries_) return true;
      bool heard = outbox_.empty();
      with_server([&](Server& s) {
        if (s.heard()) return;
        const auto now = clock::now();
        if (heard && now >= again) {
          again = now + std::chrono::milliseconds(50);
          s.remind(sender());
        }
        heard = false;
      });
      return heard;
    };
    for (bool failed = false;;) {
      try {
        if (finished()) return;
        std::optional<message> m =
            messenger_->receive(std::chrono::milliseconds(outbox_.empty() && !unsent_ && !stopping_ ? 5 : 1));
        for (; m; m = messenger_->receive({})) heed(*m);
        std::deque<letter> left = std::exchange(outbox_, {});
        for (letter& l : left) deliver(std::move(l));
        repeat();
      } catch (...) {
        give_up(std::current_exception());
        if (failed || !tell_failure()) return;  // what lasts ends this thread; others see the silence at the latest
        failed = true;
      }
    }
  }

  void give_up(std::exception_ptr why) {
    {
      const std::lock_guard lock(mutex_);
      if (!broken_) broken_ = why;
    }
    changed_.notify_all();
  }
  // Tells all workers that this server can't go on; whether that could be said.
  bool tell_failure() {
    try {
      with_server([&](Server& s) {
        s.fail(messenger_->rank(), "rank " + std::to_string(messenger_->rank()) + " failed as a server", sender());
      });
      return true;
    } catch (const std::exception&) {  // the first failure is the one to know
      return false;
    }
  }

  auto sender() {
    return [this](int rank, std::uint64_t id, std::vector<std::byte>&& bytes) {
      {
        const std::lock_guard lock(mutex_);
        sent_bytes_ += bytes.size();
      }
      deliver({rank, id, payload(std::span<const std::byte>(bytes))});
    };
  }
  // What a peer has no room for waits, and so does what is for it later, since `answered` mustn't overtake an answer;
  // what was left behind by a worker that has gone is dropped.
  void deliver(letter&& l) {
    const bool behind = std::any_of(outbox_.begin(), outbox_.end(), [&](const letter& x) { return x.to == l.to; });
    if (behind || !put(l.to, row_tag::reply, l.id, std::move(l.body))) outbox_.push_back(std::move(l));
  }

  void heed(message& m) {
    if (m.kind == message_kind::data && m.tag == static_cast<std::uint32_t>(row_tag::reply)) return hear(m);
    {
      const std::lock_guard lock(mutex_);
      const bool over = m.kind == message_kind::died || m.kind == message_kind::left;
      if (over || m.kind == message_kind::refused) lose(m.from.rank, m.from.rank, std::string(m.body.text()));
      if (m.kind == message_kind::gap && m.from.rank < static_cast<int>(links_.size()))
        links_[static_cast<std::size_t>(m.from.rank)].probe.due = {};
    }
    with_server([&](Server& s) { s.heed(m, sender()); });
  }
  // A server will not answer any more; what it has answered counts, and others answer or refuse by themselves.
  void lose(int server, int rank, std::string&& why) {
    if (server >= static_cast<int>(links_.size())) return;
    link& l = links_[static_cast<std::size_t>(server)];
    if (!l.gone.empty()) return;
    l.gone = std::move(why);
    l.gone_by = rank;
    changed_.notify_all();
  }

  void hear(message& m) {
    if (m.from.rank >= static_cast<int>(links_.size())) return;
    const std::lock_guard lock(mutex_);
    link& l = links_[static_cast<std::size_t>(m.from.rank)];
    if (m.body.size() < sizeof(row_reply)) return;  // wakes this thread only
    const auto head = row_head<row_reply>(m.body);
    if (head.status == row_status::failed)
      return lose(m.from.rank, static_cast<int>(head.staleness), std::string(m.body.text().substr(sizeof head)));
    if (head.status == row_status::missing) {
      // What was answered meanwhile, or is on its way, isn't.
      const std::uint64_t first = (std::max)(head.clock, l.first), last = (std::min)(head.clock + head.rows, l.next);
      for (std::uint64_t n = first; n < last; ++n) {
        if (!newer(head.staleness, l[n].repeated)) continue;
        l[n].repeated = l.probes;
        l.repeats.push_back(n);
      }
    } else if (m.id != l.asked) {
      return;
    } else if (!l.open || l.answered) {
      if (l.joins) thank(m.from.rank, l);  // it doesn't know yet
    } else if (head.status == row_status::answered) {
      if (!newer(head.staleness, l.again)) return;
      l.again = l.probes;
      (void)put(m.from.rank, row_tag::again, l.asked, payload(0));
      l.probe.begin(first_wait);
    } else {
      l.reply = std::move(m.body);
      l.answered = true;
      l.drop(l.asked);
      std::erase_if(l.repeats, [&](std::uint64_t n) { return n < l.first; });  // missing when that was said
      if (l.joins) thank(m.from.rank, l);
      changed_.notify_all();
    }
  }

  // What is lost of it the server asks for again.
  void thank(int k, const link& l) { (void)put(k, row_tag::thanks, l.asked, payload(0)); }

  // Sends what isn't sent yet; asks servers that have been silent whether they have a request.
  void repeat() {
    const std::lock_guard lock(mutex_);
    const auto now = clock::now();
    unsent_ = false;
    for (std::size_t k = 0; k < links_.size(); ++k) {
      link& l = links_[k];
      if (unsent(l)) {
        transmit(static_cast<int>(k), l);
        unsent_ |= unsent(l);
      } else if (l.open && !l.answered && now >= l.probe.due) {
        ++l.probes;
        (void)put(static_cast<int>(k), row_tag::probe, l.asked, payload(std::as_bytes(std::span(&l.probes, 1))));
        l.probe.later(now, longest_wait);
      }
    }
  }

  const char* who_;
  std::unique_ptr<Messenger> messenger_;
  std::unique_ptr<Server> server_;
  std::mutex serving_;        // the server; taken before the other one
  mutable std::mutex mutex_;  // all below but the outbox
  std::condition_variable changed_;
  std::vector<link> links_;
  std::uint64_t requests_ = 0, sent_bytes_ = 0;
  std::exception_ptr broken_;
  std::deque<letter> outbox_;  // of the thread
  bool unsent_ = false;        // likewise
  int unwinding_ = std::uncaught_exceptions();
  std::atomic<bool> stopping_{false}, hurries_{false};
  std::thread thread_;
};

// Opens a rank's node, on all ranks or on none. Collective.
template <class Comm, class Node, class Connection, class Server>
void open_rows(Comm& comm, const char* who, std::unique_ptr<Node>& node, const Connection& connection,
               std::unique_ptr<Server> server, int servers) {
  run_everywhere(comm, who,
                 [&] { node = std::make_unique<Node>(who, connection.open(comm), std::move(server), servers); });
  run_everywhere(comm, who, [&] { node->meet(); });
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle
