// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/comm/zmq.hpp>
#include <heddle/core/philox.hpp>
#include <heddle/trainer/server.hpp>

#include "../comm/messenger_conformance.hpp"
#include "../trainer/support.hpp"
#include "processes.hpp"

#include <memory>

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <atomic>

namespace hd = heddle;

namespace {
using namespace std::chrono_literals;
using hd::message_kind;
using heddle_test::folder;
using heddle_test::inbox;
using heddle_test::process;

hd::messenger_options quick(std::chrono::milliseconds silence = 400ms) {
  hd::messenger_options o;
  o.beat = 20ms;
  o.silence = silence;
  return o;
}

int free_port() {
  const hd::zmq::transport t(0, {"tcp://127.0.0.1:*"});
  return std::stoi(t.where().substr(t.where().rfind(':') + 1));
}

// example-begin messenger
// Answers every message with itself, until one of tag 0 comes.
void echo(int rank, const std::vector<std::string>& addresses, const hd::messenger_options& o) {
  hd::zmq::messenger m(o, rank, addresses);
  while (auto got = m.receive(10s)) {
    if (got->kind == message_kind::refused) m.renew();  // a peer had given this process up
    if (got->kind != message_kind::data) continue;      // who has joined, left or died
    if (got->tag == 0) return;
    try {
      m.send(got->from, got->tag, got->id, std::move(got->body));  // to that life of the peer, no other
    } catch (const hd::peer_error&) {                              // it has died meanwhile
    }
  }
}
// example-end
}  // namespace

TEST_CASE("messengers over ZeroMQ conform") {
  const folder sockets;
  heddle_test::conforms_to_messenger({1, 2, 3, 5}, [&](int ranks, const hd::messenger_options& o, auto f) {
    heddle_test::on_threads(
        ranks, [&](int r) { return std::make_unique<hd::zmq::messenger>(o, r, sockets.addresses(ranks)); }, f);
  });
}

