// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Ranks are threads with a stream each, on as many devices as there are, or all on one.

#include "../support/catch.hpp"
#include "any_topology.hpp"
#include "rank_check.hpp"
#include "rank_device.cuh"

#include <heddle/collective/all_reduce.cuh>
#include <heddle/collective/gather.cuh>
#include <heddle/collective/point_to_point.hpp>
#include <heddle/comm/calibrate.hpp>
#include <heddle/comm/counting.hpp>
#include <heddle/comm/hosted.cuh>
#include <heddle/comm/staged.cuh>
#include <heddle/comm/threads.cuh>

#include "conformance.hpp"

#if __has_include(<emulated/control.h>)
#include <emulated/control.h>
#endif

#include <stdexcept>
#include <string>
#include <vector>

namespace hd = heddle;
using namespace device_test;
using device_comm = hd::threads::device_communicator;

namespace device_comm_test {

int devices() {
  int count = 0;
  hd::detail::check_cuda("devices", cudaGetDeviceCount(&count));
  return count;
}

const hd::threads::options settings{.deadline = std::chrono::seconds(60)};

// Runs f(communicator, device) on every rank; rank r on device r modulo `on`.
template <class Function>
void run(int ranks, int on, Function&& f, const hd::threads::device_options& o = {},
         hd::threads::options with = settings) {
  with.ranks = ranks;
  const int all = devices();
  hd::threads::run(with, [&](hd::threads::communicator& host) {
    rank_device device(host.rank() % (std::min)(on, all));
    device_comm comm(host, device.stream(), o);
    f(comm, device);
    comm.synchronize();
  });
}

// Sums and means of every size by every topology, without waiting in between; what is wrong, in words. Which bits a
// schedule gives is compared between ranks, and with a second run.
std::string all_reduces(int ranks, int on, const std::vector<std::size_t>& sizes,
                        const hd::threads::device_options& o = {},
                        const std::vector<any_topology>& all = topologies()) {
  const auto p = static_cast<std::size_t>(ranks);
  const std::size_t cases = (all.size() + 1) * sizes.size();
  using results = std::vector<std::vector<std::vector<float>>>;  // by case and rank
  results runs[2];
  for (results& got : runs) {
    got.assign(cases, std::vector<std::vector<float>>(p));
    run(
        ranks, on,
        [&](device_comm& comm, rank_device& device) {
          std::vector<std::vector<float>> in;
          for (const std::size_t n : sizes) in.push_back(elements<float>(comm.rank(), n));
          std::vector<std::span<float>> there;
          for (std::size_t c = 0; c < cases; ++c) {
            const std::size_t t = c / sizes.size();
            there.push_back(device.put(in[c % sizes.size()]));
            if (t < all.size())
              hd::all_reduce(comm, all[t], there[c], hd::mean{}, device.queue());
            else
              hd::all_reduce(comm, hd::native{}, there[c], hd::mean{}, device.queue());
          }
          for (std::size_t c = 0; c < cases; ++c)
            got[c][static_cast<std::size_t>(comm.rank())] = device.get<float>(comm, there[c]);
        },
        o);
  }
  for (std::size_t c = 0; c < cases; ++c) {
    const auto want = reference<float>(ranks, sizes[c % sizes.size()], hd::mean{});
    for (std::size_t r = 0; r < p; ++r) {
      for (std::size_t i = 0; i < want.size(); ++i) {
        const float have = runs[0][c][r][i];
        if (std::fabs(have - want[i]) <= 1e-6 * (1 + std::fabs(want[i])) && have == runs[0][c][0][i] &&
            have == runs[1][c][r][i])
          continue;
        const std::size_t t = c / sizes.size();
        return (t < all.size() ? all[t].name() : "native") + ", " + std::to_string(ranks) + " ranks, " +
               std::to_string(want.size()) + " elements: rank " + std::to_string(r) + " has " + std::to_string(have) +
               " at " + std::to_string(i) + ", not " + std::to_string(want[i]);
      }
    }
  }
  return {};
}

// The other operations, and other types and operations of an all-reduce.
void everything(device_comm& comm, rank_device& device) {
  const int p = comm.size(), me = comm.rank();
  const auto ranks = static_cast<std::size_t>(p);
  std::vector<std::size_t> counts(ranks, 3);  // 3, 4, 5 ...; the last but one is empty
  std::size_t n = 0;
  for (std::size_t r = 0; r < ranks; ++r) counts[r] += r;
  if (p > 1) counts[ranks - 2] = 0;
  for (const std::size_t c : counts) n += c;
  const auto mine = elements<double>(me, n), three = elements<double>(me, 3);
  const auto halves = elements<hd::bfloat16>(me, 100);
  const auto floats = elements<float>(me, 100);
  const std::vector<double> room(3 * ranks);
  const auto data = device.put(mine), all = device.put(room), copy = device.put(mine), part = device.put(three);
  const auto half = device.put(halves), half_ring = device.put(halves);
  const auto largest = device.put(floats), native_largest = device.put(floats);
  hd::reduce_scatter(comm, hd::ring{}, data, std::span<const std::size_t>(counts), hd::mean{}, device.queue());
  hd::all_gather(comm, hd::ring{}, data, std::span<const std::size_t>(counts));
  hd::barrier(comm);
  hd::all_gather(comm, hd::direct{}, std::span<const double>(part), all);
  hd::broadcast(comm, copy, p - 1);
  const auto many = elements<double>(me, 3 * ranks);
  const auto rooted = device.put(mine), sent = device.put(many), to = device.put(room), from = device.put(room);
  comm.copy(to.data(), sent.data(), to.size_bytes());  // later than now: the own block, too, goes in the stream
  hd::reduce(comm, rooted, p / 2, hd::mean{}, device.queue());
  hd::all_to_all(comm, std::span<const double>(to), from);
  hd::all_reduce(comm, hd::native{}, half, hd::sum{}, device.queue());
  hd::all_reduce(comm, hd::direct{}, half_ring, hd::sum{}, device.queue());
  hd::all_reduce(comm, hd::ring{}, largest, largest_magnitude{}, device.queue());
  hd::all_reduce(comm, hd::native{}, native_largest, largest_magnitude{}, device.queue());
  const auto means = device.get<double>(comm, data), gathered = device.get<double>(comm, all),
             last = device.get<double>(comm, copy), root = device.get<double>(comm, rooted),
             exchanged = device.get<double>(comm, from);
  const auto want = reference<double>(p, n, hd::mean{});
  for (std::size_t i = 0; i < n; ++i) {
    RANK_CHECK(me != p / 2 || std::fabs(root[i] - want[i]) <= 1e-12);
    RANK_CHECK(std::fabs(means[i] - want[i]) <= 1e-12);
    RANK_CHECK(last[i] == element<double>(p - 1, i));
  }
  for (std::size_t i = 0; i < 3 * ranks; ++i) {
    const int source = static_cast<int>(i / 3);
    RANK_CHECK(gathered[i] == element<double>(source, i % 3));
    RANK_CHECK(exchanged[i] == element<double>(source, 3 * static_cast<std::size_t>(me) + i % 3));
  }
  const auto sums = reference<hd::bfloat16>(p, 100, hd::sum{});
  const auto far = reference<float>(p, 100, largest_magnitude{});
  const auto one = device.get<hd::bfloat16>(comm, half), two = device.get<hd::bfloat16>(comm, half_ring);
  const auto big = device.get<float>(comm, largest), native_big = device.get<float>(comm, native_largest);
  for (std::size_t i = 0; i < 100; ++i) {
    const auto rounded = static_cast<double>(static_cast<float>(hd::bfloat16(static_cast<float>(sums[i]))));
    RANK_CHECK(wide(one[i]) == rounded);  // one rounding
    RANK_CHECK(wide(two[i]) == rounded);
    RANK_CHECK(big[i] == far[i] && native_big[i] == far[i]);
  }
}

}  // namespace device_comm_test

