// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Ranks are threads with a device each, which find each other through threads::communicator.

#include "../support/catch.hpp"
#include "any_topology.hpp"
#include "rank_check.hpp"
#include "rank_device.cuh"

#include <heddle/collective/all_reduce.cuh>
#include <heddle/collective/gather.cuh>
#include <heddle/collective/point_to_point.hpp>
#include <heddle/comm/counting.hpp>
#include <heddle/comm/fingerprint.hpp>
#include <heddle/comm/nccl.hpp>
#include <heddle/comm/staged.cuh>
#include <heddle/comm/threads.hpp>
#include <heddle/memory/nccl_mem.hpp>
#include <heddle/memory/queue_pool.hpp>

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace hd = heddle;

namespace nccl_test {
using namespace device_test;

bool enough_devices(int ranks) {
  int count = 0;
  static_cast<void>(cudaGetDeviceCount(&count));
  static_cast<void>(cudaGetLastError());
  if (count < ranks) std::printf("SKIP: %d devices for %d ranks\n", count, ranks);
  return count >= ranks;
}

// Runs f(host communicator, NCCL communicator, device) on every rank.
template <class Function> void run(int ranks, const hd::nccl::options& o, Function&& f) {
  hd::threads::run(ranks, [&](auto& host) {
    rank_device device(host.rank());
    hd::nccl::communicator comm = hd::nccl::connect(host, device.stream(), o);
    f(host, comm, device);
    comm.synchronize();
  });
}

// All-reduces of every size by every topology, without waiting in between; what is wrong, in words.
template <class Value, class Op, class Topology>
std::string all_reduces(int ranks, const std::vector<Topology>& all, double roundoff, const Op& op = {}) {
  const auto p = static_cast<std::size_t>(ranks);
  const std::vector<std::size_t> sizes{0, 1, p - 1, p, p + 1, 17, 1025};
  std::vector<std::pair<const Topology*, std::size_t>> cases;
  for (const Topology& t : all) {
    for (const std::size_t n : sizes) {
      if (n < 1025 || &t == &all[0]) cases.push_back({&t, n});
    }
  }
  std::vector<std::vector<std::vector<Value>>> got(cases.size(), std::vector<std::vector<Value>>(p));
  run(ranks, {}, [&](auto&, hd::nccl::communicator& comm, rank_device& device) {
    std::vector<std::vector<Value>> in;
    std::vector<std::span<Value>> there;
    for (const auto& c : cases) in.push_back(elements<Value>(comm.rank(), c.second));
    for (const auto& v : in) there.push_back(device.put(v));
    for (std::size_t k = 0; k < cases.size(); ++k) hd::all_reduce(comm, *cases[k].first, there[k], op, device.queue());
    for (std::size_t k = 0; k < cases.size(); ++k)
      got[k][static_cast<std::size_t>(comm.rank())] = device.template get<Value>(comm, there[k]);
  });
  for (std::size_t k = 0; k < cases.size(); ++k) {
    const auto [t, n] = cases[k];
    const auto want = reference<Value>(ranks, n, op);
    for (std::size_t r = 0; r < p; ++r) {
      for (std::size_t i = 0; i < n; ++i) {
        const double have = wide(got[k][r][i]);
        const double off = std::fabs(have - want[i]);
        if (!(off <= roundoff * (1 + std::fabs(want[i]))) || have != wide(got[k][0][i])) {
          return t->name() + ", " + std::to_string(ranks) + " ranks, " + std::to_string(n) + " elements: rank " +
                 std::to_string(r) + " has " + std::to_string(have) + " at " + std::to_string(i) + ", not " +
                 std::to_string(want[i]);
        }
      }
    }
  }
  return {};
}

}  // namespace nccl_test

using namespace device_test;
using namespace nccl_test;

