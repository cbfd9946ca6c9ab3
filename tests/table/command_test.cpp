// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// What a sharded_table has besides pull, read and push: against a sparse_table in one process that is told the same.

#include "servers.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <map>
#include <type_traits>

#include <fcntl.h>
#include <sys/stat.h>

namespace hd = heddle;

namespace {
constexpr std::size_t dim = 4;
template <class Eviction, class Weight = float>
using table_of = hd::sparse_table<std::uint64_t, hd::row<dim, Weight>, hd::rule::adagrad, hd::initial::uniform,
                                  hd::admit::always, Eviction>;
using table_type = table_of<hd::evict::ttl>;
using wire = hd::lossy<hd::threads::messenger>;
using client = hd::sharded_table<table_type, wire>;

template <class Table> typename Table::settings how() {
  typename Table::settings s{.seed = 5, .shard_bits = 4};
  s.eviction.ticks = 2;
  return s;
}
// Workers, a thread each; what they have thrown.
template <class Table = table_type>
std::vector<std::string> work(const hd::threads::meeting_place& place, int servers, int workers, hd::losses losses,
                              const std::type_identity_t<std::function<void(int, hd::sharded_table<Table, wire>&)>>& f,
                              hd::worker_options o = {}) {
  std::vector<std::string> errors(static_cast<std::size_t>(workers));
  if (o.servers != servers || o.retry != 10ms) o = worker(servers);
  std::vector<std::thread> threads;
  for (int w = 0; w < workers; ++w) {
    threads.emplace_back([&, w] {
      try {
        hd::threads::messenger inner(quick(), place, servers + w);
        hd::losses mine = losses;
        mine.seed += static_cast<std::uint64_t>(100 + w);
        wire m(inner, mine);
        hd::sharded_table<Table, wire> c(how<Table>(), m, o);
        f(w, c);
      } catch (const std::exception& e) {
        errors[static_cast<std::size_t>(w)] = e.what();
      }
    });
  }
  for (auto& t : threads) t.join();
  std::erase(errors, "");
  return errors;
}

// What a worker does in a step: one change, of one kind or another.
enum class act { push, erase, advance, evict, nothing };
act act_of(int w, int step) {
  constexpr act all[] = {act::push,  act::push,    act::push,    act::push,  act::erase,
                         act::evict, act::advance, act::advance, act::evict, act::nothing};
  return all[hd::philox(3, static_cast<std::uint64_t>(w * 1000 + step), 0).word[0] % 10];
}
floats gradients_of(int w, int step, const floats& rows) {
  floats g = draws_of(w, step, rows.size());
  for (std::size_t i = 0; i < g.size(); ++i) g[i] += rows[i];
  return g;
}
// What a worker has been told: by erase and evict, of each step; by size and checksum, at each step that begins.
struct history {
  std::vector<keys_type> gone;  // sorted; of an erase their number
  keys_type sizes, sums;
  bool operator==(const history&) const = default;
};
template <class Table> void take(Table& t, act a, int w, int step, const floats& rows, history& h) {
  keys_type gone;
  if (a == act::push) t.push(keys_of(w, step), gradients_of(w, step, rows), {.lr = 0.1f});
  if (a == act::erase) gone.push_back(t.erase(keys_of(w + 50, step, 60)));
  if (a == act::advance) t.advance();
  if (a == act::evict) {
    const auto all = t.evict();
    gone.assign(all.begin(), all.end());
  }
  if (a == act::nothing) t.push({}, {});
  std::sort(gone.begin(), gone.end());
  h.gone.push_back(gone);
}
template <class Table> void look(Table& t, int step, history& h) {
  if (step % 4 != 3) return;
  h.sizes.push_back(t.size());
  h.sums.push_back(t.checksum());
}

// The oracle: each step everybody reads, then acts in order.
template <class Table> std::vector<history> alone(Table& t, int workers, int steps) {
  std::vector<history> all(static_cast<std::size_t>(workers));
  for (int s = 0; s < steps; ++s) {
    std::vector<floats> rows;
    for (int w = 0; w < workers; ++w) {
      rows.emplace_back(keys_of(w, s).size() * dim);
      t.preview(keys_of(w, s), rows.back());
      look(t, s, all[static_cast<std::size_t>(w)]);
    }
    for (int w = 0; w < workers; ++w)
      take(t, act_of(w, s), w, s, rows[static_cast<std::size_t>(w)], all[static_cast<std::size_t>(w)]);
  }
  return all;
}
template <class Client> history together(Client& c, int w, int steps, const std::function<void(int)>& before = {}) {
  history h;
  for (int s = 0; s < steps; ++s) {
    if (before) before(s);
    floats rows(keys_of(w, s).size() * dim);
    c.pull(keys_of(w, s), rows);
    look(c, s, h);
    take(c, act_of(w, s), w, s, rows, h);
  }
  return h;
}

template <class Table>
void same_as_alone(int server_count, int workers, int steps, const hd::losses& losses, bool ordered) {
  Table oracle(how<Table>());
  const std::vector<history> expected = alone(oracle, workers, steps);
  std::size_t went = 0;
  for (const history& h : expected)
    for (const keys_type& k : h.gone) went += k.size();
  REQUIRE(went > 20);  // or it shows nothing
  const hd::threads::meeting_place place(server_count + workers);
  servers<Table> s(how<Table>(), place,
                   {.servers = server_count,
                    .workers = workers,
                    .staleness = ordered ? 0 : hd::server_options::unbounded,
                    .ordered = ordered},
                   losses);
  std::vector<history> got(static_cast<std::size_t>(workers));
  const auto errors = work<Table>(place, server_count, workers, losses, [&](int w, auto& c) {
    got[static_cast<std::size_t>(w)] = together(c, w, steps);
    c.finish();
  });
  CHECK(errors == std::vector<std::string>{});
  CHECK(s.stop() == oracle.checksum());
  for (std::size_t w = 0; w < got.size(); ++w) {
    CHECK(got[w].gone == expected[w].gone);
    CHECK(got[w].sizes == expected[w].sizes);
    CHECK(got[w].sums == expected[w].sums);
  }
}

struct seen_row {
  floats weights;
  std::vector<std::byte> state;
  bool operator==(const seen_row&) const = default;
};
template <class Table> std::map<std::uint64_t, seen_row> rows_of(Table& t) {
  std::map<std::uint64_t, seen_row> all;
  std::size_t n = 0;
  t.for_each([&](const auto& r) {
    all[r.key] = {floats(r.weights.begin(), r.weights.end()), {r.state.begin(), r.state.end()}};
    ++n;
  });
  return n == all.size() ? all : std::map<std::uint64_t, seen_row>{};
}
std::vector<std::string> lines_of(const std::vector<std::string>& files) {
  std::vector<std::string> all;
  for (const std::string& name : files) {
    std::ifstream in(name);
    for (std::string line; std::getline(in, line);) all.push_back(line);
  }
  std::sort(all.begin(), all.end());
  return all;
}
}  // namespace