using namespace device_comm_test;

// example-begin device_threads
void reduce_on_one_device(hd::threads::communicator& others) {  // what each of hd::threads::run's ranks does
  cudaStream_t stream;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  {
    hd::threads::device_communicator comm(others, stream);  // on this thread's current device
    float* gradient = nullptr;
    cudaMallocAsync(&gradient, 1000 * sizeof(float), stream);
    cudaMemsetAsync(gradient, 0, 1000 * sizeof(float), stream);
    hd::all_reduce(comm, hd::ring{}, std::span(gradient, 1000), hd::mean{}, hd::cuda::queue{stream});  // enqueues
    comm.synchronize();
    cudaFreeAsync(gradient, stream);
  }
  cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
}
// example-end

TEST_CASE("threads on devices: every topology against double precision, the same bits on all ranks and in all runs") {
  CHECK_NOTHROW(hd::threads::run(4, reduce_on_one_device));
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const auto p = static_cast<std::size_t>(ranks);
    CHECK(all_reduces(ranks, 1, {0, 1, p - 1, p, p + 1, 17, 1025}) == "");
    run(ranks, 1, everything);
  }
  for (const int ranks : {5, 6, 7}) CHECK(all_reduces(ranks, 1, {static_cast<std::size_t>(ranks) + 1, 17}) == "");
  if (devices() > 1) {
    CHECK(all_reduces(5, 2, {0, 1, 17, 301}) == "");
    CHECK(all_reduces(3, 3, {4, 301}, {.peers = false}) == "");
    run(3, 3, everything, {.peers = false});
  }
}

TEST_CASE("threads on devices: schedules and the one pass in whatever order the device works", "[seeds]") {
  std::vector<any_topology> some = topologies();
#if __has_include(<emulated/control.h>)
  some = {some[emulated::current().seed % some.size()]};  // others under other seeds
#endif
  CHECK(all_reduces(3, 1, {40}, {}, some) == "");
  if (devices() > 1) CHECK(all_reduces(4, 2, {40}, {}, some) == "");
}

TEST_CASE("threads on devices: memory that is written again at once has been read") {
  // Each rank's buffer is overwritten behind the collective, on a stream whose work nobody waits for on the host.
  run(4, 2, [&](device_comm& comm, rank_device& device) {
    const std::vector<float> ones(300, 1.0f), noise(300, 1e9f);
    const auto a = device.put(ones), b = device.put(ones);
    for (int round = 0; round < 5; ++round) {
      comm.copy(a.data(), ones.data(), a.size_bytes());
      hd::all_reduce(comm, hd::direct{}, a, hd::sum{}, device.queue());
      comm.copy(b.data(), a.data(), a.size_bytes());
      comm.copy(a.data(), noise.data(), a.size_bytes());
      RANK_CHECK(device.get<float>(comm, b) == std::vector<float>(300, 4.0f));
      comm.copy(b.data(), ones.data(), a.size_bytes());
      hd::all_reduce(comm, hd::native{}, b, hd::sum{}, device.queue());
      comm.copy(a.data(), b.data(), a.size_bytes());
      comm.copy(b.data(), noise.data(), a.size_bytes());
      RANK_CHECK(device.get<float>(comm, a) == std::vector<float>(300, 4.0f));
    }
  });
}

TEST_CASE("threads on devices: what a rank throws, and what it calls otherwise, ends every rank's calls") {
  struct refuses {
    static bool reduce(const void*, const hd::operand*, int, void*, std::size_t, int, double) {
      throw std::logic_error("no");
    }
  };
  for (const int what : {0, 1, 2, 3, 4}) {
    std::vector<std::string> said(3);
    const auto body = [&](device_comm& comm, rank_device& device) {
      const std::vector<float> ones(30, 1.0f);
      const auto s = device.put(ones);
      comm.synchronize();  // `ones` goes before the stream ends
      const bool odd = comm.rank() == 1;
      try {
        hd::all_reduce(comm, hd::ring{}, s, hd::sum{}, device.queue());
        if (odd && what == 0) throw std::runtime_error("lost");
        if (odd && what == 1) hd::all_reduce(comm, hd::ring{}, s.first(29), hd::sum{}, device.queue());
        if (odd && what == 2) comm.scratch(std::size_t{1} << 60);
        if (what == 3) {  // thrown where peers' memory is read
          const hd::bulk_leaf<hd::cuda, float, hd::sum> adds({}, device.queue());
          hd::leaf l = adds.get();
          if (odd) l.reduce = refuses::reduce;
          hd::all_reduce_plan<hd::direct>(hd::direct{}, comm.rank(), 3, 30)(comm, s.data(), l);
        }
        if (odd && what == 4) return;  // it doesn't come
        for (int k = 0; k < 3; ++k) hd::all_reduce(comm, hd::native{}, s, hd::sum{}, device.queue());
      } catch (const std::exception& e) {
        said[static_cast<std::size_t>(comm.rank())] = e.what();
        throw;
      }
    };
    hd::threads::options o = settings;
    if (what == 4) o.deadline = std::chrono::milliseconds(200);
    CHECK_THROWS(run(3, 1, body, {}, o));
    const char* const names[] = {"lost", "rank 1 is in all_reduce(count 29", "cudaMallocAsync", "rank 1", "rank 1"};
    for (const int r : {0, 2}) {
      CAPTURE(what, r, said[static_cast<std::size_t>(r)]);
      CHECK(said[static_cast<std::size_t>(r)].find(names[what]) != std::string::npos);
    }
  }
}

