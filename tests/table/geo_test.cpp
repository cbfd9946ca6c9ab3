// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/table/geo_table.hpp>

#include "servers.hpp"

#include <cmath>
#include <functional>
#include <numeric>
#include <optional>
#include <thread>

namespace hd = heddle;

namespace {
constexpr std::size_t dim = 3;
using wire = hd::lossy<hd::threads::messenger>;

// Servers of Table and workers, a thread each. Returns the servers' rows of `keys`, and what went wrong.
template <class Table>
std::pair<floats, std::string> run(int servers, int workers, const hd::losses& losses, const keys_type& keys,
                                   const std::function<void(int, wire&)>& work) {
  const hd::threads::meeting_place place(servers + workers);
  const typename Table::settings how{.seed = 5, .shard_bits = 4};
  std::vector<std::unique_ptr<Table>> parts(static_cast<std::size_t>(servers));
  std::string failures;
  std::mutex mutex;
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < servers + workers; ++r) {
      threads.emplace_back([&, r] {
        try {
          hd::threads::messenger inner(quick(), place, r);
          hd::losses mine = losses;
          mine.seed += static_cast<std::uint64_t>(r);
          wire m(inner, mine);
          if (r >= servers) return work(r - servers, m);
          auto& part = parts[static_cast<std::size_t>(r)];
          part = std::make_unique<Table>(hd::settings_of_server(how, r, servers));
          hd::table_server server(*part, m, {.servers = servers, .workers = workers});
          server.run();
        } catch (const std::exception& e) {
          const std::lock_guard lock(mutex);
          failures += e.what();
        }
      });
    }
  }
  floats rows(keys.size() * dim);
  for (std::size_t i = 0; failures.empty() && i < keys.size(); ++i) {
    const auto shard = hd::detail::shard_of(hd::detail::mix(keys[i]), how.shard_bits);
    const auto s = hd::detail::server_of(shard, static_cast<std::uint32_t>(servers), how.shard_bits);
    parts[s]->read(std::span(&keys[i], 1), std::span(rows).subspan(i * dim, dim));
  }
  return {rows, failures};
}
}  // namespace

TEST_CASE("replicas on a sharded table send their moves in instalments, and flush sends the rest") {
  using replica = hd::geo_table<std::uint64_t, hd::row<dim>, hd::rule::sgd, hd::initial::zero, wire>;
  const keys_type key{7};
  for (const int rounds : {1, 2, 4, 8}) {
    for (const bool flushed : {false, true}) {
      for (const bool half : {false, true}) {
        if (half && !flushed) continue;
        const auto [rows, failures] =
            run<replica::server_table>(2, 4, rounds == 4 ? bad : hd::losses{}, key, [&](int w, wire& m) {
              hd::worker_options o = worker(2);
              o.half = half;
              replica r({.seed = 5, .shard_bits = 4}, {}, m, o, {.workers = 4, .period = 1});
              r.push(key, floats(dim, -static_cast<float>(w + 1)), {.lr = 1.0f});             // moves 1, 2, 3, 4
              for (int t = 1; t < rounds; ++t) r.push(key, floats(dim, 0.0f), {.lr = 1.0f});  // touches it
              RANK_CHECK(r.exchanges() == static_cast<std::uint64_t>(rounds));
              if (flushed) return r.finish();
              floats seen(dim);
              r.read(key, seen);  // the servers have its pushes
            });
        INFO(rounds << (flushed ? ", flushed" : "") << (half ? ", half" : ""));
        if (flushed) CHECK(failures.empty());
        if (!flushed) continue;
        for (const float x : rows) CHECK(x == Approx(10.0f).epsilon(half ? 1e-4 : 1e-6));
      }
    }
  }
}