TEST_CASE("erase, advance and evict over servers are those of one table, to the bit in synchronous mode") {
  for (const auto& [s, w] : {std::pair{1, 1}, {1, 3}, {3, 2}}) {
    INFO(s << " servers, " << w << " workers");
    same_as_alone<table_type>(s, w, 40, none, true);
  }
  same_as_alone<table_type>(3, 1, 40, none, false);
  same_as_alone<table_of<hd::evict::score>>(2, 2, 40, none, true);
  same_as_alone<table_of<hd::evict::ttl, hd::bfloat16>>(2, 2, 40, none, true);
}

TEST_CASE("erase, advance and evict take effect once, and say what they did, whatever is lost or repeated") {
  for (const std::uint64_t seed : {1, 2, 3}) {
    hd::losses l = bad;
    l.seed = 1000 * seed;
    same_as_alone<table_type>(2, 2, 30, l, true);
    same_as_alone<table_type>(3, 1, 30, l, false);
  }
}

TEST_CASE("servers killed in the middle of erase, advance and evict leave the same table") {
  constexpr int steps = 40;
  table_type oracle(how<table_type>());
  const std::vector<history> expected = alone(oracle, 2, steps);
  for (const std::uint64_t seed : {0, 1, 2, 3}) {
    INFO("seed " << seed);
    const folder dir;
    const hd::threads::meeting_place place(4);
    hd::losses l = seed % 2 ? bad : none;
    l.seed = 50 * seed;
    servers<table_type> s(
        how<table_type>(), place,
        {.servers = 2, .workers = 2, .staleness = 0, .ordered = true, .path = dir / "s", .save_every = 3 + seed}, l);
    std::vector<history> got(2);
    std::atomic<int> kills{0};
    std::atomic<int> at{0};
    std::thread killer([&] {
      for (int n = 0; n < 5; ++n) {
        const auto dice = hd::philox(11, seed, static_cast<std::uint64_t>(n));
        while (at < 7 * n + static_cast<int>(dice.word[0] % 5)) std::this_thread::sleep_for(200us);
        s.kill(static_cast<int>(dice.word[1] % 2));
        ++kills;
      }
    });
    const auto errors = work(place, 2, 2, l, [&](int w, client& c) {
      got[static_cast<std::size_t>(w)] = together(c, w, steps, [&](int step) {
        if (w == 0) at = step;
      });
      while (kills < 5) std::this_thread::sleep_for(1ms);
      c.finish();
    });
    killer.join();
    CHECK(errors == std::vector<std::string>{});
    CHECK(s.stop() == oracle.checksum());
    CHECK(got == expected);
  }
}

