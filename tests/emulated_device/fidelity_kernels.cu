// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// Small kernels with results that the CUDA C++ Programming Guide fixes: indices, barriers, warp operations, atomics and
// the idioms made of them.

#include "fidelity.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>
#include <cmath>
#include <cstdint>
#include <numeric>

// Not without a name: TEST_CASE opens such a namespace too, and nvcc takes the inner one for the outer.
namespace fidelity::kernels {

constexpr unsigned all_lanes = 0xffffffffu;

std::vector<int> counted(std::size_t n) {
  std::vector<int> values(n);
  std::iota(values.begin(), values.end(), 0);
  return values;
}

// ---- Indices

__global__ void indices_of_grid(uint3* thread, uint3* block, unsigned* extents) {
  const unsigned in_block = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned block_number = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned id = block_number * (blockDim.x * blockDim.y * blockDim.z) + in_block;
  thread[id] = threadIdx;
  block[id] = blockIdx;
  if (id == 0) {
    const unsigned e[] = {gridDim.x, gridDim.y, gridDim.z, blockDim.x, blockDim.y, blockDim.z};
    for (int i = 0; i < 6; ++i) extents[i] = e[i];
  }
}

void check_indices(dim3 blocks, dim3 threads) {
  const std::size_t per_block = std::size_t{threads.x} * threads.y * threads.z;
  const std::size_t n = per_block * blocks.x * blocks.y * blocks.z;
  device_array<uint3> thread(n, uint3{77, 77, 77}), block(n, uint3{77, 77, 77});
  device_array<unsigned> extents(6, 0);
  REQUIRE_CUDA(launch({blocks, threads}, indices_of_grid, thread.data(), block.data(), extents.data()));
  CHECK(extents.get() == std::vector<unsigned>{blocks.x, blocks.y, blocks.z, threads.x, threads.y, threads.z});
  const std::vector<uint3> t = thread.get(), b = block.get();
  std::size_t wrong = 0, id = 0;
  for (unsigned bz = 0; bz < blocks.z; ++bz)
    for (unsigned by = 0; by < blocks.y; ++by)
      for (unsigned bx = 0; bx < blocks.x; ++bx)
        for (unsigned tz = 0; tz < threads.z; ++tz)
          for (unsigned ty = 0; ty < threads.y; ++ty)
            for (unsigned tx = 0; tx < threads.x; ++tx, ++id)
              wrong +=
                  t[id].x != tx || t[id].y != ty || t[id].z != tz || b[id].x != bx || b[id].y != by || b[id].z != bz;
  CHECK(wrong == 0);
}

TEST_CASE("fidelity: indices in one dimension") {
  check_indices(dim3(1), dim3(1));
  check_indices(dim3(7), dim3(33));
}

TEST_CASE("fidelity: indices in two dimensions") { check_indices(dim3(3, 5), dim3(7, 9)); }

TEST_CASE("fidelity: indices in three dimensions") {
  check_indices(dim3(2, 3, 4), dim3(5, 3, 2));
  check_indices(dim3(1, 1, 9), dim3(1, 1, 64));
}

// The x index runs fastest, and 32 threads in a row make a warp.
__global__ void warps_of_block(unsigned* first_of_warp, unsigned* members) {
  const unsigned id = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned n = blockDim.x * blockDim.y * blockDim.z, begin = id / 32 * 32;
  const unsigned mask = n - begin >= 32 ? all_lanes : (1u << (n - begin)) - 1;
  first_of_warp[id] = __shfl_sync(mask, id, 0);
  members[id] = __ballot_sync(mask, 1);
}

TEST_CASE("fidelity: warps are made of threads in the order of their indices") {
  const unsigned n = 6 * 5 * 3;
  device_array<unsigned> first(n, 0), members(n, 0);
  REQUIRE_CUDA(launch({dim3(1), dim3(6, 5, 3)}, warps_of_block, first.data(), members.data()));
  const auto f = first.get(), m = members.get();
  for (unsigned i = 0; i < n; ++i) {
    CHECK(f[i] == i / 32 * 32);
    CHECK(m[i] == (i < 64 ? all_lanes : (1u << (n - 64)) - 1));
  }
}

__global__ void add_index(std::size_t n, int* values) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride)
    values[i] += static_cast<int>(i);
}

TEST_CASE("fidelity: a grid-stride loop visits each element once") {
  for (const std::size_t n : {0, 1, 95, 96, 97, 1000, 10007}) {
    device_array<int> values(std::vector<int>(n + 1, 5));
    REQUIRE_CUDA(launch({dim3(3), dim3(32)}, add_index, n, values.data()));
    std::vector<int> expected = counted(n + 1);
    for (int& e : expected) e += 5;
    expected[n] = 5;
    CHECK(values.get() == expected);
  }
}

__global__ void increment(int* value) { ++*value; }

TEST_CASE("fidelity: a kernel sees what the kernel before it in the stream wrote") {
  device_array<int> value(1, 0);
  for (int i = 0; i < 50; ++i) REQUIRE_CUDA(launch({}, increment, value.data()));
  CHECK(value.get() == std::vector<int>{50});
}

// ---- Shared memory and barriers

__global__ void reverse_block(int* values) {
  HEDDLE_SHARED(int[64], tile);
  int* const mine = values + blockIdx.x * 64;
  tile[threadIdx.x] = mine[threadIdx.x];
  __syncthreads();
  mine[threadIdx.x] = tile[63 - threadIdx.x];
}

TEST_CASE("fidelity: each block has its own shared memory") {
  device_array<int> values(counted(5 * 64));
  REQUIRE_CUDA(launch({dim3(5), dim3(64)}, reverse_block, values.data()));
  std::vector<int> expected = counted(5 * 64);
  for (int b = 0; b < 5; ++b) std::reverse(expected.begin() + 64 * b, expected.begin() + 64 * (b + 1));
  CHECK(values.get() == expected);
}

struct pair {
  double first;
  int second;
};

__global__ void several_shared(int* out) {
  HEDDLE_SHARED(int[32], a);
  HEDDLE_SHARED(pair[32], b);
  HEDDLE_SHARED(int, c);
  const int i = static_cast<int>(threadIdx.x);
  a[i] = i;
  b[i] = {i + 0.5, -i};
  if (i == 7) c = 1000;
  __syncthreads();
  const int j = 31 - i;
  out[i] = a[j] + static_cast<int>(2 * b[j].first) + b[j].second + c;  // j + (2 j + 1) - j + 1000
}

TEST_CASE("fidelity: shared variables don't overlap") {
  device_array<int> out(32, 0);
  REQUIRE_CUDA(launch({dim3(1), dim3(32)}, several_shared, out.data()));
  const auto got = out.get();
  for (int i = 0; i < 32; ++i) CHECK(got[static_cast<std::size_t>(i)] == 2 * (31 - i) + 1001);
}

template <class Value> __global__ void rotate_dynamic(Value* values) {
  HEDDLE_DYNAMIC_SHARED(Value, tile);
  tile[threadIdx.x] = values[threadIdx.x];
  __syncthreads();
  values[threadIdx.x] = tile[(threadIdx.x + 1) % blockDim.x];
}

