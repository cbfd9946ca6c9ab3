// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/cuda_queue.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/over_aligned.hpp>

#include <cuda_runtime_api.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>

namespace heddle {
inline namespace v0 {
namespace detail {

// A stream of other people: a cudaStream_t, or a wrapper that converts to one or has it in get().
template <class Stream>
concept has_stream = std::convertible_to<Stream, cudaStream_t> || requires(const Stream s) {
  { s.get() } -> std::convertible_to<cudaStream_t>;
};
template <has_stream Stream> cuda_order::queue queue_of(const Stream& s) {
  if constexpr (std::convertible_to<Stream, cudaStream_t>)
    return {static_cast<cudaStream_t>(s)};
  else
    return {s.get()};
}
}  // namespace detail

/// @brief A resource of Heddle under the names of CCCL's `cuda::mr`, of either generation.
///
/// CCCL 3.0, the one of CUDA 13.0, asks for `allocate`, `deallocate`, `allocate_async` and `deallocate_async`, with the
/// stream last; later ones for `allocate_sync`, `deallocate_sync`, `allocate` and `deallocate`, with the stream first.
/// This has both. So it converts to `cuda::mr::resource_ref` and the like, and to RMM's references, which are made of
/// them. A resource without `cuda_order::queue`, such as a `pool` of pinned memory, has the names without a stream.
/// Whoever holds a reference must keep this object. No parameter has a default value.
///
/// @code{.cpp}
/// heddle::queue_pool pool{heddle::cuda_order{}, heddle::cuda_device{}};
/// heddle::cuda_mr_over<decltype(pool), cuda::mr::device_accessible> bridge{pool};
/// cuda::mr::async_resource_ref<cuda::mr::device_accessible> ref{bridge};   // or rmm::device_async_resource_ref
/// @endcode
///
/// Sync:    as the resource.
/// Throws:  what the resource throws.
/// @tparam Properties What `get_property` answers, such as `cuda::mr::device_accessible` and `host_accessible`.
template <class Resource, class... Properties> class cuda_mr_over {
  static_assert(has_allocate_sync<Resource> && has_deallocate_sync<Resource> && has_shared_copies<Resource> &&
                    has_equality<Resource>,
                "heddle::cuda_mr_over: the resource must provide allocate_sync, deallocate_sync, copies and ==");
  static constexpr bool has_streams =
      has_allocate<Resource, cuda_order::queue> && has_deallocate<Resource, cuda_order::queue>;

 public:
  /// Over a copy of `r`.
  explicit cuda_mr_over(Resource r) : held_(std::move(r)) {}

  /// Memory usable at once: the newer name.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) { return held_.allocate_sync(bytes, alignment); }
  /// Gives it back: the newer name.
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    held_.deallocate_sync(p, bytes, alignment);
  }
  /// Memory for later work on a stream: the newer name.
  template <detail::has_stream Stream>
  void* allocate(Stream stream, std::size_t bytes, std::size_t alignment)
    requires has_streams
  {
    return held_.allocate(detail::queue_of(stream), bytes, alignment);
  }
  /// Gives it back: the newer name.
  template <detail::has_stream Stream>
  void deallocate(Stream stream, void* p, std::size_t bytes, std::size_t alignment) noexcept
    requires has_streams
  {
    held_.deallocate(detail::queue_of(stream), p, bytes, alignment);
  }

  /// Memory usable at once: the name of CCCL 3.0.
  void* allocate(std::size_t bytes, std::size_t alignment) { return held_.allocate_sync(bytes, alignment); }
  /// Gives it back: the name of CCCL 3.0.
  void deallocate(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    held_.deallocate_sync(p, bytes, alignment);
  }
  /// Memory for later work on a stream: the name of CCCL 3.0.
  template <detail::has_stream Stream>
  void* allocate_async(std::size_t bytes, std::size_t alignment, Stream stream)
    requires has_streams
  {
    return held_.allocate(detail::queue_of(stream), bytes, alignment);
  }
  /// Gives it back: the name of CCCL 3.0.
  template <detail::has_stream Stream>
  void deallocate_async(void* p, std::size_t bytes, std::size_t alignment, Stream stream) noexcept
    requires has_streams
  {
    held_.deallocate(detail::queue_of(stream), p, bytes, alignment);
  }

  /// Whether memory from one may be given back to the other.
  friend bool operator==(const cuda_mr_over& a, const cuda_mr_over& b) noexcept { return a.held_ == b.held_; }
  /// That the memory has a property; there is no such function for others.
  template <class Property>
    requires(std::same_as<Property, Properties> || ...)
  friend constexpr void get_property(const cuda_mr_over&, Property) noexcept {}

 private:
  Resource held_;
};

/// @brief A resource of Heddle over one of CCCL's or RMM's, of either generation: a resource, or a reference to one.
///
/// RMM's `device_async_resource_ref` and `cuda::mr::async_resource_ref` are references: what they refer to must outlive
/// this. Alignments above 256 bytes, which many such resources ignore, are made up for here. One without streams gives
/// memory that any queue may use at once; before it gets it back, this waits for the queue.
///
/// State:   a copy of the other; for blocks that it aligned too little, where they begin, shared by copies.
/// Sync:    as the other; `deallocate` waits for its queue where the other has no streams, and where that fails, as the
///          queue is broken, gives nothing back.
/// Throws:  `argument_error` on a bad alignment; `memory_error` where the other throws `std::bad_alloc` (RMM's errors
///          of that kind do); anything else that it throws.
template <class Other> class from_cuda_mr {
  static constexpr bool newer_streams = requires(Other& o, cudaStream_t s, void* p, std::size_t n) {
    o.allocate(s, n, n);
    o.deallocate(s, p, n, n);
  };
  static constexpr bool older_streams = requires(Other& o, cudaStream_t s, void* p, std::size_t n) {
    o.allocate_async(n, n, s);
    o.deallocate_async(p, n, n, s);
  };
  static constexpr bool newer_sync = requires(Other& o, void* p, std::size_t n) {
    o.allocate_sync(n, n);
    o.deallocate_sync(p, n, n);
  };
  static_assert(
      newer_sync || requires(Other& o, void* p, std::size_t n) {
        o.allocate(n, n);
        o.deallocate(p, n, n);
      }, "heddle::from_cuda_mr: the resource must have the calls of cuda::mr, at least those without a stream");

 public:
  /// Over a copy of `other`.
  explicit from_cuda_mr(Other other) : other_(std::move(other)) {}

  /// Memory for later work on `q`.
  void* allocate(cuda_order::queue q, std::size_t bytes, std::size_t alignment) {
    return take(
        bytes, alignment,
        [&](std::size_t n) {
          if constexpr (newer_streams)
            return other_.allocate(q.stream, n, alignment);
          else if constexpr (older_streams)
            return other_.allocate_async(n, alignment, q.stream);
          else
            return take_sync(n, alignment);
        },
        [&](void* p, std::size_t n) noexcept { give(q, p, n, alignment); });
  }
  /// Gives it back once earlier work of `q` is done.
  void deallocate(cuda_order::queue q, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    if (!p) return;
    moved_->restore(p, bytes, alignment);
    give(q, p, bytes, alignment);
  }
  /// Memory usable at once.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    return take(
        bytes, alignment, [&](std::size_t n) { return take_sync(n, alignment); },
        [&](void* p, std::size_t n) noexcept { give_sync(p, n, alignment); });
  }
  /// Gives it back.
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    if (!p) return;
    moved_->restore(p, bytes, alignment);
    give_sync(p, bytes, alignment);
  }

  /// Whether both are copies of one.
  friend bool operator==(const from_cuda_mr& a, const from_cuda_mr& b) noexcept { return a.moved_ == b.moved_; }

 private:
  template <class Take, class Give> void* take(std::size_t bytes, std::size_t alignment, Take&& from, Give&& back) {
    detail::check_alignment("from_cuda_mr", alignment);
    if (bytes == 0) return nullptr;
    (void)detail::round_up("from_cuda_mr", bytes, detail::max_alignment);
    try {
      return moved_->allocate(bytes, alignment, from, back);
    } catch (const std::bad_alloc&) {
      throw memory_error("from_cuda_mr", bytes);
    }
  }
  void give(cuda_order::queue q, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    if constexpr (newer_streams) {
      other_.deallocate(q.stream, p, bytes, alignment);
    } else if constexpr (older_streams) {
      other_.deallocate_async(p, bytes, alignment, q.stream);
    } else {
      if (cudaStreamSynchronize(q.stream) == cudaSuccess) give_sync(p, bytes, alignment);
    }
  }
  void* take_sync(std::size_t bytes, std::size_t alignment) {
    if constexpr (newer_sync)
      return other_.allocate_sync(bytes, alignment);
    else
      return other_.allocate(bytes, alignment);
  }
  void give_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    if constexpr (newer_sync)
      other_.deallocate_sync(p, bytes, alignment);
    else
      other_.deallocate(p, bytes, alignment);
  }

  Other other_;
  std::shared_ptr<detail::over_aligned> moved_ = std::make_shared<detail::over_aligned>(256);
};

}  // namespace v0
}  // namespace heddle
