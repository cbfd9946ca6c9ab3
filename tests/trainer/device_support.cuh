// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "rank_device.cuh"

#include <heddle/collective/mixed_radix.hpp>
#include <heddle/comm/threads.cuh>
#include <heddle/trainer/data_parallel.cuh>

#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include <unistd.h>

/// @file
/// A model with its tensors in device memory, and the same one on the host: gradients that round alike on both.
namespace device_trainer {
namespace hd = heddle;

constexpr std::array<std::size_t, 5> sizes{7, 0, 1000, 1, 33};
constexpr std::size_t count = 1041;

// Rank and step decide where the gradient points; exact in float, so host and device agree on every bit.
HEDDLE_HD inline float goal(int rank, std::size_t step, std::size_t i) {
  return static_cast<float>(static_cast<int>((i * 7 + static_cast<std::size_t>(rank) * 13 + step * 5) % 31) - 15) *
         0.25f;
}
template <class Element> struct gradient {
  const Element* w;
  Element* g;
  std::size_t begin;
  int rank;
  std::size_t step;
  float scale;
  HEDDLE_HD void operator()(std::size_t i) const {
    g[i] = static_cast<Element>((static_cast<float>(w[i]) - goal(rank, step, begin + i)) * scale);
  }
};

// A topology chosen at run time, so that few trainers are compiled.
struct any_topology {
  bool direct = false;
  bool none = false;  // each rank keeps what it has
  template <class Function> hd::schedule visit(Function&& f) const { return direct ? f(hd::direct{}) : f(hd::ring{}); }
  std::string name() const { return "any"; }
  hd::schedule all_reduce(int rank, int size, std::size_t n) const {
    if (none) return {};
    return visit([&](auto t) { return t.all_reduce(rank, size, n); });
  }
  hd::schedule all_gather(int rank, int size, std::span<const hd::interval> b) const {
    return visit([&](auto t) { return t.all_gather(rank, size, b); });
  }
};
constexpr any_topology in_rank_order{true};
constexpr hd::buckets tight{.first = 100, .cap = 1000};

// Kernels of a device contract a * b + c to one rounding where the host doesn't; the emulated device has the host's
// bits.
#if __has_include(<emulated/control.h>)
constexpr double rounding = 0.0;
#else
constexpr double rounding = 2e-6;
#endif

// A directory that goes away with the object.
class scratch_directory {
 public:
  scratch_directory() {
    char pattern[] = "/tmp/heddle-test-XXXXXX";
    path_ = ::mkdtemp(pattern);
  }
  ~scratch_directory() { [[maybe_unused]] const int rc = std::system(("rm -rf '" + path_ + "'").c_str()); }
  scratch_directory(const scratch_directory&) = delete;
  scratch_directory& operator=(const scratch_directory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// What a run does beside plain steps.
struct course {
  std::size_t steps = 6;
  float lr = 0.05f, max_norm = 0.0f, max_value = 0.0f;
  std::size_t bad_step = ~std::size_t{0};   // rank 1's gradient has an infinity
  std::size_t slow_from = ~std::size_t{0};  // the rate is a fourth, which begin isn't told
  bool uneven = false;                      // rank r has 3 + r samples, and 2 r fewer steps
  bool apart = false;                       // gradients are not one run of memory
  std::string save_at_3{}, load{};          // directories
};
struct outcome {
  std::vector<float> w;
  std::vector<hd::step_result> results;
  hd::report report;
};

// One training loop, as a user writes it: `model` says where memory is.
template <class Model, class Trainer> void loop(Model& m, Trainer& dp, int rank, const course& c, outcome& out) {
  if (!c.load.empty()) dp.load(c.load);
  const std::size_t mine = c.steps - (c.uneven ? 2 * static_cast<std::size_t>(rank) : 0);
  for (std::size_t s = 0; s < mine; ++s) {
    if (s == 3 && !c.save_at_3.empty()) dp.save(c.save_at_3);
    if (c.uneven) dp.begin({.samples = 3.0 + rank});
    for (std::size_t t = sizes.size(); t-- > 0;) {
      m.backward(t, rank, c.load.empty() ? s : s + 3, dp.loss_scale());
      if (rank == 1 && s == c.bad_step && t == 2) m.spoil(t);
      m.ready(dp, t);
    }
    const float lr = s < c.slow_from ? c.lr : 0.25f * c.lr;
    out.results.push_back(m.step(dp, {.lr = lr, .max_norm = c.max_norm, .max_value = c.max_value}));
  }
  m.join(dp);
  out.w = m.parameters();
  out.report = dp.report();
}

template <class Element> class host_model {
 public:
  explicit host_model(const course& c)
      : gap_(c.apart ? 5 : 0), w_(count, Element(0.5f)), g_(count + gap_ * sizes.size()) {}
  std::vector<hd::tensor> tensors() {
    auto all = hd::tensors(w_.data(), g_.data(), sizes);
    for (std::size_t t = 0; t < all.size(); ++t) all[t].gradient = static_cast<Element*>(all[t].gradient) + gap_ * t;
    return all;
  }
  void backward(std::size_t t, int rank, std::size_t step, float scale) {
    const auto all = tensors();
    std::size_t begin = 0;
    for (std::size_t k = 0; k < t; ++k) begin += sizes[k];
    hd::host::for_each(sizes[t],
                       gradient<Element>{static_cast<Element*>(all[t].parameter),
                                         static_cast<Element*>(all[t].gradient), begin, rank, step, scale},
                       {});
  }
  void spoil(std::size_t t) { static_cast<Element*>(tensors()[t].gradient)[5] = Element(INFINITY); }
  template <class Trainer> void ready(Trainer& dp, std::size_t t) { dp.ready(t); }
  template <class Trainer> hd::step_result step(Trainer& dp, const hd::step_options& o) { return dp.step(o); }
  template <class Trainer> void join(Trainer& dp) { dp.join(); }
  std::vector<float> parameters() const { return {w_.begin(), w_.end()}; }

 private:
  std::size_t gap_;
  std::vector<Element> w_, g_;
};

template <class Element> class device_model {
 public:
  device_model(const course& c, device_test::rank_device& device)
      : gap_(c.apart ? 5 : 0),
        device_(device),
        start_(count, Element(0.5f)),
        zeros_(count + gap_ * sizes.size(), Element(0.0f)),
        w_(device.put(start_)),
        g_(device.put(zeros_)) {
    device_.queue().synchronize();
  }
  std::vector<hd::tensor> tensors() {
    auto all = hd::tensors(w_.data(), g_.data(), sizes);
    for (std::size_t t = 0; t < all.size(); ++t) all[t].gradient = static_cast<Element*>(all[t].gradient) + gap_ * t;
    return all;
  }
  void backward(std::size_t t, int rank, std::size_t step, float scale) {
    const auto all = tensors();
    std::size_t begin = 0;
    for (std::size_t k = 0; k < t; ++k) begin += sizes[k];
    hd::cuda::for_each(sizes[t],
                       gradient<Element>{static_cast<Element*>(all[t].parameter),
                                         static_cast<Element*>(all[t].gradient), begin, rank, step, scale},
                       device_.queue());
  }
  void spoil(std::size_t t) {
    hd::cuda::fill(static_cast<Element*>(tensors()[t].gradient) + 5, 1, Element(INFINITY), device_.queue());
  }
  template <class Trainer> void ready(Trainer& dp, std::size_t t) { dp.ready(t, device_.queue()); }
  template <class Trainer> hd::step_result step(Trainer& dp, const hd::step_options& o) {
    return dp.step(o, device_.queue());
  }
  template <class Trainer> void join(Trainer& dp) { dp.join(device_.queue()); }
  std::vector<float> parameters() const {
    std::vector<Element> w(count);
    hd::cuda::copy(static_cast<const Element*>(w_.data()), w.data(), count, device_.queue());
    device_.queue().synchronize();
    return {w.begin(), w.end()};
  }

 private:
  std::size_t gap_;
  device_test::rank_device& device_;
  std::vector<Element> start_, zeros_;
  std::span<Element> w_, g_;
};

// The same course on the host: what devices are compared with.
template <class Plan, class Rule>
std::vector<outcome> on_host(const Plan& plan, const Rule& rule, int ranks, const course& c) {
  using element = typename std::remove_cvref_t<decltype(plan.precision)>::element;
  std::vector<outcome> out(static_cast<std::size_t>(ranks));
  hd::threads::run(ranks, [&](hd::threads::communicator& comm) {
    host_model<element> m(c);
    hd::data_parallel dp{plan, comm, m.tensors(), rule};
    loop(m, dp, comm.rank(), c, out[static_cast<std::size_t>(comm.rank())]);
  });
  return out;
}

// On devices: connect(host communicator, stream of the exchange) gives each rank its communicator; place(rank) its
// device.
template <class Plan, class Rule, class Connect>
std::vector<outcome> on_devices(const Plan& plan, const Rule& rule, int ranks, const course& c, int (*place)(int),
                                Connect&& connect) {
  using element = typename std::remove_cvref_t<decltype(plan.precision)>::element;
  std::vector<outcome> out(static_cast<std::size_t>(ranks));
  hd::threads::run(ranks, [&](hd::threads::communicator& host) {
    device_test::rank_device compute(place(host.rank())), exchange(place(host.rank()));
    auto comm = connect(host, exchange.stream());
    device_model<element> m(c, compute);
    hd::data_parallel dp{plan, comm, m.tensors(), rule};
    loop(m, dp, comm.rank(), c, out[static_cast<std::size_t>(comm.rank())]);
  });
  return out;
}

// Ranks that share device 0, on the communicator of threads.
inline int first(int) { return 0; }
inline auto threads_on_a_device(hd::threads::communicator& host, cudaStream_t stream) {
  return hd::threads::device_communicator(host, stream);
}

// What is wrong between two runs, in words: parameters that are further apart than `far`, ranks that differ, other
// results.
inline std::string differ(const std::vector<outcome>& want, const std::vector<outcome>& got, double far) {
  for (std::size_t r = 0; r < want.size(); ++r) {
    const std::string who = "rank " + std::to_string(r);
    if (got[r].w != got[0].w) return who + " differs from rank 0";
    for (std::size_t i = 0; i < count; ++i) {
      if (!(std::fabs(static_cast<double>(got[r].w[i]) - static_cast<double>(want[r].w[i])) <= far))
        return who + " has " + std::to_string(got[r].w[i]) + " at " + std::to_string(i) + ", not " +
               std::to_string(want[r].w[i]);
    }
    for (std::size_t s = 0; s < want[r].results.size(); ++s) {
      const hd::step_result &a = want[r].results[s], &b = got[r].results[s];
      if (a.skipped != b.skipped || a.met != b.met) return who + " says something else of step " + std::to_string(s);
      if (a.norm != b.norm && !(std::fabs(a.norm - b.norm) <= 1e-6 * a.norm))
        return who + " has the norm " + std::to_string(b.norm) + ", not " + std::to_string(a.norm);
    }
    if (want[r].report.steps != got[r].report.steps || want[r].report.skipped != got[r].report.skipped)
      return who + " took " + std::to_string(got[r].report.steps) + " steps";
  }
  return {};
}

template <class Plan, class Rule>
std::string compare(const Plan& plan, const Rule& rule, int ranks = 3, const course& c = {}, double far = rounding) {
  return differ(on_host(plan, rule, ranks, c), on_devices(plan, rule, ranks, c, first, threads_on_a_device), far);
}

// 3 steps, a checkpoint, 3 steps are 6 steps; also from a checkpoint of the host, and on fewer ranks.
template <class Plan, class Rule> std::string resume(const Plan& plan, const Rule& rule, double far) {
  const scratch_directory here, there;
  const auto run = [&](int ranks, const course& c) {
    return on_devices(plan, rule, ranks, c, first, threads_on_a_device);
  };
  const auto whole = run(3, {.save_at_3 = here.path()});
  const auto rest = run(3, {.steps = 3, .load = here.path()});
  for (std::size_t r = 0; r < 3; ++r) {
    if (rest[r].w != whole[r].w) return "rank " + std::to_string(r) + " goes on elsewhere";
  }
  if (rest[0].report.steps != 6) return "it went on after " + std::to_string(rest[0].report.steps - 3) + " steps";
  const auto on_another = on_host(plan, rule, 3, {.save_at_3 = there.path()});
  const auto taken = run(3, {.steps = 3, .load = there.path()});
  for (std::size_t i = 0; i < count; ++i) {
    if (!(std::fabs(taken[0].w[i] - on_another[0].w[i]) <= far)) return "what the host saved goes on elsewhere";
  }
  on_host(plan, rule, 2, {.steps = 2, .load = here.path()});
  if (const auto fewer = run(2, {.steps = 2, .load = there.path()}); fewer[1].w != fewer[0].w)
    return "two ranks that took over from three differ";
  try {
    run(3, {.load = here.path() + "/none"});
  } catch (const hd::file_error&) {
    return {};
  }
  return "a missing checkpoint was loaded";
}

}  // namespace device_trainer