TEST_CASE("fidelity: dynamic shared memory has the size of the launch") {
  for (const unsigned n : {1u, 31u, 100u, 256u}) {
    std::vector<int> expected = counted(n);
    device_array<int> values(expected);
    device_array<double> wide(std::vector<double>(expected.begin(), expected.end()));
    REQUIRE_CUDA(launch({dim3(1), dim3(n), n * sizeof(int)}, rotate_dynamic<int>, values.data()));
    REQUIRE_CUDA(launch({dim3(1), dim3(n), n * sizeof(double)}, rotate_dynamic<double>, wide.data()));
    std::rotate(expected.begin(), expected.begin() + 1, expected.end());
    CHECK(values.get() == expected);
    CHECK(wide.get() == std::vector<double>(expected.begin(), expected.end()));
  }
}

// One array is cut into several, and every declaration points to its beginning.
__global__ void carve(int n, int* out, unsigned* alignment) {
  HEDDLE_DYNAMIC_SHARED(double, wide);
  HEDDLE_DYNAMIC_SHARED(unsigned char, bytes);
  int* const narrow = reinterpret_cast<int*>(wide + n);
  const int i = static_cast<int>(threadIdx.x);
  wide[i] = i;
  narrow[i] = 10 * i;
  __syncthreads();
  out[i] = static_cast<int>(wide[n - 1 - i]) + narrow[n - 1 - i];
  if (i == 0) {
    alignment[0] = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(bytes) % 16);
    alignment[1] = reinterpret_cast<unsigned char*>(wide) == bytes;
  }
}

TEST_CASE("fidelity: dynamic shared memory is one aligned array") {
  const unsigned n = 50;
  device_array<int> out(n, -1);
  device_array<unsigned> alignment(2, 99);
  REQUIRE_CUDA(launch({dim3(1), dim3(n), n * (sizeof(double) + sizeof(int))}, carve, static_cast<int>(n), out.data(),
                      alignment.data()));
  const auto got = out.get();
  for (unsigned i = 0; i < n; ++i) CHECK(got[i] == 11 * static_cast<int>(n - 1 - i));
  CHECK(alignment.get() == std::vector<unsigned>{0, 1});
}

__global__ void transpose(const int* in, int* out, int rows, int columns) {
  HEDDLE_SHARED(int[16][17], tile);
  const int x = static_cast<int>(blockIdx.x * 16 + threadIdx.x), y = static_cast<int>(blockIdx.y * 16 + threadIdx.y);
  if (x < columns && y < rows) tile[threadIdx.y][threadIdx.x] = in[y * columns + x];
  __syncthreads();
  const int tx = static_cast<int>(blockIdx.y * 16 + threadIdx.x), ty = static_cast<int>(blockIdx.x * 16 + threadIdx.y);
  if (tx < rows && ty < columns) out[ty * rows + tx] = tile[threadIdx.x][threadIdx.y];
}

TEST_CASE("fidelity: a tile is transposed through shared memory") {
  const int rows = 37, columns = 50;
  device_array<int> in(counted(rows * columns)), out(rows * columns, -1);
  REQUIRE_CUDA(launch({dim3(4, 3), dim3(16, 16)}, transpose, in.data(), out.data(), rows, columns));
  const auto got = out.get();
  int wrong = 0;
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) wrong += got[static_cast<std::size_t>(c * rows + r)] != r * columns + c;
  CHECK(wrong == 0);
}

// Compute capability 7 and newer: a barrier waits for all threads that haven't exited.
__global__ void leave_early(int* out) {
  HEDDLE_SHARED(int[96], tile);
  const unsigned i = threadIdx.x;
  if (i >= 60) return;
  tile[i] = static_cast<int>(i);
  __syncthreads();
  if (i >= 40) return;
  out[i] = tile[59 - i];
  __syncthreads();
  out[i] += __syncthreads_count(i % 2 == 0) * 100;
}

TEST_CASE("fidelity: a barrier doesn't wait for threads that have exited") {
  device_array<int> out(40, -1);
  REQUIRE_CUDA(launch({dim3(1), dim3(96)}, leave_early, out.data()));
  const auto got = out.get();
  for (int i = 0; i < 40; ++i) CHECK(got[static_cast<std::size_t>(i)] == 59 - i + 2000);
}

__global__ void predicates(int* out) {
  const int i = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
  int* const row = out + i * 6;
  row[0] = __syncthreads_count(i % 3 == 0);
  row[1] = __syncthreads_and(i < n) != 0;
  row[2] = __syncthreads_and(i != n - 1) != 0;
  row[3] = __syncthreads_or(i == n / 2 ? -8 : 0) != 0;  // any value but zero is true
  row[4] = __syncthreads_or(0) != 0;
  row[5] = __syncthreads_count(2);
}

TEST_CASE("fidelity: barriers that count and combine predicates") {
  for (const int n : {1, 33, 100, 256}) {
    device_array<int> out(static_cast<std::size_t>(6 * n), -1);
    REQUIRE_CUDA(launch({dim3(1), dim3(static_cast<unsigned>(n))}, predicates, out.data()));
    const auto got = out.get();
    std::vector<int> expected;
    for (int i = 0; i < n; ++i)
      for (const int e : {(n + 2) / 3, 1, 0, 1, 0, n}) expected.push_back(e);
    CHECK(got == expected);
  }
}

__global__ void neighbours(int rounds, int* values) {
  HEDDLE_SHARED(int[64], a);
  HEDDLE_SHARED(int[64], b);
  int *from = a, *to = b;
  from[threadIdx.x] = values[threadIdx.x];
  for (int r = 0; r < rounds; ++r) {
    __syncthreads();
    to[threadIdx.x] = from[(threadIdx.x + 1) % 64] + 1;
    int* const swap = from;
    from = to;
    to = swap;
  }
  values[threadIdx.x] = from[threadIdx.x];
}

TEST_CASE("fidelity: a barrier in a loop separates its rounds") {
  device_array<int> values(counted(64));
  REQUIRE_CUDA(launch({dim3(1), dim3(64)}, neighbours, 70, values.data()));
  const auto got = values.get();
  for (int i = 0; i < 64; ++i) CHECK(got[static_cast<std::size_t>(i)] == (i + 70) % 64 + 70);
}

// ---- Warps

// Which lane each form of the shuffle reads, by its definition; -1 where it isn't defined.
struct indexed {
  __device__ static int read(int value, int argument, int width) {
    return __shfl_sync(all_lanes, value, argument, width);
  }
  static int source(int lane, int argument, int width) { return lane / width * width + (argument & (width - 1)); }
};
struct up {
  __device__ static int read(int value, int argument, int width) {
    return __shfl_up_sync(all_lanes, value, static_cast<unsigned>(argument), width);
  }
  static int source(int lane, int argument, int width) { return lane % width < argument ? lane : lane - argument; }
};
struct down {
  __device__ static int read(int value, int argument, int width) {
    return __shfl_down_sync(all_lanes, value, static_cast<unsigned>(argument), width);
  }
  static int source(int lane, int argument, int width) {
    return lane % width + argument >= width ? lane : lane + argument;
  }
};
// A group may read the groups before it, not those after it.
struct crossed {
  __device__ static int read(int value, int argument, int width) {
    return __shfl_xor_sync(all_lanes, value, argument, width);
  }
  static int source(int lane, int argument, int width) {
    return (lane ^ argument) / width > lane / width ? lane : lane ^ argument;
  }
};