TEST_CASE("a server that has saved a change, and dies before it has said what went, says it when it is back") {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    INFO("seed " << seed);
    const folder dir;
    hd::threads::meeting_place place(2);
    std::atomic<bool> stops{false};
    std::thread server([&] {
      for (std::uint64_t last = 1; !stops;) {  // dies at each change behind the push
        hd::threads::messenger inner(quick(), place, 0);
        wire m(inner, {.drop = 0.5, .seed = 100 * seed + last});  // a reply in two is lost
        table_type part(how<table_type>());
        hd::table_server s(part, m, {.path = dir / "s"});
        while (!stops && s.applied(0) <= last) s.serve(1ms);
        s.save();
        last = s.applied(0);
        place.kill(0);
      }
    });
    const auto errors = work(place, 1, 1, none, [&](int, client& c) {
      keys_type all(100), half(all.begin(), all.begin() + 50);
      for (std::uint64_t k = 0; k < 100; ++k) all[k] = k;
      for (std::uint64_t k = 0; k < 50; ++k) half[k] = k;
      c.push(all, floats(100 * dim, 1.0f), {.lr = 0.1f});
      RANK_CHECK(c.erase(half) == 50);
      for (int tick = 0; tick < 3; ++tick) c.advance();
      keys_type gone = c.evict();
      std::sort(gone.begin(), gone.end());
      RANK_CHECK(gone == keys_type(all.begin() + 50, all.end()));
      RANK_CHECK(c.evict().empty());
      RANK_CHECK(c.erase(half) == 0);
      c.flush();
    });
    stops = true;
    server.join();
    CHECK(errors == std::vector<std::string>{});
  }
}

namespace {
// Changes of two objects whose outcomes a table has.
std::size_t outcomes_in(const table_type& t) {
  std::size_t n = 0;
  for (const std::uint64_t object : {1, 2}) {
    for (std::uint64_t command = 1; command < 1000; ++command) {
      hd::detail::byte_writer out;
      hd::detail::table_service<table_type>::put_outcome(t, {.object = object, .command = command}, out);
      n += *reinterpret_cast<const std::uint64_t*>(out.data()) != 0;
    }
  }
  return n;
}
}  // namespace

TEST_CASE("a server keeps of what changes have done only what a worker may still ask for") {
  const folder dir;
  const hd::threads::meeting_place place(2);
  std::atomic<int> stage{0};
  std::size_t kept = 99, left = 99;
  std::thread server([&] {
    hd::threads::messenger m(quick(), place, 0);
    table_type part(how<table_type>());
    hd::table_server s(part, m, {.path = dir / "s"});
    while (stage == 0) s.serve(1ms);
    kept = outcomes_in(part);
    s.save();
    std::filesystem::copy(dir / "s", dir / "then");
    ++stage;
    while (stage == 2) s.serve(1ms);
    left = outcomes_in(part);
  });
  const keys_type key{7};
  std::vector<std::string> errors;
  for (const std::uint64_t object : {1, 2}) {
    hd::worker_options o = worker(1);
    o.object = object;
    const auto f = [&](int, client& c) {
      for (int n = 0; n < 200; ++n) {
        c.push(key, floats(dim, 1.0f), {.lr = 0.1f});
        RANK_CHECK(c.erase(key) == 1);
      }
      if (object == 2) c.finish();
    };
    for (const std::string& e : work(place, 1, 1, none, f, o)) errors.push_back(e);
    ++stage;
    while (stage == 1) std::this_thread::sleep_for(1ms);  // before another object greets the server
  }
  server.join();
  CHECK(errors == std::vector<std::string>{});
  CHECK((kept == 1 || kept == 2));  // when the last change came, what the one before had done might yet be asked for
  CHECK(left == 0);
  CHECK(hd::detail::table_reader(dir / "then").head().version == 2);
  table_type then(how<table_type>());
  then.load(dir / "then");
  CHECK(outcomes_in(then) == 1);
  then.forget_sequences();
  CHECK(outcomes_in(then) == 0);
}

namespace {
// What comes through a pipe. Whoever opens one to write waits for its reader, who takes its name away.
std::string drained(const std::string& pipe) {
  const int f = ::open(pipe.c_str(), O_RDONLY);
  ::unlink(pipe.c_str());
  std::string all;
  char buffer[4096];
  for (ssize_t n; (n = ::read(f, buffer, sizeof buffer)) > 0;) all.append(buffer, static_cast<std::size_t>(n));
  ::close(f);
  return all;
}
}  // namespace

