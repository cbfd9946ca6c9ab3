// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/memory/detail/adaptor.hpp>

#include <cstddef>
#include <utility>

namespace heddle {
inline namespace v0 {

namespace detail {
template <class Handler> class retry_policy {
 public:
  explicit retry_policy(Handler handler) : handler_(std::move(handler)) {}

  template <class Take> void* allocate(std::size_t bytes, std::size_t alignment, Take&& take) {
    for (int attempt = 1;; ++attempt) {
      try {
        return take(bytes, alignment);
      } catch (const memory_error&) {
        if (!handler_(bytes, attempt)) throw;
      }
    }
  }
  template <class Give> void deallocate(void* p, std::size_t bytes, std::size_t alignment, Give&& give) noexcept {
    give(p, bytes, alignment);
  }

 private:
  Handler handler_;
};
}  // namespace detail

/// @brief Asks a handler for help when the upstream has no memory, and tries again as long as it says so.
///
/// @code{.cpp}
/// heddle::pool cache{heddle::host_resource{}};
/// heddle::retry_on_failure memory{heddle::limiting{cache, 1 << 30},
///                                 [=](std::size_t, int attempt) mutable { return attempt == 1 && cache.trim() > 0; }};
/// @endcode
///
/// State:   the handler, shared by all copies.
/// Order:   any upstream.
/// Sync:    as the upstream; the handler may be called from several threads at once.
/// Throws:  the upstream's last `memory_error` when the handler gives up; any other error at once.
/// @tparam Handler `bool operator()(std::size_t bytes, int attempt)`: frees what it can; whether to try again. The
/// first
///         failure of a request is attempt 1.
template <class Upstream, class Handler>
class retry_on_failure : public detail::adaptor<Upstream, detail::retry_policy<Handler>> {
  static_assert(std::is_invocable_r_v<bool, Handler&, std::size_t, int>,
                "heddle::retry_on_failure: the handler must be callable as bool(std::size_t bytes, int attempt)");

 public:
  /// @param upstream Where the memory comes from. @param handler What to do when there is none.
  retry_on_failure(Upstream upstream, Handler handler)
      : detail::adaptor<Upstream, detail::retry_policy<Handler>>(std::move(upstream), std::move(handler)) {}
};

}  // namespace v0
}  // namespace heddle