template <class Form> __global__ void shuffle_all(int width, int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  for (int argument = 0; argument < 32; ++argument) out[argument * 32 + lane] = Form::read(lane, argument, width);
}

template <class Form> void check_shuffles() {
  for (int width = 1; width <= 32; width *= 2) {
    device_array<int> out(32 * 32, -1);
    REQUIRE_CUDA(launch({dim3(1), dim3(32)}, shuffle_all<Form>, width, out.data()));
    std::vector<int> expected;
    for (int argument = 0; argument < 32; ++argument)
      for (int lane = 0; lane < 32; ++lane) expected.push_back(Form::source(lane, argument, width));
    CHECK(out.get() == expected);
  }
}

TEST_CASE("fidelity: an indexed shuffle reads a lane of its group, modulo the width") { check_shuffles<indexed>(); }
TEST_CASE("fidelity: a shuffle up leaves the first lanes of a group as they are") { check_shuffles<up>(); }
TEST_CASE("fidelity: a shuffle down leaves the last lanes of a group as they are") { check_shuffles<down>(); }
TEST_CASE("fidelity: a crossed shuffle reads no later group") { check_shuffles<crossed>(); }

template <class Value> __global__ void shuffle_values(const Value* in, Value* out) {
  const Value value = in[threadIdx.x];
  Value* const row = out + threadIdx.x * 4;
  row[0] = __shfl_sync(all_lanes, value, 31 - static_cast<int>(threadIdx.x));
  row[1] = __shfl_up_sync(all_lanes, value, 3u);
  row[2] = __shfl_down_sync(all_lanes, value, 3u);
  row[3] = __shfl_xor_sync(all_lanes, value, 17);
}

template <class Value> void check_values(const std::vector<Value>& values) {
  device_array<Value> in(values), out(std::vector<Value>(128));
  REQUIRE_CUDA(launch({dim3(1), dim3(32)}, shuffle_values<Value>, in.data(), out.data()));
  std::vector<Value> expected;
  for (std::size_t lane = 0; lane < 32; ++lane)
    for (const std::size_t from : {31 - lane, lane < 3 ? lane : lane - 3, lane > 28 ? lane : lane + 3, lane ^ 17})
      expected.push_back(values[from]);
  CHECK(out.get() == expected);
}

template <class Value, class Function> std::vector<Value> each_lane(Function f) {
  std::vector<Value> values;
  for (int lane = 0; lane < 32; ++lane) values.push_back(static_cast<Value>(f(lane)));
  return values;
}

TEST_CASE("fidelity: shuffles of every type keep all bits") {
  const auto spread = [](int lane) { return 0x9e3779b97f4a7c15u * static_cast<unsigned long long>(lane + 1); };
  check_values(each_lane<int>(spread));
  check_values(each_lane<unsigned>(spread));
  check_values(each_lane<long>(spread));
  check_values(each_lane<unsigned long>(spread));
  check_values(each_lane<long long>(spread));
  check_values(each_lane<unsigned long long>(spread));
  check_values(each_lane<float>([](int lane) { return std::ldexp(1.0 + lane / 64.0, 3 * lane - 40); }));
  check_values(each_lane<double>([](int lane) { return std::ldexp(-1.0 - lane / 1e9, 30 * lane - 500); }));
}

// Lanes that took different branches may shuffle among themselves.
__global__ void shuffle_in_branches(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  int sum = lane;
  if (lane < 12) {
    const unsigned mask = 0xfffu;
    sum = __shfl_sync(mask, lane, (lane + 5) % 12) + 100;
  } else {
    const unsigned mask = 0xfffff000u;
    for (int from = 12; from < 32; ++from) sum += __shfl_sync(mask, lane, from);
  }
  __syncwarp();
  out[lane] = sum + 1000 * __shfl_xor_sync(all_lanes, lane, 1);
}

TEST_CASE("fidelity: parts of a warp shuffle in different branches") {
  device_array<int> out(32, -1);
  REQUIRE_CUDA(launch({dim3(1), dim3(32)}, shuffle_in_branches, out.data()));
  const auto got = out.get();
  for (int lane = 0; lane < 32; ++lane) {
    const int own = lane < 12 ? (lane + 5) % 12 + 100 : lane + 430;  // 12 + ... + 31
    CHECK(got[static_cast<std::size_t>(lane)] == own + 1000 * (lane ^ 1));
  }
}

__global__ void sum_warps(int n, int* sums) {
  const int i = static_cast<int>(threadIdx.x);
  const unsigned mask = __ballot_sync(all_lanes, i < n);
  if (i >= n) return;
  int sum = i;
  for (unsigned step = 16; step > 0; step /= 2) {
    const int other = __shfl_down_sync(mask, sum, step);
    if (i % 32 + static_cast<int>(step) < 32 && i + static_cast<int>(step) < n) sum += other;
  }
  if (i % 32 == 0) sums[i / 32] = sum;
}

TEST_CASE("fidelity: the last warp of a sum may be partly gone") {
  for (const int n : {1, 31, 32, 33, 77, 128}) {
    device_array<int> sums(4, 0);
    REQUIRE_CUDA(launch({dim3(1), dim3(128)}, sum_warps, n, sums.data()));
    std::vector<int> expected(4, 0);
    for (int i = 0; i < n; ++i) expected[static_cast<std::size_t>(i / 32)] += i;
    CHECK(sums.get() == expected);
  }
}

__global__ void short_warp(unsigned* out) {
  const unsigned i = threadIdx.x, mask = i < 32 ? all_lanes : (1u << (blockDim.x - 32)) - 1;
  out[i] = __ballot_sync(mask, i % 2 == 0) + __reduce_max_sync(mask, i);
}

TEST_CASE("fidelity: a block's last warp may be short") {
  const unsigned n = 45;
  device_array<unsigned> out(n, 0);
  REQUIRE_CUDA(launch({dim3(1), dim3(n)}, short_warp, out.data()));
  const auto got = out.get();
  for (unsigned i = 0; i < n; ++i) CHECK(got[i] == (i < 32 ? 0x55555555u + 31 : 0x1555u + 44));
}

__global__ void votes(unsigned* out) {
  const int lane = static_cast<int>(threadIdx.x);
  unsigned* const row = out + lane * 8;
  row[0] = __ballot_sync(all_lanes, lane % 3 == 0 ? lane + 1 : 0);
  row[1] = __any_sync(all_lanes, lane == 31) != 0;
  row[2] = __any_sync(all_lanes, lane == 32) != 0;
  row[3] = __all_sync(all_lanes, lane < 32) != 0;
  row[4] = __all_sync(all_lanes, lane != 5) != 0;
  row[5] = row[6] = row[7] = 9;
  if (lane % 2 == 0) {
    const unsigned mask = 0x55555555u;
    row[5] = __ballot_sync(mask, lane >= 16);
    row[6] = __any_sync(mask, lane == 3) != 0;  // not of this mask
    row[7] = __all_sync(mask, lane % 2 == 0) != 0;
  }
}

