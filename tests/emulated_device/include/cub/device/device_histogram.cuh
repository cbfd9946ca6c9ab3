// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What:   cub::DeviceHistogram::HistogramEven. See detail/device_call.cuh.
// Limits: one channel and one row of samples; no levels of the caller's.

#include <cub/detail/device_call.cuh>

namespace cub {

struct DeviceHistogram {
  /// Counts of num_levels - 1 bins of equal width between lower_level and upper_level; other samples don't count.
  template <class SampleIteratorT, class CounterT, class LevelT, class OffsetT>
  static cudaError_t HistogramEven(void* d_temp_storage, std::size_t& temp_storage_bytes, SampleIteratorT d_samples,
                                   CounterT* d_histogram, int num_levels, LevelT lower_level, LevelT upper_level,
                                   OffsetT num_samples, cudaStream_t stream = nullptr) {
    using sample = detail::value_of<SampleIteratorT>;
    using common = std::common_type_t<LevelT, sample>;
    if (num_levels < 2 || !(lower_level < upper_level)) return cudaErrorInvalidValue;
    detail::device_call call("cub::DeviceHistogram::HistogramEven", d_temp_storage, temp_storage_bytes, num_samples,
                             stream);
    const std::uint64_t n = call.count();
    const auto bins = static_cast<std::uint64_t>(num_levels - 1);
    call.touches(d_samples, n);
    call.touches(d_histogram, bins);
    call.apart(d_samples, n, d_histogram, bins);
    return call.run([=]() mutable {
      const common low = static_cast<common>(lower_level), high = static_cast<common>(upper_level);
      for (std::uint64_t b = 0; b < bins; ++b) d_histogram[b] = CounterT{};
      for (std::uint64_t i = 0; i < n; ++i) {
        const common s = static_cast<common>(static_cast<sample>(detail::at(d_samples, i)));
        if (!(s >= low && s < high)) continue;
        std::uint64_t bin = 0;
        if constexpr (std::is_integral_v<common>)
          bin = static_cast<std::uint64_t>(s - low) * bins / static_cast<std::uint64_t>(high - low);
        else
          bin = static_cast<std::uint64_t>((s - low) * (static_cast<common>(bins) / (high - low)));
        if (bin >= bins) bin = bins - 1;
        d_histogram[bin] += CounterT{1};
      }
    });
  }
};

}  // namespace cub
