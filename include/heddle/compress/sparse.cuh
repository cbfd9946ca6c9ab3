// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/codecs.cuh>
#include <heddle/compress/random_k.hpp>
#include <heddle/compress/top_k.hpp>

namespace heddle {
inline namespace v0 {

namespace detail {
/// @cond
inline constexpr std::uint32_t no_entry = ~std::uint32_t{0};

// Where the search for the k-th largest magnitude stands: its leading bits, and how many of those that have them are
// among the k largest.
struct top_k_search {
  std::uint32_t bits, left;
};
HEDDLE_HD inline std::uint32_t magnitude_of(float v) { return __builtin_bit_cast(std::uint32_t, v) & 0x7fffffffu; }

// Counts magnitudes by 11 bits more than are known; Level 0, 1 and 2 make 31.
template <int Level>
__global__ void top_k_count(fed_value v, std::size_t n, const top_k_search* known, std::uint32_t* bins,
                            unsigned* not_finite) {
  constexpr unsigned size = Level == 2 ? 512 : 2048, shift = Level == 0 ? 20 : Level == 1 ? 9 : 0;
  HEDDLE_SHARED(std::uint32_t[size], mine);
  for (unsigned b = threadIdx.x; b < size; b += blockDim.x) mine[b] = 0;
  __syncthreads();
  const std::uint32_t before = known->bits;
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    const float value = v(i);
    const std::uint32_t bits = magnitude_of(value);
    if (Level == 0 && !(__builtin_bit_cast(float, bits) <= v.limit)) atomicOr(not_finite, 1u);
    if (Level == 0 || (bits >> shift) / size == before) atomicAdd(&mine[bits >> shift & (size - 1)], std::uint32_t{1});
  }
  __syncthreads();
  for (unsigned b = threadIdx.x; b < size; b += blockDim.x) {
    if (mine[b]) atomicAdd(&bins[b], mine[b]);
  }
}
// The bin in which the last of them is; bins are zero again.
template <int Level> __global__ void top_k_choose(top_k_search* known, std::uint32_t* bins) {
  constexpr unsigned size = Level == 2 ? 512 : 2048, each = size / codec_threads;
  HEDDLE_SHARED(std::uint32_t[codec_threads], sums);  // of `each` bins
  std::uint32_t mine = 0;
  for (unsigned b = threadIdx.x * each; b < (threadIdx.x + 1) * each; ++b) mine += bins[b];
  sums[threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    std::uint32_t left = known->left;
    unsigned t = codec_threads - 1;
    while (t > 0 && sums[t] < left) left -= sums[t--];
    unsigned b = (t + 1) * each - 1;
    while (b > 0 && bins[b] < left) left -= bins[b--];
    *known = {known->bits * size + b, left};
  }
  __syncthreads();
  for (unsigned b = threadIdx.x; b < size; b += blockDim.x) bins[b] = 0;
}
template <class Word> __global__ void flag_values(fed_value v, Word n, unsigned* not_finite) {
  const Word stride = Word{gridDim.x} * blockDim.x;
  for (Word i = Word{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    const float value = v(i);
    if (!((value < 0.0f ? -value : value) <= v.limit)) atomicOr(not_finite, 1u);
  }
}

struct above_kth {
  fed_value v;
  const top_k_search* known;
  HEDDLE_HD bool operator()(std::size_t i) const { return magnitude_of(v(i)) > known->bits; }
};
struct equals_kth {  // zeros aren't sent
  fed_value v;
  const top_k_search* known;
  HEDDLE_HD bool operator()(std::size_t i) const { return known->bits != 0 && magnitude_of(v(i)) == known->bits; }
};
// Larger ones are written from the first slot on, as many equal ones as are left behind them.
struct write_entry {
  fed_value v;
  const top_k_search* known;
  std::size_t entries;
  bool equal;
  std::uint32_t* index;
  float* value;
  HEDDLE_HD void operator()(std::size_t k, std::size_t i) const {
    if (equal && k >= known->left) return;
    const std::size_t slot = equal ? entries - known->left + k : k;
    index[slot] = static_cast<std::uint32_t>(i);
    value[slot] = v(i);
  }
};
struct store_fed {
  fed_value v;
  float* e;
  HEDDLE_HD void operator()(std::size_t i) const {
    const float known = v(i);
    e[i] = v.late == 1.0f || fabsf(known) <= v.limit ? known : v.early(i);
  }
};
struct forget_entry {
  const std::uint32_t* index;
  fed_value v;
  float* e;
  HEDDLE_HD void operator()(std::size_t j) const {
    if (index[j] != no_entry) e[index[j]] = v.missed(index[j], e[index[j]]);
  }
};
struct add_entry {
  const std::uint32_t* index;
  const float* value;
  float* sum;
  HEDDLE_HD void operator()(std::size_t j) const {
    if (index[j] != no_entry) sum[index[j]] += value[j];
  }
};

struct random_choice {  // which elements are picked
  std::uint64_t seed, stream;
  std::size_t n, k;
  HEDDLE_HD random_k::choice operator()(std::size_t j) const {
    return random_k::chosen(n, k, j, philox(seed, stream, j / 2));
  }
};
struct send_choice {
  random_choice of;
  fed_value v;
  float* sums;
  HEDDLE_HD void operator()(std::size_t j) const {
    const random_k::choice c = of(j);
    sums[j] = v.e ? v(c.index) : v(c.index) * static_cast<float>(c.run);
  }
};
struct forget_choice {
  random_choice of;
  fed_value v;
  float* e;
  HEDDLE_HD void operator()(std::size_t j) const {
    const std::size_t i = of(j).index;
    e[i] = v.missed(i, e[i]);
  }
};
struct take_choice {
  random_choice of;
  const float* sums;
  float *g, *e;
  HEDDLE_HD void operator()(std::size_t j) const {
    const random_k::choice c = of(j);
    g[c.index] = sums[j];
    if (e) e[c.index] = 0.0f;
  }
};

template <class Kernel, class... Arguments>
void launch_over(const char* what, std::size_t n, cuda::queue q, Kernel kernel, Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((std::min)((n - 1) / 1024 + 1, std::size_t{1024})));
  config.blockDim = dim3(codec_threads);
  config.stream = q.stream;
  check_cuda(what, cudaLaunchKernelEx(&config, kernel, arguments...));
}
/// @endcond
}  // namespace detail

/// @brief `top_k` on a device: the entries that the host's finds, ties by the lower index.
///
///     hd::top_k_device device(hd::top_k{.density = 0.01});
///     device.encode(g, 1.0f, e, n, context, index, value, flag, pool, queue);   // moves no state
///     ...                                                // entries travel; all ranks look at all flags
///     device.hold(g, 1.0f, e, n, context, index, queue);                        // e = v without what was sent
///     device.add(index, value, n, sum, queue);                                  // rank by rank, in rank order
///
/// The k-th largest magnitude is found bit by bit, by counting; what is above it, and as many equal ones as still fit,
/// are picked in the order of memory and sorted by index.
/// Wire:    8 bytes per entry as it lies in memory; `append_sparse` makes the shortest form of it on the host.
/// State:   4 bytes per element (e), the caller's.
/// Traffic: `encode` reads 40 bytes per element in five passes, 20 without e; `hold` reads 8 and writes 4.
/// Order:   as top_k.
/// Sync:    everything only enqueues.
/// Throws:  argument_error for a null pointer, or a tensor of 2^32 - 1 elements or more; cuda_error; what the resource
///          throws.
class top_k_device {
 public:
  /// @param c The codec. Throws: argument_error unless its density is in (0, 1].
  explicit top_k_device(const top_k& c) : codec_(c) { c.check(); }

