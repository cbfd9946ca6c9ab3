// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include <heddle/compress/sharded.hpp>

#include "support.hpp"

#include <atomic>
#include <memory>

namespace {
std::vector<float> dgc_run(hd::dgc c, hd::sgd rule, int ranks, std::size_t steps) {
  const auto r = train(hd::strategy{.compressor = c}, rule, ranks, steps, 0.05f);
  CHECK(all_equal(r));
  return r[0];
}
}  // namespace

TEST_CASE("DGC that sends everything is momentum SGD without masking, plain SGD with it") {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const bool nesterov : {false, true}) {
      const hd::sgd rule{.momentum = 0.9f, .nesterov = nesterov, .weight_decay = 0.01f};
      const auto momentum = reference(ranks, 100, 2, momentum_oracle(static_cast<double>(0.05f), static_cast<double>(0.9f), static_cast<double>(0.01f), nesterov));
      const auto off = dgc_run({.sparsity = 0.0, .dense_below = 0, .masking = false}, rule, ranks, 100);
      CHECK(distance(off, momentum) < 1e-6);
      // In the dense phase, and for small tensors, U is the velocity.
      CHECK(distance(dgc_run({.begin_step = 1000}, rule, ranks, 100), momentum) < 1e-6);
      CHECK(distance(dgc_run({.dense_below = 5000}, rule, ranks, 100), momentum) < 1e-6);
      // The momentum survives the switch to packets.
      CHECK(distance(dgc_run({.sparsity = 0.0, .begin_step = 50, .dense_below = 0, .masking = false}, rule, ranks, 100),
                     momentum) < 1e-6);
    }
    const auto plain = reference(ranks, 100, 2, momentum_oracle(static_cast<double>(0.05f), 0.0, static_cast<double>(0.01f), false));
    const hd::sgd rule{.momentum = 0.9f, .weight_decay = 0.01f};
    CHECK(distance(dgc_run({.sparsity = 0.0, .dense_below = 0}, rule, ranks, 100), plain) < 1e-6);
  }
}

namespace {
// Never sends a packet; what it makes of a mean is twice that. Its step_dense isn't called: the momentum is the rule's.
struct twice {
  static constexpr int slots = 1;
  bool sends(std::size_t, const hd::encode_context&) const { return false; }
  template <class Packet>
  void encode(hd::slice<const float>, float, float* const*, const hd::encode_context&, Packet&) const {}
  void commit(hd::slice<const float>, float, float* const*, const hd::encode_context&,
              hd::slice<const std::byte>) const {}
  void decode_add(hd::slice<const std::byte>, hd::slice<float>) const {}
  std::size_t measure(hd::slice<const std::byte>) const { return 0; }
  bool flagged(hd::slice<const std::byte>) const { return false; }
  void correct(hd::slice<float> g, float* const*, const hd::encode_context&) const {
    for (float& v : g) v *= 2.0f;
  }
  void step_dense(hd::slice<const float>, float*, float* const*, const hd::encode_context&, float) const {}
};
static_assert(hd::has_step_dense<twice>);
}  // namespace

TEST_CASE("a compressor that leaves the momentum to the rule corrects its mean, also where it could step by itself") {
  const auto oracle = momentum_oracle(static_cast<double>(0.1f), static_cast<double>(0.9f), 0.0, false);
  const auto r = train(hd::strategy{.compressor = twice{}}, hd::sgd{.momentum = 0.9f}, 2, 20, 0.05f);
  CHECK(all_equal(r));
  CHECK(distance(r[0], reference(2, 20, 2, oracle)) < 2e-6);  // at twice the rate
}

TEST_CASE("DGC converges while it sends a tenth, and sends what it says") {
  hd::threads::run(4, [](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{.compressor = hd::dgc{.sparsity = 0.9, .dense_below = 500}}, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
    const auto start = dp.report();
    for (std::size_t s = 0; s < 400; ++s) train_step(dp, m, first_sample(s, comm.rank(), 4, 2), 2, 0.01f);
    const auto end = dp.report();
    if (comm.rank() == 0) RANK_CHECK(quadratic::loss(m.w) < 0.01);
    // Ring gather: each packet (8 + 125 + 3 + 4 * 100 bytes, a bitmap) passes three times; 41 small elements by a dense
    // ring.
    std::vector<double> sent{static_cast<double>(end.bytes_sent - start.bytes_sent) / 400};
    hd::all_reduce(comm, hd::direct{}, std::span<double>(sent), hd::sum{});
    if (comm.rank() == 0) RANK_CHECK(sent[0] == 4 * 3 * (8 + 128 + 4 * 100) + 2 * 3 * 41 * 4);
  });
}

