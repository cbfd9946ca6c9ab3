// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// What CUB promises, checked against plain loops: the same tests for NVIDIA's CUB on a GPU and for the stand-in.

#include "../support/catch.hpp"
#include "launch.hpp"

#include <heddle/core/detail/index_iterator.cuh>
#include <heddle/core/shared.cuh>

#include <cuda_fp16.h>
#include <cub/cub.cuh>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

namespace fidelity_cub {

// nvcc takes seconds for each type that is sorted: few types, and many cases of each.
constexpr int sizes[] = {0, 1, 31, 32, 33, 1000, 10007};

// ---- Memory and calls

template <class T> struct buffer : device_array<T> {
  using device_array<T>::device_array;
  void set(const std::vector<T>& from) const {
    REQUIRE(cudaMemcpy(this->data(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
  }
  std::vector<T> get() const { return this->host(); }
  std::vector<T> get(std::size_t n) const {
    std::vector<T> to(n);
    REQUIRE(cudaMemcpy(to.data(), this->data(), n * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
    return to;
  }
  T value() const { return get(1)[0]; }
};

// Both phases of a device-wide function.
template <class Call> void two_phases(Call call) {
  std::size_t bytes = 0;
  REQUIRE(call(static_cast<void*>(nullptr), bytes) == cudaSuccess);
  CHECK(bytes >= 1);
  void* storage = nullptr;
  REQUIRE(cudaMalloc(&storage, bytes) == cudaSuccess);
  REQUIRE(call(storage, bytes) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  REQUIRE(cudaFree(storage) == cudaSuccess);
}
#define TWO_PHASES(function, ...) \
  two_phases([&](void* storage, std::size_t& bytes) { return function(storage, bytes, __VA_ARGS__); })

template <class T> std::vector<T> numbers(int n, int low, int high, unsigned seed = 1) {
  std::mt19937 random(seed + static_cast<unsigned>(n));
  std::uniform_int_distribution<int> draw(low, high);
  std::vector<T> v(static_cast<std::size_t>(n));
  for (T& x : v) x = static_cast<T>(draw(random));
  return v;
}

// ---- Operators

struct larger_magnitude {
  template <class T> __host__ __device__ T operator()(T a, T b) const {
    const T x = a < T{} ? -a : a, y = b < T{} ? -b : b;
    return x < y ? y : x;
  }
};
struct square {
  template <class T> __host__ __device__ T operator()(T x) const { return x * x; }
};
struct is_multiple {
  int of;
  template <class T> __host__ __device__ bool operator()(T x) const { return static_cast<long long>(x) % of == 0; }
};
// x -> a x + b, modulo 2^32: composition is associative and doesn't commute.
struct affine {
  unsigned a, b;
  __host__ __device__ friend bool operator==(affine x, affine y) { return x.a == y.a && x.b == y.b; }
};
struct then {
  __host__ __device__ affine operator()(affine first, affine second) const {
    return {first.a * second.a, second.a * first.b + second.b};
  }
};
std::vector<affine> affines(int n) {
  const auto x = numbers<unsigned>(2 * n, 0, 1000);
  std::vector<affine> v(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = {2 * x[2 * i] + 1, x[2 * i + 1]};
  return v;
}
// Mean and count, whose sum is commutative and associative but for rounding.
struct moments {
  double mean;
  long long count;
};
struct merge {
  __host__ __device__ moments operator()(moments a, moments b) const {
    const long long n = a.count + b.count;
    return {n == 0 ? 0.0 : (a.mean * double(a.count) + b.mean * double(b.count)) / double(n), n};
  }
};
struct as_moments {
  __host__ __device__ moments operator()(float x) const { return {x, 1}; }
};

// ---- Reductions

// Small enough that floats are exact.
template <class T> void reductions() {
  for (const int n : sizes) {
    CAPTURE(n);
    const auto in = numbers<T>(n, std::is_signed_v<T> ? -30 : 0, 30);
    const buffer<T> from(in), to(1);
    T sum{}, most = std::numeric_limits<T>::lowest(), least = std::numeric_limits<T>::max(), magnitude{3};
    T squares{5};
    for (const T x : in) {
      sum = static_cast<T>(sum + x);
      most = std::max(most, x);
      least = std::min(least, x);
      magnitude = larger_magnitude{}(magnitude, x);
      squares = static_cast<T>(squares + x * x);
    }
    TWO_PHASES(cub::DeviceReduce::Sum, from.data(), to.data(), n);
    CHECK(to.value() == sum);
    TWO_PHASES(cub::DeviceReduce::Max, from.data(), to.data(), n);
    CHECK(to.value() == most);
    TWO_PHASES(cub::DeviceReduce::Min, from.data(), to.data(), static_cast<std::size_t>(n));
    CHECK(to.value() == least);
    TWO_PHASES(cub::DeviceReduce::Reduce, from.data(), to.data(), n, larger_magnitude{}, T{3});
    CHECK(to.value() == magnitude);
    TWO_PHASES(cub::DeviceReduce::TransformReduce, from.data(), to.data(), n, cuda::std::plus<T>{}, square{}, T{5});
    CHECK(to.value() == squares);

    const buffer<std::int64_t> where(1);
    TWO_PHASES(cub::DeviceReduce::ArgMax, from.data(), to.data(), where.data(), n);
    CHECK(to.value() == most);
    CHECK(where.value() == (n == 0 ? 1 : std::max_element(in.begin(), in.end()) - in.begin()));
    TWO_PHASES(cub::DeviceReduce::ArgMin, from.data(), to.data(), where.data(), n);
    CHECK(to.value() == least);
    CHECK(where.value() == (n == 0 ? 1 : std::min_element(in.begin(), in.end()) - in.begin()));
  }
}

TEST_CASE("cub: DeviceReduce") {
  SECTION("int") { reductions<int>(); }
  SECTION("float, whole numbers") { reductions<float>(); }
}

TEST_CASE("cub: DeviceReduce sums in the wider type") {
  const int n = 1000;
  const std::vector<unsigned char> in(n, 255);
  const buffer<unsigned char> from(in);
  const buffer<int> wide(1);
  TWO_PHASES(cub::DeviceReduce::Sum, from.data(), wide.data(), n);
  CHECK(wide.value() == 255 * n);
  const buffer<unsigned char> narrow(1);
  TWO_PHASES(cub::DeviceReduce::Sum, from.data(), narrow.data(), n);
  CHECK(narrow.value() == static_cast<unsigned char>(255 * n));
}

TEST_CASE("cub: DeviceReduce of floats, of a struct, and from iterators") {
  for (const int n : sizes) {
    CAPTURE(n);
    std::vector<float> in = numbers<float>(n, -1000, 1000);
    for (float& x : in) x /= 7;
    const double sum = std::accumulate(in.begin(), in.end(), 0.0);
    const buffer<float> from(in), to(1);
    TWO_PHASES(cub::DeviceReduce::Sum, from.data(), to.data(), n);
    CHECK(to.value() == Approx(sum).margin(1e-2));

    const buffer<moments> m(1);
    TWO_PHASES(cub::DeviceReduce::TransformReduce, from.data(), m.data(), n, merge{}, as_moments{}, moments{0, 0});
    CHECK(m.value().count == n);
    CHECK(m.value().mean == Approx(n == 0 ? 0 : sum / n).margin(1e-6));

    const heddle::detail::index_iterator<square, std::size_t> squares(0, {});
    const buffer<std::size_t> total(1);
    TWO_PHASES(cub::DeviceReduce::Reduce, squares, total.data(), static_cast<std::size_t>(n), cuda::std::plus<>{},
               std::size_t{7});
    const auto k = static_cast<std::size_t>(n);
    CHECK(total.value() == 7 + (n == 0 ? 0 : (k - 1) * k * (2 * k - 1) / 6));
  }
}

TEST_CASE("cub: the least of infinities is finite") {
  const buffer<float> from(std::vector<float>(3, INFINITY)), to(1);
  TWO_PHASES(cub::DeviceReduce::Min, from.data(), to.data(), 3);
  CHECK(to.value() == std::numeric_limits<float>::max());
}

TEST_CASE("cub: DeviceSegmentedReduce") {
  const auto in = numbers<int>(10007, -100, 100);
  const std::vector<int> offsets = {0, 0, 1, 32, 65, 65, 1065, 10007};
  const auto segments = static_cast<int>(offsets.size()) - 1;
  const buffer<int> from(in), bounds(offsets), to(offsets.size());
  std::vector<int> sums, most, with_init;
  for (std::size_t s = 0; s + 1 < offsets.size(); ++s) {
    const auto first = in.begin() + offsets[s], last = in.begin() + offsets[s + 1];
    sums.push_back(std::accumulate(first, last, 0));
    most.push_back(first == last ? std::numeric_limits<int>::lowest() : *std::max_element(first, last));
    with_init.push_back(std::accumulate(first, last, 5, larger_magnitude{}));
  }
  const auto k = static_cast<std::size_t>(segments);
  TWO_PHASES(cub::DeviceSegmentedReduce::Sum, from.data(), to.data(), segments, bounds.data(), bounds.data() + 1);
  CHECK(to.get(k) == sums);
  TWO_PHASES(cub::DeviceSegmentedReduce::Max, from.data(), to.data(), segments, bounds.data(), bounds.data() + 1);
  CHECK(to.get(k) == most);
  TWO_PHASES(cub::DeviceSegmentedReduce::Reduce, from.data(), to.data(), segments, bounds.data(), bounds.data() + 1,
             larger_magnitude{}, 5);
  CHECK(to.get(k) == with_init);
}

// ---- Scans

template <class T> void scans() {
  for (const int n : sizes) {
    CAPTURE(n);
    const auto count = static_cast<std::size_t>(n);
    const auto in = numbers<T>(n, 0, 9);
    std::vector<T> exclusive(count), inclusive(count), most(count);
    T sum{}, high{4};
    for (std::size_t i = 0; i < count; ++i) {
      exclusive[i] = sum;
      most[i] = high;
      sum = static_cast<T>(sum + in[i]);
      high = std::max(high, in[i]);
      inclusive[i] = sum;
    }
    const buffer<T> from(in), to(count);
    TWO_PHASES(cub::DeviceScan::ExclusiveSum, from.data(), to.data(), n);
    CHECK(to.get() == exclusive);
    TWO_PHASES(cub::DeviceScan::InclusiveSum, from.data(), to.data(), n);
    CHECK(to.get() == inclusive);
    TWO_PHASES(cub::DeviceScan::ExclusiveScan, from.data(), to.data(), cuda::maximum<>{}, T{4}, n);
    CHECK(to.get() == most);
    TWO_PHASES(cub::DeviceScan::InclusiveScan, from.data(), to.data(), cuda::std::plus<T>{}, count);
    CHECK(to.get() == inclusive);

    const buffer<T> in_place(in);
    TWO_PHASES(cub::DeviceScan::InclusiveSum, in_place.data(), n);
    CHECK(in_place.get() == inclusive);
    in_place.set(in);
    TWO_PHASES(cub::DeviceScan::ExclusiveScan, in_place.data(), in_place.data(), cuda::maximum<>{}, T{4}, n);
    CHECK(in_place.get() == most);

    const buffer<T> init(std::vector<T>{T{4}});
    TWO_PHASES(cub::DeviceScan::ExclusiveScan, from.data(), to.data(), cuda::maximum<>{},
               cub::FutureValue<T>(init.data()), n);
    CHECK(to.get() == most);
  }
}

TEST_CASE("cub: DeviceScan") {
  SECTION("int") { scans<int>(); }
  SECTION("unsigned char") { scans<unsigned char>(); }
  SECTION("double, whole numbers") { scans<double>(); }
}

TEST_CASE("cub: DeviceScan keeps the order of operands, and takes iterators") {
  for (const int n : sizes) {
    CAPTURE(n);
    const auto count = static_cast<std::size_t>(n);
    const auto in = affines(n);
    std::vector<affine> exclusive(count), inclusive(count), begun(count);
    affine all{1, 0}, from_init{3, 5};
    for (std::size_t i = 0; i < count; ++i) {
      exclusive[i] = all;
      all = then{}(all, in[i]);
      inclusive[i] = all;
      begun[i] = from_init = then{}(from_init, in[i]);
    }
    const buffer<affine> from(in), to(count);
    TWO_PHASES(cub::DeviceScan::ExclusiveScan, from.data(), to.data(), then{}, affine{1, 0}, n);
    CHECK(to.get() == exclusive);
    TWO_PHASES(cub::DeviceScan::InclusiveScan, from.data(), to.data(), then{}, n);
    CHECK(to.get() == inclusive);
    TWO_PHASES(cub::DeviceScan::InclusiveScanInit, from.data(), to.data(), then{}, affine{3, 5}, n);
    CHECK(to.get() == begun);

    const heddle::detail::index_iterator<square, std::uint64_t> squares(0, {});
    const buffer<std::uint64_t> sums(count);
    TWO_PHASES(cub::DeviceScan::ExclusiveScan, squares, sums.data(), cuda::std::plus<>{}, std::uint64_t{1}, count);
    std::vector<std::uint64_t> expected(count);
    for (std::size_t i = 0; i < count; ++i)
      expected[i] = i == 0 ? 1 : expected[i - 1] + (i - 1) * static_cast<std::uint64_t>(i - 1);
    CHECK(sums.get() == expected);
  }
}

// ---- Selection

struct store_double {
  std::size_t* to;
  __host__ __device__ void operator()(std::size_t at, std::size_t i) const { to[at] = 2 * i; }
};

TEST_CASE("cub: DeviceSelect") {
  for (const int n : sizes) {
    CAPTURE(n);
    const auto count = static_cast<std::size_t>(n);
    const auto in = numbers<int>(n, 0, 9);
    const auto flags = numbers<char>(n, 0, 1, 2);
    std::vector<int> thirds, flagged, unique;
    std::vector<std::size_t> positions;
    for (std::size_t i = 0; i < count; ++i) {
      if (in[i] % 3 == 0) thirds.push_back(in[i]);
      if (flags[i]) flagged.push_back(in[i]);
      if (i == 0 || in[i] != in[i - 1]) unique.push_back(in[i]);
      if (i % 3 == 0) positions.push_back(2 * i);
    }
    const buffer<int> from(in), to(count), kept(1);
    const buffer<char> marks(flags);
    const auto result = [&] { return to.get(static_cast<std::size_t>(kept.value())); };
    TWO_PHASES(cub::DeviceSelect::If, from.data(), to.data(), kept.data(), n, is_multiple{3});
    CHECK(result() == thirds);
    TWO_PHASES(cub::DeviceSelect::Flagged, from.data(), marks.data(), to.data(), kept.data(), n);
    CHECK(result() == flagged);
    TWO_PHASES(cub::DeviceSelect::FlaggedIf, from.data(), from.data(), to.data(), kept.data(), n, is_multiple{3});
    CHECK(result() == thirds);
    TWO_PHASES(cub::DeviceSelect::Unique, from.data(), to.data(), kept.data(), n);
    CHECK(result() == unique);

    to.set(in);
    TWO_PHASES(cub::DeviceSelect::If, to.data(), kept.data(), n, is_multiple{3});
    CHECK(result() == thirds);
    to.set(in);
    TWO_PHASES(cub::DeviceSelect::Flagged, to.data(), marks.data(), kept.data(), n);
    CHECK(result() == flagged);

    const buffer<std::size_t> written(count), number(1);
    const heddle::detail::index_iterator<heddle::detail::identity_index, std::size_t> indices(0, {});
    const heddle::detail::write_iterator<store_double> writer(0, store_double{written.data()});
    TWO_PHASES(cub::DeviceSelect::If, indices, writer, number.data(), n, is_multiple{3});
    CHECK(written.get(number.value()) == positions);
  }
}

TEST_CASE("cub: DevicePartition") {
  for (const int n : sizes) {
    CAPTURE(n);
    const auto count = static_cast<std::size_t>(n);
    const auto in = numbers<float>(n, 0, 99);
    const auto flags = numbers<int>(n, 0, 1, 2);
    const buffer<float> from(in), to(count);
    const buffer<int> marks(flags), first(1);
    const auto expected = [&](auto selects) {
      std::vector<float> v(count);
      std::size_t begin = 0, end = count;
      for (std::size_t i = 0; i < count; ++i) v[selects(i) ? begin++ : --end] = in[i];
      return v;
    };
    TWO_PHASES(cub::DevicePartition::If, from.data(), to.data(), first.data(), n, is_multiple{3});
    CHECK(to.get() == expected([&](std::size_t i) { return is_multiple{3}(in[i]); }));
    CHECK(first.value() == std::count_if(in.begin(), in.end(), is_multiple{3}));
    TWO_PHASES(cub::DevicePartition::Flagged, from.data(), marks.data(), to.data(), first.data(), n);
    CHECK(to.get() == expected([&](std::size_t i) { return flags[i] != 0; }));
    CHECK(first.value() == std::count(flags.begin(), flags.end(), 1));
  }
}

TEST_CASE("cub: DeviceRunLengthEncode") {
  for (const int n : sizes) {
    CAPTURE(n);
    const auto count = static_cast<std::size_t>(n);
    const auto in = numbers<unsigned char>(n, 0, 1);
    std::vector<unsigned char> items;
    std::vector<int> lengths, long_offsets, long_lengths;
    for (std::size_t i = 0, j = 0; i < count; i = j) {
      while (j < count && in[j] == in[i]) ++j;
      items.push_back(in[i]);
      lengths.push_back(static_cast<int>(j - i));
      if (j - i == 1) continue;
      long_offsets.push_back(static_cast<int>(i));
      long_lengths.push_back(static_cast<int>(j - i));
    }
    const buffer<unsigned char> from(in), unique(count);
    const buffer<int> counts(count), offsets(count), runs(1);
    TWO_PHASES(cub::DeviceRunLengthEncode::Encode, from.data(), unique.data(), counts.data(), runs.data(), n);
    auto k = static_cast<std::size_t>(runs.value());
    CHECK(unique.get(k) == items);
    CHECK(counts.get(k) == lengths);
    TWO_PHASES(cub::DeviceRunLengthEncode::NonTrivialRuns, from.data(), offsets.data(), counts.data(), runs.data(), n);
    k = static_cast<std::size_t>(runs.value());
    CHECK(offsets.get(k) == long_offsets);
    CHECK(counts.get(k) == long_lengths);
  }
}

TEST_CASE("cub: DeviceHistogram") {
  for (const int n : sizes) {
    CAPTURE(n);
    const auto in = numbers<int>(n, -5, 25);
    std::vector<unsigned> bins(5), halves(4);
    for (const int x : in) {
      if (x >= 0 && x < 20) ++bins[static_cast<std::size_t>(x / 4)];
      if (x >= 0 && x < 16) ++halves[static_cast<std::size_t>(x / 4)];
    }
    const buffer<int> from(in);
    const buffer<float> as_floats(std::vector<float>(in.begin(), in.end()));
    const buffer<unsigned> to(5), quarters(4);
    TWO_PHASES(cub::DeviceHistogram::HistogramEven, from.data(), to.data(), 6, 0, 20, n);
    CHECK(to.get() == bins);
    TWO_PHASES(cub::DeviceHistogram::HistogramEven, as_floats.data(), quarters.data(), 5, 0.0f, 16.0f, n);
    CHECK(quarters.get() == halves);
  }
}

struct add_index {
  unsigned long long* sum;
  __device__ void operator()(int i) const { atomicAdd(sum, static_cast<unsigned long long>(i)); }
};
struct double_it {
  __device__ void operator()(int& x) const { x *= 2; }
};

TEST_CASE("cub: DeviceFor") {
  for (const int n : sizes) {
    CAPTURE(n);
    const buffer<unsigned long long> sum(std::vector<unsigned long long>{0});
    REQUIRE(cub::DeviceFor::Bulk(n, add_index{sum.data()}) == cudaSuccess);
    CHECK(sum.value() == static_cast<unsigned long long>(n) * static_cast<unsigned long long>(n == 0 ? 0 : n - 1) / 2);
    auto in = numbers<int>(n, 0, 99);
    const buffer<int> data(in);
    REQUIRE(cub::DeviceFor::ForEachN(data.data(), n, double_it{}) == cudaSuccess);
    TWO_PHASES(cub::DeviceFor::ForEachN, data.data(), n, double_it{});
    for (int& x : in) x *= 4;
    CHECK(data.get() == in);
  }
}

// ---- Sorting

// A key's bits in an order that sorts: what CUB documents.
template <class Key> std::uint64_t sortable(Key key, bool floating, bool is_signed) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &key, sizeof key);
  const std::uint64_t sign = std::uint64_t{1} << (8 * sizeof(Key) - 1), all = sign | (sign - 1);
  if (floating) {
    if (bits == sign) bits = 0;
    return bits & sign ? ~bits & all : bits | sign;
  }
  return is_signed ? bits ^ sign : bits;
}

template <class Key> void sorts(std::vector<Key> keys, bool floating, bool is_signed) {
  const auto n = static_cast<int>(keys.size());
  const auto count = keys.size();
  std::vector<int> positions(count);
  std::iota(positions.begin(), positions.end(), 0);
  const auto same = [](const std::vector<Key>& a, const std::vector<Key>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(Key)) == 0);
  };
  const int width = static_cast<int>(8 * sizeof(Key));
  const int ranges[][2] = {{0, width}, {width / 2, width}, {3, width - 2}, {2, 2}};
  for (const auto& range : ranges) {
    for (const bool descending : {false, true}) {
      const int begin = range[0], end = range[1];
      CAPTURE(n, begin, end, descending);
      const auto digit = [&](int i) {
        std::uint64_t b = sortable(keys[static_cast<std::size_t>(i)], floating, is_signed);
        if (descending) b = ~b;
        return begin == end ? 0 : b >> begin & (~std::uint64_t{0} >> (64 - (end - begin)));
      };
      std::vector<int> order = positions;
      std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return digit(i) < digit(j); });
      std::vector<Key> sorted(count);
      for (std::size_t i = 0; i < count; ++i) sorted[i] = keys[static_cast<std::size_t>(order[i])];

      const buffer<Key> from(keys), to(count);
      const buffer<int> values(positions), moved(count);
      using sort = cub::DeviceRadixSort;
      if (descending)
        TWO_PHASES(sort::SortPairsDescending, from.data(), to.data(), values.data(), moved.data(), n, begin, end);
      else
        TWO_PHASES(sort::SortPairs, from.data(), to.data(), values.data(), moved.data(), n, begin, end);
      CHECK(same(to.get(), sorted));
      CHECK(moved.get() == order);
      CHECK(same(from.get(), keys));
      CHECK(values.get() == positions);

      cub::DoubleBuffer<Key> two_keys(from.data(), to.data());
      cub::DoubleBuffer<int> two_values(values.data(), moved.data());
      if (descending)
        TWO_PHASES(sort::SortPairsDescending, two_keys, two_values, n, begin, end);
      else
        TWO_PHASES(sort::SortPairs, two_keys, two_values, n, begin, end);
      if (begin != end) {
        CHECK(same((two_keys.selector == 0 ? from : to).get(), sorted));
        CHECK((two_values.selector == 0 ? values : moved).get() == order);
      } else {
        CHECK(two_keys.selector == 0);
      }

      if constexpr (std::is_same_v<Key, int>) {
        const buffer<Key> other(keys), only(count);
        if (descending)
          TWO_PHASES(sort::SortKeysDescending, other.data(), only.data(), n, begin, end);
        else
          TWO_PHASES(sort::SortKeys, other.data(), only.data(), n, begin, end);
        CHECK(same(only.get(), sorted));
        cub::DoubleBuffer<Key> one(other.data(), to.data());
        if (descending)
          TWO_PHASES(sort::SortKeysDescending, one, n, begin, end);
        else
          TWO_PHASES(sort::SortKeys, one, n, begin, end);
        if (begin != end) CHECK(same((one.selector == 0 ? other : to).get(), sorted));
      }
    }
  }
}

template <class Key> void sorts_integers() {
  for (const int n : sizes) {
    std::mt19937_64 random(static_cast<unsigned>(n));
    std::vector<Key> keys(static_cast<std::size_t>(n));
    for (Key& k : keys) k = static_cast<Key>(random());
    sorts(keys, false, std::is_signed_v<Key>);
  }
}
template <class Key> void sorts_floats() {
  for (const int n : sizes) {
    auto keys = numbers<Key>(n, -500, 500);
    const auto make = [&](std::size_t i, Key special) {
      if (i < keys.size()) keys[i] = special;
    };
    make(1, -std::numeric_limits<Key>::infinity());
    make(3, std::numeric_limits<Key>::infinity());
    make(5, Key(-0.0));
    make(6, Key(0.0));
    make(7, Key(-0.0));
    make(12, std::numeric_limits<Key>::quiet_NaN());
    make(13, -std::numeric_limits<Key>::quiet_NaN());
    make(14, std::numeric_limits<Key>::denorm_min());
    sorts(keys, true, true);
  }
}

TEST_CASE("cub: DeviceRadixSort") {
  SECTION("int") { sorts_integers<int>(); }
  SECTION("unsigned long long") { sorts_integers<unsigned long long>(); }
  SECTION("float") { sorts_floats<float>(); }
  SECTION("half") {
    std::vector<__half> keys(1000);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const auto bits = static_cast<std::uint16_t>(i * 40503);
      std::memcpy(static_cast<void*>(&keys[i]), &bits, sizeof bits);
    }
    sorts(keys, true, true);
  }
}

// ---- Blocks and warps

template <class T, int X, int Y, cub::BlockReduceAlgorithm Algorithm>
__global__ void block_sums(const T* in, T* out, int valid) {
  using reduce = cub::BlockReduce<T, X, Algorithm, Y>;
  using storage = typename reduce::TempStorage;
  HEDDLE_SHARED(storage, temporary);
  const int threads = X * Y,
            i = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.y * X + threadIdx.x);
  const T sum = reduce(temporary).Sum(in[i]);
  __syncthreads();
  const T part = reduce(temporary).Reduce(in[i], cuda::maximum<>{}, valid);
  __syncthreads();
  T pair[2] = {in[i], T(2) * in[i]};
  const T triple = reduce(temporary).Sum(pair);
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    out[3 * blockIdx.x] = sum;
    out[3 * blockIdx.x + 1] = part;
    out[3 * blockIdx.x + 2] = triple;
  }
}

