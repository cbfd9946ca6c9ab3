// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// about: all topologies with 2 to 8 ranks, and a step of DGC, on one GPU, as a fraction of its memory bandwidth; fused
// and separate AdamW
#include "support/results.hpp"

#include <heddle/collective/all_reduce.cuh>
#include <heddle/collective/gather.cuh>
#include <heddle/collective/hierarchical.hpp>
#include <heddle/collective/leaders.hpp>
#include <heddle/collective/pipelined.hpp>
#include <heddle/collective/recursive_doubling.hpp>
#include <heddle/comm/threads.cuh>
#include <heddle/compress/dgc.cuh>
#include <heddle/optim/adamw.hpp>

#include <chrono>
#include <cstdlib>
#include <functional>

namespace hd = heddle;

namespace gpu_bench {

constexpr int runs = 7, calls = 10;  // a time is the median of `runs` times of `calls` calls

void check(const char* what, cudaError_t code) { hd::detail::check_cuda(what, code); }

// A rank's stream and its memory on the one device.
class workplace {
 public:
  workplace() { check("stream", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  workplace(const workplace&) = delete;
  ~workplace() {
    for (void* p : blocks_) cudaFreeAsync(p, stream_);
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  cudaStream_t stream() const { return stream_; }
  hd::cuda::queue queue() const { return {stream_}; }
  std::span<float> floats(std::size_t n, float value) {
    void* p = nullptr;
    check("memory", cudaMallocAsync(&p, (n ? n : 1) * sizeof(float), stream_));
    blocks_.push_back(p);
    hd::cuda::fill(static_cast<float*>(p), n, value, queue());
    return {static_cast<float*>(p), n};
  }

 private:
  cudaStream_t stream_ = nullptr;
  std::vector<void*> blocks_;
};

using comm_type = hd::threads::device_communicator;

// Seconds of call(comm, place) on `ranks` ranks, from when all begin until the last one's device work is done.
// prepare(comm, place) gives each rank its `call`.
template <class Prepare> double seconds(int ranks, Prepare&& prepare) {
  std::vector<std::vector<double>> times(static_cast<std::size_t>(ranks));
  hd::threads::run(ranks, [&](hd::threads::communicator& host) {
    workplace place;
    comm_type comm(host, place.stream());
    const auto call = prepare(comm, place);
    call();
    comm.synchronize();
    for (int run = 0; run < runs; ++run) {
      hd::barrier(host);
      const auto start = std::chrono::steady_clock::now();
      for (int k = 0; k < calls; ++k) call();
      comm.synchronize();
      hd::barrier(host);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      times[static_cast<std::size_t>(host.rank())].push_back(took.count() / calls);
    }
  });
  return bench::median(times[0]);
}

struct copy_element {
  const float* from;
  float* to;
  HEDDLE_HD void operator()(std::size_t i) const { to[i] = from[i]; }
};

// Bytes a second that a kernel which copies reads and writes, all together.
double bandwidth(std::size_t n) {
  const double s = seconds(1, [&](comm_type&, workplace& w) {
    const auto from = w.floats(n, 1.0f), to = w.floats(n, 0.0f);
    return [=, q = w.queue()] { hd::cuda::for_each(n, copy_element{from.data(), to.data()}, q); };
  });
  return 2.0 * static_cast<double>(n) * sizeof(float) / s;
}

struct any {
  std::string text;
  std::function<hd::schedule(int, int, std::size_t)> make;
  std::string name() const { return text; }
  hd::schedule all_reduce(int rank, int size, std::size_t n) const { return make(rank, size, n); }
};
template <class Topology> any erased(const char* name, const Topology& t) {
  return {name, [t](int rank, int size, std::size_t n) { return t.all_reduce(rank, size, n); }};
}
std::vector<any> topologies() {
  return {erased("ring", hd::ring{}),
          erased("direct", hd::direct{}),
          erased("torus_2d", hd::torus_2d{}),
          erased("halving_doubling", hd::halving_doubling{}),
          erased("recursive_doubling", hd::recursive_doubling{}),
          erased("tree", hd::tree{}),
          erased("double_tree", hd::double_tree{}),
          erased("hierarchical", hd::hierarchical<>{.group = 2}),
          erased("leaders", hd::leaders<>{.group = 2}),
          erased("pipelined_ring", hd::pipelined{hd::ring{}, 4})};
}

// Bytes of memory that a schedule reads and writes: a receive that reduces reads two and writes one, one that copies
// reads one and writes one. Further operands of one interval in a round are read only.
double traffic(const any& t, int ranks, std::size_t n) {
  double elements = 0;
  for (int r = 0; r < ranks; ++r) {
    const hd::schedule s = t.all_reduce(r, ranks, n);
    for (std::size_t k = 0; k < s.rounds(); ++k) {
      std::vector<hd::interval> seen;
      for (const hd::operation& o : s.round(k)) {
        if (o.act == hd::action::send) continue;
        const bool again = std::find(seen.begin(), seen.end(), o.range) != seen.end();
        elements += static_cast<double>(o.range.count) * (o.act == hd::action::copy ? 2 : again ? 1 : 3);
        seen.push_back(o.range);
      }
    }
  }
  return elements * sizeof(float);
}

// Every rank's gradient, reduced, and AdamW by the owner, whose result goes to all: one pass over the block.
template <class Step> struct fused_element {
  const float* gradient[16];
  float* parameter[16];
  int inputs, outputs;
  float factor;
  float *m, *v;
  Step step;
  HEDDLE_HD void operator()(std::size_t i) const {
    double sum = 0.0;
    for (int k = 0; k < inputs; ++k) sum += static_cast<double>(gradient[k][i]);
    const float g = static_cast<float>(sum * static_cast<double>(factor));
    float p = parameter[0][i], a = m[i], b = v[i];
    step(p, g, a, b);
    m[i] = a;
    v[i] = b;
    for (int k = 0; k < outputs; ++k) parameter[k][i] = p;
  }
};
struct adamw_element {
  using step_type = decltype(hd::adamw{}.element_step({}));
  const float* gradient;
  float *parameter, *m, *v;
  step_type step;
  HEDDLE_HD void operator()(std::size_t i) const {
    float p = parameter[i], a = m[i], b = v[i];
    step(p, gradient[i], a, b);
    parameter[i] = p;
    m[i] = a;
    v[i] = b;
  }
};

// The fused pass as a leaf of the one-pass all-reduce from gradients to parameters.
struct fused_adamw {
  float *m, *v;  // of this rank's block
  adamw_element::step_type step;
  hd::cuda::queue queue;
  static bool reduce(const void*, const hd::operand*, int, void*, std::size_t, int, double) {
    throw hd::argument_error("fused_adamw: devices that can't read each other");
  }
  static bool reduce_to(const void* context, const hd::operand* in, int inputs, void* const* out, int outputs,
                        std::size_t count, double factor) {
    const auto& self = *static_cast<const fused_adamw*>(context);
    fused_element<adamw_element::step_type> f{{},     {},     inputs,   outputs, static_cast<float>(factor),
                                              self.m, self.v, self.step};
    for (int k = 0; k < inputs; ++k) f.gradient[k] = static_cast<const float*>(in[k].data);
    for (int k = 0; k < outputs; ++k) f.parameter[k] = static_cast<float*>(out[k]);
    hd::cuda::for_each(count, f, self.queue);
    return false;
  }
  hd::leaf leaf() const { return {hd::dtype::f32, 2, true, sizeof(float), &reduce, this, &reduce_to}; }
};

const hd::update_context rate{.lr = 1e-3f, .step = 1};

void updates(bench::results& all, int ranks, std::size_t n, double rate_of_memory) {
  const auto p = static_cast<std::size_t>(ranks);
  const double fused = seconds(ranks, [&](comm_type& comm, workplace& w) {
    const auto g = w.floats(n, 0.5f), x = w.floats(n, 1.0f), m = w.floats(n / p + 64, 0.0f),
               v = w.floats(n / p + 64, 0.0f);
    return [=, &comm, l = fused_adamw{m.data(), v.data(), hd::adamw{}.element_step(rate), w.queue()}] {
      const hd::header h{hd::operation_kind::all_reduce, hd::dtype::f32, 2, 0, comm.next_sequence(), 1, n};
      comm.native_all_reduce(h, g.data(), x.data(), n, l.leaf());
    };
  });
  // Sharded, each part a pass of its own.
  const double separate = seconds(ranks, [&](comm_type& comm, workplace& w) {
    const auto g = w.floats(n, 0.5f), x = w.floats(n, 1.0f), m = w.floats(n / p + p, 0.0f),
               v = w.floats(n / p + p, 0.0f);
    std::vector<std::size_t> counts(p, n / p);
    counts.back() += n % p;
    const std::size_t own = n / p * static_cast<std::size_t>(comm.rank());
    return [=, &comm, q = w.queue()] {
      const auto mine = hd::reduce_scatter(comm, hd::direct{}, g, std::span<const std::size_t>(counts), hd::mean{}, q);
      hd::cuda::for_each(mine.size(),
                         adamw_element{mine.data(), x.data() + own, m.data(), v.data(), hd::adamw{}.element_step(rate)},
                         q);
      hd::all_gather(comm, hd::direct{}, x, std::span<const std::size_t>(counts));
    };
  });
  // As without sharding: the mean everywhere, then each rank updates everything.
  const double unsharded = seconds(ranks, [&](comm_type& comm, workplace& w) {
    const auto g = w.floats(n, 0.5f), x = w.floats(n, 1.0f), m = w.floats(n, 0.0f), v = w.floats(n, 0.0f);
    return [=, &comm, q = w.queue()] {
      hd::all_reduce(comm, hd::native{}, g, hd::mean{}, q);
      hd::cuda::for_each(n, adamw_element{g.data(), x.data(), m.data(), v.data(), hd::adamw{}.element_step(rate)}, q);
    };
  });
  const std::string name = "gpu.fused_adamw." + std::to_string(ranks) + "." + std::to_string(n);
  // Gradients of all are read, parameters of all written, the owner's parameter and moments read, and moments written.
  const double floor = static_cast<double>(n) * sizeof(float) * (2.0 * ranks + 5.0) / rate_of_memory;
  all.ratio(name + ".separate", fused * 1e6, separate * 1e6, "us");
  all.ratio(name + ".unsharded", fused * 1e6, unsharded * 1e6, "us");
  all.ratio(name + ".floor", fused * 1e6, floor * 1e6, "us");
}

// A sum of two uniform numbers, elements independent.
struct noise_element {
  float* to;
  HEDDLE_HD void operator()(std::size_t i) const {
    std::uint64_t z = (i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    to[i] = static_cast<float>(z >> 40) * 0x1p-24f + static_cast<float>(z & 0xffffff) * 0x1p-24f - 1.0f;
  }
};

// The fused step of DGC at 99.9 %, 20 bytes per element: gradient, U and V are read, U and V written.
void dgc_steps(bench::results& all, std::size_t n, double rate_of_memory) {
  const auto k = static_cast<std::uint32_t>(n / 1000 + 1), most = k + k / 4;
  for (const bool sorted : {false, true}) {
    const double took = seconds(1, [&](comm_type&, workplace& w) {
      const auto g = w.floats(n, 0.0f), u = w.floats(n, 0.0f), v = w.floats(n, 0.0f), value = w.floats(most, 0.0f),
                 index = w.floats(most, 0.0f);
      hd::cuda::for_each(n, noise_element{g.data()}, w.queue());
      auto* const places = reinterpret_cast<std::uint32_t*>(index.data());
      const hd::dgc_segment of{g.data(), nullptr, u.data(), v.data(), places, value.data(), n, k, most};
      const auto passes = std::make_shared<hd::dgc_device>(std::span(&of, 1), w.queue(), sorted);
      const auto steps = std::make_shared<std::size_t>(0);
      const auto call = [=, q = w.queue()] {
        passes->step({}, {.step = (*steps)++, .ranks = 4, .momentum = 0.9f}, q);
      };
      for (int warm = 0; warm < 50; ++warm) call();
      return call;
    });
    const double floor = 20.0 * static_cast<double>(n) / rate_of_memory;
    all.ratio(sorted ? "gpu.dgc_step.sorted.floor" : "gpu.dgc_step.floor", took * 1e6, floor * 1e6, "us");
  }
}

int run(std::size_t n, const char* file) {
  bench::results all;
  const double memory = bandwidth(4 * n);
  std::printf("a kernel that copies moves %.0f GB/s\n", memory * 1e-9);
  for (const int ranks : {2, 3, 4, 8}) {
    const std::string end = "." + std::to_string(ranks) + "." + std::to_string(n * sizeof(float)) + ".floor";
    const double least = 2.0 * ranks * static_cast<double>(n) * sizeof(float) / memory;
    const double native = seconds(ranks, [&](comm_type& comm, workplace& w) {
      const auto x = w.floats(n, 1.0f);
      return [=, &comm, q = w.queue()] { hd::all_reduce(comm, hd::native{}, x, hd::mean{}, q); };
    });
    all.ratio("gpu.native" + end, native * 1e6, least * 1e6, "us");
    for (const any& t : topologies()) {
      const double took = seconds(ranks, [&](comm_type& comm, workplace& w) {
        const auto x = w.floats(n, 1.0f);
        auto plan = std::make_shared<hd::all_reduce_plan<any>>(t, comm.rank(), ranks, n);
        auto l = std::make_shared<hd::bulk_leaf<hd::cuda, float, hd::mean>>(hd::mean{}, w.queue());
        return [=, &comm] { (*plan)(comm, x.data(), l->get()); };
      });
      all.ratio("gpu." + t.name() + end, took * 1e6, traffic(t, ranks, n) / memory * 1e6, "us");
    }
  }
  for (const int ranks : {2, 4, 8}) updates(all, ranks, n, memory);
  dgc_steps(all, n, memory);
  return all.write(file) ? 0 : 1;
}

}  // namespace gpu_bench

// gpu RESULTS [ELEMENTS]: elements of each rank, by default 64 MiB of floats.
int main(int argc, char** argv) {
  int devices = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (argc < 2 || code != cudaSuccess || devices == 0) {
    std::printf("SKIP gpu %s\n", argc < 2 ? "no name of a file for results" : cudaGetErrorString(code));
    return 0;
  }
  try {
    return gpu_bench::run(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::size_t{1} << 24, argv[1]);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "gpu: %s\n", e.what());
    return 1;
  }
}