TEST_CASE("threads on devices: who gets an error may write its buffer at once, since nobody reads it any more") {
  struct reads_and_refuses {
    float* to;
    cudaStream_t stream;
    static bool reduce(const void* context, const hd::operand* in, int, void*, std::size_t n, int, double) {
      const auto& self = *static_cast<const reads_and_refuses*>(context);
      cudaMemcpyAsync(self.to, in[0].data, n * sizeof(float), cudaMemcpyDefault, self.stream);
      throw std::logic_error("no");
    }
  };
  for (int attempt = 0; attempt < 5; ++attempt) {
    std::vector<std::vector<float>> seen(3, std::vector<float>(10));
    const auto body = [&](device_comm& comm, rank_device& device) {
      const std::vector<float> ones(30, 1.0f), noise(30, 1e9f), room(10);
      const auto s = device.put(ones), copied = device.put(room);
      comm.synchronize();
      const bool odd = comm.rank() == 1;
      const hd::bulk_leaf<hd::cuda, float, hd::sum> adds({}, device.queue());
      const reads_and_refuses refuses{copied.data(), device.stream()};
      hd::leaf l = adds.get();
      if (odd) l.reduce = refuses.reduce, l.context = &refuses;
      const auto me = static_cast<std::size_t>(comm.rank());
      try {  // each rank reduces ten elements, from all buffers
        hd::all_reduce_plan<hd::direct>(hd::direct{}, comm.rank(), 3, 30)(comm, s.data(), l);
      } catch (const std::exception&) {
        const rank_device other(0);
        const auto theirs = odd ? s : s.subspan(10, 10);
        cudaMemcpyAsync(theirs.data(), noise.data(), theirs.size_bytes(), cudaMemcpyDefault, other.stream());
        cudaStreamSynchronize(other.stream());
      }
      const auto mine = odd ? copied : s.subspan(10 * me, 10);
      cudaMemcpyAsync(seen[me].data(), mine.data(), mine.size_bytes(), cudaMemcpyDefault, device.stream());
      cudaStreamSynchronize(device.stream());
    };
    CHECK_THROWS(run(3, 1, body));
    for (const std::vector<float>& x : seen) CHECK(*std::max_element(x.begin(), x.end()) <= 3.0f);  // 1: has not begun
  }
}

TEST_CASE("threads on devices: a duplicate serves another thread, wrappers work in the stream") {
  run(3, 2, [&](device_comm& comm, rank_device& device) {
    const std::vector<hd::float16> most(20, hd::float16(60000.0f));
    const auto words = device.put(most);
    try {  // the sum would leave the range, and nothing would tell
      hd::all_reduce(comm, hd::native{}, words, hd::sum{}, device.queue());
      RANK_CHECK(false);
    } catch (const hd::argument_error&) {
    }
    hd::all_reduce(comm, hd::native{}, words, hd::mean{}, device.queue());
    for (const hd::float16 x : device.get<hd::float16>(comm, words)) RANK_CHECK(static_cast<float>(x) == 60000.0f);
    device_comm second = comm.duplicate();
    hd::counting counted(comm.duplicate());
    const std::vector<float> ones(300, 1.0f);
    const auto a = device.put(ones), b = device.put(ones), c = device.put(ones);
    std::exception_ptr thrown;
    int number = 0;
    hd::detail::check_cuda("device", cudaGetDevice(&number));
    std::thread other([&] {
      try {
        hd::detail::check_cuda("device", cudaSetDevice(number));
        for (int k = 0; k < 3; ++k) hd::all_reduce(second, hd::ring{}, a, hd::mean{}, device.queue());
      } catch (...) {
        thrown = std::current_exception();
      }
    });
    hd::all_reduce(comm, hd::ring{}, b, hd::sum{}, device.queue());
    other.join();
    if (thrown) std::rethrow_exception(thrown);
    hd::hosted carried(comm.duplicate());
    std::thread([&] {  // whose current device isn't the rank's
      try {
        auto third = carried.duplicate();
        std::vector<float> host(10, 1.0f);
        hd::all_reduce(third, hd::ring{}, std::span<float>(host));
        RANK_CHECK(host == std::vector<float>(10, 3.0f));
      } catch (...) {
        thrown = std::current_exception();
      }
    })
        .join();
    if (thrown) std::rethrow_exception(thrown);
    hd::all_reduce(counted, hd::ring{}, c, hd::sum{}, device.queue());
    RANK_CHECK(counted.sent().bytes == 1600);  // 2 n (P - 1) / P floats
    RANK_CHECK(device.get<float>(comm, a) == ones);
    RANK_CHECK(device.get<float>(comm, b) == std::vector<float>(300, 3.0f));
    RANK_CHECK(device.get<float>(comm, c) == std::vector<float>(300, 3.0f));
  });
}

TEST_CASE("hosted: host memory over a communicator that works in a stream conforms") {
  heddle_test::conforms_to_communicator({1, 2, 3}, [](int ranks, auto f) {
    hd::threads::options o{.ranks = ranks, .deadline = std::chrono::seconds(2)};
    hd::threads::run(o, [&](hd::threads::communicator& host) {
      rank_device device(host.rank() % (std::min)(2, devices()));
      hd::hosted comm(device_comm(host, device.stream()));
      static_assert(!hd::stream_ordered<decltype(comm)>);
      f(comm);
    });
  });
  hd::links measured[2];
  run(2, 2, [&](device_comm& comm, rank_device&) {
    hd::hosted carried(comm.duplicate());
    measured[comm.rank()] = hd::calibrate(carried);
  });
  CHECK(measured[0] == measured[1]);
  CHECK(measured[0].intra.cost.alpha > 0);
}
