// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/trainer/detail/checkpoint.hpp>
#include <heddle/trainer/detail/device_forms.cuh>
#include <heddle/trainer/detail/exchanged.hpp>

#include <algorithm>
#include <optional>

namespace heddle {
inline namespace v0 {
namespace detail {

// What a compressor holds back on a device, part by part: copies of it, and a mirror on the host for checkpoints.
// `buckets` have a device_work each.
template <class Strategy> class device_held {
  using kind = exchange_kind<Strategy>;
  using form_type = device_form<typename kind::compressor_type>;

 public:
  using held_type = held_state<host_resource>;

  device_held(form_type& form, cuda::queue q) : form_(form), queue_(q) {}
  device_held(const device_held&) = delete;
  device_held& operator=(const device_held&) = delete;

  void add(const held_part& p) { parts_.push_back(p); }
  // When all have been added.
  void begin() {
    if constexpr (kind::holds) {
      std::sort(parts_.begin(), parts_.end(), [](const held_part& a, const held_part& b) {
        return a.tensor != b.tensor ? a.tensor < b.tensor : a.begin < b.begin;
      });
      form_.hold(parts_, queue_);
    }
  }

  std::optional<held_type>& mirror() noexcept { return mirror_; }
  const std::optional<held_type>& mirror() const noexcept { return mirror_; }
  // Opens the mirror, until what it returns goes away.
  struct open_type {
    device_held* self;
    explicit open_type(device_held* s) : self(s) {}
    open_type(const open_type&) = delete;
    open_type& operator=(const open_type&) = delete;
    ~open_type() { self->mirror_.reset(); }
  };
  [[nodiscard]] open_type open() {
    if constexpr (kind::holds) {
      mirror_.emplace(host_resource{}, static_cast<std::size_t>(kind::slots), parts_);
    }
    return open_type(this);
  }
  // sent(i): whether tensor i was compressed in the last step.
  template <class Buckets, class Function> void pack(archive_writer& out, const Buckets& buckets, Function&& sent) {
    if constexpr (kind::holds) {
      each([&](float* here, float* there, std::size_t n) { cuda::copy(there, here, n, queue_); });
      for (const auto& b : buckets) {
        form_.thresholds(b.work, queue_,
                         [&](std::size_t i, std::size_t begin, float from) { *extra_of(i, begin) = from; });
      }
      mirror_->pack(out, sent);
    }
    static_cast<void>(out), static_cast<void>(buckets), static_cast<void>(sent);
  }
  template <class Buckets> void restore(Buckets& buckets) {
    if constexpr (kind::holds) {
      mirror_->restore();
      each([&](float* here, float* there, std::size_t n) { cuda::copy(here, there, n, queue_); });
      for (const held_part& p : parts_) {
        if (p.extra) form_.begin_at(p.tensor, p.begin, *extra_of(p.tensor, p.begin));
      }
      for (auto& b : buckets) b.work.forget();  // tables are made anew, from the thresholds
      queue_.synchronize();
    }
    static_cast<void>(buckets);
  }
  // A slot of what is held of tensor i here; a copy.
  std::vector<float> copy(std::size_t i, std::size_t slot) const {
    std::vector<float> all;
    if constexpr (kind::holds) {
      for (const held_part& p : parts_) {
        if (p.tensor != i) continue;
        all.resize(all.size() + p.count);
        cuda::copy(static_cast<const float*>(form_.state(slot, i, p.begin)), all.data() + all.size() - p.count, p.count,
                   queue_);
        queue_.synchronize();
      }
    }
    return all;
  }

 private:
  // f(in the mirror, on the device, count) for all that is held.
  template <class Function> void each(Function&& f) {
    float* here[kind::slots + 1];
    for (const held_part& p : parts_) {
      mirror_->pointers(p.tensor, p.begin, here);
      for (int k = 0; k < kind::slots; ++k)
        f(here[k], form_.state(static_cast<std::size_t>(k), p.tensor, p.begin), p.count);
    }
    queue_.synchronize();
  }
  float* extra_of(std::size_t i, std::size_t begin) {
    float* here[kind::slots + 1];
    mirror_->pointers(i, begin, here);
    return here[kind::slots];
  }

  form_type& form_;
  cuda::queue queue_;
  typename kind::template list<held_part> parts_;  // whose state is here
  std::optional<held_type> mirror_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle
