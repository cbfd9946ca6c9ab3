// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/memory/concept.hpp>
#include <heddle/memory/host_resource.hpp>

#include <cstddef>
#include <memory>
#include <utility>

namespace heddle {
inline namespace v0 {
namespace detail {

// That a resource can stand below an adaptor; the compiler says what it lacks.
template <class Upstream> consteval bool is_upstream() {
  static_assert(has_allocate_sync<Upstream>, "heddle: the upstream must provide allocate_sync(bytes, alignment)");
  static_assert(has_deallocate_sync<Upstream>,
                "heddle: the upstream must provide a noexcept deallocate_sync(pointer, bytes, alignment)");
  static_assert(has_shared_copies<Upstream>, "heddle: the upstream must be copyable");
  static_assert(has_equality<Upstream>, "heddle: the upstream must provide ==");
  return true;
}

// What all adaptors over one upstream share. Every allocation of at least one byte becomes
// policy.allocate(bytes, alignment, take), where take(bytes, alignment) asks the upstream in the same way, with the
// same queue if there was one; every deallocation policy.deallocate(pointer, bytes, alignment, give). Copies share the
// policy.
template <class Upstream, class Policy> class adaptor {
  static_assert(is_upstream<Upstream>());

 public:
  /// Memory for work on `queue`.
  template <class Queue>
  void* allocate(Queue queue, std::size_t bytes, std::size_t alignment)
    requires has_allocate<Upstream, Queue>
  {
    if (bytes == 0) return upstream_.allocate(queue, bytes, alignment);
    return policy_->allocate(bytes, alignment,
                             [&](std::size_t n, std::size_t a) { return upstream_.allocate(queue, n, a); });
  }

  /// Gives memory of `allocate` back.
  template <class Queue>
  void deallocate(Queue queue, void* p, std::size_t bytes, std::size_t alignment) noexcept
    requires has_deallocate<Upstream, Queue>
  {
    if (!p) return;
    policy_->deallocate(p, bytes, alignment,
                        [&](void* q, std::size_t n, std::size_t a) noexcept { upstream_.deallocate(queue, q, n, a); });
  }

  /// Memory usable at once.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    if (bytes == 0) return upstream_.allocate_sync(bytes, alignment);
    return policy_->allocate(bytes, alignment,
                             [&](std::size_t n, std::size_t a) { return upstream_.allocate_sync(n, a); });
  }

  /// Gives memory of `allocate_sync` back.
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    if (!p) return;
    policy_->deallocate(p, bytes, alignment,
                        [&](void* q, std::size_t n, std::size_t a) noexcept { upstream_.deallocate_sync(q, n, a); });
  }

  /// Whether both share one state.
  friend bool operator==(const adaptor& a, const adaptor& b) noexcept { return a.policy_ == b.policy_; }

 protected:
  template <class... Arguments>
  explicit adaptor(Upstream upstream, Arguments&&... arguments)
      : upstream_(std::move(upstream)), policy_(std::make_shared<Policy>(std::forward<Arguments>(arguments)...)) {}

  Policy& policy() const noexcept { return *policy_; }

 private:
  Upstream upstream_;
  std::shared_ptr<Policy> policy_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle
