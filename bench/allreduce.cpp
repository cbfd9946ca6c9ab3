// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
// about: all-reduce of threads against Open MPI, Gloo and the memory's bandwidth; hiding communication behind backward
// driver: script

// bench/allreduce.py runs this, in turn with the peers (bench/peers):
//     allreduce RANKS BYTES CALLS SAMPLES...   prints "<what> <bytes> <seconds>" per sample: native{}, ring{},
//                                              halving_doubling{} and, as "userop", ring{} with an operation of the
//                                              user's, in place, one call of CALLS in a row; with two ranks a loop by
//                                              hand, too, that reads and writes what native{} must
//     allreduce stream RANKS                   prints "stream <bytes per second>": every rank scales 64 MiB of its own
//     allreduce overlap                        prints "<what> 0 <seconds>" of compute, serial and overlapped steps
//     allreduce buckets                        prints "<links>.<cap or automatic> <bytes> <seconds>" of steps of a model of
//                                              twelve layers, on links of which a message costs more and more
//     allreduce proof                          prints "<topology> 1024 <seconds>" of making and proving its schedules
//     allreduce lanes                          prints "<what> <lanes> <seconds>" of a step, and of what its links need
#include "support/overlap.hpp"

#include <heddle/collective/automatic_buckets.hpp>
#include <heddle/collective/verify.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace hd = heddle;

namespace {

using clock_type = std::chrono::steady_clock;

double since(clock_type::time_point start) { return std::chrono::duration<double>(clock_type::now() - start).count(); }

struct add {  // as a user writes it
  float operator()(float a, float b) const { return a + b; }
};

[[noreturn]] void wrong(const char* what) {
  std::fprintf(stderr, "allreduce: %s gives a wrong sum\n", what);
  std::exit(3);
}

// Each rank on a core of its own, as mpirun places processes.
void place(int rank, int ranks) {
#if defined(__linux__)
  if (static_cast<unsigned>(ranks) > std::thread::hardware_concurrency()) return;
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(rank, &core);
  pthread_setaffinity_np(pthread_self(), sizeof core, &core);
#else
  (void)rank, (void)ranks;
#endif
}

// One sample: seconds per call on rank 0, which no other rank can leave behind by more than a call.
template <class Comm, class Plan>
double sample(Comm& comm, Plan& plan, std::vector<float>& data, int calls,
              const hd::leaf& l = hd::leaf_of<float>(hd::sum{})) {
  hd::barrier(comm);
  const auto start = clock_type::now();
  for (int c = 0; c < calls; ++c) plan(comm, data.data(), l);
  return since(start) / calls;
}

// What native{} on two ranks can't do without: each reads its half of both buffers, but what is before the first cache
// line, and writes the sums into both.
#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target_clones("avx2", "default")))
#endif
void add_both(float* __restrict a, float* __restrict b, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) a[i] = b[i] = a[i] + b[i];
}

struct by_hand {
  float* buffers[2] = {};
  std::atomic<int> passes[2] = {};

  // A pass, in pieces and every other time backwards, as native{} goes, and then a wait for the other rank.
  void operator()(int rank, std::size_t n, int pass) {
    constexpr std::size_t piece = 2048;
    const std::size_t lead = (0 - reinterpret_cast<std::uintptr_t>(buffers[0])) % 64 / sizeof(float);
    const std::size_t middle = n / 32 * 16 + lead, begin = rank ? middle : lead, end = rank ? n : middle;
    const std::size_t pieces = (end - begin + piece - 1) / piece;
    for (std::size_t k = 0; k < pieces; ++k) {
      const std::size_t i = begin + (pass % 2 ? k : pieces - 1 - k) * piece;
      add_both(buffers[0] + i, buffers[1] + i, (std::min)(piece, end - i));
    }
    passes[rank].store(pass, std::memory_order_release);
    for (int looks = 0; passes[1 - rank].load(std::memory_order_acquire) < pass; ++looks) {
      if (looks > 10000) std::this_thread::yield();
    }
  }
};

void reduce(int ranks, std::size_t bytes, int calls, int samples) {
  const std::size_t n = bytes / sizeof(float);
  by_hand loop;
  hd::threads::run(ranks, [&](auto& comm) {
    place(comm.rank(), ranks);
    std::vector<float> data(n);
    if (ranks == 2) loop.buffers[comm.rank()] = data.data();
    int pass = 0;
    const auto prepare = [&](const char* what, const auto& topology) {
      hd::all_reduce_plan<std::remove_cvref_t<decltype(topology)>> plan(topology, comm.rank(), ranks, n);
      std::fill(data.begin(), data.end(), 1.0f);
      plan(comm, data.data(), hd::leaf_of<float>(hd::sum{}));
      for (const float x : data) {
        if (x != static_cast<float>(ranks)) wrong(what);
      }
      return plan;
    };
    auto native = prepare("native", hd::native{});
    auto ring = prepare("ring", hd::ring{});
    auto halving = prepare("halving_doubling", hd::halving_doubling{});
    const auto print = [&](const char* what, double seconds) {
      if (comm.rank() == 0) std::printf("%s %zu %.9g\n", what, bytes, seconds);
    };
    for (int s = 0; s < samples; ++s) {
      print("native", sample(comm, native, data, calls));
      for (const bool users : {s % 2 == 0, s % 2 != 0}) {  // in turns, so that neither is always second
        if (users) print("userop", sample(comm, ring, data, calls, hd::leaf_of<float>(add{})));
        else print("ring", sample(comm, ring, data, calls));
      }
      print("halving_doubling", sample(comm, halving, data, calls));
      if (ranks != 2) continue;
      hd::barrier(comm);
      const auto start = clock_type::now();
      for (int c = 0; c < calls; ++c) loop(comm.rank(), n, ++pass);
      print("hand", since(start) / calls);
    }
  });
}

// Bytes read and written per second where each rank reads and writes memory of its own, once.
void stream(int ranks) {
  constexpr std::size_t n = std::size_t{16} << 20;
  hd::threads::run(ranks, [&](auto& comm) {
    place(comm.rank(), ranks);
    std::vector<float> data(n, 1.0f);
    for (int s = 0; s < 10; ++s) {
      hd::barrier(comm);
      const auto start = clock_type::now();
      for (float& x : data) x *= 1.0001f;
      hd::barrier(comm);
      const double seconds = since(start);
      if (comm.rank() == 0) std::printf("stream 0 %.9g\n", 2.0 * ranks * n * sizeof(float) / seconds);
    }
    if (data[0] <= 1.0f) wrong("the loop");  // it wasn't optimised away
  });
}

void overlap() {
  hd::threads::run(2, [](auto& comm) {
    overlapped_training(comm, [&](const char* what, double seconds) {
      if (comm.rank() == 0) std::printf("%s 0 %.9g\n", what, seconds);
    });
  });
}

// Steps of 24 buckets on links of a virtual network, with several lanes. Links are idle while ranks wake up and reduce.
void lanes() {
  constexpr std::size_t tensors_count = 24, elements = 50'000;
  const hd::link_cost cost{.alpha = 20e-6, .beta = 1e-9};
  for (const std::size_t n : {1, 2, 4}) {
    hd::threads::run(2, [&](auto& comm) {
      std::vector<float> parameters(tensors_count * elements, 1.0f), gradients(tensors_count * elements, 1.0f);
      std::vector<hd::tensor> tensors;
      for (std::size_t i = 0; i < tensors_count; ++i) {
        tensors.push_back({parameters.data() + i * elements, gradients.data() + i * elements, elements, hd::dtype::f32,
                           "tensor" + std::to_string(i), 0});
      }
      hd::throttled slow(comm, cost);
      const hd::strategy plan{.topology = hd::ring{}, .buckets = {.first = 1, .cap = 1}, .lanes = n};
      hd::data_parallel dp(plan, slow, std::span<const hd::tensor>(tensors), hd::sgd{});
      for (int s = 0; s < 12; ++s) {
        hd::barrier(comm);
        const auto start = clock_type::now();
        for (std::size_t i = tensors_count; i-- > 0;) dp.ready(i);
        dp.step({.lr = 0.1f});
        if (comm.rank() == 0 && s > 1) std::printf("step %zu %.9g\n", n, since(start));
      }
    });
  }
  std::printf("links 0 %.9g\n", tensors_count * 2 * (cost.alpha + cost.beta * elements / 2 * sizeof(float)));
}

// Simulated time of a rank: what it computes, and until when its communication, which runs behind it, has come.
struct simulated {
  using duration = std::chrono::duration<double>;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<simulated, duration>;
  static constexpr bool is_steady = true;
  static inline thread_local time_point computed{}, carried{};
  static time_point now() { return carried = std::max(carried, computed); }
  static void sleep_until(time_point t) { carried = std::max(carried, t); }
};

// Called by the program's own thread: what a thread behind it would do takes place in ready(), at simulated times.
template <class Comm> struct polled : hd::detail::wrapper<Comm> {
  using hd::detail::wrapper<Comm>::wrapper;
  hd::progress progress() const { return hd::progress::polled; }
  polled duplicate() { return polled(this->inner_.duplicate()); }
  template <class Apply>
  void exchange(hd::header h, std::span<const hd::outgoing> out, std::span<const hd::incoming> in, Apply&& apply) {
    this->inner_.exchange(h, out, in, std::forward<Apply>(apply));
  }
};

// Steps of a model of twelve layers of unequal tensors, whose backward takes as long as all its bytes on the links, with
// buckets of fixed caps and with those that the model of the links chooses. Time is simulated: it is the same every time.
void buckets() {
  constexpr std::size_t width = 64, layers = 12;
  std::vector<std::size_t> sizes{512 * width};  // an embedding, then layers as of a transformer
  for (std::size_t l = 0; l < layers; ++l) {
    for (const std::size_t n : {width, width, 3 * width * width, 3 * width, width * width, width, width, width,
                                4 * width * width, 4 * width, 4 * width * width, width}) {
      sizes.push_back(n);
    }
  }
  std::size_t total = 0;
  for (const std::size_t n : sizes) total += n;
  const double all = 60e-3,
               bytes = static_cast<double>(total * sizeof(float));  // direct{} on two ranks sends each once
  struct network {
    const char* name;
    double alpha;
  };
  for (const network& net : {network{"near", 0.02e-3}, network{"middle", 0.2e-3}, network{"far", 2e-3}}) {
    const hd::links costs{.intra = {{net.alpha, all / bytes}}};
    hd::threads::run(2, [&](auto& comm) {
      using quiet = polled<hd::threads::communicator>;
      hd::throttled<quiet, simulated> slow(quiet(comm), costs);
      const auto contender = [&](const std::string& name, std::size_t cap, const auto& rule) {
        std::vector<float> parameters(total, 1.0f), gradients(total, 1.0f);
        const hd::strategy<hd::direct, hd::none, hd::every_step, hd::full_precision, hd::recompute::none,
                           hd::host_resource, std::remove_cvref_t<decltype(rule)>>
            plan{.buckets = rule};
        hd::data_parallel dp(plan, slow, hd::tensors(parameters.data(), gradients.data(), sizes), hd::sgd{});
        hd::barrier(slow);
        const auto start = simulated::computed = simulated::now();
        std::size_t done = 0;
        for (std::size_t i = sizes.size(); i-- > 0;) {
          done += sizes[i];
          simulated::computed =
              start + simulated::duration(all * static_cast<double>(done) / static_cast<double>(total));
          dp.ready(i);
        }
        dp.step({.lr = 0.1f});
        const double seconds = (simulated::now() - start).count();
        if (comm.rank() == 0) std::printf("%s.%s %zu %.9g\n", net.name, name.c_str(), cap, seconds);
      };
      contender("automatic", 0, hd::automatic_buckets{costs});
      for (std::size_t parts = 1; parts <= 64; ++parts) {
        const std::size_t cap = total * sizeof(float) / parts;
        contender("cap", cap, hd::buckets{cap, cap});
      }
    });
  }
}

// Processor time of one thread: schedules of 1024 ranks, made and proven.
void proof() {
  const auto timed = [](const auto& t) {
    const std::clock_t start = std::clock();
    if (!hd::verify(t, 1024)) wrong(t.name().c_str());
    const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    std::string name = t.name();
    std::printf("%s 1024 %.9g\n", name.substr(0, name.find_first_of(" (")).c_str(), seconds);
  };
  timed(hd::ring{});
  timed(hd::halving_doubling{});
  timed(hd::torus_2d{32});
  timed(hd::hierarchical{hd::ring{}, hd::ring{}, 32});
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "overlap") {
    overlap();
  } else if (what == "buckets") {
    buckets();
  } else if (what == "proof") {
    proof();
  } else if (what == "lanes") {
    lanes();
  } else if (what == "stream" && argc > 2) {
    stream(std::atoi(argv[2]));
  } else if (std::atoi(what.c_str()) > 0) {
    for (int a = 2; a + 2 < argc; a += 3) {
      reduce(std::atoi(argv[1]), std::strtoull(argv[a], nullptr, 10), std::atoi(argv[a + 1]), std::atoi(argv[a + 2]));
    }
  } else {
    std::fprintf(stderr, "usage: allreduce RANKS BYTES CALLS SAMPLES... | stream RANKS | overlap | buckets | proof | lanes\n");
    return 2;
  }
}