TEST_CASE("an instalment is the stated part of what is kept") {
  using replica = hd::geo_table<std::uint64_t, hd::row<dim>, hd::rule::sgd, hd::initial::zero, wire>;
  const keys_type key{9};
  std::atomic<int> ready{0};
  floats seen[8];
  const auto [rows, failures] = run<replica::server_table>(1, 4, {}, key, [&](int w, wire& m) {
    replica r({.seed = 5, .shard_bits = 4}, {}, m, worker(1), {.workers = 4, .period = 1});
    const auto meet = [&](int at) {
      ++ready;
      while (ready < at) std::this_thread::sleep_for(100us);
    };
    for (int t = 0; t < 8; ++t) {
      r.push(key, floats(dim, t == 0 ? -static_cast<float>(w + 1) : 0.0f), {.lr = 1.0f});
      floats mine(dim);
      r.read(key, mine);
      meet(8 * t + 4);
      if (w == 0) {
        seen[t].resize(dim);
        r.read(key, seen[t]);
      }
      meet(8 * t + 8);
    }
    r.finish();
  });
  CHECK(failures.empty());
  for (int t = 0; t < 8; ++t) {
    REQUIRE(seen[t].size() == dim);
    CHECK(static_cast<double>(seen[t][0]) == Approx(10.0 * (1.0 - std::pow(0.75, t + 1))));
  }
}

TEST_CASE("one replica alone is plain training, and every key is one like any other") {
  using replica = hd::geo_table<std::uint64_t, hd::row<dim>, hd::rule::adagrad, hd::initial::uniform, wire>;
  const keys_type keys{0, ~std::uint64_t{0}, std::uint64_t{1} << 63, 5, 5, 0};
  hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::adagrad> expected({.seed = 5, .shard_bits = 4});
  const auto gradient = [&](int t) {
    floats g(keys.size() * dim);
    for (std::size_t i = 0; i < g.size(); ++i) g[i] = hd::random_uniform(3, static_cast<std::uint64_t>(t), i) - 0.5f;
    return g;
  };
  for (int t = 0; t < 10; ++t) expected.push(keys, gradient(t), {.lr = 0.1f});
  const auto [rows, failures] = run<replica::server_table>(2, 1, {}, keys, [&](int, wire& m) {
    replica r({.seed = 5, .shard_bits = 4}, {}, m, worker(2), {.period = 3});
    floats before(keys.size() * dim), begin(dim);
    r.pull(keys, before);
    hd::initial::uniform{}.fill<dim>(begin.data(), 5, 0, 0);
    RANK_CHECK(std::equal(begin.begin(), begin.end(), before.begin()));
    floats spoilt = gradient(0);
    spoilt.assign(spoilt.size(), std::nanf(""));
    r.push(keys, spoilt, {.lr = 0.1f});
    RANK_CHECK(r.rejected() == keys.size());
    r.push(keys_type{}, floats{}, {.lr = 0.1f});
    for (int t = 0; t < 10; ++t) r.push(keys, gradient(t), {.lr = 0.1f});
    RANK_CHECK_THROWS_AS(r.push(keys, floats(1)), hd::argument_error);
    RANK_CHECK_THROWS_AS(r.pull(keys, std::span<float>{}), hd::argument_error);
    floats huge(2 * dim, 3e38f);
    r.push(keys_type{5, 5}, huge, {.lr = 1.0f});  // whose sum isn't finite
    RANK_CHECK(r.rejected() == keys.size() + 1);
    r.finish();
  });
  CHECK(failures.empty());
  floats wanted(rows.size());
  expected.read(keys, wanted);
  for (std::size_t i = 0; i < rows.size(); ++i) CHECK(rows[i] == Approx(wanted[i]).epsilon(1e-5));
  hd::threads::meeting_place place(2);
  hd::threads::messenger inner(quick(), place, 1);
  wire m(inner, {});
  for (const auto spoil : {+[](hd::worker_options&, hd::geo_table_options& g) { g.period = 0; },
                           +[](hd::worker_options&, hd::geo_table_options& g) { g.part = 1.5; },
                           +[](hd::worker_options&, hd::geo_table_options& g) { g.workers = 0; },
                           +[](hd::worker_options& o, hd::geo_table_options&) { o.gather = 9; }}) {
    hd::worker_options o = worker(1);
    hd::geo_table_options g;
    spoil(o, g);
    CHECK_THROWS_AS(replica({}, {}, m, o, g), hd::argument_error);
  }
}