template <class T, int X, int Y, cub::BlockReduceAlgorithm Algorithm = cub::BLOCK_REDUCE_WARP_REDUCTIONS>
void checks_block_sums() {
  constexpr int threads = X * Y, blocks = 3;
  const auto in = numbers<T>(blocks * threads, 1, 100);
  const buffer<T> from(in), to(3 * blocks);
  for (const int valid : {1, threads / 2 + 1, threads}) {
    CAPTURE(X, Y, valid);
    REQUIRE(launch({.blocks = dim3(blocks), .threads = dim3(X, Y)}, block_sums<T, X, Y, Algorithm>, from.data(),
                   to.data(), valid) == cudaSuccess);
    const auto got = to.get();
    for (int b = 0; b < blocks; ++b) {
      const auto first = in.begin() + b * threads;
      const T sum = std::accumulate(first, first + threads, T{});
      CHECK(got[static_cast<std::size_t>(3 * b)] == sum);
      CHECK(got[static_cast<std::size_t>(3 * b + 1)] == *std::max_element(first, first + valid));
      CHECK(got[static_cast<std::size_t>(3 * b + 2)] == 3 * sum);
    }
  }
}

template <int Threads> __global__ void block_composes(const affine* in, affine* out) {
  using reduce = cub::BlockReduce<affine, Threads>;
  using storage = typename reduce::TempStorage;
  HEDDLE_SHARED(storage, temporary);
  const affine all = reduce(temporary).Reduce(in[threadIdx.x], then{});
  if (threadIdx.x == 0) *out = all;
}
template <int Threads> __global__ void block_with_own_storage(const int* in, int* out) {
  const int sum = cub::BlockReduce<int, Threads>().Sum(in[threadIdx.x]);
  if (threadIdx.x == 0) *out = sum;
}

