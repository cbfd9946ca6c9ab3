// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include "servers.hpp"

#include <unistd.h>
#include <cstdlib>
#include <functional>

namespace hd = heddle;

namespace {
constexpr std::size_t dim = 4;
using table_type = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::adagrad>;
using wire = hd::lossy<hd::threads::messenger>;
using client = hd::sharded_table<table_type, wire>;

const table_type::settings how{.seed = 5, .shard_bits = 4};

floats gradients_of(int w, int step, std::size_t n = 40) { return draws_of(w, step, n * dim); }

struct outcome {
  std::uint64_t checksum = 0;
  std::size_t rows = 0;
  std::vector<std::string> errors;
};

// Servers and workers, a thread each; `work(rank of the worker, client)`.
outcome run(int servers, int workers, hd::server_options so, const hd::losses& losses,
            const std::function<void(int, client&)>& work, hd::worker_options wo = {},
            hd::threads::meeting_place* where = nullptr) {
  const hd::threads::meeting_place own(servers + workers);
  const hd::threads::meeting_place place = where ? *where : own;
  so.servers = servers;
  so.workers = workers;
  so.join = (std::min)(so.join, std::chrono::nanoseconds(20s));  // a worker may have left before a server was there
  if (wo.servers == 1) wo = worker(servers);
  outcome out;
  std::mutex mutex;
  const auto note = [&](const std::string& e) {
    const std::lock_guard lock(mutex);
    out.errors.push_back(e);
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < servers + workers; ++r) {
    threads.emplace_back([&, r] {
      try {
        hd::threads::messenger inner(quick(), place, r);
        hd::losses mine = losses;
        mine.seed += static_cast<std::uint64_t>(r);
        wire m(inner, mine);
        if (r < servers) {
          table_type part(hd::settings_of_server(how, r, servers));
          hd::server_options o = so;
          if (!o.path.empty()) o.path += std::to_string(r);
          hd::table_server server(part, m, o);
          server.run();
          const std::lock_guard lock(mutex);
          out.checksum += part.checksum();
          out.rows += part.size();
        } else {
          client c(how, m, wo);
          work(r - servers, c);
        }
      } catch (const std::exception& e) {
        note(std::to_string(r) + ": " + e.what());
      }
    });
  }
  for (auto& t : threads) t.join();
  return out;
}

void all_well(const outcome& o) {
  for (const std::string& e : o.errors) UNSCOPED_INFO(e);
  CHECK(o.errors.empty());
}

// Synchronous training: every step reads and then pushes what depends on what was read.
void train(int w, client& c, int steps) {
  for (int s = 0; s < steps; ++s) {
    const keys_type k = keys_of(w, s);
    floats rows(k.size() * dim), g = gradients_of(w, s);
    c.pull(k, rows);
    for (std::size_t i = 0; i < g.size(); ++i) g[i] += rows[i];
    c.push(k, g, {.lr = 0.1f});
  }
  c.finish();
}
// The same without servers: a step's workers read the same rows, and push in their order.
std::uint64_t reference(int workers, int steps) {
  table_type t(how);
  for (int s = 0; s < steps; ++s) {
    std::vector<floats> all;
    for (int w = 0; w < workers; ++w) {
      const keys_type k = keys_of(w, s);
      floats rows(k.size() * dim), g = gradients_of(w, s);
      t.pull(k, rows);
      for (std::size_t i = 0; i < g.size(); ++i) g[i] += rows[i];
      all.push_back(std::move(g));
    }
    for (int w = 0; w < workers; ++w) t.push(keys_of(w, s), all[static_cast<std::size_t>(w)], {.lr = 0.1f});
  }
  return t.checksum();
}
}  // namespace

TEST_CASE("virtual shards go to servers in equal runs") {
  for (const unsigned bits : {0u, 1u, 4u, 10u}) {
    for (std::uint32_t servers = 1; servers <= (1u << bits) && servers < 20; ++servers) {
      for (std::uint32_t s = 0; s < (1u << bits); ++s) {
        const std::uint32_t k = hd::detail::server_of(s, servers, bits);
        if (s < hd::detail::first_shard_of(k, servers, bits) || s >= hd::detail::first_shard_of(k + 1, servers, bits))
          FAIL("shard " << s << " of 2^" << bits << " on " << servers);
      }
    }
  }
  CHECK_THROWS_AS(hd::settings_of_server(how, 0, 17), hd::argument_error);
}