TEST_CASE("a save whose shards are of different moments is made up for, each change in each shard once") {
  constexpr int steps = 30, begun = 10, caught = 18;
  table_type oracle(how<table_type>());
  const std::vector<history> expected = alone(oracle, 2, steps);
  std::map<act, int> between;
  for (int s = begun; s < caught; ++s)
    for (const int w : {0, 1}) ++between[act_of(w, s)];
  REQUIRE((between[act::push] > 2 && between[act::evict] > 1 && between[act::advance] > 1 && between[act::erase] > 0));
  const folder dir;
  const std::string path = dir / "s", pipe = path + ".tmp";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  hd::threads::meeting_place place(3);
  std::atomic<int> at[2] = {0, 0};
  std::atomic<bool> failed{false}, dies{false}, again{false}, stops{false};
  std::uint64_t sum = 0;
  std::thread server([&] {
    for (const std::uint64_t save_every : {2 * begun, 0}) {
      while (save_every == 0 && !again) std::this_thread::sleep_for(1ms);
      hd::threads::messenger m(quick(), place, 0);
      table_type part(how<table_type>());
      hd::table_server s(part, m,
                         {.workers = 2, .staleness = 0, .ordered = true, .path = path, .save_every = save_every});
      while (save_every == 0 ? !stops : !dies) {
        try {
          s.serve(1ms);
        } catch (const hd::file_error&) {  // a pipe can't be synchronised
          failed = true;
        }
      }
      sum = part.checksum();
      if (save_every != 0) place.kill(0);
    }
  });
  std::vector<history> got(2);
  std::thread killer([&] {
    while (at[0] < caught || at[1] < caught) std::this_thread::sleep_for(1ms);
    const std::string file = drained(pipe);
    while (!failed) std::this_thread::sleep_for(1ms);
    dies = true;
    std::ofstream(path, std::ios::binary).write(file.data(), static_cast<std::streamsize>(file.size()));
    again = true;
  });
  const auto errors = work(place, 1, 2, none, [&](int w, client& c) {
    got[static_cast<std::size_t>(w)] = together(c, w, steps, [&](int step) {
      at[w] = step;
      while (step == caught && !again) std::this_thread::sleep_for(1ms);
    });
    c.finish();
  });
  killer.join();
  stops = true;
  server.join();
  CHECK(errors == std::vector<std::string>{});
  CHECK(sum == oracle.checksum());
  CHECK(got == expected);  // what the first life has said is said
}

namespace {
// Admits all; a save stops at the last shard until it may go on.
struct slow_save {
  inline static std::atomic<int> shards_left{-1};  // above 0: shards until then; 0: it waits
  struct state : hd::detail::no_admission_state {
    template <class Out> void save(Out&) const {
      if (shards_left > 0) --shards_left;
      while (shards_left == 0) std::this_thread::sleep_for(1ms);
    }
  };
  bool admit(state&, std::uint64_t, const hd::sighting&, const hd::admission_context&) const { return true; }
  bool admits_unseen(std::uint64_t, std::uint64_t) const { return true; }
  std::string name() const { return "slow_save"; }
};
}  // namespace