  /// Slots for the entries of a tensor of n elements.
  std::size_t entries(std::size_t n) const noexcept { return codec_.entries(n); }

  /// @brief Writes the largest of g factor / ranks + held_scale e, e being null or a tensor, in rising order of their
  /// index; slots that stay free, since zeros aren't sent, have the index 2^32 - 1.
  /// @param g Gradient, n elements. @param factor Multiplies it. @param e What is held. @param n Elements.
  /// @param x Ranks and held_scale. @param index Receives entries(n) indices. @param value As many values.
  /// @param not_finite Set to 1 where a value, or the sum of all ranks', may not be finite; else left.
  /// @param resource Of temporary memory. @param q Where the work goes.
  template <class Resource>
  void encode(const float* g, device_factor factor, const float* e, std::size_t n, const encode_context& x,
              std::uint32_t* index, float* value, unsigned* not_finite, Resource& resource, cuda::queue q) const {
    for (const void* p : {static_cast<const void*>(g), static_cast<const void*>(index), static_cast<const void*>(value),
                          static_cast<const void*>(not_finite)})
      detail::check_pointer("top_k_device::encode", p, n);
    if (n >= detail::no_entry) {
      throw argument_error("heddle::top_k_device: a tensor of " + std::to_string(n) +
                           " elements, allowed is below 2^32 - 1");
    }
    if (n == 0) return;
    const std::size_t k = entries(n), bins = 2048;
    const detail::fed_value v = detail::fed(g, factor, e, x);
    const detail::temporary block(
        resource, q, bins * sizeof(std::uint32_t) + 2 * detail::temporary<Resource, cuda::queue>::alignment);
    auto* const counts = reinterpret_cast<std::uint32_t*>(block.data());
    auto* const known = reinterpret_cast<detail::top_k_search*>(counts + bins);
    auto* const found = reinterpret_cast<std::size_t*>(known + 1);
    cuda::fill(counts, bins, 0u, q);
    cuda::fill(known, 1, detail::top_k_search{0, static_cast<std::uint32_t>(k)}, q);
    cuda::fill(index, k, detail::no_entry, q);
    cuda::fill(value, k, 0.0f, q);
    narrow<0>(v, n, known, counts, not_finite, q);
    narrow<1>(v, n, known, counts, not_finite, q);
    narrow<2>(v, n, known, counts, not_finite, q);
    cuda::select(n, detail::above_kth{v, known}, detail::write_entry{v, known, k, false, index, value}, found, resource,
                 q);
    cuda::select(n, detail::equals_kth{v, known}, detail::write_entry{v, known, k, true, index, value}, found, resource,
                 q);
    cuda::sort_pairs(index, value, k, resource, q);
  }
  /// @brief e becomes what the entries lack, at the scale of x.held_scale and x.held_late.
  void hold(const float* g, device_factor factor, float* e, std::size_t n, const encode_context& x,
            const std::uint32_t* index, cuda::queue q) const {
    for (const void* p : {static_cast<const void*>(g), static_cast<const void*>(e), static_cast<const void*>(index)})
      detail::check_pointer("top_k_device::hold", p, n);
    cuda::for_each(n, detail::store_fed{detail::fed(g, factor, e, x), e}, q);
    cuda::for_each(entries(n), detail::forget_entry{index, detail::fed(g, factor, e, x), e}, q);
  }
  /// @brief sum[index] += value for each entry of one rank, of a tensor of n elements.
  void add(const std::uint32_t* index, const float* value, std::size_t n, float* sum, cuda::queue q) const {
    for (const void* p :
         {static_cast<const void*>(index), static_cast<const void*>(value), static_cast<const void*>(sum)})
      detail::check_pointer("top_k_device::add", p, n);
    cuda::for_each(entries(n), detail::add_entry{index, value, sum}, q);
  }