TEST_CASE("synchronous training gives the table of one process, for any number of servers") {
  for (const auto& [servers, workers] : {std::pair{1, 1}, {1, 3}, {3, 2}}) {
    const outcome o =
        run(servers, workers, {.staleness = 0, .ordered = true}, none, [](int w, client& c) { train(w, c, 8); });
    all_well(o);
    CHECK(o.checksum == reference(workers, 8));
  }
}

TEST_CASE("messages lost, repeated and reordered leave the same table") {  // T10
  const std::uint64_t expected = reference(2, 10);
  for (const std::uint64_t seed : {1, 2, 3}) {
    hd::losses l = bad;
    l.seed = 100 * seed;
    std::atomic<std::uint64_t> retries{0};
    const outcome o = run(2, 2, {.staleness = 0, .ordered = true}, l, [&](int w, client& c) {
      train(w, c, 10);
      retries += c.retries();
    });
    all_well(o);
    CHECK(o.checksum == expected);
    CHECK(retries > 0);
  }
}

TEST_CASE("a server killed in the middle goes on from its save, and the table is the same") {
  const std::uint64_t expected = reference(2, 12);
  for (const std::uint64_t seed : {0, 1, 2, 3}) {
    const folder dir;
    hd::threads::meeting_place place(3);
    hd::losses l = seed % 2 ? bad : none;
    l.seed = seed;
    std::atomic<int> pushed{0};
    std::atomic<bool> stop{false};
    std::uint64_t sum = 0;
    std::atomic<int> lives{0};
    std::string error;
    std::mutex writing;
    std::thread server([&] {
      while (!stop) {
        hd::threads::messenger inner(quick(), place, 0);
        wire m(inner, l);
        table_type part(how);
        hd::table_server s(part, m,
                           {.servers = 1,
                            .workers = 2,
                            .staleness = 0,
                            .ordered = true,
                            .path = dir / "s",
                            .save_every = 5});
        ++lives;
        const auto dice = hd::philox(seed, 1, static_cast<std::uint64_t>(lives)).word[0] % 5;
        const int until = lives <= 3 ? (std::min)(24, pushed + 3 + static_cast<int>(dice)) : 1000;
        while (!stop && pushed < until) s.serve(1ms);
        if (stop)
          sum = part.checksum();
        else
          place.kill(0);  // cut off, whatever it was about to say; its table is gone
      }
    });
    std::vector<std::thread> workers;
    std::atomic<int> done{0};
    for (int w = 0; w < 2; ++w) {
      workers.emplace_back([&, w] {
        try {
          hd::threads::messenger inner(quick(), place, 1 + w);
          wire m(inner, l);
          client c(how, m, worker(1));
          for (int s = 0; s < 12; ++s) {
            const keys_type k = keys_of(w, s);
            floats rows(k.size() * dim), g = gradients_of(w, s);
            c.pull(k, rows);
            for (std::size_t i = 0; i < g.size(); ++i) g[i] += rows[i];
            c.push(k, g, {.lr = 0.1f});
            ++pushed;
          }
          while (lives <= 3) std::this_thread::sleep_for(1ms);  // all deaths are before the end
          c.finish();
        } catch (const std::exception& e) {
          const std::lock_guard lock(writing);
          error = e.what();
        }
        ++done;
      });
    }
    for (auto& w : workers) w.join();
    stop = true;
    server.join();
    CHECK(error == "");
    CHECK(lives == 4);
    CHECK(sum == expected);
  }
}