TEST_CASE("a replica meets a key as the servers have it, and what it only reads doesn't grow old") {
  using replica = hd::geo_table<std::uint64_t, hd::row<dim>, hd::rule::sgd, hd::initial::uniform, wire>;
  const keys_type old{7}, pushed{8}, own{9};
  const replica::server_table::settings how{.seed = 5, .shard_bits = 4};
  const auto begin = [&](const keys_type& key) {
    floats row(dim);
    hd::initial::uniform{}.fill<dim>(row.data(), how.seed, how.table, key[0]);
    return row;
  };
  std::atomic<int> stage{0};
  const auto reach = [&](int s) { stage = s; };
  const auto await = [&](int s) {
    for (int i = 0; stage < s && i < 50'000; ++i)
      std::this_thread::sleep_for(100us);  // not for ever, if a check failed
  };
  const auto [rows, failures] = run<replica::server_table>(2, 2, {}, pushed, [&](int w, wire& m) {
    replica r(how, {}, m, worker(2), {.workers = 2, .period = 1, .part = 1.0, .oldest = 2});
    floats row(dim);
    const auto has = [&](const keys_type& key, float above) {
      r.pull(key, row);
      for (std::size_t i = 0; i < dim; ++i) RANK_CHECK(std::abs(row[i] - begin(key)[i] - above) < 1e-5f);
    };
    const auto move = [&](const keys_type& key, float by) { r.push(key, floats(dim, -by), {.lr = 1.0f}); };
    if (w == 0) {
      move(old, 10.0f), move(pushed, 10.0f);
      r.flush();
      reach(1), await(2);
      move(old, 5.0f);
      r.flush();
      reach(3), await(4);
      move(old, 5.0f);
      r.flush();
      reach(5);
      return r.finish();
    }
    await(1);
    has(old, 10.0f);     // by a pull
    has(own, 0.0f);      // whom nobody has moved
    move(pushed, 1.0f);  // by a push, which is on top of what was there
    has(pushed, 11.0f);
    reach(2), await(3);
    has(old, 10.0f);  // as old as an exchange
    move(own, 1.0f), move(own, 1.0f);
    has(old, 15.0f);  // since it was read, the first of these has asked for it
    for (int i = 0; i < 4; ++i) move(own, 1.0f);
    reach(4), await(5);
    has(old, 20.0f);  // not read for more than two exchanges: asked for before it is
    r.finish();
    has(own, 6.0f);
  });
  CHECK(failures.empty());
  for (std::size_t i = 0; i < rows.size(); ++i) CHECK(std::abs(rows[i] - begin(pushed)[i] - 11.0f) < 1e-5f);
}

namespace {
using counting = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::sum, hd::initial::zero>;
using tag = hd::detail::table_tag;

// What a worker says, message by message.
void say(hd::threads::messenger& m, tag t, std::uint64_t id, hd::detail::table_request h, const keys_type& keys = {},
         int server = 0) {
  h.items = keys.size();
  hd::detail::byte_writer out;
  out.put(h);
  out.put(keys.data(), 8 * keys.size());
  const floats ones(t == tag::push ? dim * keys.size() : 0, 1.0f);
  out.put(ones.data(), 4 * ones.size());
  RANK_CHECK(m.try_send(server, static_cast<std::uint32_t>(t), id,
                        hd::payload(std::span<const std::byte>(out.data(), out.size()))));
}
}  // namespace

TEST_CASE("a server that started again without having heard a greeting takes any word for one") {
  // A former job has left; the table has that.
  counting part({.shard_bits = 4});
  constexpr std::uint32_t whole = 0x4000, presence = 0x8000;
  for (std::uint32_t w = 0; w < 2; ++w) {
    part.note_sequence(w, 7), part.note_sequence(w + whole, 7), part.note_sequence(w + presence, 1);
  }
  const auto layout = part.layout_number();
  for (const auto first : {tag::push, tag::pull}) {
    hd::threads::meeting_place place(3);
    hd::threads::messenger home(quick(), place, 0), one(quick(), place, 1), two(quick(), place, 2);
    hd::table_server server(part, home, {.workers = 2, .staleness = 0, .ordered = true});
    one.connect(0), two.connect(0);
    const auto serve = [&] {
      while (server.serve(20ms)) {
      }
    };
    serve();
    CHECK(server.all_gone());
    // Words from before that save don't bring it back, nor does one that says that it leaves.
    say(one, tag::push, 7, {.layout = layout, .object = 5}, {1});
    say(one, tag::pull, 9, {.layout = layout, .pushes = 6, .object = 5}, {1});
    say(one, tag::save, 10, {.layout = layout, .pushes = 7, .object = 5, .last = 1});
    serve();
    CHECK(server.all_gone());
    say(two, tag::pull, 11, {.layout = layout, .pushes = 7, .object = 5}, {1});
    serve();
    CHECK_FALSE(server.all_gone());
    say(one, first, first == tag::push ? 8 : 11, {.layout = layout, .pushes = 7, .object = 5}, {1});
    serve();
    CHECK(server.applied(0) == 7);  // a step waits for the second worker, who is here, too
    if (first == tag::pull) say(one, tag::push, 8, {.layout = layout, .object = 5}, {1});
    say(two, tag::push, 8, {.layout = layout, .object = 5}, {1});
    serve();
    CHECK(server.applied(0) == 8);
    CHECK(server.applied(1) == 8);
    part.forget_sequences();
    for (std::uint32_t w = 0; w < 2; ++w) {
      part.note_sequence(w, 7), part.note_sequence(w + whole, 7), part.note_sequence(w + presence, 1);
    }
  }
  part.forget_sequences();
  CHECK(part.sequence_of(0) == 0);
}

TEST_CASE("a server that begins when all have left answers one that hasn't heard so") {
  counting part({.seed = 5, .shard_bits = 4});
  constexpr std::uint32_t whole = 0x4000, presence = 0x8000;
  part.note_sequence(0, 7), part.note_sequence(whole, 7), part.note_sequence(presence, 1);
  hd::threads::meeting_place place(2);
  hd::threads::messenger home(quick(), place, 0);
  hd::table_server server(part, home, {.workers = 1, .linger = 5s});
  CHECK(server.all_gone());
  const auto layout = part.layout_number();
  std::jthread runs([&] { server.run(); });
  std::this_thread::sleep_for(100ms);  // it runs by then, as one that has started again beside a worker that waits
  std::optional<hd::threads::messenger> one(std::in_place, quick(), place, 1);
  one->connect(0);
  bool answered = false;
  for (int tries = 0; tries < 200 && !answered; ++tries) {
    (void)one->receive(20ms);
    if (one->life_of(0) == 0) continue;
    say(*one, tag::save, 10, {.layout = layout, .pushes = 7, .object = 5, .last = 1}, {});
    while (const auto m = one->receive(20ms)) answered |= m->kind == hd::message_kind::data && m->id == 10;
  }
  CHECK(answered);
  one.reset();  // says goodbye
}

TEST_CASE("a dead worker's batches go to one who asks, once each, also if that one dies") {
  constexpr int batches = 30;
  for (const int variant : {0, 1, 2, 3}) {
    const bool again = variant % 2 != 0, apart = variant >= 2;  // apart: each worker's clock is ahead of its heir's
    hd::threads::meeting_place place(4);
    std::atomic<int> pushed{0};
    std::atomic<int> heirs{0};
    // A batch of a worker is one key of its own.
    const auto train = [&](int self, wire& m, int until) {
      for (int of = self; of >= 0;) {
        hd::worker_options o = worker(1);
        o.resumes = o.stands_for >= 0;
        if (of != self) o.stands_for = of, o.resumes = true;
        const int which = of == self ? 0 : 1 + heirs;  // a rank's objects have numbers of their own
        if (apart) o.object = static_cast<std::uint64_t>(1000 * (self + 1) + which), o.patience = 10s;
        hd::sharded_table<counting, wire> t({.seed = 5, .shard_bits = 4}, m, o);
        if (of != self) ++heirs;
        for (int b = static_cast<int>(t.pushed_before()); b < batches; ++b) {
          if (b == until && (of == self || again)) {
            t.flush();
            place.kill(1 + self);
            return;
          }
          const keys_type key{static_cast<std::uint64_t>(1000 * of + b)};
          floats row(dim);
          t.pull(key, row);
          t.push(key, floats(dim, 1.0f), {.lr = 1.0f});
          ++pushed;
        }
        RANK_CHECK_THROWS_AS(t.next_orphan(), hd::argument_error);  // its own share isn't done yet
        t.finish();
        of = t.next_orphan();
      }
    };
    counting part({.seed = 5, .shard_bits = 4});
    std::string failure;
    std::mutex mutex;
    {
      std::vector<std::jthread> threads;
      for (int r = 0; r < 4; ++r) {
        threads.emplace_back([&, r] {
          try {
            hd::threads::messenger inner(quick(), place, r);
            wire m(inner, {.drop = 0.05, .duplicate = 0.05, .reorder = 0.05, .seed = static_cast<std::uint64_t>(r)});
            // Worker 2 dies in its own; worker 1 dies in its own, or, again, later in what it took over.
            if (r > 0) return train(r - 1, m, r == 3 ? 11 : r == 2 && again ? 20 : batches + 1);
            hd::table_server server(part, m, {.workers = 3, .on_death = hd::worker_death::reassign});
            server.run();
          } catch (const std::exception& e) {
            const std::lock_guard lock(mutex);
            failure = e.what();
          }
        });
      }
    }
    INFO("variant " << variant);
    CHECK(failure == "");
    CHECK(heirs == (again ? 2 : 1));
    CHECK(part.size() == 3 * batches);
    std::size_t ones = 0;
    part.for_each([&](const auto& r) { ones += r.weights[0] == 1.0f; });
    CHECK(ones == 3 * batches);
  }
}

TEST_CASE("a worker goes on above the last object that any server knows, whatever its clock says") {
  const counting::settings how{.seed = 5, .shard_bits = 4};
  hd::threads::meeting_place place(3);
  std::vector<std::unique_ptr<counting>> parts;
  for (int k = 0; k < 2; ++k) parts.push_back(std::make_unique<counting>(hd::settings_of_server(how, k, 2)));
  keys_type keys(20);
  std::iota(keys.begin(), keys.end(), std::uint64_t{0});
  const auto owner = [&](std::uint64_t key) {
    return hd::detail::server_of(hd::detail::shard_of(hd::detail::mix(key), how.shard_bits), 2, how.shard_bits);
  };
  std::uint64_t late = 1000;  // a key of the first server
  while (owner(late) != 0) ++late;
  std::string failures;
  std::mutex mutex;
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < 3; ++r) {
      threads.emplace_back([&, r] {
        try {
          if (r < 2) {
            hd::threads::messenger m(quick(), place, r);
            hd::server_options o{.servers = 2, .on_death = hd::worker_death::wait, .linger = 300ms, .join = 20s};
            hd::table_server server(*parts[static_cast<std::size_t>(r)], m, o);
            return server.run();
          }
          const auto layout = counting(how).layout_number();
          // The second server knows one that died before it reached the first.
          const std::uint64_t last[2] = {100, 900};
          {
            hd::messenger_options ahead = quick();
            ahead.life = std::uint64_t{1} << 62;
            hd::threads::messenger m(ahead, place, 2);
            const auto await = [&](hd::message_kind kind, int n) {
              for (int i = 0; i < 50 && n > 0; ++i)
                if (const auto got = m.receive(200ms); got && got->kind == kind) --n;
              RANK_CHECK(n == 0);
            };
            m.connect(0), m.connect(1);
            await(hd::message_kind::joined, 2);
            for (int k = 0; k < 2; ++k) {
              say(m, tag::hello, 1, {.layout = layout, .object = last[k]}, {}, k);
              say(m, tag::push, 1, {.layout = layout, .object = last[k]}, {}, k);
            }
            await(hd::message_kind::data, 4);
            place.kill(2);
          }
          hd::threads::messenger m(quick(), place, 2);
          // Another life; and later in that, when the clock has gone back.
          for (const std::uint64_t object : {50, 20}) {
            // What is late is passed over, also by the server that hadn't heard of it.
            if (object == 20) say(m, tag::push, 4, {.layout = layout, .object = 900}, {late});
            hd::worker_options o = worker(2);
            o.patience = 5s;
            o.object = object;
            hd::sharded_table<counting, hd::threads::messenger> t(how, m, o);
            RANK_CHECK(t.pushed_before() == (object == 50 ? 1 : 3));
            t.push(keys, floats(keys.size() * dim, 1.0f), {.lr = 1.0f});
            t.finish();
          }
        } catch (const std::exception& e) {
          const std::lock_guard lock(mutex);
          failures += e.what();
        }
      });
    }
  }
  CHECK(failures == "");
  for (const std::uint64_t key : keys) {
    floats row(dim);
    parts[owner(key)]->read(keys_type{key}, row);
    CHECK(row == floats(dim, 2.0f));
  }
  CHECK(parts[0]->size() + parts[1]->size() == keys.size());
}

