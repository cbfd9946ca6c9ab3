// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/host.hpp>
#include <heddle/memory/concept.hpp>

#include <concepts>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief Any resource behind one type: for interfaces that can't be templates.
///
/// A copy shares the resource. Costs a virtual call; where the type can be known, pass the resource itself.
///
/// State:   one allocation that holds the resource, shared by all copies.
/// Order:   holds any resource; adaptors may stand around it.
/// Sync:    as the resource it holds.
/// Throws:  what the resource throws.
/// @tparam Queue The queue of the backend whose memory it is.
template <class Queue = host::queue> class any_resource {
 public:
  /// Holds a copy of `r`.
  template <class Resource>
    requires(!std::same_as<std::remove_cvref_t<Resource>, any_resource> &&
             resource<std::remove_cvref_t<Resource>, Queue>)
  any_resource(Resource&& r)
      : held_(std::make_shared<model<std::remove_cvref_t<Resource>>>(std::forward<Resource>(r))) {}

  /// Memory for work on `queue`.
  void* allocate(Queue queue, std::size_t bytes, std::size_t alignment) {
    return held_->allocate(queue, bytes, alignment);
  }
  /// Gives memory of `allocate` back.
  void deallocate(Queue queue, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    held_->deallocate(queue, p, bytes, alignment);
  }
  /// Memory usable at once.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) { return held_->allocate_sync(bytes, alignment); }
  /// Gives memory of `allocate_sync` back.
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept {
    held_->deallocate_sync(p, bytes, alignment);
  }

  /// Whether both hold resources of one type that compare equal.
  friend bool operator==(const any_resource& a, const any_resource& b) noexcept {
    return a.held_ == b.held_ || a.held_->equals(*b.held_);
  }

 private:
  struct interface {
    virtual ~interface() = default;
    virtual void* allocate(Queue queue, std::size_t bytes, std::size_t alignment) = 0;
    virtual void deallocate(Queue queue, void* p, std::size_t bytes, std::size_t alignment) noexcept = 0;
    virtual void* allocate_sync(std::size_t bytes, std::size_t alignment) = 0;
    virtual void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept = 0;
    virtual bool equals(const interface& other) const noexcept = 0;
  };

  template <class Resource> struct model final : interface {
    explicit model(Resource r) : held(std::move(r)) {}
    void* allocate(Queue queue, std::size_t bytes, std::size_t alignment) override {
      return held.allocate(queue, bytes, alignment);
    }
    void deallocate(Queue queue, void* p, std::size_t bytes, std::size_t alignment) noexcept override {
      held.deallocate(queue, p, bytes, alignment);
    }
    void* allocate_sync(std::size_t bytes, std::size_t alignment) override {
      return held.allocate_sync(bytes, alignment);
    }
    void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment) noexcept override {
      held.deallocate_sync(p, bytes, alignment);
    }
    bool equals(const interface& other) const noexcept override {
      const auto* const same = dynamic_cast<const model*>(&other);
      return same && same->held == held;
    }
    Resource held;
  };

  std::shared_ptr<interface> held_;
};

static_assert(resource<any_resource<>>);

}  // namespace v0
}  // namespace heddle