TEST_CASE("pushes that are gathered are summed, and go out in time") {  // T12
  hd::worker_options wo = worker(2);
  wo.gather = 1000;
  wo.gather_for = 30ms;
  table_type expected(how);
  floats sum(dim);
  for (int i = 0; i < 3; ++i)
    for (std::size_t d = 0; d < dim; ++d) sum[d] += gradients_of(0, i, 1)[d];
  expected.push(keys_type{7}, sum, {.lr = 0.1f});
  std::atomic<bool> seen{false};
  const outcome o = run(
      2, 2, {}, none,
      [&](int w, client& c) {
        if (w == 0) {
          for (int i = 0; i < 3; ++i) c.push(keys_type{7}, gradients_of(0, i, 1), {.lr = 0.1f});
          const auto end = std::chrono::steady_clock::now() + 10s;
          while (!seen && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(2ms);  // silence
        } else {
          floats before(dim), now(dim);
          expected.read(keys_type{7}, before);
          const auto end = std::chrono::steady_clock::now() + 10s;
          while (now != before && std::chrono::steady_clock::now() < end) c.read(keys_type{7}, now);
          seen = now == before;
        }
        c.finish();
      },
      wo);
  all_well(o);
  CHECK(seen);
  CHECK(o.checksum == expected.checksum());
}

TEST_CASE("nobody reads further ahead than the bound") {
  constexpr int steps = 12, bound = 2;
  std::atomic<int> clock[2] = {0, 0};
  std::atomic<int> worst{0};
  const outcome o = run(1, 2, {.staleness = bound}, none, [&](int w, client& c) {
    floats rows(dim);
    for (int s = 0; s < steps; ++s) {
      c.pull(keys_type{1}, rows);
      const int ahead = clock[w] - clock[1 - w];
      for (int seen = worst; ahead > seen && !worst.compare_exchange_weak(seen, ahead);) {
      }
      if (w == 1) std::this_thread::sleep_for(3ms);
      ++clock[w];
      c.push(keys_type{1}, floats(dim, 1.0f), {.lr = 0.01f});
    }
    c.finish();
  });
  all_well(o);
  CHECK(worst <= bound + 1);  // the other's clock is read a moment later than the server's
  CHECK(worst > 0);
}

TEST_CASE("a batch is asked for in advance, hot rows are kept, and 16 bits suffice") {
  hd::worker_options wo = worker(3);
  wo.cached_rows = 64;
  wo.cached_for = 100;
  wo.half = true;
  std::uint64_t hits = 0;
  bool same = true, near = true;
  const outcome o = run(
      3, 1, {}, none,
      [&](int, client& c) {
        const keys_type k = keys_of(0, 0);
        auto p = c.start_pull(k);
        floats a(k.size() * dim), b(k.size() * dim), one(dim);
        c.finish_pull(std::move(p), a);
        c.pull(k, b);
        same = a == b;
        hits = c.cache_hits();
        c.read(k, b);
        RANK_CHECK(c.cache_hits() == hits);  // evaluation reads what the servers have
        {
          const auto dropped = c.start_pull(keys_type{9000});
        }
        auto moved = c.start_pull(keys_type{9001}), to = std::move(moved);
        RANK_CHECK_THROWS_AS(c.finish_pull(std::move(moved), one), hd::argument_error);
        c.finish_pull(std::move(to), one);
        RANK_CHECK_THROWS_AS(c.finish_pull(std::move(to), one), hd::argument_error);
        for (std::size_t i = 0; i < k.size(); ++i) {
          hd::initial::uniform{}.fill<dim>(one.data(), how.seed, 0, k[i]);
          for (std::size_t d = 0; d < dim; ++d) near = near && std::abs(a[i * dim + d] - one[d]) <= 0.01f / 256;
        }
        c.push(k, gradients_of(0, 0), {.lr = 0.1f});
        RANK_CHECK_THROWS_AS(c.push(k, floats(3)), hd::argument_error);
        floats nan(dim, std::nanf(""));
        c.push(keys_type{1}, nan);
        c.finish();
      },
      wo);
  all_well(o);
  CHECK((same && near));
  CHECK(hits > 20);
}

TEST_CASE("a full log waits for the server's save") {
  const folder dir;
  hd::worker_options wo = worker(2);
  wo.log_bytes = 4000;  // some six pushes
  const outcome o = run(
      2, 2, {.staleness = 0, .ordered = true, .path = dir / "s"}, none, [](int w, client& c) { train(w, c, 20); }, wo);
  all_well(o);
  CHECK(o.checksum == reference(2, 20));
}

TEST_CASE("a worker that dies, or leaves unfinished, is named to the others, or they go on, as the server is told") {
  // T11
  for (const auto& [policy, killed] : {std::pair{hd::worker_death::report, true},
                                       {hd::worker_death::go_on, true},
                                       {hd::worker_death::report, false},
                                       {hd::worker_death::go_on, false}}) {
    INFO("killed " << killed);
    const bool kills = killed;
    hd::threads::meeting_place place(3);
    std::atomic<bool> pushed{false};
    const auto start = std::chrono::steady_clock::now();
    const outcome o = run(
        1, 2, {.staleness = 0, .ordered = true, .on_death = policy}, none,
        [&](int w, client& c) {
          if (w == 1) {
            c.push(keys_of(1, 0), gradients_of(1, 0), {.lr = 0.1f});
            c.flush();
            if (kills) place.kill(2);
            return;  // without finish
          }
          train(0, c, 3);
        },
        {}, &place);
    CHECK(std::chrono::steady_clock::now() - start < 20s);
    const bool named = std::any_of(o.errors.begin(), o.errors.end(), [](const std::string& e) {
      return e.rfind("1: ", 0) == 0 && e.find("rank 2") != std::string::npos;
    });
    if (policy == hd::worker_death::report)
      CHECK(named);
    else
      CHECK(o.errors.empty());
  }
}

TEST_CASE("a read says which keys have a row, and a server which rows a bound has dropped") {
  const outcome o = run(3, 1, {}, none, [](int, client& c) {
    const keys_type keys{1, 900, 1, 7, 901, 3};
    std::vector<std::uint8_t> found(keys.size(), 9);
    floats rows(keys.size() * dim);
    c.push(keys_type{1, 2, 3, 4, 5, 6, 7}, floats(7 * dim, 1.0f), {.lr = 0.1f});
    RANK_CHECK(c.read(keys, rows, found) == 2);
    RANK_CHECK(found == std::vector<std::uint8_t>{1, 0, 1, 1, 0, 1});
    RANK_CHECK(c.read(keys, rows) == 2);
    RANK_CHECK(c.read({}, {}) == 0);
    RANK_CHECK_THROWS_AS(c.read(keys, rows, std::span(found).first(2)), hd::argument_error);
    c.finish();
  });
  all_well(o);

  using bounded = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::sum, hd::initial::zero, hd::admit::always,
                                   hd::evict::lfu>;
  const bounded::settings s{.eviction = {.bytes = 12000}, .shard_bits = 1};
  hd::threads::meeting_place place(2);
  keys_type gone;
  bounded part(s);
  std::thread server([&] {
    hd::threads::messenger inner(quick(), place, 0);
    wire m(inner, none);
    hd::table_server served(part, m, {});
    served.on_gone([&](std::span<const std::uint64_t> keys) { gone.insert(gone.end(), keys.begin(), keys.end()); });
    served.run();
  });
  keys_type all(600);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  std::vector<std::uint8_t> found(all.size());
  floats rows(all.size() * dim);
  std::size_t missing = 0;
  {
    hd::threads::messenger inner(quick(), place, 1);
    wire m(inner, none);
    hd::worker_options wo = worker(1);
    wo.half = true;
    hd::sharded_table<bounded, wire> c(s, m, wo);
    for (std::size_t i = 0; i < all.size(); i += 60) c.push(std::span(all).subspan(i, 60), floats(60 * dim, 1.0f));
    missing = c.read(all, rows, found);
    c.finish();
  }
  server.join();
  CHECK(missing == gone.size());
  CHECK(missing > 100);
  CHECK(part.size() == all.size() - missing);
  std::sort(gone.begin(), gone.end());
  for (std::size_t i = 0; i < all.size(); ++i) {
    CHECK(found[i] == !std::binary_search(gone.begin(), gone.end(), all[i]));
    CHECK(rows[i * dim] == static_cast<float>(found[i]));
  }
}

TEST_CASE("a server that dies and doesn't come back is named within the patience") {  // T11
  hd::threads::meeting_place place(2);
  hd::threads::messenger inner(quick(), place, 1);
  wire m(inner, none);
  std::atomic<bool> stop{false};
  std::thread server([&] {
    hd::threads::messenger own(quick(), place, 0);
    table_type part(how);
    hd::table_server s(part, own, {});
    while (!stop) s.serve(1ms);
    place.kill(0);
  });
  hd::worker_options o = worker(1);
  o.patience = 1s;
  client c(how, m, o);
  floats rows(dim);
  c.pull(keys_type{1}, rows);
  stop = true;
  server.join();
  const auto start = std::chrono::steady_clock::now();
  c.push(keys_type{1}, rows);  // is kept
  std::string said;
  try {
    c.pull(keys_type{1}, rows);
  } catch (const hd::comm_error& e) {
    said = e.what();
  }
  CHECK(said.find("peer 0") != std::string::npos);
  CHECK(std::chrono::steady_clock::now() - start < 10s);
}

TEST_CASE("a cached row is as old as the pull that asked for it") {
  hd::worker_options wo = worker(2);
  wo.cached_rows = 64;
  const outcome o = run(
      2, 1, {}, none,
      [&](int, client& c) {
        floats before(dim), now(dim);
        auto p = c.start_pull(keys_type{1});
        c.push(keys_type{1}, floats(dim, 1.0f), {.lr = 0.1f});
        c.finish_pull(std::move(p), before);
        c.pull(keys_type{1}, now);
        floats expected(dim);
        c.read(keys_type{1}, expected);
        RANK_CHECK(now == expected);
        c.finish();
      },
      wo);
  all_well(o);
}

TEST_CASE("pulls make no rows, and servers that count pushes take none that are gathered") {
  outcome o = run(2, 1, {.staleness = 0, .ordered = true}, none, [](int, client& c) {
    floats rows(2 * dim), begin(dim);
    c.pull(keys_type{1, 2}, rows);
    hd::initial::uniform{}.fill<dim>(begin.data(), how.seed, 0, 2);
    RANK_CHECK(std::equal(begin.begin(), begin.end(), rows.begin() + dim));
    c.push(keys_type{1}, floats(dim, 1.0f), {.lr = 0.1f});
    c.finish();
  });
  all_well(o);
  CHECK(o.rows == 1);
  hd::worker_options wo = worker(2);
  wo.gather = 100;
  o = run(2, 1, {.staleness = 3}, none, [](int, client&) {}, wo);
  CHECK(std::any_of(o.errors.begin(), o.errors.end(),
                    [](const std::string& e) { return e.find("it gathers pushes") != std::string::npos; }));
}

namespace {
// Fails once, where it is told to.
struct scarce {
  bool* fails = nullptr;
  struct state {
    std::size_t bytes() const { return 0; }
    template <class Out> void save(Out&) const {}
    template <class In> void load(In&, const hd::admission_context&) {}
  };
  bool admit(state&, std::uint64_t mixed, const hd::sighting&, const hd::admission_context&) const {
    if (fails && hd::detail::unmix(mixed) == 13 && std::exchange(*fails, false)) throw std::bad_alloc();
    return true;
  }
  bool admits_unseen(std::uint64_t, std::uint64_t) const { return true; }
  std::string name() const { return "scarce"; }
};
using scarce_table = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::sum, hd::initial::zero, scarce,
                                      hd::evict::never, hd::guard::clamp>;
using direct = hd::threads::messenger;

// What a worker's object says, message by message.
void say(direct& m, hd::detail::table_tag tag, std::uint64_t id, hd::detail::table_request h,
         const keys_type& keys = {}) {
  h.items = keys.size();
  hd::detail::byte_writer out;
  out.put(h);
  out.put(keys.data(), 8 * keys.size());
  const floats ones(tag == hd::detail::table_tag::push ? dim * keys.size() : 0, 1.0f);
  out.put(ones.data(), 4 * ones.size());
  REQUIRE(m.try_send(0, static_cast<std::uint32_t>(tag), id,
                     hd::payload(std::span<const std::byte>(out.data(), out.size()))));
}
}  // namespace

TEST_CASE("a server takes each push once, whole, and from the object that greeted last") {
  using tag = hd::detail::table_tag;
  bool fails = true;
  const scarce_table::settings s{.admission = {&fails}, .shard_bits = 4};
  scarce_table part(s);
  hd::threads::meeting_place place(3);
  direct inner(quick(), place, 0), one(quick(), place, 1), two(quick(), place, 2);
  wire home(inner, none);
  hd::table_server server(part, home, {.workers = 2, .staleness = 0});
  one.connect(0), two.connect(0);
  const auto serve = [&] {
    while (server.serve(20ms)) {
    }
  };
  serve();
  const std::uint64_t layout = part.layout_number();
  say(one, tag::hello, 1, {.layout = layout, .object = 5});
  say(two, tag::hello, 1, {.layout = layout, .object = 5});
  say(one, tag::push, 1, {.layout = layout, .object = 4}, {1});  // late, of a former object
  serve();
  CHECK(server.applied(0) == 0);
  const keys_type keys{1, 2, 3, 4, 13, 20, 21, 22};
  say(one, tag::push, 1, {.layout = layout, .object = 5}, keys);
  CHECK_THROWS_AS(serve(), std::bad_alloc);
  CHECK(server.applied(0) == 0);
  say(one, tag::push, 1, {.layout = layout, .object = 5}, keys);  // repeated, since there was no answer
  serve();
  CHECK(server.applied(0) == 1);
  floats rows(keys.size() * dim);
  CHECK(part.read(keys, rows) == 0);
  CHECK(rows == floats(rows.size(), 1.0f));

  // A pull that waits for the other worker is answered once, however often it was asked for.
  const auto replies = [&](std::uint64_t id) {
    int n = 0;
    while (const auto m = one.receive(20ms)) n += m->kind == hd::message_kind::data && m->id == id;
    return n;
  };
  for (int i = 0; i < 3; ++i) say(one, tag::pull, 7, {.layout = layout, .pushes = 1, .object = 5}, {1});
  serve();
  CHECK(replies(7) == 0);
  say(two, tag::push, 1, {.layout = layout, .object = 5});
  serve();
  CHECK(replies(7) == 1);

  // It leaves; another object of the same life comes.
  say(one, tag::push, 2, {.layout = layout, .object = 5, .last = 1});
  say(two, tag::push, 2, {.layout = layout, .object = 5, .last = 1});
  serve();
  CHECK(server.all_gone());
  say(one, tag::hello, 1, {.layout = layout, .object = 6});
  serve();
  CHECK_FALSE(server.all_gone());
  // It takes the place of one that another server had no last push of: here that push is passed over, but leaves again.
  say(one, tag::push, 1, {.layout = layout, .object = 6});
  serve();
  CHECK_FALSE(server.all_gone());
  say(one, tag::push, 2, {.layout = layout, .object = 6, .last = 1});
  serve();
  CHECK(server.applied(0) == 2);
  CHECK(server.all_gone());

  // A table that was saved while a push was under way has it in some shards only: it isn't taken for whole.
  part.push(keys_type{1}, floats(dim, 1.0f), {.worker = 0, .sequence = 3});
  hd::table_server again(part, home, {.workers = 2});
  CHECK(again.applied(0) == 2);
}

TEST_CASE("each push has its own rate, also where others came while it waited for room") {
  const folder dir;
  hd::threads::meeting_place place(2);
  std::atomic<bool> stop{false}, paused{false};
  table_type part(how);
  std::thread server([&] {
    direct inner(quick(), place, 0);
    wire home(inner, none);
    hd::table_server s(part, home, {.path = dir / "s"});
    while (!stop) {
      if (paused)
        std::this_thread::sleep_for(1ms);
      else
        s.serve(1ms);
    }
  });
  {
    direct inner(quick(), place, 1);
    wire m(inner, none);
    hd::worker_options o = worker(1);
    o.gather = 4;
    o.gather_for = 20s;
    o.log_bytes = 100;
    client c(how, m, o);
    paused = true;
    c.push(keys_type{11, 12, 13, 14}, floats(4 * dim, 1.0f), {.lr = 0.1f});  // the log is full
    std::thread other([&] { c.push(keys_type{1}, floats(dim, 1.0f), {.lr = 0.1f}); });
    std::thread resume([&] {
      std::this_thread::sleep_for(60ms);
      paused = false;
    });
    c.push(keys_type{2}, floats(dim, 1.0f), {.lr = 0.2f});
    other.join();
    resume.join();
    c.finish();
  }
  stop = true;
  server.join();
  floats first(2 * dim), row(2 * dim);
  for (std::size_t k = 0; k < 2; ++k) hd::initial::uniform{}.fill<dim>(first.data() + k * dim, how.seed, 0, k + 1);
  part.read(keys_type{1, 2}, row);
  CHECK(first[0] - row[0] == Approx(0.1f).epsilon(1e-4));
  CHECK(first[dim] - row[dim] == Approx(0.2f).epsilon(1e-4));
}

TEST_CASE("a worker that never comes is given up") {
  table_type part(how);
  hd::threads::meeting_place place(2);
  direct inner(quick(), place, 0), other(quick(), place, 1);
  wire home(inner, none), one(other, none);
  hd::table_server server(part, home, {.join = 30ms});
  std::string said;
  try {
    server.run();
  } catch (const hd::comm_error& e) {
    said = e.what();
  }
  CHECK(said.find("rank 1 has not come") != std::string::npos);
  for (const auto spoil : {+[](hd::worker_options& o) { o.retry = 0ns; },
                           +[](hd::worker_options& o) { o.patience = std::chrono::nanoseconds::max(); },
                           +[](hd::worker_options& o) { o.cached_rows = 3; }}) {
    hd::worker_options o = worker(1);
    spoil(o);
    CHECK_THROWS_AS((hd::sharded_table<scarce_table, wire>({}, one, o)), hd::argument_error);
  }
  CHECK_THROWS_AS((hd::sharded_table<scarce_table, wire>({.shard_bits = 40}, one, worker(1))), hd::argument_error);
}

TEST_CASE("gradients are guarded once, by the worker, as they travel") {
  const auto train = [](float limit, bool half, const floats& g, std::uint64_t& rejected, std::uint64_t& applied,
                        const hd::losses& losses = none, int times = 1) {
    const scarce_table::settings s{.guard = {.limit = limit}, .shard_bits = 4};
    scarce_table part(s);
    hd::threads::meeting_place place(2);
    std::thread server([&] {
      direct inner(quick(), place, 0);
      wire home(inner, losses);
      hd::table_server served(part, home, {});
      served.run();
      applied = served.applied(0);
    });
    hd::worker_options o = worker(1);
    o.half = half;
    o.gather = times == 1 ? 100 : 0;
    {
      direct inner(quick(), place, 1);
      wire m(inner, none);
      hd::sharded_table<scarce_table, wire> c(s, m, o);
      c.push(keys_type{}, floats{});  // nothing is a push, too
      c.flush();
      for (int i = 0; i < times; ++i) c.push(keys_type{1, 1}, g);
      c.finish();
      rejected = c.rejected();
    }
    server.join();
    floats row(dim);
    part.read(keys_type{1}, row);
    return row;
  };
  std::uint64_t rejected = 0, applied = 0;
  CHECK(train(2.0f, false, floats(2 * dim, 1.5f), rejected, applied) == floats(dim, 3.0f));
  CHECK(rejected == 0);
  CHECK(applied == 3);
  floats large(2 * dim, 0.0f);
  large[0] = 3.4e38f;  // finite, but not in 16 bits
  CHECK(train(3.4e38f, true, large, rejected, applied) == floats(dim, 0.0f));
  CHECK(rejected == 1);
  // A third of all replies lost: each push counts once.  T10
  CHECK(train(2.0f, false, floats(2 * dim, 0.5f), rejected, applied, {.drop = 1.0 / 3}, 1000) == floats(dim, 1000.0f));
  CHECK(applied == 1002);
}