TEST_CASE("nobody waits for those who make up for dead workers, however long that takes") {
  constexpr int batches = 120;
  for (const bool ordered : {false, true}) {
    hd::threads::meeting_place place(5);
    std::atomic<int> heirs{0};
    // A batch of a worker is one key of its own. Worker 2 dies early and worker 3 late, so the heir of 3 is far ahead
    // of that of 2; worker 1 still has own batches then. Own ones are quick: only the rest of 2 takes longer than the
    // patience.
    const auto train = [&](int self, hd::threads::messenger& m) {
      for (int of = self; of >= 0;) {
        hd::worker_options o = worker(1);
        o.patience = 2s;
        if (of != self) o.stands_for = of, o.resumes = true, ++heirs;
        hd::sharded_table<counting, hd::threads::messenger> t({.seed = 5, .shard_bits = 4}, m, o);
        for (int b = static_cast<int>(t.pushed_before()); b < batches; ++b) {
          if (of == self && ((self == 2 && b == 5) || (self == 3 && b == 100))) {
            t.flush();
            place.kill(1 + self);
            return;
          }
          const keys_type key{static_cast<std::uint64_t>(1000 * of + b)};
          floats row(dim);
          t.pull(key, row);
          std::this_thread::sleep_for(of != self ? 25ms : self == 1 && b >= batches - 2 ? 100ms : 0ms);
          t.push(key, floats(dim, 1.0f), {.lr = 1.0f});
        }
        t.finish();
        of = t.next_orphan();
      }
    };
    counting part({.seed = 5, .shard_bits = 4});
    std::string failures;
    std::mutex mutex;
    {
      std::vector<std::jthread> threads;
      for (int r = 0; r < 5; ++r) {
        threads.emplace_back([&, r] {
          try {
            hd::threads::messenger m(quick(), place, r);
            if (r > 0) return train(r - 1, m);
            hd::server_options o;
            o.workers = 4;
            o.staleness = ordered ? 0 : 2;
            o.ordered = ordered;
            o.on_death = hd::worker_death::reassign;
            hd::table_server server(part, m, o);
            server.run();
          } catch (const std::exception& e) {
            const std::lock_guard lock(mutex);
            failures += e.what();
          }
        });
      }
    }
    INFO((ordered ? "ordered" : "staleness 2"));
    CHECK(failures == "");
    CHECK(heirs == 2);
    CHECK(part.size() == 4 * batches);
    std::size_t ones = 0;
    part.for_each([&](const auto& r) { ones += r.weights[0] == 1.0f; });
    CHECK(ones == 4 * batches);
  }
}

