// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/compress/detail/dgc_kernels.cuh>
#include <heddle/compress/dgc.hpp>
#include <heddle/core/archive.hpp>
#include <heddle/core/cuda.cuh>

#include <span>

namespace heddle {
inline namespace v0 {

/// @brief The passes of `dgc` on a device, several tensors in one launch.
///
/// A step, after all ranks have agreed that every gradient is finite (`finite`, then an all-reduce of the flag):
///
///     device.step(c, x, q);         // entries are in each segment's index and value, their number in control()
///
/// or, so that entries travel during backward, with sorted lists,
///
///     device.prepare(c, x, bad, q); // reads, and writes the same entries; *bad where the step must not be taken
///     device.commit(c, x, q);       // when all ranks know that it counts: U, V and thresholds as after step
///
/// Selection is by threshold, which lets 0.5 to 1.25 of the entries pass that are wanted: sampled in each step as
/// long as sums grow fast, then steered by what it let pass, and sampled again after a step that left this range. A
/// segment's `capacity` bounds what is sent; what doesn't fit stays held.
/// Wire:    8 bytes per entry as it lies in memory; `append_sparse` makes the shortest form of a sorted list.
/// State:   8 bytes per element (U and V, the caller's), 16 per tensor, 8 per 1024 elements.
/// Traffic: `step` 20 bytes per element and launch, 24 with weight decay, the least for one pass; 8 + 8 bytes per 1024
///          elements for sorted lists; `prepare` 12 and `commit` 20, the least for two halves, 4 more each with weight
///          decay; `finite` 4; `fits` 12, 16 with weight decay. A sample reads 12 bytes of each of 64 n / k elements,
///          at least of 8192 (k of n are wanted), here and there, twice.
/// Order:   as `dgc`.
/// Sync:    the constructor, save() and load() wait for their copies; everything else only enqueues.
/// Paper:   as `dgc`; the look-back of sorted lists: Merrill, Garland 2016.
/// Throws:  argument_error for a null pointer, a tensor of 2^32 - 1 elements or more, or too many of them; cuda_error.
class dgc_device {
 public:
  /// @param segments The tensors; what they point to must outlive this object. @param q Where it is set up.
  /// @param sorted Whether entries come in rising order of their index, the same on every run; else in any order.
  dgc_device(std::span<const dgc_segment> segments, cuda::queue q, bool sorted = false)
      : segments_(segments.begin(), segments.end()), queue_(q), sorted_(sorted) {
    std::vector<detail::dgc_row> rows;
    for (const dgc_segment& s : segments) {
      check(s);
      bool vectors = true;
      for (const float* p : {s.gradient, s.parameter, static_cast<const float*>(s.u), static_cast<const float*>(s.v)}) {
        vectors = vectors && reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
      }
      rows.push_back({s, tiles_, vectors});
      tiles_ += (s.count + detail::dgc_tile - 1) / detail::dgc_tile;
    }
    rows_ = rows.size();
    if (tiles_ > 0xfffe0000ull)
      throw argument_error("heddle::dgc_device: " + std::to_string(tiles_) +
                           " tiles of 1024 elements, allowed is below 2^32 - 2^17");
    const auto part = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
    const std::size_t table = part(rows.size() * sizeof(detail::dgc_row)), control = part(rows_ * sizeof(dgc_control));
    bytes_ = table + control + part(tiles_ * sizeof(std::uint64_t)) + 256;
    memory_ = static_cast<std::byte*>(cuda::memory{}.allocate(q, bytes_, 256));
    table_ = reinterpret_cast<detail::dgc_row*>(memory_);
    control_ = reinterpret_cast<dgc_control*>(memory_ + table);
    state_ = reinterpret_cast<std::uint64_t*>(memory_ + table + control);
    ticket_ = reinterpret_cast<std::uint32_t*>(memory_ + bytes_ - 256);
    try {
      cuda::copy(rows.data(), table_, rows.size(), q);
      cuda::fill(control_, rows_, dgc_control{}, q);
      q.synchronize();
    } catch (...) {
      cuda::memory{}.deallocate(q, memory_, bytes_, 256);
      throw;
    }
  }
  dgc_device(const dgc_device&) = delete;
  dgc_device& operator=(const dgc_device&) = delete;
  /// Gives its memory back in the order of the queue that it was set up on.
  ~dgc_device() { cuda::memory{}.deallocate(queue_, memory_, bytes_, 256); }

  /// @brief Sets *bad to 1 where a gradient is not finite, else leaves it.
  /// @param bad In device memory. @param q Queue.
  void finite(std::uint32_t* bad, cuda::queue q) const {
    detail::check_pointer("dgc_device::finite", bad, 1);
    if (tiles_) launch("dgc_device::finite", blocks(), detail::dgc_finite_kernel<std::uint32_t>, q, table(), bad);
  }

  /// @brief Sets *bad to 1 where `step` would leave float's range, or a sum over all ranks of what it sends could; else
  /// leaves it. Reads gradients, U and V, 12 bytes per element, 16 with weight decay; instead of `finite`.
  /// @param x As for `step`. @param bad In device memory. @param q Queue.
  void fits(const encode_context& x, std::uint32_t* bad, cuda::queue q) const {
    detail::check_pointer("dgc_device::fits", bad, 1);
    if (tiles_)
      launch("dgc_device::fits", blocks(), detail::dgc_fits_kernel<std::uint32_t>, q, table(), scalars(x, true),
             detail::most_sent(x.ranks), bad);
  }

  /// @brief Moves U and V and writes what is to be sent. @param c Masking is taken from it. @param x Ranks, momentum,
  /// weight decay; step is the seed of samples. @param q Queue.
  void step(const dgc& c, const encode_context& x, cuda::queue q) {
    if (tiles_ == 0) return;
    const detail::dgc_scalars r = scalars(x, c.masking && x.step >= c.begin_step);
    search("dgc_device::step", r, x, q);
    launch("dgc_device::step", blocks(),
           sorted_ ? detail::dgc_step_kernel<true, false> : detail::dgc_step_kernel<false, false>, q, table(), r, 0.0f,
           static_cast<std::uint32_t*>(nullptr));
    steer("dgc_device::step", q);
  }

  /// @brief The preparing half: writes what `step` would send, and sets *bad to 1 where `fits` would; moves no state.
  /// @param c As for `step`. @param x As for `step`. @param bad In device memory. @param q Queue.
  /// Throws: argument_error unless lists are sorted.
  void prepare(const dgc& c, const encode_context& x, std::uint32_t* bad, cuda::queue q) {
    if (!sorted_) throw argument_error("heddle::dgc_device::prepare: it needs sorted lists, these are in any order");
    detail::check_pointer("dgc_device::prepare", bad, 1);
    if (tiles_ == 0) return;
    const detail::dgc_scalars r = scalars(x, c.masking && x.step >= c.begin_step);
    search("dgc_device::prepare", r, x, q);
    launch("dgc_device::prepare", blocks(), detail::dgc_step_kernel<true, true>, q, table(), r,
           detail::most_sent(x.ranks), bad);
  }
  /// @brief The committing half: moves U, V and thresholds. Gradients, parameters, factors and lists are as `prepare`
  /// left them. @param c As for `prepare`. @param x As for `prepare`. @param q Queue.
  void commit(const dgc& c, const encode_context& x, cuda::queue q) {
    if (tiles_ == 0) return;
    launch("dgc_device::commit", blocks(), detail::dgc_commit_kernel<std::uint64_t>, q, table(),
           scalars(x, c.masking && x.step >= c.begin_step), std::uint64_t{tiles_});
    steer("dgc_device::commit", q);
  }

  /// @brief sum[index] += value for one rank's list. Lists of several ranks, added in rank order, give every rank the
  /// same bits. @param index No index twice, each below the elements of `sum`. @param value As many. @param count How
  /// many. @param sum Where they are added. @param q Queue.
  static void add(const std::uint32_t* index, const float* value, std::size_t count, float* sum, cuda::queue q) {
    if (count == 0) return;
    detail::check_pointer("dgc_device::add", index, count);
    detail::check_pointer("dgc_device::add", value, count);
    detail::check_pointer("dgc_device::add", sum, count);
    const std::size_t wanted = (count - 1) / detail::dgc_threads + 1;
    launch("dgc_device::add", static_cast<unsigned>((std::min)(wanted, most_blocks)),
           detail::dgc_add_kernel<std::size_t>, q, index, value, count, sum);
  }

  /// @brief Writes U, V and thresholds, between two steps. Synchronises. Throws: file_error; cuda_error.
  void save(const std::string& path, cuda::queue q) const {
    archive_writer out;
    out.put(static_cast<std::uint64_t>(segments_.size()));
    std::vector<dgc_control> control(segments_.size());
    cuda::copy(static_cast<const dgc_control*>(control_), control.data(), control.size(), q);
    q.synchronize();
    std::vector<float> block;
    for (std::size_t k = 0; k < segments_.size(); ++k) {
      out.put(control[k].threshold);
      for (const float* from : {segments_[k].u, segments_[k].v}) {
        block.resize(segments_[k].count);
        cuda::copy(from, block.data(), block.size(), q);
        q.synchronize();
        out.put(block.data(), block.size());
      }
    }
    out.write(path);
  }
  /// @brief Goes on with what was saved: with this rank's file bit for bit; with those of all ranks that there were, in
  /// the same order everywhere, with an even part of all that they held, thresholds being sampled anew. Synchronises.
  /// @param paths The file, or all files. @param ranks Among how many ranks these are divided; 1 for one's own.
  /// @param q Queue. Throws: argument_error for no file or no rank; file_error if one is missing, damaged, or of tensors
  /// of other sizes, and nothing has changed then; cuda_error.
  void load(std::span<const std::string> paths, int ranks, cuda::queue q) {
    if (paths.empty() || ranks < 1)
      throw argument_error("heddle::dgc_device::load: " + std::to_string(paths.size()) + " files for " +
                           std::to_string(ranks) + " ranks, allowed is 1 or more of each");
    const bool own = paths.size() == 1 && ranks == 1;
    std::vector<std::vector<double>> sums(2 * segments_.size());
    std::vector<dgc_control> control(segments_.size());
    std::vector<float> block;
    for (const std::string& path : paths) {
      archive_reader in(path);
      if (in.get<std::uint64_t>() != segments_.size()) in.refuse("it has another number of tensors");
      for (std::size_t k = 0; k < segments_.size(); ++k) {
        const auto threshold = in.get<std::uint32_t>();
        control[k] = {own ? threshold : 0, 0, 0, 0};
        for (const std::size_t slot : {2 * k, 2 * k + 1}) {
          block.resize(segments_[k].count);
          in.get(block.data(), block.size());
          sums[slot].resize(block.size());
          for (std::size_t i = 0; i < block.size(); ++i) sums[slot][i] += static_cast<double>(block[i]);
        }
      }
      in.finish();
    }
    for (std::size_t slot = 0; slot < sums.size(); ++slot) {
      block.clear();
      for (const double x : sums[slot]) block.push_back(static_cast<float>(x / ranks));
      cuda::copy(static_cast<const float*>(block.data()), slot % 2 ? segments_[slot / 2].v : segments_[slot / 2].u,
                 block.size(), q);
      q.synchronize();
    }
    cuda::copy(static_cast<const dgc_control*>(control.data()), control_, control.size(), q);
    q.synchronize();  // what was copied is on this stack
  }

  /// What the last step found of each segment, in device memory; its thresholds are state for a checkpoint to keep.
  dgc_control* control() const noexcept { return control_; }

 private:
  static constexpr std::size_t most_blocks = std::size_t{1} << 16;

  static void check(const dgc_segment& s) {
    if (s.count >= 0xffffffffull) {
      throw argument_error("heddle::dgc_device: a tensor of " + std::to_string(s.count) +
                           " elements, allowed is below 2^32 - 1");
    }
    detail::check_pointer("dgc_device: gradient", s.gradient, s.count);
    detail::check_pointer("dgc_device: u", s.u, s.count);
    detail::check_pointer("dgc_device: v", s.v, s.count);
    detail::check_pointer("dgc_device: index", s.index, s.count ? s.capacity : 0);
    detail::check_pointer("dgc_device: value", s.value, s.count ? s.capacity : 0);
  }

  static detail::dgc_scalars scalars(const encode_context& x, bool masking) noexcept {
    const float ranks = static_cast<float>(x.ranks);
    return {ranks,  x.weight_decay / ranks, x.momentum, x.nesterov ? x.momentum : 1.0f, x.nesterov ? 1.0f : 0.0f,
            masking};
  }

  unsigned blocks() const noexcept { return static_cast<unsigned>((std::min)(tiles_, most_blocks)); }

  // Forgets what the last step found, and finds the thresholds of this one.
  void search(const char* what, const detail::dgc_scalars& r, const encode_context& x, cuda::queue q) const {
    launch(what, few(), detail::dgc_begin_kernel<std::uint64_t>, q, table(),
           std::uint64_t{few()} * detail::dgc_threads);
    launch(what, static_cast<unsigned>(rows_), detail::dgc_sample_kernel<std::uint64_t>, q, table(), r,
           std::uint64_t{x.step} << 32);
  }
  void steer(const char* what, cuda::queue q) const {
    launch(what, few(), detail::dgc_steer_kernel<std::uint64_t>, q, table(),
           std::uint64_t{few()} * detail::dgc_threads);
  }
  unsigned few() const noexcept {  // blocks of what works on tables only
    return static_cast<unsigned>((std::min)((tiles_ + rows_) / detail::dgc_threads + 1, std::size_t{1024}));
  }

  detail::dgc_table table() const noexcept {
    return {table_, control_, state_, ticket_, tiles_, static_cast<std::uint32_t>(rows_)};
  }

  template <class... Formal, class... Actual>
  static void launch(const char* what, unsigned blocks, void (*kernel)(Formal...), cuda::queue q, Actual... actual) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(detail::dgc_threads);
    config.stream = q.stream;
    detail::check_cuda(what, cudaLaunchKernelEx(&config, kernel, static_cast<Formal>(actual)...));
  }

  std::vector<dgc_segment> segments_;
  cuda::queue queue_;
  bool sorted_;
  std::size_t tiles_ = 0, rows_ = 0, bytes_ = 0;
  std::byte* memory_ = nullptr;
  detail::dgc_row* table_ = nullptr;
  dgc_control* control_ = nullptr;
  std::uint64_t* state_ = nullptr;
  std::uint32_t* ticket_ = nullptr;
};

}  // namespace v0
}  // namespace heddle