// example-begin nccl
void reduce_on_devices(int rank, int ranks, hd::threads::communicator& others) {
  cudaSetDevice(rank);
  cudaStream_t stream;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  {
    hd::nccl::communicator comm = hd::nccl::connect(others, stream);  // or over mpi::world(), a file, your own comm
    float* gradient = nullptr;
    cudaMallocAsync(&gradient, 1000 * sizeof(float), stream);
    cudaMemsetAsync(gradient, 0, 1000 * sizeof(float), stream);
    hd::all_reduce(comm, hd::ring{}, std::span(gradient, 1000), hd::mean{}, hd::cuda::queue{stream});  // enqueues
    comm.synchronize();  // waits, with a deadline; throws what NCCL reports
    cudaFreeAsync(gradient, stream);
    if (comm.size() != ranks) throw std::logic_error("all ranks are connected");
  }
  cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
}
// example-end

TEST_CASE("nccl: the page's example runs") {
  if (!enough_devices(2)) return;
  CHECK_NOTHROW(hd::threads::run(2, [](auto& comm) { reduce_on_devices(comm.rank(), comm.size(), comm); }));
}

TEST_CASE("nccl: schedules of every topology reduce device memory") {
  const std::vector<any_topology> all = topologies(), ring(1, all[0]);
  for (const int ranks : {1, 2, 3, 4, 5, 7}) {
    if (!enough_devices(ranks)) return;
    CHECK(all_reduces<float, hd::mean>(ranks, all, 1e-6) == "");
  }
  CHECK(all_reduces<float, hd::sum>(5, all, 1e-6) == "");
  CHECK(all_reduces<float, hd::product>(5, all, 0.0) == "");  // of few digits each
  CHECK(all_reduces<float, hd::min>(4, all, 0.0) == "");
  CHECK(all_reduces<float, hd::max>(5, all, 0.0) == "");
  CHECK(all_reduces<int, hd::sum>(3, ring, 0.0) == "");
  CHECK(all_reduces<hd::bfloat16, hd::mean>(4, ring, 0.02) == "");
  CHECK(all_reduces<float, largest_magnitude>(4, ring, 0.0) == "");
}

TEST_CASE("nccl: wrappers work in the stream as well") {
  if (!enough_devices(4)) return;
  std::vector<std::uint64_t> bytes(4);
  std::vector<float> first(4);
  run(4, {}, [&](auto&, hd::nccl::communicator& comm, rank_device& device) {
    hd::counting counted(comm);
    const std::vector<float> ones(400, 1.0f);
    const auto s = device.put(ones);
    hd::all_reduce(counted, hd::ring{}, s, hd::sum{}, device.queue());
    bytes[static_cast<std::size_t>(comm.rank())] = counted.sent().bytes;
    first[static_cast<std::size_t>(comm.rank())] = device.get<float>(comm, s)[399];
  });
  CHECK(bytes == std::vector<std::uint64_t>(4, 2400));  // 2 n (P - 1) / P floats
  CHECK(first == std::vector<float>(4, 4.0f));
}

TEST_CASE("nccl: the library's own all-reduce") {
  const std::vector<hd::native> native(1);
  for (const int ranks : {1, 2, 5}) {
    if (!enough_devices(ranks)) return;
    CHECK(all_reduces<float, hd::sum>(ranks, native, 1e-6) == "");
    CHECK(all_reduces<float, hd::max>(ranks, native, 0.0) == "");
    CHECK(all_reduces<float, hd::min>(ranks, native, 0.0) == "");
    CHECK(all_reduces<float, hd::product>(ranks, native, 0.0) == "");
  }
  CHECK(all_reduces<hd::bfloat16, hd::mean>(3, native, 0.02) == "");
}

TEST_CASE("nccl: the mean of ones is one, also in bfloat16") {
  if (!enough_devices(7)) return;
  std::vector<int> wrong(7, -1);
  run(7, {}, [&](auto&, hd::nccl::communicator& comm, rank_device& device) {
    const std::vector<hd::bfloat16> ones(5, hd::bfloat16(1.0f));
    const auto a = device.put(ones), b = device.put(ones);
    hd::all_reduce(comm, hd::native{}, a, hd::mean{}, device.queue());
    hd::all_reduce(comm, hd::ring{}, b, hd::mean{}, device.queue());
    int bad = 0;
    for (const auto s : {a, b})
      for (const hd::bfloat16 x : device.get<hd::bfloat16>(comm, s)) bad += static_cast<float>(x) != 1.0f;
    wrong[static_cast<std::size_t>(comm.rank())] = bad;
  });
  CHECK(wrong == std::vector<int>(7, 0));
}