TEST_CASE("an heir that was only silent keeps what it took over") {
  hd::worker_options o;
  o.stands_for = 0xffff;  // on the wire as good as none
  CHECK_THROWS_AS(o.check(), hd::argument_error);
  counting part({.shard_bits = 4});
  hd::threads::meeting_place place(4);
  hd::threads::messenger home(quick(), place, 0);
  auto one = std::make_unique<hd::threads::messenger>(quick(), place, 1);
  auto two = std::make_unique<hd::threads::messenger>(quick(), place, 2);
  hd::threads::messenger three(quick(), place, 3);
  hd::table_server server(part, home, {.workers = 3, .on_death = hd::worker_death::reassign});
  one->connect(0), two->connect(0), three.connect(0);
  const auto serve = [&] {
    while (server.serve(20ms)) {
    }
  };
  serve();
  const auto layout = part.layout_number();
  const auto given = [&](hd::threads::messenger& m) {
    say(m, tag::orphan, 3, {.layout = layout, .object = 5, .last = 1});
    serve();
    std::uint32_t worker = 77;
    while (const auto r = m.receive(20ms)) {
      if (r->kind != hd::message_kind::data || r->id != 3) continue;
      hd::detail::byte_reader in(r->body.data(), r->body.size(), "a reply");
      in.get<hd::detail::table_reply>();
      worker = in.get<std::uint32_t>();
    }
    return worker;
  };
  for (auto* const m : {one.get(), two.get(), &three}) say(*m, tag::hello, 1, {.layout = layout, .object = 5});
  for (auto* const m : {two.get(), &three}) say(*m, tag::push, 1, {.layout = layout, .object = 5, .last = 1});
  serve();
  place.kill(1);
  one.reset();
  std::this_thread::sleep_for(700ms);
  CHECK(given(*two) == 0);
  say(*two, tag::hello, 4, {.layout = layout, .object = 6, .stands_for = 1});
  serve();
  place.kill(2);
  two.reset();
  std::this_thread::sleep_for(700ms);
  serve();
  hd::threads::messenger back(quick(), place, 2);
  back.connect(0);
  serve();
  CHECK(given(three) == hd::detail::no_orphan_yet);
}