TEST_CASE("cub: BlockReduce") {
  checks_block_sums<int, 32, 1>();
  checks_block_sums<int, 96, 1>();
  checks_block_sums<float, 128, 1>();
  checks_block_sums<double, 256, 1, cub::BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY>();
  checks_block_sums<long long, 16, 4, cub::BLOCK_REDUCE_RAKING>();

  const auto in = affines(128);
  affine all{1, 0};
  for (const affine& a : in) all = then{}(all, a);
  const buffer<affine> from(in), to(1);
  REQUIRE(launch({.threads = dim3(128)}, block_composes<128>, from.data(), to.data()) == cudaSuccess);
  CHECK(to.value() == all);

  const buffer<int> ones(std::vector<int>(64, 1)), sum(1);
  REQUIRE(launch({.threads = dim3(64)}, block_with_own_storage<64>, ones.data(), sum.data()) == cudaSuccess);
  CHECK(sum.value() == 64);
}

// Hands out what comes before each block's part.
struct running {
  affine before;
  __device__ affine operator()(affine all) {
    const affine old = before;
    before = then{}(before, all);
    return old;
  }
};

// out: eight results per thread.
template <int Threads, cub::BlockScanAlgorithm Algorithm> __global__ void block_scans(const affine* in, affine* out) {
  using scan = cub::BlockScan<affine, Threads, Algorithm>;
  using storage = typename scan::TempStorage;
  HEDDLE_SHARED(storage, temporary);
  const int t = static_cast<int>(threadIdx.x);
  affine* const mine = out + 8 * t;
  affine result, all;
  scan(temporary).InclusiveScan(in[t], result, then{});
  mine[0] = result;
  __syncthreads();
  scan(temporary).ExclusiveScan(in[t], result, affine{3, 5}, then{}, all);
  mine[1] = result;
  mine[2] = all;
  __syncthreads();
  // Two parts of two items each, of which the second one continues the first one.
  running prefix{{1, 0}};
  for (int part = 0; part < 2; ++part) {
    affine items[2] = {in[2 * t], in[2 * t + 1]}, scanned[2];
    if (part == 0)
      scan(temporary).ExclusiveScan(items, scanned, then{}, prefix);
    else
      scan(temporary).InclusiveScan(items, scanned, then{}, prefix);
    mine[3 + 2 * part] = scanned[0];
    mine[4 + 2 * part] = scanned[1];
    __syncthreads();
  }
  affine items[2] = {in[2 * t], in[2 * t + 1]};
  scan(temporary).InclusiveScan(items, items, affine{3, 5}, then{});
  mine[7] = items[1];
}

template <int Threads, cub::BlockScanAlgorithm Algorithm = cub::BLOCK_SCAN_RAKING> void checks_block_scans() {
  CAPTURE(Threads);
  const auto in = affines(2 * Threads);
  const buffer<affine> from(in), to(8 * Threads);
  REQUIRE(launch({.threads = dim3(Threads)}, block_scans<Threads, Algorithm>, from.data(), to.data()) == cudaSuccess);
  const auto got = to.get();
  const affine one{1, 0}, init{3, 5};
  affine all = one;
  for (int t = 0; t < Threads; ++t) all = then{}(all, in[static_cast<std::size_t>(t)]);
  affine whole = one;
  for (const affine& a : in) whole = then{}(whole, a);
  affine before = one, doubled = one;
  bool right = true;
  for (std::size_t t = 0; t < Threads; ++t) {
    const affine* const mine = got.data() + 8 * t;
    right &= mine[1] == then{}(init, before);
    before = then{}(before, in[t]);
    right &= mine[0] == before && mine[2] == all;
    for (const std::size_t k : {0, 1}) {
      right &= mine[3 + k] == doubled;
      doubled = then{}(doubled, in[2 * t + k]);
      right &= mine[5 + k] == then{}(whole, doubled);
    }
    right &= mine[7] == then{}(init, doubled);
  }
  CHECK(right);
}