TEST_CASE("fidelity: votes count only the lanes of the mask") {
  device_array<unsigned> out(32 * 8, 7);
  REQUIRE_CUDA(launch({dim3(1), dim3(32)}, votes, out.data()));
  const auto got = out.get();
  for (std::size_t lane = 0; lane < 32; ++lane) {
    std::vector<unsigned> expected{0x49249249u, 1, 0, 1, 0, 9, 9, 9};
    if (lane % 2 == 0) expected[5] = 0x55550000u, expected[6] = 0, expected[7] = 1;
    CHECK(std::vector<unsigned>(got.begin() + static_cast<std::ptrdiff_t>(8 * lane),
                                got.begin() + static_cast<std::ptrdiff_t>(8 * lane + 8)) == expected);
  }
}

__global__ void matches(unsigned* out) {
  const int lane = static_cast<int>(threadIdx.x);
  unsigned* const row = out + lane * 6;
  int same = -1, other = -1;
  row[0] = __match_any_sync(all_lanes, lane % 3);
  row[1] = __match_any_sync(all_lanes, (1ull << 40) * static_cast<unsigned long long>(lane / 8));
  row[2] = __match_all_sync(all_lanes, 17, &same);
  row[3] = __match_all_sync(all_lanes, lane / 31, &other);
  row[4] = static_cast<unsigned>(same != 0) * 2 + static_cast<unsigned>(other != 0);
  row[5] = 0;
  if (lane >= 20) row[5] = __match_any_sync(0xfff00000u, lane < 22 ? 1.5 : 2.5);
}

TEST_CASE("fidelity: lanes find those with the same value") {
  device_array<unsigned> out(32 * 6, 7);
  REQUIRE_CUDA(launch({dim3(1), dim3(32)}, matches, out.data()));
  const auto got = out.get();
  for (unsigned lane = 0; lane < 32; ++lane) {
    CHECK(got[lane * 6] == (lane % 3 == 0 ? 0x49249249u : lane % 3 == 1 ? 0x92492492u : 0x24924924u));
    CHECK(got[lane * 6 + 1] == 0xffu << lane / 8 * 8);
    CHECK(got[lane * 6 + 2] == all_lanes);
    CHECK(got[lane * 6 + 3] == 0);
    CHECK(got[lane * 6 + 4] == 2);
    CHECK(got[lane * 6 + 5] == (lane < 20 ? 0 : lane < 22 ? 0x00300000u : 0xffc00000u));
  }
}

__global__ void reductions(const unsigned* in, unsigned mask, unsigned* out) {
  const unsigned lane = threadIdx.x;
  if (!(mask >> lane & 1u)) return;
  const unsigned value = in[lane];
  const int number = static_cast<int>(value);
  unsigned* const row = out + lane * 9;
  row[0] = __reduce_add_sync(mask, value);
  row[1] = __reduce_min_sync(mask, value);
  row[2] = __reduce_max_sync(mask, value);
  row[3] = __reduce_and_sync(mask, value);
  row[4] = __reduce_or_sync(mask, value);
  row[5] = __reduce_xor_sync(mask, value);
  row[6] = static_cast<unsigned>(__reduce_add_sync(mask, number));
  row[7] = static_cast<unsigned>(__reduce_min_sync(mask, number));
  row[8] = static_cast<unsigned>(__reduce_max_sync(mask, number));
}

TEST_CASE("fidelity: reductions over a warp wrap around and keep signs") {
  std::vector<unsigned> values;
  for (unsigned lane = 0; lane < 32; ++lane) values.push_back(0x9e3779b9u * (lane + 3) | 0x00010000u);
  for (const unsigned mask : {all_lanes, 0x0000ffffu, 0x80000001u, 0x00000400u, 0xa5a5a5a5u}) {
    device_array<unsigned> in(values), out(32 * 9, 1234);
    REQUIRE_CUDA(launch({dim3(1), dim3(32)}, reductions, in.data(), mask, out.data()));
    unsigned sum = 0, least = UINT_MAX, most = 0, both = UINT_MAX, any = 0, odd = 0;
    int lowest = INT_MAX, highest = INT_MIN;
    for (unsigned lane = 0; lane < 32; ++lane) {
      if (!(mask >> lane & 1u)) continue;
      const unsigned v = values[lane];
      sum += v, least = (std::min)(least, v), most = (std::max)(most, v), both &= v, any |= v, odd ^= v;
      lowest = (std::min)(lowest, static_cast<int>(v)), highest = (std::max)(highest, static_cast<int>(v));
    }
    const auto got = out.get();
    std::vector<unsigned> expected;
    for (unsigned lane = 0; lane < 32; ++lane) {
      for (const unsigned e :
           {sum, least, most, both, any, odd, sum, static_cast<unsigned>(lowest), static_cast<unsigned>(highest)})
        expected.push_back(mask >> lane & 1u ? e : 1234);
    }
    CHECK(got == expected);
  }
}

__global__ void exchange_in_warps(int* values) {
  HEDDLE_SHARED(int[96], tile);
  const unsigned i = threadIdx.x, warp = i / 32 * 32;
  int value = values[i];
  for (int round = 0; round < 8; ++round) {
    tile[i] = value;
    __syncwarp();
    value = tile[warp + (i + 1) % 32];
    __syncwarp();
  }
  values[i] = value;
}

TEST_CASE("fidelity: __syncwarp orders shared memory in a warp") {
  device_array<int> values(counted(96));
  REQUIRE_CUDA(launch({dim3(1), dim3(96)}, exchange_in_warps, values.data()));
  const auto got = values.get();
  for (int i = 0; i < 96; ++i) CHECK(got[static_cast<std::size_t>(i)] == i / 32 * 32 + (i + 8) % 32);
}

__global__ void sync_halves(int* out) {
  HEDDLE_SHARED(int[32], tile);
  const unsigned i = threadIdx.x, mask = i < 16 ? 0x0000ffffu : 0xffff0000u;
  tile[i] = static_cast<int>(i);
  __syncwarp(mask);
  out[i] = tile[i ^ 15];
}

TEST_CASE("fidelity: __syncwarp of half a warp") {
  device_array<int> out(32, -1);
  REQUIRE_CUDA(launch({dim3(1), dim3(32)}, sync_halves, out.data()));
  const auto got = out.get();
  for (int i = 0; i < 32; ++i) CHECK(got[static_cast<std::size_t>(i)] == (i ^ 15));
}

__global__ void active(unsigned* out) { out[threadIdx.x] = threadIdx.x < 10 ? __activemask() : 1u << threadIdx.x; }

TEST_CASE("fidelity: __activemask names the caller and only those who may be with it") {
  device_array<unsigned> out(32, 0);
  REQUIRE_CUDA(launch({dim3(1), dim3(32)}, active, out.data()));
  const auto got = out.get();
  for (unsigned i = 0; i < 32; ++i) {
    CHECK((got[i] >> i & 1u) == 1u);
    CHECK((i >= 10 || got[i] < 1024u));
  }
}

// ---- Atomics

template <class Value> __global__ void add_ones(Value* sum, Value* before) {
  before[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(sum, static_cast<Value>(1));
}

template <class Value> void check_tickets() {
  device_array<Value> sum(1, Value{5}), before(8 * 64, Value{0});
  REQUIRE_CUDA(launch({dim3(8), dim3(64)}, add_ones<Value>, sum.data(), before.data()));
  CHECK(sum.get()[0] == Value{517});
  std::vector<Value> got = before.get();
  std::sort(got.begin(), got.end());
  for (int i = 0; i < 512; ++i) CHECK(got[static_cast<std::size_t>(i)] == static_cast<Value>(5 + i));
}

TEST_CASE("fidelity: atomicAdd hands out each value once") {
  check_tickets<int>();
  check_tickets<unsigned>();
  check_tickets<unsigned long long>();
  check_tickets<float>();
  check_tickets<double>();
}

// Sums of 16-bit types: whole numbers up to the fraction's width are exact, in any order.
template <class Narrow> __global__ void add_narrow(Narrow* sum, float* before, float value) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  before[i] = static_cast<float>(atomicAdd(sum, Narrow(value)));
}
template <class Pair, class Narrow> __global__ void add_pairs(Pair* sum, float2* before) {
  const Pair old = atomicAdd(sum, Pair(Narrow(1.0f), Narrow(threadIdx.x == 0 ? 2.0f : 0.0f)));
  before[threadIdx.x] = make_float2(static_cast<float>(old.x), static_cast<float>(old.y));
}

template <class Narrow, class Pair> void check_narrow_sums(unsigned blocks, float too_large, float too_small) {
  const unsigned n = blocks * 32;
  device_array<Narrow> sum(2, Narrow(0.0f));
  device_array<float> before(n, -1.0f);
  REQUIRE_CUDA(launch({dim3(blocks), dim3(32)}, add_narrow<Narrow>, sum.data(), before.data(), 1.0f));
  CHECK(static_cast<float>(sum.get()[0]) == static_cast<float>(n));
  CHECK(static_cast<float>(sum.get()[1]) == 0.0f);  // the other half of the word
  std::vector<float> tickets = before.get();
  std::sort(tickets.begin(), tickets.end());
  for (unsigned i = 0; i < n; ++i) CHECK(tickets[i] == static_cast<float>(i));
  // Rounded to the nearest at each step: the smaller addend is lost, a tie goes to even.
  device_array<Narrow> large(1, Narrow(too_large));
  REQUIRE_CUDA(launch({dim3(1), dim3(5)}, add_narrow<Narrow>, large.data(), before.data(), too_small));
  CHECK(static_cast<float>(large.get()[0]) == too_large);
  device_array<Pair> pair(1, Pair(Narrow(0.0f), Narrow(4.0f)));
  device_array<float2> old(64, float2{});
  REQUIRE_CUDA(launch({dim3(1), dim3(64)}, add_pairs<Pair, Narrow>, pair.data(), old.data()));
  CHECK(static_cast<float>(pair.get()[0].x) == 64.0f);
  CHECK(static_cast<float>(pair.get()[0].y) == 6.0f);
  CHECK(old.get()[0].y == 4.0f);
  // Each half is atomic by itself: the first ones are tickets, whatever the second ones say.
  std::vector<float> firsts;
  for (const float2 f : old.get()) firsts.push_back(f.x);
  std::sort(firsts.begin(), firsts.end());
  for (unsigned i = 0; i < 64; ++i) CHECK(firsts[i] == static_cast<float>(i));
}

TEST_CASE("fidelity: atomicAdd of half, bfloat16 and their pairs") {
  check_narrow_sums<__half, __half2>(8, 2048.0f, 1.0f);
  check_narrow_sums<__nv_bfloat16, __nv_bfloat162>(4, 256.0f, 1.0f);
}

// One thread, one place: what each function leaves there and returns.
__global__ void single_atomics(int* i, unsigned* u, unsigned long long* w, long long* l, float* f, int* returned) {
  int n = 0;
  returned[n++] = atomicAdd(i, -3);                             // 10 -> 7
  returned[n++] = atomicSub(i, 9);                              // 7 -> -2
  returned[n++] = atomicMin(i, 4);                              // -2
  returned[n++] = atomicMax(i, 6);                              // -2 -> 6
  returned[n++] = atomicAnd(i, 12);                             // 6 -> 4
  returned[n++] = atomicOr(i, 3);                               // 4 -> 7
  returned[n++] = atomicXor(i, 5);                              // 7 -> 2
  returned[n++] = atomicExch(i, 77);                            // 2 -> 77
  returned[n++] = atomicCAS(i, 76, 1);                          // 77
  returned[n++] = atomicCAS(i, 77, 42);                         // 77 -> 42
  returned[n++] = static_cast<int>(atomicSub(u, 1u));           // 0 -> 0xffffffff
  returned[n++] = static_cast<int>(atomicMin(u, 8u));           // 0xffffffff -> 8
  returned[n++] = static_cast<int>(atomicMax(u, 0x80000000u));  // 8 -> 0x80000000
  returned[n++] = static_cast<int>(atomicExch(f, 2.5f));        // 7 -> 2.5
  atomicAdd(w, 1ull << 40);
  atomicOr(w, 1ull << 50);
  atomicXor(w, 1ull << 40);
  atomicAnd(w, ~1ull);
  atomicMax(w, 1ull << 49);
  atomicMin(w, 1ull << 60);
  atomicMin(l, -(1ll << 40));
  atomicMax(l, -(1ll << 41));
  if (atomicCAS(w, 1ull << 50, 3ull << 50) == 1ull << 50) returned[n++] = 1;
  if (atomicExch(w, 9ull) == 3ull << 50) returned[n++] = 2;
}

TEST_CASE("fidelity: what every atomic function leaves and returns") {
  device_array<int> i(1, 10), returned(16, -1);
  device_array<unsigned> u(1, 0);
  device_array<unsigned long long> w(1, 1);
  device_array<long long> l(1, 5);
  device_array<float> f(1, 7.0f);
  REQUIRE_CUDA(launch({}, single_atomics, i.data(), u.data(), w.data(), l.data(), f.data(), returned.data()));
  CHECK(returned.get() == std::vector<int>{10, 7, -2, -2, 6, 4, 7, 2, 77, 77, 0, -1, 8, 7, 1, 2});
  CHECK(i.get()[0] == 42);
  CHECK(u.get()[0] == 0x80000000u);
  CHECK(w.get()[0] == 9);
  CHECK(l.get()[0] == -(1ll << 40));
  CHECK(f.get()[0] == 2.5f);
}