TEST_CASE("a rank without gradient, and a rank that selects nothing, are legal") {
  hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(5)}, [](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{.compressor = hd::dgc{.sparsity = 0.9, .dense_below = 0}}, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
    for (std::size_t s = 0; s < 5; ++s) {
      quadratic::gradient(m.w.data(), m.g.data(), s, 1);
      if (comm.rank() == 1 || s == 3) std::fill(m.g.begin(), m.g.end(), 0.0f);
      for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
      RANK_CHECK_FALSE(dp.step({.lr = 0.01f}).skipped);
    }
  });
}

TEST_CASE("what was sent and what is held add up, through skipped steps, a checkpoint and other numbers of ranks") {
  // Rates of zero keep w fixed, so what was sent is the sum of updates / lr; instead lr 1 makes it w0 - w.
  scratch_directory dir;
  const hd::sgd rule{.momentum = 0.5f};
  const auto plan = hd::strategy{.compressor = hd::dgc{.sparsity = 0.95, .dense_below = 0}};
  std::vector<double> input(quadratic::count, 0.0), sent(quadratic::count, 0.0), held(quadratic::count, 0.0);
  std::vector<float> w(quadratic::count, 0.5f);
  std::mutex lock;
  std::size_t step = 0;
  for (const int ranks : {4, 2, 8, 3}) {
    std::vector<double> before(quadratic::count), after(quadratic::count, 0.0);
    std::copy(held.begin(), held.end(), before.begin());
    const std::size_t from = step;
    hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{plan, comm, m.tensors(), rule};
      if (from) dp.load(dir.path());
      std::vector<double> loaded(quadratic::count, 0.0);
      const auto add_held = [&](std::vector<double>& to, double sign) {
        std::size_t at = 0;
        for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) {
          for (const float v : dp.held(i, 1)) to[at++] += sign * v;
        }
      };
      {
        std::lock_guard guard(lock);
        add_held(after, 1.0);
      }
      hd::barrier(comm);
      if (comm.rank() == 0 && from) {
        double worst = 0.0, scale = 0.0;
        for (std::size_t i = 0; i < after.size(); ++i) {
          worst = std::max(worst, std::fabs(after[i] - before[i]));
          scale = std::max(scale, std::fabs(before[i]));
        }
        RANK_CHECK(worst <= 1e-6 * scale);
      }
      for (std::size_t s = from; s < from + 25; ++s) {
        for (std::size_t i = 0; i < m.g.size(); ++i) m.g[i] = static_cast<float>(quadratic::noise(s * 10 + static_cast<std::size_t>(comm.rank()), i));
        const bool bad = s == from + 7;
        if (bad && comm.rank() == ranks - 1) m.g[17] = NAN;
        std::vector<float> u0;
        for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) u0.insert(u0.end(), dp.held(i, 0).begin(), dp.held(i, 0).end());
        std::vector<double> mine(m.g.size());
        for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = 0.5 * u0[i] + m.g[i] / static_cast<double>(ranks);
        for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
        const bool skipped = dp.step({.lr = 1.0f}).skipped;
        if (skipped != bad) throw std::runtime_error("skipped the wrong step");
        if (!skipped) {
          std::lock_guard guard(lock);
          for (std::size_t i = 0; i < mine.size(); ++i) input[i] += mine[i];
          if (comm.rank() == 0) {
            for (std::size_t i = 0; i < mine.size(); ++i) sent[i] += m.g[i];  // what the exchange left in the gradient
          }
        }
        hd::barrier(comm);
      }
      dp.save(dir.path());
      hd::barrier(comm);
      {
        std::lock_guard guard(lock);
        if (comm.rank() == 0) std::fill(held.begin(), held.end(), 0.0);
      }
      hd::barrier(comm);
      std::lock_guard guard(lock);
      add_held(held, 1.0);
    });
    double worst = 0.0, scale = 0.0;
    for (std::size_t i = 0; i < input.size(); ++i) {
      worst = std::max(worst, std::fabs(input[i] - (sent[i] + held[i])));
      scale = std::max(scale, std::fabs(input[i]));
    }
    CHECK(worst <= 1e-6 * scale);
    step += 25;
  }
}

namespace {
// A plan whose packets stay packets for every tensor of the model.
hd::dgc sends(double sparsity, hd::overlap when = hd::overlap::transactional) {
  return {.sparsity = sparsity, .dense_below = 0, .overlap = when};
}
}  // namespace

TEST_CASE("one pass after backward gives what two halves during it give, and skips without a trace") {
  std::array<std::vector<float>, 2> ends;
  for (int late = 0; late < 2; ++late) {
    hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
      quadratic m;
      hd::dgc c = sends(0.95, late ? hd::overlap::none : hd::overlap::transactional);
      c.dense_below = 30;
      c.begin_step = 3;
      hd::data_parallel dp{hd::strategy{.compressor = c}, comm, m.tensors(), hd::sgd{.momentum = 0.9f, .weight_decay = 0.01f}};
      for (std::size_t s = 0; s < 20; ++s) {
        quadratic::gradient(m.w.data(), m.g.data(), first_sample(s, comm.rank(), 3, 2), 2);
        const std::vector<float> w = m.w, u(dp.held(2, 0).begin(), dp.held(2, 0).end()), v(dp.held(2, 1).begin(), dp.held(2, 1).end());
        if (s % 7 == 4 && comm.rank() == 2) m.g[100] = s == 4 ? NAN : INFINITY;
        for (std::size_t i = quadratic::sizes.size(); i-- > 0;) dp.ready(i);
        const bool skipped = dp.step({.lr = 0.05f}).skipped;
        RANK_CHECK(skipped == (s % 7 == 4));
        if (!skipped) continue;
        RANK_CHECK(w == m.w);
        RANK_CHECK(std::equal(u.begin(), u.end(), dp.held(2, 0).begin()));
        RANK_CHECK(std::equal(v.begin(), v.end(), dp.held(2, 1).begin()));
      }
      dp.join();
      if (comm.rank() == 0) ends[static_cast<std::size_t>(late)] = m.w;
    });
  }
  CHECK(ends[0] == ends[1]);
}

TEST_CASE("entries of an element are added in the order of their ranks, on every rank") {
  for (const bool late : {false, true}) {
    hd::threads::run({.ranks = 4, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
      quadratic m;
      m.w.assign(m.w.size(), 0.0f);
      const hd::dgc c{
          .sparsity = 0.99, .dense_below = 0, .overlap = late ? hd::overlap::none : hd::overlap::transactional};
      hd::data_parallel dp{hd::strategy{.compressor = c}, comm, m.tensors(), hd::sgd{}};
      const float theirs[] = {1.0f, 1e8f, -1e8f, 0.0f};  // (1 + 1e8) - 1e8 is 0; added otherwise they make 1
      m.g[7] = theirs[comm.rank()];
      for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
      RANK_CHECK_FALSE(dp.step({.lr = 1.0f}).skipped);
      RANK_CHECK(m.w == std::vector<float>(quadratic::count, 0.0f));
      RANK_CHECK(dp.held(2, 1)[0] == 0.0f);
    });
  }
}

TEST_CASE("where packets are together no smaller than a dense sum, one travels") {
  for (const auto when : {hd::overlap::transactional, hd::overlap::none}) {
    hd::threads::run({.ranks = 4, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
      quadratic m, other;
      const hd::sgd rule{.momentum = 0.9f};
      const auto bytes_of = [&](double sparsity, quadratic& q) {
        hd::data_parallel dp{hd::strategy{.compressor = sends(sparsity, when)}, comm, q.tensors(), rule};
        const std::uint64_t before = dp.report().bytes_sent;
        for (std::size_t s = 0; s < 3; ++s) train_step(dp, q, first_sample(s, comm.rank(), 4, 1), 1, 0.05f);
        q.g[20] = comm.rank() == 1 ? NAN : 1.0f;
        for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
        RANK_CHECK(dp.step({.lr = 0.05f}).skipped);
        return dp.report().bytes_sent - before;
      };
      const std::uint64_t most = 4 * (2 * 3 * quadratic::count + 4 * 8);  // a dense ring's, and the rounding of its blocks
      for (const double sparsity : {0.0, 0.3, 0.5, 0.7, 0.9, 0.99}) RANK_CHECK(bytes_of(sparsity, m) <= most);
      RANK_CHECK(bytes_of(0.99, other) < most / 8);
    });
  }
}

namespace {
// Counts the payload bytes that leave a rank's group of `group` ranks; duplicates count into the same figure.
template <class Comm> class across : public hd::detail::wrapper<Comm> {
 public:
  across(Comm inner, int group,
         std::shared_ptr<std::atomic<std::uint64_t>> bytes = std::make_shared<std::atomic<std::uint64_t>>(0))
      : hd::detail::wrapper<Comm>(std::move(inner)), group_(group), bytes_(std::move(bytes)) {}
  across duplicate() { return {this->inner_.duplicate(), group_, bytes_}; }
  std::uint64_t bytes() const { return *bytes_; }
  template <class Apply>
  void exchange(hd::header h, std::span<const hd::outgoing> out, std::span<const hd::incoming> in, Apply&& apply) {
    const bool payload = h.kind != hd::operation_kind::control && h.kind != hd::operation_kind::barrier;
    for (const hd::outgoing& m : out) {
      if (payload && m.peer / group_ != this->rank() / group_) *bytes_ += m.bytes;
    }
    this->inner_.exchange(h, out, in, std::forward<Apply>(apply));
  }

 private:
  int group_;
  std::shared_ptr<std::atomic<std::uint64_t>> bytes_;
};

auto in_groups(const hd::dgc& c, int group) {
  return hd::strategy{.topology = hd::hierarchical{hd::ring{}, hd::ring{}, group}, .compressor = hd::sharded{c}};
}
template <class Body> void run_in_groups(int ranks, int group, Body&& body) {
  hd::threads::run({.ranks = ranks, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
    across counted(comm.duplicate(), group);
    body(counted);
  });
}
// As train(); if `through` names a directory, with a checkpoint into a new object after half of the steps; before step
// `bad_at` one more, with a NaN on the last rank, that must leave no trace.
std::vector<std::vector<float>> train_in_groups(const hd::dgc& c, int group, hd::sgd rule, int ranks, std::size_t steps,
                                                const std::string& through = {}, std::size_t bad_at = 1000) {
  std::vector<std::vector<float>> out(static_cast<std::size_t>(ranks));
  run_in_groups(ranks, group, [&](auto& comm) {
    quadratic m;
    const auto some = [&](auto& dp, std::size_t from, std::size_t to) {
      const auto state = [&] {
        std::vector<float> all = m.w;
        for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) {
          for (const int slot : {0, 1}) all.insert(all.end(), dp.held(i, slot).begin(), dp.held(i, slot).end());
        }
        return all;
      };
      for (std::size_t s = from; s < to; ++s) {
        if (s == bad_at) {
          const std::vector<float> before = state();
          m.g.assign(m.g.size(), 1.0f);
          if (comm.rank() + 1 == ranks) m.g[500] = NAN;
          for (std::size_t i = quadratic::sizes.size(); i-- > 0;) dp.ready(i);
          RANK_CHECK(dp.step({.lr = 0.05f}).skipped);
          RANK_CHECK(state() == before);
        }
        RANK_CHECK_FALSE(train_step(dp, m, first_sample(s, comm.rank(), ranks, 2), 2, 0.05f).skipped);
      }
    };
    {
      hd::data_parallel dp{in_groups(c, group), comm, m.tensors(), rule};
      some(dp, 0, through.empty() ? steps : steps / 2);
      if (!through.empty()) dp.save(through);
    }
    if (!through.empty()) {
      m = quadratic{};
      hd::data_parallel dp{in_groups(c, group), comm, m.tensors(), rule};
      dp.load(through);
      some(dp, steps / 2, steps);
    }
    out[static_cast<std::size_t>(comm.rank())] = m.w;
  });
  return out;
}
}  // namespace

TEST_CASE("sharded DGC: each rank holds a part, and what it does is DGC of its group's gradient") {
  const hd::sgd rule{.momentum = 0.9f, .weight_decay = 0.01f};
  const auto oracle = [&](int ranks) {
    return reference(ranks, 60, 2, momentum_oracle(static_cast<double>(0.05f), static_cast<double>(0.9f), static_cast<double>(0.01f), false));
  };
  hd::dgc all = sends(0.0), later = sends(0.5);
  all.masking = false;
  later.begin_step = 1000;
  const int groups[5][2] = {{1, 1}, {4, 2}, {5, 2}, {7, 3}, {4, 4}};  // 5 is 2+2+1, 7 is 3+3+1
  for (const auto& [ranks, group] : groups) {
    const auto r = train_in_groups(all, group, rule, ranks, 60);
    CHECK(all_equal(r));
    CHECK(distance(r[0], oracle(ranks)) < 1e-6);
  }
  for (const auto when : {hd::overlap::transactional, hd::overlap::none}) {
    later.overlap = when;
    later.dense_below = 20;
    CHECK(distance(train_in_groups(later, 2, rule, 4, 60)[0], oracle(4)) < 1e-6);
  }

  // A group of one rank is DGC; the part that a rank holds falls with the group.
  const auto one = train_in_groups(sends(0.9), 1, rule, 3, 20),
             flat = train(hd::strategy{.compressor = sends(0.9)}, rule, 3, 20, 0.05f);
  CHECK(one[0] == flat[0]);
  scratch_directory dir;
  std::vector<double> before;
  for (const int ranks : {6, 4, 7}) {  // 3+3, 3+1, 3+3+1
    std::vector<double> held(quadratic::count, 0.0);
    std::mutex lock;
    std::size_t state = 0;
    run_in_groups(ranks, 3, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{in_groups(sends(0.95), 3), comm, m.tensors(), rule};
      if (ranks != 6) dp.load(dir.path());
      const std::uint64_t bytes = dp.report().state_bytes;
      for (int round = 0; round < 2; ++round) {
        if (round == 1) {
          for (std::size_t s = 0; s < 10; ++s) train_step(dp, m, first_sample(s, comm.rank(), ranks, 1), 1, 0.05f);
          dp.save(dir.path());
          hd::barrier(comm);
          if (comm.rank() == 0) std::fill(held.begin(), held.end(), 0.0);
          hd::barrier(comm);
        }
        // A lone tensor of 1000 elements is cut by the columns of its bucket; compare sums over all elements.
        {
          std::lock_guard guard(lock);
          state = std::max<std::size_t>(state, bytes);
          for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) {
            for (const float v : dp.held(i, 1)) held[i] += v;
          }
        }
        hd::barrier(comm);
        if (round == 0 && comm.rank() == 0 && ranks != 6) {
          for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) RANK_CHECK(std::fabs(held[i] - before[i]) < 1e-4);
        }
        hd::barrier(comm);
      }
    });
    before = held;
    const std::size_t columns = ranks == 6 ? 3 : 1;
    CHECK(state <= 8 * (quadratic::count / columns + 1) + 8 * 5);
  }
}

TEST_CASE("sharded DGC resumes bit for bit, and a skipped step leaves no trace") {
  const hd::sgd rule{.momentum = 0.9f, .weight_decay = 0.01f};
  for (const auto when : {hd::overlap::transactional, hd::overlap::none}) {
    const hd::dgc c = sends(0.9, when);
    for (const int ranks : {4, 5}) {  // 2+2, 2+2+1
      scratch_directory dir;
      const auto whole = train_in_groups(c, 2, rule, ranks, 20);
      CHECK(all_equal(whole));
      CHECK(train_in_groups(c, 2, rule, ranks, 20, dir.path()) == whole);
      CHECK(train_in_groups(c, 2, rule, ranks, 20, {}, 7) == whole);
    }
  }
}

TEST_CASE("sharded DGC: in each step what is sent and held is what was held and went in") {
  for (const int ranks : {4, 5}) {  // 2+2: two columns; 2+2+1: one
    std::vector<double> before(quadratic::count), input(before), after(before);
    std::mutex lock;
    run_in_groups(ranks, 2, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{in_groups(sends(0.9), 2), comm, m.tensors(), hd::sgd{.momentum = 0.5f}};
      // to += by * slot, element by element: of a tensor that is cut the rank with the first tensor has the beginning.
      const auto add = [&](std::vector<double>& to, int slot, double by) {
        const std::lock_guard guard(lock);
        const bool first = dp.held(0, slot).size() == quadratic::sizes[0];
        std::size_t at = 0;
        for (std::size_t i = 0; i < quadratic::sizes.size(); at += quadratic::sizes[i++]) {
          const auto part = dp.held(i, slot);
          std::size_t k = first ? at : at + quadratic::sizes[i] - part.size();
          for (const float v : part) to[k++] += by * static_cast<double>(v);
        }
      };
      for (std::size_t s = 0; s < 12; ++s) {
        if (comm.rank() == 0)
          for (auto* x : {&before, &input, &after}) std::fill(x->begin(), x->end(), 0.0);
        hd::barrier(comm);
        for (std::size_t i = 0; i < m.g.size(); ++i)
          m.g[i] = static_cast<float>(quadratic::noise(s * 10 + static_cast<std::size_t>(comm.rank()), i));
        const std::vector<float> given = m.g;
        add(before, 1, 1.0);
        add(input, 0, 0.5);
        {
          const std::lock_guard guard(lock);
          for (std::size_t i = 0; i < given.size(); ++i) input[i] += given[i] / static_cast<double>(ranks);
        }
        for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
        RANK_CHECK_FALSE(dp.step({.lr = 1.0f}).skipped);
        add(after, 1, 1.0);
        hd::barrier(comm);
        double worst = 0.0, scale = 0.0, sent = 0.0;
        for (std::size_t i = 0; i < m.g.size(); ++i) {  // what the exchange left in the gradient was sent
          worst = std::max(worst, std::fabs(before[i] + input[i] - after[i] - m.g[i]));
          scale = std::max(scale, std::fabs(before[i] + input[i]));
          sent += std::fabs(m.g[i]);
        }
        RANK_CHECK(sent > 0.0);
        RANK_CHECK(worst <= 1e-6 * scale);
        hd::barrier(comm);
      }
    });
  }
}

TEST_CASE("sharded DGC: what leaves a node doesn't grow with its ranks, so each sends its part of it") {
  const auto bytes = [](int group) {  // of each rank, in five steps between two nodes
    std::vector<std::uint64_t> sent(2 * static_cast<std::size_t>(group));
    run_in_groups(2 * group, group, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{in_groups(sends(0.95), group), comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
      const std::uint64_t before = comm.bytes();
      for (std::size_t s = 0; s < 5; ++s) train_step(dp, m, first_sample(s, comm.rank(), comm.size(), 1), 1, 0.05f);
      sent[static_cast<std::size_t>(comm.rank())] = comm.bytes() - before;
    });
    return sent;
  };
  const std::uint64_t alone = bytes(1)[0];
  CHECK(alone > 5 * 4 * 50);
  for (const int group : {2, 4}) {
    for (const std::uint64_t b : bytes(group)) {
      CHECK(b > 0);
      // Besides its part of the entries: heads of packets, and numbers of entries that are rounded up.
      CHECK(b <= alone / static_cast<std::uint64_t>(group) + 5 * 4 * 24);
    }
  }
}

TEST_CASE("huge gradients make DGC skip, and never leave an infinity behind") {
  for (const bool dense : {false, true}) {
    for (const auto when : {hd::overlap::transactional, hd::overlap::none}) {
      hd::dgc c = sends(0.98, when);
      if (dense) c.dense_below = 5000;
      hd::threads::run({.ranks = 4, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
        quadratic m;
        hd::data_parallel dp{hd::strategy{.compressor = c}, comm, m.tensors(), hd::sgd{.momentum = dense ? 0.9f : 0.0f}};
        for (std::size_t s = 0; s < 7; ++s) {
          m.g.assign(m.g.size(), dense ? 8e37f : 2e38f);
          for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
          // Beyond 3.4e38: 0.8 (1 + 0.9 + ... + 0.9^5), or 4 V = 2 + 2.
          RANK_CHECK(dp.step({.lr = 1e-6f}).skipped == (s >= (dense ? 5 : 1)));
          RANK_CHECK(hd::all_finite(m.w.data(), m.w.size()));
          for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) {
            for (int slot = 0; slot < 2; ++slot) RANK_CHECK(hd::all_finite(dp.held(i, slot).data(), dp.held(i, slot).size()));
          }
        }
      });
    }
  }
}

TEST_CASE("what is held of a tensor that travels dense after loading is sent at once, and replicas stay equal") {
  for (const int later : {3, 2}) {
    scratch_directory dir;
    std::vector<float> w(quadratic::count);
    const auto step = [](auto& dp, quadratic& m, float g) {
      m.g.assign(m.g.size(), g);
      for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
      dp.step({.lr = 1.0f});
    };
    hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{hd::strategy{.compressor = sends(0.9)}, comm, m.tensors(), hd::sgd{}};
      for (int s = 0; s < 3; ++s) step(dp, m, static_cast<float>(comm.rank() + 1));  // a mean of 2
      dp.save(dir.path());
    });
    std::vector<std::vector<float>> out(static_cast<std::size_t>(later));
    hd::threads::run({.ranks = later, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
      quadratic m;
      hd::dgc c = sends(0.9);
      c.dense_below = 5000;
      const auto plan = hd::strategy{.compressor = c};
      {
        hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
        dp.load(dir.path());
        dp.save(dir.path());  // on the way nothing is forgotten
      }
      hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
      dp.load(dir.path());
      for (int s = 0; s < 2; ++s) step(dp, m, 0.0f);
      for (const float x : m.w) RANK_CHECK(std::fabs(x - (0.5f - 6.0f)) < 1e-5f);
      for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) {
        for (const float v : dp.held(i, 1)) RANK_CHECK(v == 0.0f);
      }
      out[static_cast<std::size_t>(comm.rank())] = m.w;
    });
    CHECK(all_equal(out));
  }
}

TEST_CASE("sharded state keeps its sum when the same ranks load it in other groups") {
  const auto plan = [](int group) { return in_groups(sends(0.9), group); };
  for (const auto& [from, to] : {std::pair{2, 1}, std::pair{1, 2}, std::pair{2, 2}}) {
    scratch_directory dir;
    std::array<double, 2> held{};
    std::array<std::vector<float>, 3> before;
    std::mutex lock;
    const auto add = [&](auto& dp, std::size_t which) {
      const std::lock_guard guard(lock);
      for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) {
        for (const float v : dp.held(i, 1)) held[which] += static_cast<double>(v);
      }
    };
    run_in_groups(3, 1, [&, from = from, to = to](auto& comm) {
      const auto rank = static_cast<std::size_t>(comm.rank());
      quadratic m;
      {
        hd::data_parallel dp{plan(from), comm, m.tensors(), hd::sgd{}};
        for (int s = 0; s < 3; ++s) {
          m.g.assign(m.g.size(), static_cast<float>(comm.rank() + 1));
          for (std::size_t i = 0; i < quadratic::sizes.size(); ++i) dp.ready(i);
          dp.step({.lr = 0.1f});
        }
        dp.save(dir.path());
        add(dp, 0);
        before[rank].assign(dp.held(2, 1).begin(), dp.held(2, 1).end());
      }
      hd::data_parallel dp{plan(to), comm, m.tensors(), hd::sgd{}};
      dp.load(dir.path());
      add(dp, 1);
      if (from == to)
        RANK_CHECK(std::equal(before[rank].begin(), before[rank].end(), dp.held(2, 1).begin(), dp.held(2, 1).end()));
    });
    CHECK(held[0] > 1.0);
    CHECK(held[1] == Approx(held[0]).epsilon(1e-6));
  }
}