template <int Threads> __global__ void block_sum_scans(const int* in, int* out) {
  using scan = cub::BlockScan<int, Threads>;
  using storage = typename scan::TempStorage;
  HEDDLE_SHARED(storage, temporary);
  int exclusive, inclusive, all;
  scan(temporary).ExclusiveSum(in[threadIdx.x], exclusive);
  __syncthreads();
  scan(temporary).InclusiveSum(in[threadIdx.x], inclusive, all);
  out[3 * threadIdx.x] = exclusive;
  out[3 * threadIdx.x + 1] = inclusive;
  out[3 * threadIdx.x + 2] = all;
}

TEST_CASE("cub: BlockScan") {
  checks_block_scans<32>();
  checks_block_scans<48>();
  checks_block_scans<128, cub::BLOCK_SCAN_WARP_SCANS>();
  checks_block_scans<256, cub::BLOCK_SCAN_RAKING_MEMOIZE>();

  const auto in = numbers<int>(128, 0, 9);
  const buffer<int> from(in), to(3 * 128);
  REQUIRE(launch({.threads = dim3(128)}, block_sum_scans<128>, from.data(), to.data()) == cudaSuccess);
  std::vector<int> expected;
  int sum = 0;
  for (const int x : in) {
    expected.push_back(sum);
    expected.push_back(sum += x);
    expected.push_back(std::accumulate(in.begin(), in.end(), 0));
  }
  CHECK(to.get() == expected);
}

// out: per logical warp its sum, that of its first `valid` lanes, and its composition; per thread six scans.
template <int Lanes>
__global__ void warps(const int* in, const affine* maps, int* sums, affine* composed, affine* scanned, int valid) {
  constexpr int threads = 64;
  using reduce = cub::WarpReduce<int, Lanes>;
  using compose = cub::WarpReduce<affine, Lanes>;
  using scan = cub::WarpScan<affine, Lanes>;
  using reduces = typename reduce::TempStorage[threads / Lanes];
  using composes = typename compose::TempStorage[threads / Lanes];
  using scans = typename scan::TempStorage[threads / Lanes];
  HEDDLE_SHARED(reduces, for_sums);
  HEDDLE_SHARED(composes, for_maps);
  HEDDLE_SHARED(scans, for_scans);
  const int t = static_cast<int>(threadIdx.x), warp = t / Lanes;
  const int sum = reduce(for_sums[warp]).Sum(in[t]);
  __syncwarp();
  const int part = reduce(for_sums[warp]).Reduce(in[t], cuda::minimum<>{}, valid);
  const affine all = compose(for_maps[warp]).Reduce(maps[t], then{});
  if (t % Lanes == 0) {
    sums[2 * warp] = sum;
    sums[2 * warp + 1] = part;
    composed[warp] = all;
  }
  affine* const mine = scanned + 6 * t;
  affine inclusive, exclusive, total;
  scan(for_scans[warp]).InclusiveScan(maps[t], inclusive, then{}, total);
  mine[0] = inclusive;
  mine[1] = total;
  __syncwarp();
  scan(for_scans[warp]).ExclusiveScan(maps[t], exclusive, affine{3, 5}, then{});
  mine[2] = exclusive;
  __syncwarp();
  scan(for_scans[warp]).Scan(maps[t], inclusive, exclusive, affine{3, 5}, then{});
  mine[3] = inclusive;
  mine[4] = exclusive;
  __syncwarp();
  mine[5] = scan(for_scans[warp]).Broadcast(maps[t], Lanes - 1);
}