__global__ void combine(const int* in, int* out, unsigned* bits) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicMin(out, in[i]);
  atomicMax(out + 1, in[i]);
  atomicSub(out + 2, in[i]);
  atomicOr(bits, 1u << i % 32);
  atomicAnd(bits + 1, ~(1u << i % 16));
  atomicXor(bits + 2, i);
}

TEST_CASE("fidelity: atomics of many blocks combine to one result") {
  std::vector<int> values;
  int least = INT_MAX, most = INT_MIN, sum = 0;
  unsigned odd = 0;
  for (unsigned i = 0; i < 512; ++i) {
    const int v = static_cast<int>(i * 2654435761u >> 12) - 500000;
    values.push_back(v);
    least = (std::min)(least, v), most = (std::max)(most, v), sum += v, odd ^= i;
  }
  device_array<int> in(values), out(std::vector<int>{INT_MAX, INT_MIN, 0});
  device_array<unsigned> bits(std::vector<unsigned>{0, all_lanes, 0});
  REQUIRE_CUDA(launch({dim3(4), dim3(128)}, combine, in.data(), out.data(), bits.data()));
  CHECK(out.get() == std::vector<int>{least, most, -sum});
  CHECK(bits.get() == std::vector<unsigned>{all_lanes, 0xffff0000u, odd});
}

__global__ void wrap_around(unsigned* counters, unsigned* seen) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  seen[2 * i] = atomicInc(counters, 9);
  seen[2 * i + 1] = atomicDec(counters + 1, 9);
}

TEST_CASE("fidelity: atomicInc and atomicDec wrap around") {
  device_array<unsigned> counters(std::vector<unsigned>{0, 0}), seen(2 * 128, 99);
  REQUIRE_CUDA(launch({dim3(2), dim3(64)}, wrap_around, counters.data(), seen.data()));
  CHECK(counters.get() == std::vector<unsigned>{8, 2});  // 128 steps of 10
  unsigned up_counts[10] = {}, down_counts[10] = {};
  const auto got = seen.get();
  for (std::size_t i = 0; i < 128; ++i) {
    REQUIRE(got[2 * i] < 10);
    REQUIRE(got[2 * i + 1] < 10);
    ++up_counts[got[2 * i]];
    ++down_counts[got[2 * i + 1]];
  }
  for (unsigned v = 0; v < 10; ++v) {
    CHECK(up_counts[v] == (v < 8 ? 13u : 12u));
    CHECK(down_counts[v] == (v == 0 || v > 2 ? 13u : 12u));
  }
}

__global__ void out_of_range(unsigned* counters) {
  counters[2] = atomicInc(counters, 9);
  counters[3] = atomicDec(counters + 1, 9);
}

TEST_CASE("fidelity: atomicInc and atomicDec bring a value beyond the limit back") {
  device_array<unsigned> counters(std::vector<unsigned>{50, 50, 0, 0});
  REQUIRE_CUDA(launch({}, out_of_range, counters.data()));
  CHECK(counters.get() == std::vector<unsigned>{0, 9, 50, 50});
}

// The loop of the programming guide, any operation from compare and swap; what it begins with is read by an atomic too.
__device__ float atomic_max(float* address, float value) {
  unsigned* const bits = reinterpret_cast<unsigned*>(address);
  unsigned old = atomicOr(bits, 0u), expected;
  do {
    expected = old;
    if (__uint_as_float(expected) >= value) break;
    old = atomicCAS(bits, expected, __float_as_uint(value));
  } while (old != expected);
  return __uint_as_float(old);
}

__global__ void maximum(const float* in, float* most, unsigned long long* product) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  atomic_max(most, in[i]);
  unsigned long long old = atomicAdd(product, 0ull), expected;
  do {
    expected = old;
    old = atomicCAS(product, expected, expected * 3);
  } while (old != expected);
}

TEST_CASE("fidelity: loops of compare and swap lose no update") {
  std::vector<float> values;
  for (int i = 0; i < 256; ++i) values.push_back(static_cast<float>(i * 97 % 256) - 300.5f);
  device_array<float> in(values), most(1, -1e30f);
  device_array<unsigned long long> product(1, 1);
  REQUIRE_CUDA(launch({dim3(4), dim3(64)}, maximum, in.data(), most.data(), product.data()));
  CHECK(most.get()[0] == -45.5f);
  unsigned long long power = 1;
  for (int i = 0; i < 256; ++i) power *= 3;
  CHECK(product.get()[0] == power);
}

__global__ void halves_of_words(unsigned short* at) {
  unsigned short old = 0, expected;
  do {
    expected = old;
    old = atomicCAS(at + threadIdx.x % 2, expected, static_cast<unsigned short>(expected + 1));
  } while (old != expected);
}

TEST_CASE("fidelity: compare and swap of 16 bits leaves the other half alone") {
  device_array<unsigned short> at(4, 0);
  REQUIRE_CUDA(launch({dim3(3), dim3(33)}, halves_of_words, at.data()));
  CHECK(at.get() == std::vector<unsigned short>{51, 48, 0, 0});
}

// A stack: whoever exchanges the head gets the element before.
__global__ void push_all(int* head, int* next) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  next[i] = atomicExch(head, i);
}

TEST_CASE("fidelity: exchanges link every element once") {
  device_array<int> head(1, -1), next(300, -7);
  REQUIRE_CUDA(launch({dim3(5), dim3(60)}, push_all, head.data(), next.data()));
  const auto links = next.get();
  std::vector<int> seen(300, 0);
  int steps = 0;
  for (int at = head.get()[0]; at != -1 && steps < 300; at = links[static_cast<std::size_t>(at)], ++steps)
    ++seen[static_cast<std::size_t>(at)];
  CHECK(steps == 300);
  CHECK(seen == std::vector<int>(300, 1));
}

__global__ void histogram(std::size_t n, const unsigned* values, unsigned* bins) {
  HEDDLE_SHARED(unsigned[16], own);
  if (threadIdx.x < 16) own[threadIdx.x] = 0;
  __syncthreads();
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    atomicAdd(&own[values[i] % 16], 1u);
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(bins + threadIdx.x, own[threadIdx.x]);
}

TEST_CASE("fidelity: a histogram through atomics on shared memory") {
  std::vector<unsigned> values, expected(16, 0);
  for (unsigned i = 0; i < 3000; ++i) {
    values.push_back(i * i + 3 * i);
    ++expected[values.back() % 16];
  }
  device_array<unsigned> in(values), bins(16, 0);
  REQUIRE_CUDA(launch({dim3(4), dim3(96)}, histogram, values.size(), in.data(), bins.data()));
  CHECK(bins.get() == expected);
}

__global__ void scoped(int* values) {
  HEDDLE_SHARED(int, own);
  if (threadIdx.x == 0) own = 0;
  __syncthreads();
  atomicAdd_block(&own, 2);
  atomicMax_block(values + 1, static_cast<int>(threadIdx.x));
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd_system(values, own);
}

TEST_CASE("fidelity: atomics with a scope") {
  device_array<int> values(2, 1);
  REQUIRE_CUDA(launch({dim3(1), dim3(70)}, scoped, values.data()));
  CHECK(values.get() == std::vector<int>{141, 69});
}

// ---- Idioms

// Blocks write partial sums; the last one to finish, found by a counter, adds them up.
__global__ void sum_with_last_block(std::size_t n, const int* in, int* partial, unsigned* done, int* result) {
  HEDDLE_SHARED(int[64], tile);
  HEDDLE_SHARED(bool, last);
  int sum = 0;
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += in[i];
  tile[threadIdx.x] = sum;
  __syncthreads();
  for (unsigned half = 32; half > 0; half /= 2) {
    if (threadIdx.x < half) tile[threadIdx.x] += tile[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = tile[0];
    __threadfence();
    last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) {
    const volatile int* const written = partial;
    int all = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) all += written[b];
    *result = all;
  }
}

TEST_CASE("fidelity: the last block to finish sees what all others wrote") {
  const std::size_t n = 5000;
  device_array<int> in(counted(n)), partial(9, -1), result(1, -1);
  device_array<unsigned> done(1, 0);
  for (int round = 0; round < 3; ++round) {  // the counter is back at zero after each
    REQUIRE_CUDA(
        launch({dim3(9), dim3(64)}, sum_with_last_block, n, in.data(), partial.data(), done.data(), result.data()));
    CHECK(result.get()[0] == static_cast<int>(n * (n - 1) / 2));
    CHECK(done.get()[0] == 0);
  }
}

__global__ void with_lock(int* lock, long long* guarded) {
  if (threadIdx.x % 8 == 0) {
    bool entered = false;
    while (!entered) {
      if (atomicCAS(lock, 0, 1) != 0) continue;
      __threadfence();
      volatile long long* const values = guarded;
      values[0] = values[0] + 1;
      values[1] = values[1] + values[0];
      __threadfence();
      atomicExch(lock, 0);
      entered = true;
    }
  }
}

TEST_CASE("fidelity: a spin lock lets one thread in at a time") {
  device_array<int> lock(1, 0);
  device_array<long long> guarded(2, 0);
  REQUIRE_CUDA(launch({dim3(6), dim3(64)}, with_lock, lock.data(), guarded.data()));
  CHECK(guarded.get() == std::vector<long long>{48, 48 * 49 / 2});
  CHECK(lock.get()[0] == 0);
}

__global__ void hand_over(const int* in, int* out) {
  HEDDLE_SHARED(int, data);
  HEDDLE_SHARED(int, flag);
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    data = in[blockIdx.x] * 3;
    __threadfence_block();
    atomicExch(&flag, 1);
  } else if (threadIdx.x == 32) {
    while (atomicAdd(&flag, 0) == 0) {
    }
    __threadfence_block();
    out[blockIdx.x] = *static_cast<volatile int*>(&data);
  }
}

TEST_CASE("fidelity: a flag and fences hand data to another warp") {
  device_array<int> in(counted(20)), out(20, -1);
  REQUIRE_CUDA(launch({dim3(20), dim3(64)}, hand_over, in.data(), out.data()));
  std::vector<int> expected = counted(20);
  for (int& e : expected) e *= 3;
  CHECK(out.get() == expected);
}

// One atomic per warp: the lanes that keep something count themselves by a ballot.
__global__ void append(int n, const int* in, int* out, unsigned* count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const unsigned lane = threadIdx.x % 32;
  const bool keep = i < n && in[i] % 3 == 1;
  const unsigned kept = __ballot_sync(all_lanes, keep);
  unsigned begin = 0;
  if (lane == 0 && kept != 0) begin = atomicAdd(count, static_cast<unsigned>(__popc(kept)));
  begin = __shfl_sync(all_lanes, begin, 0);
  if (keep) out[begin + static_cast<unsigned>(__popc(kept & ((1u << lane) - 1)))] = in[i];
}

TEST_CASE("fidelity: warps append what they keep without holes") {
  const int n = 1000;
  device_array<int> in(counted(n)), out(n, -1);
  device_array<unsigned> count(1, 0);
  REQUIRE_CUDA(launch({dim3(16), dim3(64)}, append, n, in.data(), out.data(), count.data()));
  REQUIRE(count.get()[0] == 333);
  std::vector<int> got = out.get();
  CHECK(std::count(got.begin(), got.end(), -1) == n - 333);
  got.resize(333);
  for (std::size_t i = 1; i < got.size(); ++i) {  // in order within a warp's 32 inputs
    if (got[i] / 32 == got[i - 1] / 32) CHECK(got[i] > got[i - 1]);
  }
  std::sort(got.begin(), got.end());
  for (int i = 0; i < 333; ++i) CHECK(got[static_cast<std::size_t>(i)] == 3 * i + 1);
}

