// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#include "support.hpp"

#include <cstdio>
#include <fstream>

namespace {
// 20 steps, with a checkpoint into a new object after 10 if `through` names a directory.
template <class Plan, class Rule>
std::vector<std::vector<float>> twenty(const Plan& plan, const Rule& rule, const std::string& through) {
  std::vector<std::vector<float>> out(3);
  const auto steps = [](auto& dp, quadratic& m, int rank, std::size_t from, std::size_t to) {
    for (std::size_t s = from; s < to; ++s) train_step(dp, m, first_sample(s, rank, 3, 2), 2, 0.02f);
  };
  hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(20)}, [&](auto& comm) {
    quadratic m;
    {
      hd::data_parallel dp{plan, comm, m.tensors(), rule};
      steps(dp, m, comm.rank(), 0, through.empty() ? 20 : 10);
      if (!through.empty()) dp.save(through);
    }
    if (!through.empty()) {
      m = quadratic{};
      hd::data_parallel dp{plan, comm, m.tensors(), rule};
      dp.load(through);
      steps(dp, m, comm.rank(), 10, 20);
    }
    out[static_cast<std::size_t>(comm.rank())] = m.w;
  });
  return out;
}

template <class Plan, class Rule>
void resumes(const Plan& plan, const Rule& rule) {
  scratch_directory dir;
  CHECK((twenty(plan, rule, "") == twenty(plan, rule, dir.path())));
}
}  // namespace

TEST_CASE("10 steps, save, load, 10 steps are 20 steps, bit for bit") {
  resumes(hd::strategy{.topology = hd::ring{}}, hd::adamw{.weight_decay = 0.1f});
  resumes(hd::strategy{.topology = hd::native{}}, hd::sgd{.momentum = 0.9f, .nesterov = true});
  resumes(hd::strategy{.topology = hd::direct{}, .compressor = hd::cast<hd::float16>{}}, hd::adamw{});
  resumes(hd::strategy{.compressor = hd::dgc{.sparsity = 0.9, .dense_below = 10}}, hd::sgd{.momentum = 0.9f});
  resumes(hd::strategy{.compressor = hd::clip{} | hd::dgc{.sparsity = 0.99, .begin_step = 5, .warmup_steps = 8, .dense_below = 10}}, hd::sgd{.momentum = 0.9f});
  resumes(hd::strategy{.mode = hd::local_sgd{.period = 4}}, hd::adamw{});  // 10 is in the middle of a period
  resumes(hd::strategy{.compressor = hd::dgc{.sparsity = 0.9, .dense_below = 10}, .mode = hd::local_sgd{.period = 4}}, hd::adamw{});
}