template <int Lanes> void checks_warps() {
  CAPTURE(Lanes);
  const auto in = numbers<int>(64, -100, 100);
  const auto maps = affines(64);
  const int valid = (Lanes + 1) / 2;
  const buffer<int> from(in), sums(2 * 64 / Lanes);
  const buffer<affine> maps_from(maps), composed(64 / Lanes), scanned(6 * 64);
  REQUIRE(launch({.threads = dim3(64)}, warps<Lanes>, from.data(), maps_from.data(), sums.data(), composed.data(),
                 scanned.data(), valid) == cudaSuccess);
  const auto got_sums = sums.get();
  const auto got_maps = composed.get(), got = scanned.get();
  const affine init{3, 5};
  for (std::size_t w = 0; w < 64 / Lanes; ++w) {
    const auto first = in.begin() + static_cast<int>(w) * Lanes;
    CHECK(got_sums[2 * w] == std::accumulate(first, first + Lanes, 0));
    CHECK(got_sums[2 * w + 1] == *std::min_element(first, first + valid));
    affine all = maps[w * Lanes];
    for (std::size_t i = 1; i < Lanes; ++i) all = then{}(all, maps[w * Lanes + i]);
    CHECK(got_maps[w] == all);
    affine before{1, 0};
    bool right = true;
    for (std::size_t i = 0; i < Lanes; ++i) {
      const affine* const mine = got.data() + 6 * (w * Lanes + i);
      right &= mine[2] == then{}(init, before) && mine[4] == mine[2];
      before = then{}(before, maps[w * Lanes + i]);
      right &= mine[0] == before && mine[1] == all && mine[3] == then{}(init, before);
      right &= mine[5] == maps[w * Lanes + Lanes - 1];
    }
    CHECK(right);
  }
}

__global__ void segmented_warp(const int* in, const int* flags, int* heads, int* tails) {
  using reduce = cub::WarpReduce<int>;
  using storage = typename reduce::TempStorage;
  HEDDLE_SHARED(storage, temporary);
  const int t = static_cast<int>(threadIdx.x);
  heads[t] = reduce(temporary).HeadSegmentedSum(in[t], flags[t]);
  __syncwarp();
  tails[t] = reduce(temporary).TailSegmentedSum(in[t], flags[t]);
}

TEST_CASE("cub: WarpReduce and WarpScan") {
  checks_warps<32>();
  checks_warps<8>();
  checks_warps<2>();

  const auto in = numbers<int>(32, 1, 100), flags = numbers<int>(32, 0, 1, 2);
  const buffer<int> from(in), marks(flags), heads(32), tails(32);
  REQUIRE(launch({.threads = dim3(32)}, segmented_warp, from.data(), marks.data(), heads.data(), tails.data()) ==
          cudaSuccess);
  const auto by_head = heads.get(), by_tail = tails.get();
  for (std::size_t i = 0; i < 32; ++i) {
    if (i == 0 || flags[i]) {
      int sum = in[i];
      for (std::size_t j = i + 1; j < 32 && !flags[j]; ++j) sum += in[j];
      CHECK(by_head[i] == sum);
    }
    if (i == 0 || flags[i - 1]) {
      int sum = in[i];
      for (std::size_t j = i; j + 1 < 32 && !flags[j]; ++j) sum += in[j + 1];
      CHECK(by_tail[i] == sum);
    }
  }
}

}  // namespace fidelity_cub