// Scan of warps, scan of their totals, sum of both.
__global__ void scan_block(const int* in, int* out) {
  HEDDLE_SHARED(int[32], totals);
  const unsigned i = threadIdx.x, lane = i % 32, warp = i / 32;
  int sum = in[i];
  for (unsigned step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(all_lanes, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) totals[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    int total = lane < blockDim.x / 32 ? totals[lane] : 0;
    for (unsigned step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(all_lanes, total, step);
      if (lane >= step) total += other;
    }
    totals[lane] = total;
  }
  __syncthreads();
  out[i] = sum + (warp == 0 ? 0 : totals[warp - 1]);
}

void check_scan(unsigned n) {
  std::vector<int> values, expected;
  int sum = 0;
  for (unsigned i = 0; i < n; ++i) {
    values.push_back(static_cast<int>(i * 7919 % 101) - 50);
    expected.push_back(sum += values.back());
  }
  device_array<int> in(values), out(n, 0);
  REQUIRE_CUDA(launch({dim3(1), dim3(n)}, scan_block, in.data(), out.data()));
  CHECK(out.get() == expected);
}

TEST_CASE("fidelity: a scan of a block by warps") {
  check_scan(32);
  check_scan(256);
}
TEST_CASE("fidelity: a scan of the largest block", "[big]") { check_scan(1024); }

template <unsigned Threads> __global__ void reduce_tree(const float* in, float* out) {
  HEDDLE_SHARED(float[Threads], tile);
  tile[threadIdx.x] = in[blockIdx.x * Threads + threadIdx.x];
  for (unsigned half = Threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) tile[threadIdx.x] += tile[threadIdx.x + half];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = tile[0];
}

template <unsigned Threads> void check_tree() {
  const std::size_t blocks = 3;
  std::vector<float> values;
  for (std::size_t i = 0; i < blocks * Threads; ++i) values.push_back(1.0f / static_cast<float>(i + 1));
  device_array<float> in(values), out(blocks, 0.0f);
  REQUIRE_CUDA(
      launch({dim3(static_cast<unsigned>(blocks)), dim3(Threads)}, reduce_tree<Threads>, in.data(), out.data()));
  const auto got = out.get();
  for (std::size_t b = 0; b < blocks; ++b) {
    std::vector<float> tile(values.begin() + static_cast<std::ptrdiff_t>(b * Threads),
                            values.begin() + static_cast<std::ptrdiff_t>((b + 1) * Threads));
    for (unsigned half = Threads / 2; half > 0; half /= 2)
      for (unsigned i = 0; i < half; ++i) tile[i] += tile[i + half];
    CHECK(got[b] == tile[0]);  // the same additions, so the same bits
  }
}

TEST_CASE("fidelity: a tree of sums gives the bits of its order") { check_tree<128>(); }
TEST_CASE("fidelity: a tree over the largest block", "[big]") { check_tree<1024>(); }

// ---- Loads, time, stacks

__global__ void scale_vectors(const float4* in, float4* out, const int2* pairs, double2* wide) {
  const unsigned i = threadIdx.x;
  const float4 v = in[i];
  out[i] = make_float4(v.w, 2 * v.z, 3 * v.y, 4 * v.x);
  const int2 p = pairs[i];
  wide[i] = make_double2(p.y, p.x);
}

TEST_CASE("fidelity: vectors are loaded and stored whole") {
  std::vector<float> values;
  for (int i = 0; i < 128; ++i) values.push_back(static_cast<float>(i));
  device_array<float> in(values), out(128, 0.0f);
  device_array<int> pairs(counted(64));
  device_array<double> wide(64, 0.0);
  REQUIRE_CUDA(launch({dim3(1), dim3(32)}, scale_vectors, reinterpret_cast<const float4*>(in.data()),
                      reinterpret_cast<float4*>(out.data()), reinterpret_cast<const int2*>(pairs.data()),
                      reinterpret_cast<double2*>(wide.data())));
  const auto got = out.get();
  const auto doubles = wide.get();
  for (std::size_t i = 0; i < 32; ++i) {
    const float x = values[4 * i];
    CHECK(got[4 * i] == x + 3);
    CHECK(got[4 * i + 1] == 2 * (x + 2));
    CHECK(got[4 * i + 2] == 3 * (x + 1));
    CHECK(got[4 * i + 3] == 4 * x);
    CHECK(doubles[2 * i] == static_cast<double>(2 * i + 1));
    CHECK(doubles[2 * i + 1] == static_cast<double>(2 * i));
  }
}

__global__ void cached(const int* __restrict__ in, const float4* __restrict__ vectors, const double* __restrict__ wide,
                       double* __restrict__ out) {
  const unsigned i = threadIdx.x;
  const float4 v = __ldg(vectors + i);
  out[i] = __ldg(in + i) + static_cast<double>(v.x + v.y + v.z + v.w) + __ldg(wide + i);
}

TEST_CASE("fidelity: __ldg reads what is there") {
  std::vector<double> wide;
  for (int i = 0; i < 16; ++i) wide.push_back(i / 1024.0);
  device_array<int> in(counted(16));
  device_array<float4> vectors(16, float4{0.25f, 0.25f, 0.5f, 1.0f});
  device_array<double> eighths(wide), out(16, 0.0);
  REQUIRE_CUDA(launch({dim3(1), dim3(16)}, cached, in.data(), vectors.data(), eighths.data(), out.data()));
  const auto got = out.get();
  for (std::size_t i = 0; i < 16; ++i) CHECK(got[i] == static_cast<double>(i) + 2.0 + wide[i]);
}

__global__ void read_clock(long long* times) {
  long long last = clock64();
  int backwards = 0;
  for (int i = 0; i < 100; ++i) {
    const long long now = clock64();
    backwards += now < last;
    last = now;
  }
  times[0] = backwards;
  const long long begin = clock64();
  while (clock64() - begin < 2000) {
  }
  times[1] = 1;
}

TEST_CASE("fidelity: clock64 doesn't run backwards, and it runs") {
  device_array<long long> times(2, -1);
  REQUIRE_CUDA(launch({}, read_clock, times.data()));
  CHECK(times.get() == std::vector<long long>{0, 1});
}

__device__ int ackermann(int m, int n) {
  if (m == 0) return n + 1;
  if (n == 0) return ackermann(m - 1, 1);
  return ackermann(m - 1, ackermann(m, n - 1));
}

__global__ void recurse(int* out) {
  const int i = static_cast<int>(threadIdx.x);
  out[i] = ackermann(2, i % 4);
}

TEST_CASE("fidelity: device functions may call themselves") {
  device_array<int> out(32, -1);
  REQUIRE_CUDA(launch({dim3(1), dim3(32)}, recurse, out.data()));
  const auto got = out.get();
  for (int i = 0; i < 32; ++i) CHECK(got[static_cast<std::size_t>(i)] == 2 * (i % 4) + 3);
}

__global__ void sort_own(int* values) {
  int own[24];
  int* const mine = values + threadIdx.x * 24;
  for (int i = 0; i < 24; ++i) own[i] = mine[i];
  __syncthreads();
  for (int i = 1; i < 24; ++i) {
    const int value = own[i];
    int at = i;
    for (; at > 0 && own[at - 1] > value; --at) own[at] = own[at - 1];
    own[at] = value;
  }
  __syncthreads();
  for (int i = 0; i < 24; ++i) mine[i] = own[i];
}

TEST_CASE("fidelity: every thread has arrays of its own, also across barriers") {
  std::vector<int> values;
  for (int i = 0; i < 40 * 24; ++i) values.push_back(i * 7919 % 1009);
  device_array<int> at(values);
  REQUIRE_CUDA(launch({dim3(1), dim3(40)}, sort_own, at.data()));
  for (int t = 0; t < 40; ++t) std::sort(values.begin() + 24 * t, values.begin() + 24 * (t + 1));
  CHECK(at.get() == values);
}

// Warps at different places meet again at the block's barrier.
__global__ void diverge(int* out) {
  HEDDLE_SHARED(int[128], tile);
  const int i = static_cast<int>(threadIdx.x);
  int value = 0;
  for (int k = 0; k < i % 37; ++k) value += k;
  if (i / 32 % 2 == 0) {
    value += 10000;
    __syncwarp();
  }
  tile[i] = value;
  __syncthreads();
  out[i] = tile[127 - i];
}

TEST_CASE("fidelity: threads that took different times meet at a barrier") {
  device_array<int> out(128, -1);
  REQUIRE_CUDA(launch({dim3(1), dim3(128)}, diverge, out.data()));
  const auto got = out.get();
  for (int i = 0; i < 128; ++i) {
    const int from = 127 - i, k = from % 37;
    CHECK(got[static_cast<std::size_t>(i)] == k * (k - 1) / 2 + (from / 32 % 2 == 0 ? 10000 : 0));
  }
}

__global__ void __launch_bounds__(1024, 1) fill_block(int* out) {
  out[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) out[1024] = out[1023];
}

TEST_CASE("fidelity: a block of 1024 threads", "[big]") {
  device_array<int> out(1025, -1);
  REQUIRE_CUDA(launch({dim3(1), dim3(1024)}, fill_block, out.data()));
  std::vector<int> expected = counted(1024);
  expected.push_back(1023);
  CHECK(out.get() == expected);
}

}  // namespace fidelity::kernels