TEST_CASE("nccl: schedules without reductions move device memory") {
  if (!enough_devices(5)) return;
  constexpr std::size_t n = 17;
  std::vector<std::string> wrong(5);
  run(5, {}, [&](auto&, hd::nccl::communicator& comm, rank_device& device) {
    const auto mine = elements<float>(comm.rank(), n), many = elements<float>(comm.rank(), 5 * n);
    const std::vector<float> room(5 * n);
    const auto in = device.put(mine), out = device.put(room);
    comm.native_all_gather({}, in.data(), out.data(), in.size_bytes());
    const auto all = device.get<float>(comm, out);
    const auto shared = device.put(mine);
    comm.native_broadcast({}, shared.data(), shared.size_bytes(), 3);
    const auto third = device.get<float>(comm, shared);
    std::string& said = wrong[static_cast<std::size_t>(comm.rank())];
    for (std::size_t i = 0; i < n; ++i) {
      if (third[i] != element<float>(3, i)) said = "broadcast";
      for (int r = 0; r < 5; ++r)
        if (all[static_cast<std::size_t>(r) * n + i] != element<float>(r, i)) said = "all_gather";
    }
    const auto parts = device.put(many), part = device.put(room).first(n);
    const hd::bulk_leaf<hd::cuda, float, hd::mean> l(hd::mean{}, device.queue());
    comm.native_reduce_scatter({}, parts.data(), part.data(), n, l.get());
    const auto share = device.get<float>(comm, std::span<const float>(part));
    const auto want = reference<float>(5, 5 * n, hd::mean{});
    for (std::size_t i = 0; i < n; ++i) {
      if (std::fabs(share[i] - want[static_cast<std::size_t>(comm.rank()) * n + i]) > 1e-5) said = "reduce_scatter";
    }
  });
  CHECK(wrong == std::vector<std::string>(5));
}

TEST_CASE("nccl: schedules that gather, scatter, broadcast, reduce and exchange device memory") {
  for (const int ranks : {1, 2, 3, 5}) {
    if (!enough_devices(ranks)) return;
    const auto p = static_cast<std::size_t>(ranks);
    std::vector<std::size_t> counts(p, 3);  // 3, 4, 5 ...; the last but one is empty
    for (std::size_t r = 0; r < p; ++r) counts[r] += r;
    if (p > 1) counts[p - 2] = 0;
    std::size_t n = 0;
    for (const std::size_t c : counts) n += c;
    const auto want = reference<double>(ranks, n, hd::mean{});
    std::vector<std::string> wrong(p);
    run(ranks, {}, [&](auto&, hd::nccl::communicator& comm, rank_device& device) {
      const auto mine = elements<double>(comm.rank(), n), three = elements<double>(comm.rank(), 3);
      const std::vector<double> room(3 * p);
      const auto data = device.put(mine), all = device.put(room), copy = device.put(mine);
      const auto part = device.put(three);
      hd::reduce_scatter(comm, hd::ring{}, data, std::span<const std::size_t>(counts), hd::mean{}, device.queue());
      hd::all_gather(comm, hd::ring{}, data, std::span<const std::size_t>(counts));
      hd::barrier(comm);
      hd::all_gather(comm, hd::ring{}, std::span<const double>(part), all);
      hd::broadcast(comm, copy, comm.size() - 1);
      const auto many = elements<double>(comm.rank(), 3 * p);
      const auto rooted = device.put(mine), sent = device.put(many), to = device.put(room), from = device.put(room);
      comm.copy(to.data(), sent.data(), to.size_bytes());  // later than now: the own block, too, goes in the stream
      const int root = comm.size() / 2;
      hd::reduce(comm, rooted, root, hd::mean{}, device.queue());
      hd::all_to_all(comm, std::span<const double>(to), from);
      std::string& said = wrong[static_cast<std::size_t>(comm.rank())];
      const auto means = device.get<double>(comm, data), gathered = device.get<double>(comm, all),
                 last = device.get<double>(comm, copy), reduced = device.get<double>(comm, rooted),
                 exchanged = device.get<double>(comm, from);
      for (std::size_t i = 0; i < n; ++i) {
        if (comm.rank() == root && std::fabs(reduced[i] - want[i]) > 1e-12) said = "reduce";
        if (std::fabs(means[i] - want[i]) > 1e-12) said = "reduce_scatter and all_gather";
        if (last[i] != element<double>(comm.size() - 1, i)) said = "broadcast";
      }
      for (std::size_t i = 0; i < 3 * p; ++i) {
        const int source = static_cast<int>(i / 3);
        if (gathered[i] != element<double>(source, i % 3)) said = "all_gather";
        if (exchanged[i] != element<double>(source, 3 * static_cast<std::size_t>(comm.rank()) + i % 3))
          said = "all_to_all";
      }
    });
    CHECK(wrong == std::vector<std::string>(p));
  }
}