TEST_CASE("other buckets after loading change nothing") {
  scratch_directory dir;
  const auto plan = hd::strategy{.topology = hd::direct{}, .compressor = hd::dgc{.sparsity = 0.9, .dense_below = 10}};
  auto small = plan;
  small.buckets = {.first = 1, .cap = 1};
  std::vector<float> w[2];
  for (const bool rebucket : {false, true}) {
    hd::threads::run(3, [&](auto& comm) {
      quadratic m;
      const auto steps = [&](auto& dp, std::size_t from) {
        for (std::size_t s = from; s < from + 5; ++s) train_step(dp, m, first_sample(s, comm.rank(), 3, 2), 2, 0.02f);
      };
      {
        hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
        steps(dp, 0);
        dp.save(dir.path());
      }
      hd::data_parallel dp{rebucket ? small : plan, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
      dp.load(dir.path());
      steps(dp, 5);
      if (comm.rank() == 0) w[rebucket] = m.w;
    });
  }
  CHECK((w[0] == w[1]));
}

TEST_CASE("replicas stay equal when a checkpoint of 4 ranks goes on with 2 and 8") {
  for (const int ranks : {2, 8, 1}) {
    scratch_directory dir;
    const auto plan = hd::strategy{.compressor = hd::dgc{.sparsity = 0.9, .begin_step = 3, .dense_below = 10}};
    const auto part = [&](int n, std::size_t from, bool load) {
      std::vector<std::vector<float>> out(static_cast<std::size_t>(n));
      hd::threads::run(n, [&](auto& comm) {
        quadratic m;
        hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
        if (load) dp.load(dir.path());
        for (std::size_t s = from; s < from + 6; ++s) train_step(dp, m, first_sample(s, comm.rank(), n, 2), 2, 0.02f);
        dp.save(dir.path());
        if (dp.report().steps != from + 6) throw std::runtime_error("wrong step count");
        out[static_cast<std::size_t>(comm.rank())] = m.w;
      });
      CHECK(all_equal(out));
      return out[0];
    };
    const auto before = part(4, 0, false);
    const auto after = part(ranks, 6, true);
    CHECK(quadratic::loss(after) < quadratic::loss(before));
  }
}

namespace {
template <class Damage>
void refused(const std::string& expected, Damage&& damage) {
  scratch_directory dir;
  hd::threads::run({.ranks = 3, .deadline = std::chrono::seconds(5)}, [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{}, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
    train_step(dp, m, static_cast<std::size_t>(comm.rank()), 1, 0.1f);
    dp.save(dir.path());
    hd::barrier(comm);
    if (comm.rank() == 0) damage(dir.path());
    hd::barrier(comm);
    const std::vector<float> before = m.w;
    std::string what;
    try {
      dp.load(dir.path());
    } catch (const hd::file_error& e) {
      what = e.what();
    }
    if (what.empty()) throw std::runtime_error("rank " + std::to_string(comm.rank()) + " loaded it");
    if (comm.rank() == 1 && what.find(expected) == std::string::npos) throw std::runtime_error(what);
    if (m.w != before) throw std::runtime_error("state changed");
    train_step(dp, m, 1, 1, 0.1f);  // and training goes on
  });
}

void flip(const std::string& path, std::streamoff at) {
  std::fstream f(path, std::ios::in | std::ios::out | std::ios::binary);
  f.seekg(at);
  const char c = static_cast<char>(f.get() ^ 4);
  f.seekp(at);
  f.put(c);
}
}  // namespace

TEST_CASE("a damaged, missing or foreign checkpoint is refused on every rank and changes nothing") {
  CHECK_NOTHROW(refused("can't open", [](const std::string& d) { std::remove((d + "/checkpoint-1.rank-1").c_str()); }));
  CHECK_NOTHROW(refused("checksum", [](const std::string& d) { flip(d + "/checkpoint-1.rank-1", 2000); }));
  CHECK_NOTHROW(refused("version", [](const std::string& d) { flip(d + "/checkpoint-1.rank-1", 6); }));
  CHECK_NOTHROW(refused("not a Heddle checkpoint", [](const std::string& d) { flip(d + "/checkpoint-1.rank-1", 0); }));
  CHECK_NOTHROW(refused("header says", [](const std::string& d) {
    REQUIRE(::truncate((d + "/checkpoint-1.rank-1").c_str(), 1000) == 0);
  }));
  CHECK_NOTHROW(refused("can't open", [](const std::string& d) { std::remove((d + "/manifest").c_str()); }));
}

namespace {
const hd::threads::options two{.ranks = 2, .deadline = std::chrono::seconds(5)};

template <class Trainer>
std::string refusal(Trainer& dp, const std::string& dir) {
  try {
    dp.load(dir);
  } catch (const hd::file_error& e) {
    return e.what();
  }
  return "loaded";
}
}  // namespace

TEST_CASE("another model's checkpoint is refused by name, and a directory that can't be made is an error everywhere") {
  scratch_directory dir;
  hd::threads::run({.ranks = 2, .deadline = std::chrono::seconds(5)}, [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{hd::strategy{}, comm, m.tensors(), hd::sgd{}};
    dp.save(dir.path());
    auto renamed = m.tensors();
    renamed[2].name = "head";
    hd::data_parallel other{hd::strategy{}, comm, renamed, hd::sgd{}};
    RANK_CHECK(refusal(other, dir.path()).find("this model's is \"head\"") != std::string::npos);
    RANK_CHECK_THROWS_AS(dp.save("/proc/heddle"), hd::file_error);
  });
}


TEST_CASE("a checkpoint of another kind of strategy is refused, and changes nothing") {
  scratch_directory dir;
  hd::threads::run(two, [&](auto& comm) {
    quadratic m;
    {
      hd::data_parallel dp{hd::strategy{.compressor = hd::dgc{.dense_below = 0}}, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
      train_step(dp, m, 0, 1, 0.1f);
      dp.save(dir.path());
    }
    const auto before = m.w;
    const auto check = [&](auto plan, auto rule) {
      hd::data_parallel dp{plan, comm, m.tensors(), rule};
      const std::string why = refusal(dp, dir.path());
      if (why.find("was written under") == std::string::npos || m.w != before) throw std::runtime_error(why);
    };
    check(hd::strategy{}, hd::adamw{});                             // as many floats, other meaning
    check(hd::strategy{.mode = hd::local_sgd{}}, hd::sgd{});        // likewise
    check(hd::strategy{.compressor = hd::clip{} | hd::dgc{}}, hd::sgd{});
    check(hd::strategy{}, hd::sgd{});
  });
}

TEST_CASE("ranks that took different numbers of local steps save one checkpoint") {
  scratch_directory dir;
  hd::threads::run(two, [&](auto& comm) {
    quadratic m;
    const auto plan = hd::strategy{.mode = hd::local_sgd{.period = 100}};
    hd::data_parallel dp{plan, comm, m.tensors(), hd::adamw{}};
    for (std::size_t s = 0; s < (comm.rank() ? 3u : 5u); ++s) train_step(dp, m, s, 1, 0.01f);
    dp.join();
    dp.save(dir.path());
    const auto saved = m.w;
    train_step(dp, m, 9, 1, 0.01f);
    dp.load(dir.path());
    if (m.w != saved) throw std::runtime_error("not what was saved");
    dp.save(dir.path());  // nothing has changed: a new generation all the same
    dp.load(dir.path());
    if (m.w != saved) throw std::runtime_error("not what was saved twice");
  });
  CHECK(std::ifstream(dir.path() + "/checkpoint-2.rank-0").good());
  CHECK_FALSE(std::ifstream(dir.path() + "/checkpoint-1.rank-0").good());
  CHECK_FALSE(std::ifstream(dir.path() + "/checkpoint-1.rank-1").good());
}

TEST_CASE("a save that fails leaves the older checkpoint, whatever was loaded from it") {
  scratch_directory dir;
  const auto plan = hd::strategy{.compressor = hd::dgc{.sparsity = 0.9, .dense_below = 0}};
  std::vector<float> saved;
  hd::threads::run(4, [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
    train_step(dp, m, static_cast<std::size_t>(comm.rank()), 1, 0.1f);
    dp.save(dir.path());
    if (comm.rank() == 0) saved = m.w;
  });
  std::system(("mkdir " + dir.path() + "/checkpoint-2.rank-1.tmp").c_str());  // so that rank 1 can't write
  hd::threads::run(two, [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
    dp.load(dir.path());
    bool failed = false;
    try {
      dp.save(dir.path());
    } catch (const hd::file_error&) {
      failed = true;
    }
    if (!failed) throw std::runtime_error("rank " + std::to_string(comm.rank()) + " saved");
  });
  CHECK_FALSE(std::ifstream(dir.path() + "/checkpoint-2.rank-0").good());
  hd::threads::run(4, [&](auto& comm) {
    quadratic m;
    hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{.momentum = 0.9f}};
    dp.load(dir.path());
    if (m.w != saved) throw std::runtime_error("the older checkpoint was harmed");
  });
}

TEST_CASE("replicas that drifted meet when they are loaded on another number of ranks") {
  for (const int ranks : {1, 2, 6}) {
    scratch_directory dir;
    std::vector<double> sum(quadratic::count, 0.0);
    std::mutex lock;
    const auto plan = hd::strategy{.mode = hd::local_sgd{.period = 100}};
    hd::threads::run(4, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
      const std::size_t n = 1 + static_cast<std::size_t>(comm.rank());
      train_step(dp, m, n * 10, n, 0.5f);
      dp.save(dir.path());
      std::lock_guard guard(lock);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += m.w[i] * static_cast<double>(n) / 10.0;
    });
    hd::threads::run(ranks, [&](auto& comm) {
      quadratic m;
      hd::data_parallel dp{plan, comm, m.tensors(), hd::sgd{}};
      dp.load(dir.path());
      if (distance(m.w, sum) > 1e-6) throw std::runtime_error("off by " + std::to_string(distance(m.w, sum)));
      dp.synchronize();
      if (distance(m.w, sum) > 1e-6) throw std::runtime_error("moved");
    });
  }
}
