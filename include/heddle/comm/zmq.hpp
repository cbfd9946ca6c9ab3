// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/basic_messenger.hpp>
#include <heddle/comm/detail/tell_ranks.hpp>

#if !__has_include(<zmq.h>)
#error "heddle/comm/zmq.hpp needs zmq.h: link the CMake target heddle::zmq, or install libzmq3-dev and link with -lzmq"
#endif
#include <zmq.h>

#include <atomic>
#include <memory>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace heddle {
inline namespace v0 {
/// @brief Ranks as processes that ZeroMQ connects.
namespace zmq {

/// @brief Carries packets between processes by ZeroMQ: one socket that others connect to, and one to each peer.
///
/// Pairs of PUSH and PULL, not ROUTER and DEALER: every packet names its sender, so nothing needs to be routed, and a
/// packet is one frame. Only established connections are given packets, so none waits for a process that isn't there.
class transport {
 public:
  /// @param rank This rank.
  /// @param addresses Where each rank is bound: `tcp://host:port`, `ipc://file`, or for this rank with a port `*`,
  /// which takes a free one. Empty where it isn't known: such a rank must call first, and its own address must name a
  /// host that the others can reach.
  /// @param announced What the others are told to connect to, where that isn't what is bound: behind a port mapping.
  /// @param linger How long the destructor waits until what was sent has left.
  /// Throws: argument_error; comm_error with ZeroMQ's text if the address can't be bound.
  transport(int rank, std::vector<std::string> addresses, const std::string& announced = {},
            std::chrono::milliseconds linger = std::chrono::milliseconds(1000))
      : rank_(rank), addresses_(std::move(addresses)), links_(addresses_.size()), linger_(linger) {
    if (rank < 0 || rank >= size() || addresses_[static_cast<std::size_t>(rank)].empty()) {
      throw argument_error("heddle::zmq::messenger: rank " + std::to_string(rank) + "; allowed is 0 to " +
                           std::to_string(size() - 1) + ", with an address to bind");
    }
    std::string& mine = addresses_[static_cast<std::size_t>(rank)];
    try {
      check(context_ = zmq_ctx_new(), "zmq_ctx_new");
      check(inward_ = zmq_socket(context_, ZMQ_PULL), "zmq_socket");
      const int none = 0;
      zmq_setsockopt(inward_, ZMQ_RCVHWM, &none, sizeof none);  // what is under way is bounded by windows
      zmq_setsockopt(inward_, ZMQ_LINGER, &none, sizeof none);
      check(zmq_bind(inward_, mine.c_str()) == 0, "zmq_bind to " + mine);
      char bound[512] = {};
      std::size_t length = sizeof bound;
      check(zmq_getsockopt(inward_, ZMQ_LAST_ENDPOINT, bound, &length) == 0, "zmq_getsockopt");
      mine = announced.empty() ? reached(mine, bound) : announced;
      length = sizeof ready_;
      check(zmq_getsockopt(inward_, ZMQ_FD, &ready_, &length) == 0, "zmq_getsockopt");
      check((woken_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) >= 0, "eventfd");
    } catch (...) {
      close_all();
      throw;
    }
  }
  transport(const transport&) = delete;
  transport& operator=(const transport&) = delete;
  ~transport() { close_all(); }

  /// This rank.
  int rank() const noexcept { return rank_; }
  /// How many ranks there can be.
  int size() const noexcept { return static_cast<int>(addresses_.size()); }
  /// The address that others connect to.
  const std::string& where() const noexcept { return addresses_[static_cast<std::size_t>(rank_)]; }

  /// @brief Connects to a peer, in the background. @param peer Which. @param where Its address, empty for the one
  /// known. One that names no host doesn't replace it.
  void open(int peer, std::string_view where) {
    std::string& known = addresses_[static_cast<std::size_t>(peer)];
    void*& link = links_[static_cast<std::size_t>(peer)];
    if (!where.empty() && where != known && (known.empty() || !anywhere(where))) {
      close(peer);
      known = where;
    }
    if (link || known.empty()) return;
    link = zmq_socket(context_, ZMQ_PUSH);
    if (!link) return;
    const int none = 0, one = 1, first = 20, longest = 500;
    zmq_setsockopt(link, ZMQ_SNDHWM, &none, sizeof none);
    zmq_setsockopt(link, ZMQ_LINGER, &none, sizeof none);
    zmq_setsockopt(link, ZMQ_IMMEDIATE, &one, sizeof one);
    zmq_setsockopt(link, ZMQ_RECONNECT_IVL, &first, sizeof first);
    zmq_setsockopt(link, ZMQ_RECONNECT_IVL_MAX, &longest, sizeof longest);
    if (zmq_connect(link, known.c_str()) != 0) close(peer);
  }
  /// @brief Drops a connection and what waits for it. @param peer To whom.
  void close(int peer) {
    void*& link = links_[static_cast<std::size_t>(peer)];
    if (link) zmq_close(std::exchange(link, nullptr));
  }
  /// @brief Sends a packet. @param peer To whom. @param p The packet; a long one isn't copied.
  bool put(int peer, payload& p) {
    void* const link = links_[static_cast<std::size_t>(peer)];
    if (!link) return false;
    const std::size_t bytes = payload::room + p.size();
    zmq_msg_t m;
    if (bytes <= copied) {
      if (zmq_msg_init_size(&m, bytes) != 0) throw std::bad_alloc();
      std::memcpy(zmq_msg_data(&m), p.head(), bytes);
      if (zmq_msg_send(&m, link, ZMQ_DONTWAIT) >= 0) {
        p = {};
        return true;
      }
      zmq_msg_close(&m);
      return false;
    }
    payload* const kept = new payload(std::move(p));
    const auto release = [](void*, void* which) { delete static_cast<payload*>(which); };
    if (zmq_msg_init_data(&m, kept->head(), bytes, release, kept) != 0) {
      delete kept;
      throw std::bad_alloc();
    }
    if (zmq_msg_send(&m, link, ZMQ_DONTWAIT) >= 0) return true;
    p = std::move(*kept);
    zmq_msg_close(&m);
    return false;
  }
  /// @brief Takes the next packet. @param p Where to.
  bool get(payload& p) {
    for (;;) {
      zmq_msg_t m;
      zmq_msg_init(&m);
      if (zmq_msg_recv(&m, inward_, ZMQ_DONTWAIT) < 0) {
        zmq_msg_close(&m);
        std::uint64_t times = 0;
        if (rung_.exchange(false)) [[maybe_unused]]
          const auto n = read(woken_, &times, sizeof times);
        return false;
      }
      const std::size_t bytes = zmq_msg_size(&m);
      std::byte* const first = static_cast<std::byte*>(zmq_msg_data(&m));
      if (bytes < payload::room) {  // from somebody who isn't one of us
        zmq_msg_close(&m);
        continue;
      }
      if (bytes <= copied || reinterpret_cast<std::uintptr_t>(first) % 8 != 0) {
        p = payload(bytes - payload::room);
        std::memcpy(p.head(), first, bytes);
        zmq_msg_close(&m);
        return true;
      }
      zmq_msg_t* const kept = new zmq_msg_t;
      zmq_msg_init(kept);
      zmq_msg_move(kept, &m);
      zmq_msg_close(&m);
      const auto release = [](void* which) noexcept {
        zmq_msg_close(static_cast<zmq_msg_t*>(which));
        delete static_cast<zmq_msg_t*>(which);
      };
      p = payload(first, bytes - payload::room, release, kept);
      return true;
    }
  }
  /// @brief Waits for a packet. @param longest At most so long.
  void wait(std::chrono::nanoseconds longest) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
    const timespec t{static_cast<std::time_t>(seconds.count()), static_cast<long>((longest - seconds).count())};
    pollfd either[2] = {{ready_, POLLIN, 0}, {woken_, POLLIN, 0}};
    ppoll(either, 2, &t, nullptr);
  }
  /// Ends a wait.
  void wake() {
    const std::uint64_t once = 1;
    rung_ = true;
    [[maybe_unused]] const auto n = write(woken_, &once, sizeof once);
  }

 private:
  static constexpr std::size_t copied = 4096;  // bytes of a packet that is copied rather than kept

  void check(bool good, const std::string& what) const {
    if (good) return;
    throw comm_error("zmq::messenger", rank_, -1, what + ": " + zmq_strerror(zmq_errno()));
  }
  // Whether an address means any host, so that it is good for binding only.
  static bool anywhere(std::string_view where) {
    return where.starts_with("tcp://*:") || where.starts_with("tcp://0.0.0.0:") || where.starts_with("tcp://[::]:");
  }
  // The address with the port that was taken; the host as it was given, unless it means any.
  static std::string reached(const std::string& asked, const std::string& bound) {
    if (!asked.starts_with("tcp://")) return bound;
    return anywhere(asked) ? bound : asked.substr(0, asked.rfind(':')) + bound.substr(bound.rfind(':'));
  }
  void close_all() noexcept {
    const int most = static_cast<int>(linger_.count());
    for (void*& link : links_) {
      if (!link) continue;
      zmq_setsockopt(link, ZMQ_LINGER, &most, sizeof most);
      zmq_close(std::exchange(link, nullptr));
    }
    if (inward_) zmq_close(inward_);
    if (context_) zmq_ctx_term(context_);
    if (woken_ >= 0) ::close(woken_);
  }

  int rank_;
  std::vector<std::string> addresses_;
  std::vector<void*> links_;
  std::chrono::milliseconds linger_;
  void* context_ = nullptr;
  void* inward_ = nullptr;
  int ready_ = -1, woken_ = -1;
  std::atomic<bool> rung_{false};
};

/// @brief A messenger between processes.
///
/// A process that restarts binds the same address, or announces another; its peers find it again either way. A process
/// that is killed is found out by its silence. Where a connection breaks and both sides live, ZeroMQ connects again.
/// Needs a Linux kernel (eventfd).
class messenger : public basic_messenger<transport> {
 public:
  /// @param o Settings. @param rank This rank. @param addresses Where each rank is bound, see `transport`.
  /// @param announced What the others are told to connect to, where that isn't what is bound: behind a port mapping.
  /// @param linger How long the destructor waits until what was sent has left.
  /// Throws: argument_error; comm_error with ZeroMQ's text if the address can't be bound.
  messenger(const messenger_options& o, int rank, std::vector<std::string> addresses, const std::string& announced = {},
            std::chrono::milliseconds linger = std::chrono::milliseconds(1000))
      : basic_messenger(o, rank, std::move(addresses), announced, linger) {}

  /// The address that others reach this rank by.
  const std::string& where() const noexcept { return carrier().where(); }
};
static_assert(heddle::messenger<messenger>);

/// @brief Opens messengers between the ranks of a communicator, over which they tell each other their addresses.
struct connection {
  std::string address{};  ///< Where this rank is bound, and reached by the others: `tcp://host:port`, `ipc://file`.
  messenger_options options{};  ///< Of every messenger.

  /// @brief A messenger with this rank's number. Collective.
  /// @param comm Any communicator.
  /// Throws: argument_error on every rank if an address is empty, longer than 255 bytes, or names no host or port;
  /// comm_error with ZeroMQ's text if it can't be bound.
  template <heddle::communicator Comm> std::unique_ptr<messenger> open(Comm& comm) const {
    struct record {
      char text[256];
    } mine{};
    if (address.size() < sizeof mine.text && address.find('*') == address.npos) address.copy(mine.text, address.size());
    std::vector<std::string> all;
    for (const record& r : heddle::detail::tell_ranks(comm, mine)) all.emplace_back(r.text);
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r].empty())
        throw argument_error("heddle::zmq::connection: rank " + std::to_string(r) +
                             " has no address that others can reach; allowed are tcp://host:port and ipc://file");
    }
    return std::make_unique<messenger>(options, comm.rank(), std::move(all));
  }
};

}  // namespace zmq
}  // namespace v0
}  // namespace heddle