TEST_CASE("whose data was given away is told, and who is left without an heir is named") {
  counting part({.shard_bits = 4});
  hd::threads::meeting_place place(3);
  hd::threads::messenger home(quick(), place, 0);
  auto one = std::make_unique<hd::threads::messenger>(quick(), place, 1);
  hd::threads::messenger two(quick(), place, 2);
  hd::table_server server(part, home, {.workers = 2, .on_death = hd::worker_death::reassign, .join = 100ms});
  one->connect(0), two.connect(0);
  const auto serve = [&] {
    while (server.serve(20ms)) {
    }
  };
  serve();
  const auto layout = part.layout_number();
  const auto said = [&](std::uint64_t id) {  // the reply to an `orphan`, or why it failed
    serve();
    std::pair<std::uint32_t, std::string> out{0, "nothing"};
    while (const auto m = two.receive(20ms)) {
      if (m->kind != hd::message_kind::data || m->id != id) continue;
      hd::detail::byte_reader in(m->body.data(), m->body.size(), "a reply");
      const auto head = in.get<hd::detail::table_reply>();
      if (head.status == hd::detail::reply_status::failed)
        out = {0, std::string(reinterpret_cast<const char*>(in.take(in.left())), m->body.size() - sizeof head)};
      else
        out = {in.get<std::uint32_t>(), ""};
    }
    return out;
  };
  say(*one, tag::hello, 1, {.layout = layout, .object = 5});
  say(two, tag::hello, 1, {.layout = layout, .object = 5});
  say(two, tag::push, 1, {.layout = layout, .object = 5, .last = 1});
  say(two, tag::orphan, 2, {.layout = layout, .object = 5, .last = 1});
  CHECK(said(2).first == hd::detail::no_orphan_yet);
  place.kill(1);
  one.reset();
  std::this_thread::sleep_for(700ms);
  for (int i = 0; i < 2; ++i) {  // the same one, however often it is asked for
    say(two, tag::orphan, 3, {.layout = layout, .object = 5, .last = 1});
    CHECK(said(3).first == 0);
  }
  say(two, tag::hello, 4, {.layout = layout, .object = 6, .stands_for = 1});
  serve();
  // It wasn't dead, only silent.
  hd::threads::messenger back(quick(), place, 1);
  back.connect(0);
  serve();
  say(back, tag::push, 1, {.layout = layout, .object = 5}, {1});
  serve();
  CHECK(server.applied(0) == 0);
  std::string why;
  while (const auto m = back.receive(20ms))
    if (m->kind == hd::message_kind::data) why.assign(reinterpret_cast<const char*>(m->body.data()), m->body.size());
  CHECK(why.find("its data was given to rank 2") != std::string::npos);
  say(two, tag::pull, 6, {.layout = layout, .object = 6, .stands_for = 77}, {1});
  CHECK(said(6).second.find("stands for worker 76") != std::string::npos);
  // Nobody is left.
  place.kill(2), place.kill(1);
  std::string named;
  try {
    server.run();
  } catch (const hd::comm_error& e) {
    named = e.what();
  }
  CHECK(named.find("(peer 1)") != std::string::npos);
}