TEST_CASE("nccl: splits by host, whose names the settings may give") {
  if (!enough_devices(5)) return;
  // Machines a, b, a, b, a: three ranks and two.
  std::vector<std::vector<int>> got(5);
  hd::threads::run(5, [&](auto& host) {
    rank_device device(host.rank());
    const hd::nccl::options o{.host = host.rank() % 2 == 0 ? "a" : "b"};
    hd::nccl::communicator comm = hd::nccl::connect(host, device.stream(), o);
    hd::nccl::communicator local = comm.split_by_host(), across = comm.split_across_hosts();
    std::vector<int> said{local.rank(), local.size(), across.rank(), across.size()};
    const std::vector<float> one(1, static_cast<float>(1 << comm.rank()));
    const auto a = device.put(one), b = device.put(one);
    hd::all_reduce(local, hd::ring{}, a, hd::sum{}, device.queue());
    hd::all_reduce(across, hd::ring{}, b, hd::sum{}, device.queue());
    for (const auto s : {a, b}) said.push_back(static_cast<int>(device.get<float>(comm, s)[0]));
    const auto none = comm.split(comm.rank() == 0 ? NCCL_SPLIT_NOCOLOR : 1, 0);
    said.push_back(none ? none->size() : 0);
    got[static_cast<std::size_t>(comm.rank())] = said;
    comm.synchronize();
  });
  CHECK(got[0] == std::vector<int>{0, 3, 0, 2, 21, 3, 0});
  CHECK(got[1] == std::vector<int>{0, 2, 1, 2, 10, 3, 4});
  CHECK(got[2] == std::vector<int>{1, 3, 0, 2, 21, 12, 4});
  CHECK(got[3] == std::vector<int>{1, 2, 1, 2, 10, 12, 4});
  CHECK(got[4] == std::vector<int>{2, 3, 0, 1, 21, 16, 4});
}

TEST_CASE("nccl: by default two levels of NCCL's own collectives, split by machine") {
  struct layout {
    std::string hosts;
    bool levels;
  };
  for (const layout& x : {layout{"aabb", true}, {"abab", true}, {"aabbb", false}, {"abcd", false}, {"aaa", false}}) {
    const auto ranks = static_cast<int>(x.hosts.size());
    if (!enough_devices(ranks)) return;
    CAPTURE(x.hosts);
    std::vector<int> wrong(x.hosts.size());
    hd::threads::run(ranks, [&](auto& host) {
      const auto me = static_cast<std::size_t>(host.rank());
      rank_device device(host.rank());
      const hd::nccl::options o{.host = x.hosts.substr(me, 1), .levels_from = 100};
      hd::nccl::communicator comm = hd::nccl::connect(host, device.stream(), o);
      RANK_CHECK(comm.levels() == x.levels && comm.duplicate().levels() == x.levels);
      std::vector<std::vector<float>> in;
      for (const std::size_t n : {0, 1, 2, 3, 17, 1025}) in.push_back(elements<float>(comm.rank(), n));
      for (const auto& v : in) {
        const auto sums = device.put(v), means = device.put(v), largest = device.put(v);
        hd::all_reduce(comm, hd::native{}, sums, hd::sum{}, device.queue());
        hd::all_reduce(comm, hd::native{}, means, hd::mean{}, device.queue());
        hd::all_reduce(comm, hd::native{}, largest, hd::max{}, device.queue());
        const auto same = [&](std::span<float> got, const std::vector<double>& want) {
          const std::vector<float> have = device.get<float>(comm, got);
          for (std::size_t i = 0; i < want.size(); ++i) wrong[me] += !(std::fabs(have[i] - want[i]) <= 1e-5);
        };
        same(sums, reference<float>(ranks, v.size(), hd::sum{}));
        same(means, reference<float>(ranks, v.size(), hd::mean{}));
        same(largest, reference<float>(ranks, v.size(), hd::max{}));
      }
      comm.synchronize();
    });
    CHECK(wrong == std::vector<int>(x.hosts.size()));
  }
  if (!enough_devices(4)) return;
  hd::threads::run(4, [&](auto& host) {
    rank_device device(host.rank());
    const hd::nccl::options o{.host = host.rank() < 2 ? "a" : "b", .levels = false};
    hd::nccl::communicator comm = hd::nccl::connect(host, device.stream(), o);
    RANK_CHECK(!comm.levels());
    comm.split_levels();
    RANK_CHECK(comm.levels());
  });
}

TEST_CASE("nccl: fingerprint names both sides where calls differ") {
  if (!enough_devices(3)) return;
  std::vector<std::string> said(3);
  const auto differ = [&](auto&, hd::nccl::communicator& comm, rank_device& device) {
    const std::vector<float> ones(10, 1.0f);
    const auto s = device.put(ones);
    hd::fingerprint checked(comm);
    hd::all_reduce(checked, hd::ring{}, s, hd::sum{}, device.queue());
    RANK_CHECK(device.get<float>(comm, s) == std::vector<float>(10, 3.0f));
    try {
      hd::all_reduce(checked, hd::ring{}, s.first(comm.rank() == 2 ? 9 : 10), hd::sum{}, device.queue());
    } catch (const hd::comm_error& e) {
      said[static_cast<std::size_t>(comm.rank())] = e.what();
      throw;
    }
  };
  CHECK_THROWS_AS(run(3, {}, differ), hd::comm_error);
  for (const std::string& text : said) {
    CAPTURE(text);
    CHECK(text.find("rank 0 is in all_reduce(count 10,") != std::string::npos);
    CHECK(text.find("rank 2 is in all_reduce(count 9,") != std::string::npos);
  }
}

TEST_CASE("nccl: schedules reduce in whatever order the device works", "[seeds]") {
  if (!enough_devices(4)) return;
  std::vector<int> wrong(4);
  hd::threads::run(4, [&](auto& host) {
    rank_device device(host.rank());
    const hd::nccl::options o{.host = host.rank() % 2 ? "a" : "b", .levels_from = 0};
    hd::nccl::communicator comm = hd::nccl::connect(host, device.stream(), o);  // native{} in two levels
    const std::vector<float> in = elements<float>(comm.rank(), 40);
    const auto a = device.put(in), b = device.put(in), c = device.put(in);
    hd::all_reduce(comm, hd::ring{}, a, hd::sum{}, device.queue());
    hd::all_reduce(comm, hd::halving_doubling{}, b, hd::sum{}, device.queue());
    hd::all_reduce(comm, hd::native{}, c, hd::sum{}, device.queue());
    const auto want = reference<float>(4, in.size(), hd::sum{});
    for (const auto s : {a, b, c}) {
      const std::vector<float> have = device.get<float>(comm, s);
      for (std::size_t i = 0; i < want.size(); ++i)
        wrong[static_cast<std::size_t>(comm.rank())] += !(std::fabs(have[i] - want[i]) <= 1e-5);
    }
    comm.synchronize();
  });
  CHECK(wrong == std::vector<int>(4));
}

TEST_CASE("nccl: a communicator of the user's, blocking, is worked on and left alone") {
  if (!enough_devices(3)) return;
  ncclUniqueId id;
  REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
  std::vector<double> sums(3);
  hd::threads::run(3, [&](auto& host) {
    rank_device device(host.rank());
    ncclComm_t mine = nullptr;
    if (ncclCommInitRank(&mine, 3, id, host.rank()) != ncclSuccess) throw std::runtime_error("init");
    {
      hd::nccl::communicator comm(mine, device.stream());
      hd::nccl::communicator second = comm.duplicate();
      const std::vector<double> one(1, comm.rank() + 1.0);
      const auto s = device.put(one);
      hd::all_reduce(second, hd::ring{}, s, hd::sum{}, device.queue());
      sums[static_cast<std::size_t>(comm.rank())] = device.get<double>(comm, s)[0];
    }
    hd::nccl_mem pages;
    void* const x = pages.allocate_sync(4096, 256);
    {
      hd::nccl::communicator broken(mine, device.stream());
      const hd::nccl::registration bucket = broken.register_memory(x, 4096);
      broken.fail("on purpose");  // which leaves `mine` alone, so the bucket has to be given back
    }
    hd::barrier(host);
#if __has_include(<emulated/control.h>)
    RANK_CHECK(emulated::registered_with_nccl() == 0);
#endif
    hd::barrier(host);
    pages.deallocate_sync(x, 4096, 256);
    if (ncclCommDestroy(mine) != ncclSuccess) throw std::runtime_error("destroy");
  });
  CHECK(sums == std::vector<double>(3, 6.0));
}

TEST_CASE("nccl: an id travels through a file") {
  if (!enough_devices(2)) return;
  const std::string path = "nccl_test_id." + std::to_string(getpid());
  std::vector<int> sizes(2);
  hd::threads::run(2, [&](auto& host) {
    rank_device device(host.rank());
    auto comm = hd::nccl::connect(host.rank(), 2, hd::nccl::share_through_file(path, host.rank(), 2), device.stream(),
                                    {.blocking = true});
    sizes[static_cast<std::size_t>(host.rank())] = comm.size();
  });
  std::remove(path.c_str());
  CHECK(sizes == std::vector<int>{2, 2});
  ncclUniqueId id{};
  const auto missing = hd::nccl::share_through_file(path, 1, 2, std::chrono::milliseconds(20));
  CHECK_THROWS_WITH(missing(id), Catch::Contains("rank 0 did not come to " + path));
  // Rank 0 doesn't begin before the last rank has the id: it would block for ever if that never comes.
  const auto alone = hd::nccl::share_through_file(path, 0, 2, std::chrono::milliseconds(20));
  CHECK_THROWS_WITH(alone(id), Catch::Contains("rank 1 did not come to " + path));
  std::remove(path.c_str());
  CHECK_THROWS_AS(hd::nccl::connect(2, 2, missing, nullptr), hd::argument_error);
}

TEST_CASE("nccl: who waits for a rank that has left gets an error within the deadline, and so does every later call") {
  if (!enough_devices(3)) return;
  std::vector<std::string> said(3);
  const auto body = [&](auto&, hd::nccl::communicator& comm, rank_device& device) {
    const std::vector<float> zeros(8);
    const auto s = device.put(zeros);
    comm.synchronize();
    if (comm.rank() == 2) return;
    std::string& text = said[static_cast<std::size_t>(comm.rank())];
    try {
      hd::all_reduce(comm, hd::native{}, s, hd::sum{}, device.queue());
      comm.synchronize();
    } catch (const hd::comm_error& e) {
      text = e.what();
    }
    try {
      hd::all_reduce(comm, hd::native{}, s, hd::sum{}, device.queue());
    } catch (const hd::comm_error&) {
      text += ", twice";
    }
    hd::all_reduce(comm, hd::ring{}, s, hd::sum{}, device.queue());
  };
  CHECK_THROWS_AS(run(3, {.deadline = std::chrono::milliseconds(500)}, body), hd::comm_error);
  for (const int r : {0, 1}) {
    CHECK(said[static_cast<std::size_t>(r)] ==
          "heddle::synchronize on rank " + std::to_string(r) + ": synchronize of rank " + std::to_string(r) +
              " did not end within 500 ms: a peer has not come, twice");
  }
}

TEST_CASE("nccl: a blocking communicator is left within the deadline, whatever its stream still waits for") {
  if (!enough_devices(2)) return;
  const hd::nccl::options settings{.deadline = std::chrono::milliseconds(300), .blocking = true};
  const auto start = std::chrono::steady_clock::now();
  run(2, settings, [&](auto&, hd::nccl::communicator& comm, rank_device& device) {
    const std::vector<float> zeros(8);
    const auto s = device.put(zeros);
    comm.synchronize();
    hd::nccl::communicator second = comm.duplicate();
    if (comm.rank() == 0) hd::all_reduce(second, hd::native{}, s, hd::sum{}, device.queue());  // rank 1 never joins
  });
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
}

TEST_CASE("nccl: what can't be done is refused before anything is enqueued") {
  if (!enough_devices(2)) return;
  std::vector<int> refused(2);
  run(2, {}, [&](auto&, hd::nccl::communicator& comm, rank_device& device) {
    const std::vector<hd::float16> halves(4, hd::float16(1.0f));
    const std::vector<float> floats(4, 2.0f);
    const auto h = device.put(halves);
    const auto f = device.put(floats);
    int& count = refused[static_cast<std::size_t>(comm.rank())];
    const auto expect = [&](auto&& call) {
      try {
        call();
      } catch (const hd::argument_error&) {
        ++count;
      }
    };
    expect([&] { hd::all_reduce(comm, hd::ring{}, h, hd::sum{}, device.queue()); });
    expect([&] { hd::all_reduce(comm, hd::native{}, h, hd::sum{}, device.queue()); });
    expect([&] { comm.register_memory(nullptr, 8); });
#if __has_include(<emulated/control.h>)  // NCCL itself may take memory of the host, and make nothing of it
    expect([&] { comm.register_memory(&count, sizeof count); });
#else
    ++count;
#endif
    static_cast<void>(comm.register_memory(nullptr, 0));
    expect([&] { hd::all_reduce(comm, hd::native{}, f, largest_magnitude{}, device.queue()); });
    expect([&] { hd::all_reduce(comm, hd::native{}, h, hd::accumulate_in<float>(hd::mean{}), device.queue()); });
    hd::all_reduce(comm, hd::native{}, h, hd::mean{}, device.queue());  // the communicator is as good as before
    for (const hd::float16 x : device.get<hd::float16>(comm, h)) count += static_cast<float>(x) == 1.0f;
  });
  CHECK(refused == std::vector<int>(2, 10));
}

TEST_CASE("staged: device memory over a communicator of the host") {
  for (const int ranks : {1, 2, 3, 5}) {
    if (!enough_devices(ranks)) return;
    for (const std::size_t n : {0, 1, 4, 1023, 3001}) {
      for (const std::size_t chunk : {std::size_t{512}, std::size_t{1} << 20, SIZE_MAX}) {
        INFO(ranks << " ranks, " << n << " elements, chunks of " << chunk << " bytes");
        const auto want = reference<float>(ranks, n, hd::mean{});
        std::vector<double> worst(static_cast<std::size_t>(ranks));
        hd::threads::run(ranks, [&](auto& host) {
          rank_device device(host.rank());
          hd::counting counted(host);
          hd::staged comm(counted, device.stream(), {.chunk = chunk});
          static_assert(hd::communicator<decltype(comm)> && hd::stream_ordered<decltype(comm)>);
          const std::vector<float> mine = elements<float>(comm.rank(), n);
          const auto a = device.put(mine), b = device.put(mine), c = device.put(mine);
          auto second = comm.duplicate();
          hd::all_reduce(comm, hd::ring{}, a, hd::mean{}, device.queue());
          hd::all_reduce(second, hd::direct{}, b, hd::mean{}, device.queue());  // lends what it reduces
          hd::broadcast(comm, c, comm.size() - 1);
          hd::barrier(comm);
          double& error = worst[static_cast<std::size_t>(comm.rank())];
          const auto last = device.get<float>(comm, c);
          for (const auto s : {a, b}) {
            const auto got = device.get<float>(comm, s);
            for (std::size_t i = 0; i < n; ++i) error = std::fmax(error, std::fabs(got[i] - want[i]));
          }
          for (std::size_t i = 0; i < n; ++i) error = std::fmax(error, std::fabs(last[i] - element<float>(ranks - 1, i)));
        });
        for (const double e : worst) CHECK(e < 1e-5);
      }
    }
  }
  CHECK_THROWS_WITH(hd::threads::run(1, [](auto& host) { hd::staged(host, nullptr, {.chunk = 0}); }),
                    Catch::Contains("chunk 0; allowed is 1 byte and above"));
}

#if __has_include(<emulated/control.h>)
TEST_CASE("nccl: an error that NCCL reports later ends the next call") {
  std::vector<std::string> said(2);
  const auto body = [&](auto&, hd::nccl::communicator& comm, rank_device& device) {
    const std::vector<float> zeros(8);
    const auto s = device.put(zeros);
    hd::nccl::communicator second = comm.duplicate();
    comm.synchronize();
    std::string& text = said[static_cast<std::size_t>(comm.rank())];
    try {
      emulated::fail_nccl(comm.get(), ncclRemoteError);
      hd::all_reduce(comm, hd::ring{}, s, hd::sum{}, device.queue());
    } catch (const hd::comm_error& e) {
      text = e.what();
    }
    try {
      hd::all_reduce(second, hd::native{}, s, hd::sum{}, device.queue());  // marked, and aborted, with the first
    } catch (const hd::comm_error&) {
      text += " twice";
    }
    throw std::logic_error("so that nobody synchronises again");
  };
  CHECK_THROWS_AS(run(2, {}, body), std::logic_error);
  for (const int r : {0, 1}) {
    CHECK(said[static_cast<std::size_t>(r)] == "heddle::all_reduce on rank " + std::to_string(r) +
                                                   ": ncclCommGetAsyncError: remote process exited or there was a "
                                                   "network error (a failure on purpose) twice");
  }
}
#endif

TEST_CASE("nccl: a pool over ncclMemAlloc gives memory that collectives take") {
  if (!enough_devices(2)) return;
  run(2, {}, [](hd::threads::communicator& host, hd::nccl::communicator& comm, rank_device& device) {
    hd::queue_pool memory{hd::cuda_order{}, hd::nccl_mem{}, {.max = std::size_t{8} << 20}};
    const std::vector<float> mine(1000, static_cast<float>(host.rank() + 1));
    auto* const x = static_cast<float*>(memory.allocate(device.queue(), 4000, 256));
    comm.copy(x, mine.data(), 4000);
    hd::all_reduce(comm, hd::ring{}, std::span(x, 1000), hd::sum{}, device.queue());
    RANK_CHECK(device.get(comm, std::span<const float>(x, 1000)) == std::vector<float>(1000, 3.0f));
    memory.deallocate(device.queue(), x, 4000, 256);
  });
  CHECK_THROWS_AS(hd::nccl_mem{}.allocate_sync(std::size_t{1} << 50, 256), hd::memory_error);
}

TEST_CASE("nccl: memory of its own and of the program's is registered, and given back") {
  if (!enough_devices(4)) return;
  [[maybe_unused]] std::size_t registered = 1;  // only the emulated device tells
  hd::threads::run(4, [&](hd::threads::communicator& host) {
    rank_device device(host.rank());
    const hd::nccl::options o{.host = host.rank() < 2 ? "a" : "b", .registered = true};
    hd::nccl::communicator comm = hd::nccl::connect(host, device.stream(), o);
    hd::nccl_mem pages;
    auto* const x = static_cast<float*>(pages.allocate_sync(4096, 256));
    {
      const hd::nccl::registration bucket = comm.register_memory(x, 4096);
      const std::vector<float> ones(1000, 1.0f);
      for (int round = 0; round < 2; ++round) {
        comm.copy(x, ones.data(), 4000);
        const std::span<float> s(x, 1000);
        if (round == 0) hd::all_reduce(comm, hd::native{}, s, hd::sum{}, device.queue());
        else hd::all_reduce(comm, hd::direct{}, s, hd::sum{}, device.queue());  // lends what it reduces
        RANK_CHECK(device.get<float>(comm, s) == std::vector<float>(1000, 4.0f));
      }
      hd::barrier(comm);
      comm.synchronize();
#if __has_include(<emulated/control.h>)
      // The bucket with three communicators, and what each rank lends: three messages of a quarter.
      if (host.rank() == 0) registered = emulated::registered_with_nccl();
#endif
      hd::barrier(comm);
      comm.synchronize();
    }
    pages.deallocate_sync(x, 4096, 256);
  });
#if __has_include(<emulated/control.h>)
  CHECK(registered >= 4 * (3 * 4096 + 3 * 1000));
  CHECK(emulated::registered_with_nccl() == 0);
#endif
}