TEST_CASE("a killed process is named, and its successor is found") {
  const folder sockets;
  for (const bool at_once : {false, true}) {
    INFO((at_once ? "restarted at once, at an address" : "restarted when it is missed, at a port"));
    // The client's address isn't known to the server, which learns it from the client.
    std::vector<std::string> there{"", at_once ? sockets.addresses(2)[1] : "tcp://127.0.0.1:*"};
    const auto serve = [&] { echo(1, there, quick()); };
    if (!at_once) there[1] = "tcp://127.0.0.1:" + std::to_string(free_port());  // for all lives
    std::optional<process> server(serve);
    std::vector<std::string> here = there;
    here[0] = "tcp://127.0.0.1:*";
    hd::zmq::messenger m(quick(), 0, here);
    inbox in(m);
    std::uint64_t id = 0, former = 0;
    m.connect(1);
    for (int life = 0; life < 4; ++life) {
      INFO("life " << life);
      const hd::message joined = in.next(message_kind::joined, 0, 1);
      CHECK(joined.from.life > former);
      const auto served = 3 + hd::philox(1, 0, static_cast<std::uint64_t>(life)).word[0] % 40;
      for (std::uint32_t k = 0; k < served; ++k, ++id) {
        m.send(1, 7, id, heddle_test::numbers(0, 1, id, 10 * (id % 2000)));
        const hd::message back = in.next(message_kind::data, 7, 1);
        REQUIRE(back.id == id);
        REQUIRE(back.from == joined.from);
        REQUIRE(heddle_test::same(back.body, heddle_test::numbers(0, 1, id, 10 * (id % 2000))));
      }
      for (int k = 0; k < 5; ++k) m.send(1, 8, id, heddle_test::numbers(0, 1, 1, 100'000));  // under way when it dies
      server->send(SIGKILL);
      const auto start = std::chrono::steady_clock::now();
      server.reset();
      former = joined.from.life;
      if (!at_once) {
        const hd::message died = in.next(message_kind::died, 0, 1);
        CHECK(died.from == joined.from);
        CHECK(died.body.text().find("rank 1 was silent for ") == 0);
        CHECK(std::chrono::steady_clock::now() - start < 5s);  // the silence is 400 ms
        CHECK_THROWS_AS(m.send(1, 7, 0, hd::payload(0)), hd::peer_error);
      }
      server.emplace(serve);
      if (at_once) CHECK(in.next(message_kind::died, 0, 1).from == joined.from);
    }
    in.next(message_kind::joined, 0, 1);
    m.send(1, 0, 0, hd::payload(0));
    CHECK(in.next(message_kind::left, 0, 1).body.text() == "rank 1 has left");
    CHECK(server->wait() == 0);
  }
}

TEST_CASE("a process that was stopped learns that it is held for dead, and begins another life") {
  const folder sockets;
  const auto there = sockets.addresses(2);
  process server([&] { echo(1, there, quick()); });
  hd::zmq::messenger m(quick(), 0, there);
  inbox in(m);
  m.connect(1);
  const hd::message joined = in.next(message_kind::joined, 0, 1);
  server.send(SIGSTOP);
  CHECK(in.next(message_kind::died, 0, 1).from == joined.from);
  server.send(SIGCONT);
  const hd::message again = in.next(message_kind::joined, 0, 1);
  CHECK(again.from.life > joined.from.life);
  m.send(1, 7, 3, hd::payload(5));
  CHECK(in.next(message_kind::data, 7, 1).id == 3);
}

namespace {
// Passes on what comes to a port of its own to another port, until it is told to break the connection; then anew.
class relay {
 public:
  explicit relay(int to) : to_(to), listening_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in a = local(0);
    socklen_t length = sizeof a;
    REQUIRE(bind(listening_, reinterpret_cast<sockaddr*>(&a), sizeof a) == 0);
    REQUIRE(listen(listening_, 4) == 0);
    REQUIRE(getsockname(listening_, reinterpret_cast<sockaddr*>(&a), &length) == 0);
    port_ = ntohs(a.sin_port);
    thread_ = std::thread([this] { run(); });
  }
  ~relay() {
    stop_ = true;
    thread_.join();
    close(listening_);
  }
  int port() const { return port_; }
  void cut() { cut_ = true; }

 private:
  static sockaddr_in local(int port) {
    sockaddr_in a{};
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    a.sin_port = htons(static_cast<std::uint16_t>(port));
    return a;
  }
  static bool pass_on(int from, int to) {
    char bytes[4096];
    const auto n = read(from, bytes, sizeof bytes);
    for (auto sent = n - n; sent < n;) {
      const auto more = send(to, bytes + sent, static_cast<std::size_t>(n - sent), MSG_NOSIGNAL);
      if (more <= 0) return false;
      sent += more;
    }
    return n > 0;
  }
  void run() {
    while (!stop_) {
      pollfd waits{listening_, POLLIN, 0};
      if (poll(&waits, 1, 10) < 1) continue;
      const int in = accept(listening_, nullptr, nullptr), out = socket(AF_INET, SOCK_STREAM, 0);
      const sockaddr_in a = local(to_);
      bool open = connect(out, reinterpret_cast<const sockaddr*>(&a), sizeof a) == 0;
      while (open && !stop_ && !cut_.exchange(false)) {
        pollfd both[2] = {{in, POLLIN, 0}, {out, POLLIN, 0}};
        if (poll(both, 2, 10) < 1) continue;
        if (both[0].revents) open = pass_on(in, out);
        if (open && both[1].revents) open = pass_on(out, in);
      }
      close(in);
      close(out);
    }
  }

  int to_, listening_, port_ = 0;
  std::atomic<bool> stop_{false}, cut_{false};
  std::thread thread_;
};
}  // namespace

TEST_CASE("a connection that breaks is made again, and what was lost on it is told") {
  hd::messenger_options o = quick(20s);
  o.window = 256 << 10;
  const int port = free_port();
  relay between(port);
  const std::string bound = "tcp://127.0.0.1:" + std::to_string(port),
                    reached = "tcp://127.0.0.1:" + std::to_string(between.port());
  hd::zmq::messenger receiver(o, 1, {"", bound}, reached), sender(o, 0, {"tcp://127.0.0.1:*", reached});
  constexpr std::uint64_t count = 600;
  std::thread sending([&] {
    for (std::uint64_t k = 0; k < count; ++k) {
      if (k % 150 == 100) between.cut();
      sender.send(1, 1, k, heddle_test::numbers(0, 1, k, 20'000));
    }
    for (int k = 0; k < 50; ++k) sender.send(1, 2, 0, hd::payload(0));
  });
  std::uint64_t next = 0, received = 0, gaps = 0;
  bool told = false, right = true;
  for (std::uint32_t tag = 1; tag == 1;) {
    const auto got = receiver.receive(20s);
    REQUIRE(got);
    told |= got->kind == message_kind::gap;
    gaps += got->kind == message_kind::gap;
    right &= got->kind == message_kind::joined || got->kind == message_kind::gap || got->kind == message_kind::data;
    if (got->kind != message_kind::data) continue;
    tag = got->tag;
    if (tag != 1) continue;
    right &= told ? got->id >= next : got->id == next;  // nothing is missing that wasn't told, nothing comes twice
    right &= heddle_test::same(got->body, heddle_test::numbers(0, 1, got->id, 20'000));
    next = got->id + 1;
    ++received;
    told = false;
  }
  sending.join();
  CHECK(right);
  CHECK(received > count / 4);
  CHECK(gaps >= 1);
}

TEST_CASE("an address without a host doesn't replace the one that is known") {
  const std::string bound = "tcp://127.0.0.1:" + std::to_string(free_port());
  hd::zmq::messenger server(quick(), 1, {"", bound}, "tcp://0.0.0.0:" + std::to_string(free_port()));  // nobody there
  hd::zmq::messenger client(quick(), 0, {"tcp://127.0.0.1:*", bound});
  inbox in(client), out(server);
  client.connect(1);
  in.next(message_kind::joined, 0, 1);
  std::this_thread::sleep_for(50ms);
  client.send(1, 1, 5, hd::payload(0));
  CHECK(out.next(message_kind::data, 1, 0).id == 5);
}

TEST_CASE("what can't be bound or isn't understood") {
  const folder sockets;
  const auto there = sockets.addresses(2);
  CHECK_THROWS_AS(hd::zmq::messenger(quick(), 2, there), hd::argument_error);
  CHECK_THROWS_WITH(hd::zmq::messenger(quick(), 0, {"tcp://no.such.host.invalid:1", ""}),
                    Catch::Contains("zmq_bind to tcp://no.such.host.invalid:1: "));
  hd::zmq::messenger m(quick(), 0, there);
  // Somebody who isn't one of us.
  void* const context = zmq_ctx_new();
  void* const s = zmq_socket(context, ZMQ_PUSH);
  REQUIRE(zmq_connect(s, there[0].c_str()) == 0);
  for (const std::size_t bytes : {0, 1, 63, 64, 65, 5000}) {
    const std::string noise(bytes, '\x7f');
    CHECK(zmq_send(s, noise.data(), bytes, 0) >= 0);
  }
  const auto end = std::chrono::steady_clock::now() + 10s;
  while (m.counts().discarded < 3 && std::chrono::steady_clock::now() < end) CHECK(!m.receive(10ms));
  CHECK(m.counts().discarded == 3);
  zmq_close(s);
  zmq_ctx_term(context);
}

TEST_CASE("parameter servers over ZeroMQ train bit for bit as every_step on threads") {
  const folder sockets;
  const auto there = sockets.addresses(3);
  const auto expected = train(hd::strategy{.topology = hd::native{}}, hd::sgd{}, 3, 8, 0.05f);
  hd::threads::run(3, [&](auto& comm) {
    quadratic m;
    const hd::zmq::connection connection{.address = there[static_cast<std::size_t>(comm.rank())]};
    const auto plan = hd::strategy{.mode = hd::async_ps<hd::zmq::connection>{.connection = connection, .staleness = 0}};
    hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
    for (std::size_t s = 0; s < 8; ++s) train_step(dp, m, first_sample(s, comm.rank(), 3, 2), 2, 0.05f);
    dp.join();
    RANK_CHECK(m.w == expected[0]);
    RANK_CHECK_THROWS_AS(hd::zmq::connection{}.open(comm), hd::argument_error);
  });
}