TEST_CASE("what is pushed while a server saves is in its worker's log until the next save") {
  using slow = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::adagrad, hd::initial::uniform, slow_save>;
  const slow::settings settings{.seed = 5, .shard_bits = 4};
  slow oracle(settings);
  const auto push = [](auto& t, int step) {
    keys_type keys = keys_of(0, step);
    std::erase_if(keys, [](std::uint64_t k) { return hd::detail::shard_of(hd::detail::mix(k), 4) == 15; });
    t.push(keys, floats(keys.size() * dim, 1.0f), {.lr = 0.1f});
  };
  for (int step = 0; step < 17; ++step) push(oracle, step);
  const folder dir;
  const std::string path = dir / "s";
  hd::threads::meeting_place place(2);
  slow_save::shards_left = 16;
  std::atomic<bool> dies{false}, dead{false}, stops{false};
  std::uint64_t sum = 0;
  std::thread server([&] {
    for (const std::uint64_t save_every : {10, 0}) {
      hd::threads::messenger m(quick(), place, 0);
      slow part(settings);
      hd::table_server s(part, m, {.path = path, .save_every = save_every});
      while (save_every == 0 ? !stops : !dies) s.serve(1ms);
      sum = part.checksum();
      if (save_every != 0) place.kill(0);
      dead = true;
    }
  });
  std::string error;
  try {
    hd::threads::messenger m(quick(), place, 1);
    hd::sharded_table<slow, hd::threads::messenger> c(settings, m, worker(1));
    for (int step = 0; step < 10; ++step) push(c, step);
    while (slow_save::shards_left != 0) std::this_thread::sleep_for(1ms);
    for (int step = 10; step < 15; ++step) push(c, step);
    CHECK(c.erase(keys_type{1'000'000'007}) == 0);
    slow_save::shards_left = -1;
    while (::access(path.c_str(), F_OK) != 0) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(50ms);  // until the server has noticed
    push(c, 15);
    c.flush();  // now it knows what is saved
    dies = true;
    while (!dead) std::this_thread::sleep_for(1ms);
    push(c, 16);
    c.finish();
  } catch (const std::exception& e) {
    error = e.what();
    slow_save::shards_left = -1;
    dies = true;
  }
  stops = true;
  server.join();
  CHECK(error == "");
  CHECK(sum == oracle.checksum());
}

TEST_CASE("rows are visited, counted and summed over all servers") {
  const hd::threads::meeting_place place(5);
  servers<table_type> s(how<table_type>(), place, {.servers = 3, .workers = 2}, bad);
  table_type oracle(how<table_type>());
  for (int step = 0; step < 5; ++step)
    oracle.push(keys_of(0, step), floats(40 * dim, 0.25f + static_cast<float>(step)), {.lr = 0.1f});
  const auto errors = work(place, 3, 1, bad, [&](int, client& c) {
    RANK_CHECK(c.size() == 0);
    RANK_CHECK(rows_of(c).empty());
    for (int step = 0; step < 5; ++step)
      c.push(keys_of(0, step), floats(40 * dim, 0.25f + static_cast<float>(step)), {.lr = 0.1f});
    RANK_CHECK(c.size() == oracle.size());
    RANK_CHECK(c.checksum() == oracle.checksum());
    RANK_CHECK(rows_of(c) == rows_of(oracle));
    RANK_CHECK(c.bytes() > c.size() * table_type::record_bytes);
    std::size_t visited = 0;
    c.for_each([&](const table_type::row_view& r) {  // may call the table
      if (++visited <= 3) RANK_CHECK(c.erase(keys_type{r.key, r.key}) == 1);
    });
    RANK_CHECK(c.size() == oracle.size() - 3);
    RANK_CHECK(c.erase({}) == 0);
    RANK_CHECK(c.erase(keys_type{1'000'000}) == 0);
    c.finish();
  });
  CHECK(errors == std::vector<std::string>{});
  s.stop();
}

TEST_CASE("an erased row isn't read from the cache") {
  const hd::threads::meeting_place place(2);
  servers<table_type> s(how<table_type>(), place, {});
  hd::worker_options o = worker(1);
  o.cached_rows = 64;
  o.cached_for = 100;
  const auto errors = work(
      place, 1, 1, none,
      [&](int, client& c) {
        floats first(dim), now(dim);
        c.pull(keys_type{7}, first);
        c.push(keys_type{7}, floats(dim, 1.0f), {.lr = 0.1f});
        c.pull(keys_type{7}, now);
        RANK_CHECK(now == first);  // as old as the cache may be
        RANK_CHECK(c.erase(keys_type{7}) == 1);
        c.push(keys_type{7}, floats(dim, 0.0f), {.lr = 0.1f});
        c.pull(keys_type{7}, now);
        RANK_CHECK(now == first);
        c.push(keys_type{7}, floats(dim, 1.0f), {.lr = 0.1f});
        c.advance();
        c.pull(keys_type{7}, now);
        RANK_CHECK(now != first);
        c.finish();
      },
      o);
  CHECK(errors == std::vector<std::string>{});
  s.stop();
}

TEST_CASE("files of servers are loaded on any number of them: full, deltas, serving, text") {
  for (const bool loses : {false, true}) {
    const folder dir;
    const hd::threads::meeting_place place(4);
    hd::losses l = loses ? bad : none;
    servers<table_type> s(how<table_type>(), place, {.servers = 2, .workers = 2, .path = dir / "own", .save_every = 4},
                          l);
    std::atomic<bool> saved{false};
    std::uint64_t sum = 0, size = 0;
    std::map<std::uint64_t, seen_row> rows;
    const auto errors = work(place, 2, 2, l, [&](int w, client& c) {
      if (w == 1) {  // trains until all but the last is written
        for (int step = 0; !saved; ++step) {
          c.push(keys_of(1, step), floats(40 * dim, 0.5f), {.lr = 0.1f});
          if (step % 16 == 3) c.erase(keys_of(1, step, 10));
          c.flush();
        }
        c.finish();
        saved = false;
        return;
      }
      for (int step = 0; step < 5; ++step) c.push(keys_of(0, step), floats(40 * dim, 1.0f), {.lr = 0.1f});
      c.save(dir / "day");
      for (int n = 1; n <= 3; ++n) {
        c.push(keys_of(0, 10 + n), floats(40 * dim, 1.0f), {.lr = 0.1f});
        c.erase(keys_of(0, n, 10));
        c.save();  // the servers' own, which is in no delta's way
        if (n == 3) {
          saved = true;
          while (saved) std::this_thread::sleep_for(1ms);
        }
        c.save_delta(dir / ("day." + std::to_string(n)));
      }
      c.save_serving<hd::scaled_int8>(dir / "served8");
      c.save_serving(dir / "served");
      c.export_text(dir / "text");
      sum = c.checksum();
      size = c.size();
      rows = rows_of(c);
      c.finish();
    });
    CHECK(errors == std::vector<std::string>{});
    CHECK(s.stop() == sum);
    REQUIRE(rows.size() == size);
    for (const int n : {1, 2, 5}) {
      std::uint64_t loaded = 0;
      std::size_t served = 0, served8 = 0;
      for (int r = 0; r < n; ++r) {
        table_type mine(hd::settings_of_server(how<table_type>(), r, n));
        mine.load(hd::files_of_servers(dir / "day", 2));
        for (const char* delta : {"day.1", "day.2", "day.3"})
          for (const std::string& file : hd::files_of_servers(dir / delta, 2)) mine.load_delta(file);
        CHECK_THROWS_AS(mine.load_delta(hd::files_of_servers(dir / "day.1", 2)[0]), hd::file_error);
        loaded += mine.checksum();
        const auto weights = [&]<class Weight>(Weight, const char* name, std::size_t& count, float part) {
          hd::sparse_table<std::uint64_t, hd::row<dim, Weight>, hd::rule::frozen> t(
              hd::settings_of_server(typename decltype(t)::settings{.shard_bits = 4}, r, n));
          t.load(hd::files_of_servers(dir / name, 2));
          count += t.size();
          for (const auto& [key, row] : rows_of(t)) {
            float largest = 0.0f;
            for (const float x : rows[key].weights) largest = std::max(largest, std::abs(x));
            for (std::size_t i = 0; i < dim; ++i)
              if (!(std::abs(row.weights[i] - rows[key].weights[i]) <= part * largest)) FAIL("key " << key);
          }
        };
        weights(float{}, "served", served, 0.0f);
        weights(hd::scaled_int8{}, "served8", served8, 1.01f / 254);
      }
      CHECK(loaded == sum);
      CHECK(served == size);
      CHECK(served8 == size);
    }
    table_type whole(how<table_type>());
    whole.load(hd::files_of_servers(dir / "day", 2));
    for (const char* delta : {"day.1", "day.2", "day.3"})
      for (const std::string& file : hd::files_of_servers(dir / delta, 2)) whole.load_delta(file);
    whole.export_text(dir / "whole");
    CHECK(lines_of(hd::files_of_servers(dir / "text", 2)) == lines_of({dir / "whole"}));
    // A file that is one server's isn't loaded for the whole, nor a delta on another file.
    CHECK_THROWS_AS(table_type(how<table_type>()).load(hd::files_of_servers(dir / "day", 2)[1]), hd::file_error);
    table_type other(hd::settings_of_server(how<table_type>(), 0, 2));
    other.load(dir / "own0");
    CHECK_THROWS_AS(other.load_delta(dir / "day.1-0"), hd::file_error);
  }
}

namespace {
// What two servers have saved, as one table: its checksum.
std::uint64_t loaded(const std::string& full, const std::vector<std::string>& deltas) {
  table_type t(how<table_type>());
  t.load(hd::files_of_servers(full, 2));
  for (const std::string& delta : deltas)
    for (const std::string& file : hd::files_of_servers(delta, 2)) t.load_delta(file);
  return t.checksum();
}
}  // namespace

TEST_CASE("deltas go on where servers have started again, and hold then all rows") {
  const folder dir;
  const hd::threads::meeting_place place(3);
  servers<table_type> s(how<table_type>(), place, {.servers = 2, .path = dir / "own"});
  std::vector<std::uint64_t> sums;
  std::vector<std::string> deltas;
  const auto errors = work(place, 2, 1, none, [&](int, client& c) {
    table_type oracle(how<table_type>());
    const auto both = [&](auto f) { f(c), f(oracle); };
    for (int step = 0; step < 5; ++step)
      both([&](auto& t) { t.push(keys_of(0, step), floats(40 * dim, 1.0f), {.lr = 0.1f}); });
    c.save(dir / "f");  // of itself also what a next life begins with
    for (int n = 1; n <= 6; ++n) {
      both([&](auto& t) {
        t.erase(keys_of(0, n, 10));
        t.push(keys_of(0, 10 + n), floats(40 * dim, 1.0f), {.lr = 0.1f});
      });
      if (n == 4) c.save();
      if (n == 2 || n == 4 || n == 5) s.kill(n % 2);
      c.save_delta(dir / ("f." + std::to_string(n)));
      deltas.push_back(dir / ("f." + std::to_string(n)));
      sums.push_back(oracle.checksum());
    }
    c.finish();
  });
  CHECK(errors == std::vector<std::string>{});
  s.stop();
  REQUIRE(sums.size() == 6);
  for (std::size_t n = 1; n <= deltas.size(); ++n)
    CHECK(loaded(dir / "f", {deltas.begin(), deltas.begin() + static_cast<std::ptrdiff_t>(n)}) == sums[n - 1]);

  using hd::detail::file_kind;
  const auto kind = [&](const char* file) { return hd::detail::table_reader(dir / file).head().kind; };
  CHECK(kind("f.1-0") == file_kind::delta);
  CHECK(kind("f.2-0") == file_kind::whole);
  CHECK(kind("f.2-1") == file_kind::delta);
  CHECK(kind("f.3-0") == file_kind::delta);
  CHECK(kind("f.5-1") == file_kind::whole);
  // It needs none of those before it; those behind need it; none of them comes twice or later.
  table_type part(hd::settings_of_server(how<table_type>(), 0, 2));
  part.load(dir / "f-0");
  CHECK(has(message_of([&] { part.load_delta(dir / "f.3-0"); }), "it is delta 3, where delta 1 is due"));
  part.load_delta(dir / "f.2-0");
  part.load_delta(dir / "f.3-0");
  const std::uint64_t sum = part.checksum();
  for (const char* former : {"f.1-0", "f.2-0", "f.3-0"}) CHECK_THROWS_AS(part.load_delta(dir / former), hd::file_error);
  CHECK(has(message_of([&] { part.load(dir / "f.2-0"); }), "it is a delta"));
  CHECK(part.checksum() == sum);

  // Where no save is, nothing goes on.
  std::remove((dir / "own0").c_str());
  const hd::threads::meeting_place anew(3);
  servers<table_type> t(how<table_type>(), anew, {.servers = 2, .path = dir / "own"});
  CHECK(work(anew, 2, 1, none, [&](int, client& c) {
          RANK_CHECK_THROWS_AS(c.save_delta(dir / "f.7"), hd::argument_error);
          c.finish();
        }).empty());
  t.stop();
}

TEST_CASE("deltas follow the file that a server's table was loaded from, also where it keeps no save yet") {
  const folder dir;
  table_type day(how<table_type>());
  day.push(keys_of(0, 0), floats(40 * dim, 1.0f), {.lr = 0.1f});
  day.save(dir / "day-0");
  const auto push = [](auto& t, int step) { t.push(keys_of(0, step), floats(40 * dim, 1.0f), {.lr = 0.1f}); };
  // Lives of a server and its worker; the first begins with the file, the next one with what the server keeps.
  for (int life = 1; life <= 2; ++life) {
    const hd::threads::meeting_place place(2);
    std::atomic<bool> stops{false};
    std::string said;
    std::thread server([&] {
      try {
        hd::threads::messenger m(quick(), place, 0);
        table_type part(how<table_type>());
        if (life == 1) part.load(dir / "day-0");
        hd::table_server s(part, m, {.path = dir / "own"});
        while (!stops) s.serve(1ms);
      } catch (const std::exception& e) {
        said = e.what();
      }
    });
    const auto errors = work(place, 1, 1, none, [&](int, client& c) {
      push(c, life);
      c.save_delta(dir / ("day." + std::to_string(life)));
      c.finish();
    });
    stops = true;
    server.join();
    CHECK(said == "");
    CHECK(errors == std::vector<std::string>{});
    table_type t(how<table_type>());
    t.load(dir / "day-0");
    for (int n = 1; n <= life; ++n) t.load_delta(dir / ("day." + std::to_string(n) + "-0"));
    push(day, life);
    CHECK(t.checksum() == day.checksum());
  }
}

TEST_CASE("a server's save is the server's, whatever its owner loads and saves meanwhile and afterwards") {
  const folder dir;
  const hd::threads::meeting_place place(3);
  hd::threads::messenger m(quick(), place, 0);
  table_type part(how<table_type>()), day(how<table_type>());
  day.push(keys_of(0, 0), floats(40 * dim, 1.0f), {.lr = 0.1f});
  day.save(dir / "day");
  const auto sum_of = [&](const std::string& path) {
    table_type t(how<table_type>());
    t.load(path);
    return t.checksum();
  };
  {
    hd::table_server s(part, m, {.path = dir / "own"});
    s.save();
    part.load(dir / "day");
    s.save();
    CHECK(sum_of(dir / "own") == day.checksum());
    part.save(dir / "full");
    CHECK(std::filesystem::exists(dir / "own.chain"));
  }
  part.push(keys_of(0, 1), floats(40 * dim, 1.0f), {.lr = 0.1f});
  const auto at = [&](const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const std::string link = at(dir / "own.chain");
  part.save(dir / "final");
  CHECK(at(dir / "own.chain") == link);
  {
    hd::table_server s(part, m, {});  // keeps none
    part.save(dir / "final");
    part.save_delta(dir / "final.1");
  }
  CHECK(at(dir / "own.chain") == link);
  CHECK(sum_of(dir / "own") == day.checksum());
  // A next life goes on where the former one was.
  hd::table_server s(part, m, {.path = dir / "own"});
  CHECK(part.checksum() == day.checksum());
  part.save_delta(dir / "full.1");
  part.load(dir / "full");
  part.load_delta(dir / "full.1");
  CHECK(part.checksum() == day.checksum());
}

TEST_CASE("a file that can't be written fails the call alone") {
  const folder dir;
  const hd::threads::meeting_place place(3);
  servers<table_type> s(how<table_type>(), place, {.servers = 2, .path = dir / "own"});
  std::uint64_t sum = 0;
  const auto errors = work(place, 2, 1, none, [&](int, client& c) {
    c.push(keys_of(0, 0), floats(40 * dim, 1.0f), {.lr = 0.1f});
    RANK_CHECK_THROWS_AS(c.save_delta(dir / "d"), hd::argument_error);  // of what?
    RANK_CHECK_THROWS_AS(c.save(dir / "nowhere/f"), hd::file_error);
    RANK_CHECK_THROWS_AS(c.export_text(dir / "nowhere/f"), hd::file_error);
    RANK_CHECK_THROWS_AS(c.save_serving<hd::float16>(dir / "nowhere/f"), hd::file_error);
    RANK_CHECK_THROWS_AS(c.save_delta(dir / "d"), hd::argument_error);
    c.save(dir / "f");
    c.save_delta(dir / "f.1");
    // Of one call a server has written its part and another hasn't: the next one needs neither.
    std::filesystem::create_directory(dir / "f.2-1.tmp");
    c.push(keys_of(0, 1), floats(40 * dim, 1.0f), {.lr = 0.1f});
    RANK_CHECK_THROWS_AS(c.save_delta(dir / "f.2"), hd::file_error);
    c.erase(keys_of(0, 0, 5));
    c.save_delta(dir / "f.3");
    c.push(keys_of(0, 2), floats(40 * dim, 1.0f), {.lr = 0.1f});
    c.save_delta(dir / "f.4");
    std::filesystem::create_directory(dir / "f.5-1.tmp");
    RANK_CHECK_THROWS_AS(c.save_delta(dir / "f.5"), hd::file_error);
    sum = c.checksum();
  });
  CHECK(errors == std::vector<std::string>{});
  CHECK(loaded(dir / "f", {dir / "f.1", dir / "f.3", dir / "f.4"}) == sum);
  // A worker that has started again knows nothing of it.
  CHECK(work(place, 2, 1, none, [&](int, client& c) {
          c.push(keys_of(0, 3), floats(40 * dim, 1.0f), {.lr = 0.1f});
          c.save_delta(dir / "f.6");
          c.push(keys_of(0, 4), floats(40 * dim, 1.0f), {.lr = 0.1f});
          c.save_delta(dir / "f.7");
          sum = c.checksum();
          std::filesystem::create_directory(dir / "f.8-1.tmp");
          RANK_CHECK_THROWS_AS(c.save_delta(dir / "f.8"), hd::file_error);
          c.save(dir / "g");  // makes up for it
          c.save_delta(dir / "g.1");
          c.finish();
        }).empty());
  s.stop();
  CHECK(sum != 0);
  CHECK(loaded(dir / "f", {dir / "f.1", dir / "f.3", dir / "f.4", dir / "f.6", dir / "f.7"}) == sum);
  const auto kind = [&](const char* file) { return hd::detail::table_reader(dir / file).head().kind; };
  CHECK(kind("f.6-0") == hd::detail::file_kind::whole);
  CHECK(kind("f.7-0") == hd::detail::file_kind::delta);
  CHECK(kind("g.1-0") == hd::detail::file_kind::delta);

  using plain = hd::sparse_table<std::uint64_t, hd::row<dim>, hd::rule::adagrad, hd::initial::uniform,
                                 hd::admit::always, hd::evict::ttl, hd::guard::reject, hd::changes::untracked>;
  const hd::threads::meeting_place where(2);
  servers<plain> t(how<plain>(), where, {});
  CHECK(work<plain>(where, 1, 1, none, [&](int, auto& c) {
          c.push(keys_of(0, 0), floats(40 * dim, 1.0f), {.lr = 0.1f});
          c.save(dir / "p");
          RANK_CHECK_THROWS_AS(c.save_delta(dir / "p.1"), hd::argument_error);
          c.finish();
        }).empty());
  t.stop();
}

TEST_CASE("a server works while it writes a file, however long that takes") {
  const folder dir;
  for (const bool own : {true, false}) {
    INFO("own " << own);
    const std::string pipe = dir / (own ? "own0.tmp" : "f-0.tmp");
    REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
    const hd::threads::meeting_place place(3);
    servers<table_type> s(how<table_type>(), place, {.workers = 2, .path = own ? dir / "own" : std::string()});
    std::atomic<bool> wrote{false};
    hd::worker_options o = worker(1);
    o.patience = 2s;
    std::atomic<int> served{0};
    const auto errors = work(
        place, 1, 2, none,
        [&](int w, client& c) {
          if (w == 0) {
            c.push(keys_of(0, 0), floats(40 * dim, 1.0f), {.lr = 0.1f});
            try {  // a pipe can't be synchronised, so it fails in the end
              own ? c.save() : c.save(dir / "f");
            } catch (const hd::error&) {
            }
            wrote = true;
            if (!own) RANK_CHECK(c.size() > 0);
            return;
          }
          const auto start = std::chrono::steady_clock::now();
          floats rows(40 * dim);
          for (int step = 0; std::chrono::steady_clock::now() - start < 3500ms; ++step, ++served) {
            c.push(keys_of(1, step), floats(40 * dim, 1.0f), {.lr = 0.1f});
            c.pull(keys_of(1, step), rows);
            std::this_thread::sleep_for(1ms);
          }
          RANK_CHECK(!wrote);
          drained(pipe);
          while (!wrote) std::this_thread::sleep_for(1ms);
        },
        o);
    CHECK(errors == std::vector<std::string>{});
    CHECK(served > 100);
    s.stop();
  }
}