 private:
  template <int Level>
  static void narrow(const detail::fed_value& v, std::size_t n, detail::top_k_search* known, std::uint32_t* counts,
                     unsigned* not_finite, cuda::queue q) {
    detail::launch_over("top_k_device::encode", n, q, detail::top_k_count<Level>, v, n,
                        static_cast<const detail::top_k_search*>(known), counts, not_finite);
    detail::launch_over("top_k_device::encode", 1, q, detail::top_k_choose<Level>, known, counts);
  }

  top_k codec_;
};

/// @brief `random_k` on a device: the elements that the host picks, with error feedback where e is given.
///
///     hd::random_k_device device(hd::random_k{.density = 0.1});
///     device.send(g, 1.0f, e, n, context, sums, flag, queue);      // moves no state
///     ...                                                          // sums are added up over all ranks
///     device.commit(g, 1.0f, e, n, context, sums, queue);          // g becomes the update, e what is held
///
/// Wire:    an all-reduce of picked(n) floats.
/// State:   4 bytes per element (e), the caller's; none without.
/// Traffic: `send` reads 8 bytes per element to look for infinities; `commit` reads 8 and writes 8.
/// Order:   as random_k.
/// Sync:    everything only enqueues.
/// Throws:  argument_error for a null pointer; cuda_error.
class random_k_device {
 public:
  /// @param c The codec. Throws: argument_error unless its density is in (0, 1].
  explicit random_k_device(const random_k& c) : codec_(c) { c.check(); }

  /// Numbers that a tensor of n elements sends.
  std::size_t picked(std::size_t n) const { return codec_.picked(n, {}); }

  /// @brief Writes picked(n) numbers of this rank.
  /// @param g Gradient, n elements. @param factor Multiplies it. @param e What is held; null without error feedback.
  /// @param n Elements. @param x Step, tensor, ranks and held_scale, the same on all ranks. @param sums Receives them.
  /// @param not_finite Set to 1 where a value, or the sum of all ranks', may not be finite; else left.
  /// @param q Where the work goes.
  void send(const float* g, device_factor factor, const float* e, std::size_t n, const encode_context& x, float* sums,
            unsigned* not_finite, cuda::queue q) const {
    for (const void* p :
         {static_cast<const void*>(g), static_cast<const void*>(sums), static_cast<const void*>(not_finite)})
      detail::check_pointer("random_k_device::send", p, n);
    if (n == 0) return;
    detail::fed_value v = detail::fed(g, factor, e, x);
    const detail::random_choice of = choice(n, x);
    if (!e) v.limit /= static_cast<float>((n - 1) / of.k + 1);  // sent times the length of its run
    detail::launch_over("random_k_device::send", n, q, detail::flag_values<std::size_t>, v, n, not_finite);
    cuda::for_each(of.k, detail::send_choice{of, v, sums}, q);
  }
  /// @brief Makes the update of the sums of all ranks, and moves e, at the scale of x.held_scale and x.held_late.
  void commit(float* g, device_factor factor, float* e, std::size_t n, const encode_context& x, const float* sums,
              cuda::queue q) const {
    for (const void* p : {static_cast<const void*>(g), static_cast<const void*>(sums)})
      detail::check_pointer("random_k_device::commit", p, n);
    const detail::random_choice of = choice(n, x);
    const detail::fed_value v = detail::fed(g, factor, e, x);
    const bool late = e && x.held_late != 1.0f;
    if (e) cuda::for_each(n, detail::store_fed{v, e}, q);
    if (late) cuda::for_each(of.k, detail::forget_choice{of, v, e}, q);  // while g is there
    cuda::fill(g, n, 0.0f, q);
    cuda::for_each(of.k, detail::take_choice{of, sums, g, late ? nullptr : e}, q);
  }

 private:
  detail::random_choice choice(std::size_t n, const encode_context& x) const {
    return {codec_.seed, random_stream(x.tensor, static_cast<std::uint32_t>(x.step)), n, picked(n)};
  }

  random_k codec_;
};

}  // namespace v0
}  // namespace heddle
