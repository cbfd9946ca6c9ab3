// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// The blocks of model.hpp cut into eight layers each, over the same parameters: so a recomputation policy may drop the
// attention's weights or an activation and keep the products beside them. Residual paths are skips.

#pragma once

#include <heddle/recompute/layer.hpp>

#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "model.hpp"

namespace gpt {

/// What the fine layers have in common: batch x context x `width` numbers out, nothing saved but the output.
template <class Real> class fine_layer {
 public:
  fine_layer(workspace<Real>& shared, const std::vector<tensor_plan>& plan, std::size_t first, std::size_t tensors,
             std::size_t width)
      : shared_{&shared}, plan_{&plan}, first_{first}, tensors_{tensors}, width_{width} {}

  std::size_t output_bytes() const { return shared_->dims.batch * shared_->dims.context * width_ * sizeof(Real); }
  std::size_t saved_bytes() const { return 0; }
  void add_gradient(const void* more, void* sum) const {
    add(output_bytes() / sizeof(Real), static_cast<const Real*>(more), static_cast<Real*>(sum));
  }

 protected:
  /// Calls f(b, scratch) for every sequence.
  template <class F> void each(cutter<Real> scratch, F f) const {
    for (std::size_t b = 0; b < shared_->dims.batch; ++b) f(b, scratch);
  }
  cutter<Real> scratch() const { return {shared_->scratch}; }
  std::size_t rows() const { return shared_->dims.context; }
  const Real* parameter(std::size_t t) const { return shared_->parameters[first_ + t]; }
  Real* gradient(std::size_t t) const { return shared_->gradients[first_ + t]; }
  void begin_backward() const { shared_->clear(*plan_, first_, tensors_); }
  void end_backward() const {
    for (std::size_t i = tensors_; i-- > 0;) shared_->ready(first_ + i);
  }
  static const Real* in(const void* p) { return static_cast<const Real*>(p); }
  static Real* out(void* p) { return static_cast<Real*>(p); }

  workspace<Real>* shared_;
  const std::vector<tensor_plan>* plan_;
  std::size_t first_, tensors_, width_;
};

/// Layer norm; backward normalises its input once more.
template <class Real> class fine_norm : public fine_layer<Real> {
 public:
  fine_norm(workspace<Real>& shared, const std::vector<tensor_plan>& plan, std::size_t first)
      : fine_layer<Real>(shared, plan, first, 2, shared.dims.width) {}

  void forward(const void* x, void* y, void*, hd::recompute::pass) {
    const std::size_t r = this->rows(), w = this->width_, n = r * w;
    this->each(this->scratch(), [&](std::size_t b, cutter<Real> scratch) {
      Real* normal = scratch.take(n);
      normalise(r, w, this->in(x) + b * n, normal, scratch.take(r));
      scale_and_shift(r, w, normal, this->parameter(0), this->parameter(1), this->out(y) + b * n);
    });
  }
  void backward(const void* x, const void*, const void* d_y, void* d_x) {
    const std::size_t r = this->rows(), w = this->width_, n = r * w;
    this->begin_backward();
    this->each(this->scratch(), [&](std::size_t b, cutter<Real> scratch) {
      Real* normal = scratch.take(n);
      Real* scale = scratch.take(r);
      normalise(r, w, this->in(x) + b * n, normal, scale);
      std::fill_n(this->out(d_x) + b * n, n, Real(0));
      layer_norm_backward(r, w, normal, scale, this->parameter(0), this->in(d_y) + b * n, this->gradient(0),
                          this->gradient(1), this->out(d_x) + b * n);
    });
    this->end_backward();
  }
};

/// x W + bias; with `Residual` also what a skip brings.
template <class Real, bool Residual> class fine_linear : public fine_layer<Real> {
 public:
  using from_type = std::conditional_t<Residual, hd::recompute::inputs, const void*>;
  using to_type = std::conditional_t<Residual, hd::recompute::input_gradients, void*>;

  fine_linear(workspace<Real>& shared, const std::vector<tensor_plan>& plan, std::size_t first, std::size_t from,
              std::size_t to)
      : fine_layer<Real>(shared, plan, first, 2, to), from_{from} {}

  void forward(from_type x, void* y, void*, hd::recompute::pass) {
    const std::size_t r = this->rows(), w = this->width_;
    this->each(this->scratch(), [&](std::size_t b, cutter<Real>) {
      Real* to = this->out(y) + b * r * w;
      if constexpr (Residual) {
        linear(r, from_, w, this->in(x[0]) + b * r * from_, this->parameter(0), this->parameter(1), to);
        add(r * w, this->in(x[1]) + b * r * w, to);
      } else {
        linear(r, from_, w, this->in(x) + b * r * from_, this->parameter(0), this->parameter(1), to);
      }
    });
  }
  void backward(from_type x, const void*, const void* d_y, to_type d_x) {
    const std::size_t r = this->rows(), w = this->width_;
    const void* from = nullptr;
    void* to = nullptr;
    if constexpr (Residual) {
      from = x[0];
      to = d_x[0];
      std::copy_n(this->in(d_y), this->shared_->dims.batch * r * w, this->out(d_x[1]));
    } else {
      from = x;
      to = d_x;
    }
    this->begin_backward();
    cutter<Real> scratch = this->scratch();
    Real* turned = scratch.take(from_ * w);
    transpose(from_, w, this->parameter(0), w, turned);
    this->each(scratch, [&](std::size_t b, cutter<Real>) {
      linear_backward(r, from_, w, this->in(from) + b * r * from_, turned, this->in(d_y) + b * r * w, this->gradient(0),
                      this->gradient(1), this->out(to) + b * r * from_);
    });
    this->end_backward();
  }

 private:
  std::size_t from_;
};

/// The attention core: what lies between its projections. It saves its weights, the largest block of all.
template <class Real> class fine_attention : public fine_layer<Real> {
 public:
  fine_attention(workspace<Real>& shared, const std::vector<tensor_plan>& plan)
      : fine_layer<Real>(shared, plan, 0, 0, shared.dims.width) {}

  std::size_t saved_bytes() const { return this->shared_->dims.batch * weights() * sizeof(Real); }

  void forward(const void* x, void* y, void* saved, hd::recompute::pass) { run(x, y, saved); }
  void restore(const void* x, void* saved) { run(x, nullptr, saved); }
  void backward(const void* x, const void* saved, const void* d_y, void* d_x) {
    const shape& s = this->shared_->dims;
    const std::size_t n = this->rows() * this->width_;
    this->each(this->scratch(), [&](std::size_t b, cutter<Real> scratch) {
      attend_backward(s, this->in(x) + 3 * b * n, this->in(saved) + b * weights(), this->in(d_y) + b * n,
                      this->out(d_x) + 3 * b * n, scratch);
    });
  }

 private:
  std::size_t weights() const { return this->shared_->dims.heads * this->rows() * this->rows(); }
  void run(const void* x, void* y, void* saved) const {
    const std::size_t n = this->rows() * this->width_;
    this->each(this->scratch(), [&](std::size_t b, cutter<Real> scratch) {
      Real* room = scratch.take(weights());
      if (saved) room = this->out(saved) + b * weights();
      attend(this->shared_->dims, this->in(x) + 3 * b * n, room, y ? this->out(y) + b * n : nullptr, scratch);
    });
  }
};

/// The activation of the MLP.
template <class Real> class fine_gelu : public fine_layer<Real> {
 public:
  fine_gelu(workspace<Real>& shared, const std::vector<tensor_plan>& plan)
      : fine_layer<Real>(shared, plan, 0, 0, 4 * shared.dims.width) {}

  void forward(const void* x, void* y, void*, hd::recompute::pass) {
    gelu(this->output_bytes() / sizeof(Real), this->in(x), this->out(y));
  }
  void backward(const void* x, const void*, const void* d_y, void* d_x) {
    const std::size_t n = this->rows() * this->width_;
    this->each(this->scratch(), [&](std::size_t b, cutter<Real> scratch) {
      std::copy_n(this->in(d_y) + b * n, n, this->out(d_x) + b * n);
      gelu_backward(n, this->in(x) + b * n, scratch.take(n), this->out(d_x) + b * n);
    });
  }
};

/// A model's layers with its blocks cut up: the embedding, eight layers of each block, the head.
template <class Real> class fine_layers {
 public:
  explicit fine_layers(model<Real>& m) {
    m.for_each_layer([&](auto& l, std::string name) {
      using layer_type = std::remove_reference_t<decltype(l)>;
      if constexpr (std::is_same_v<layer_type, block<Real>>) {
        cut(m, name);
      } else {
        list_.emplace_back(l, std::move(name));
      }
    });
  }

  /// In order, for a chain.
  const std::vector<hd::recompute::layer>& list() const { return list_; }

 private:
  void cut(model<Real>& m, const std::string& name) {
    const std::size_t w = m.shared().dims.width, first = 2 + cut_++ * block<Real>::tensor_count;
    const std::size_t before = list_.size() - 1, middle = before + 4;
    const auto put = [&](auto layer, const char* part, std::vector<std::size_t> also_reads = {}) {
      auto kept = std::make_shared<decltype(layer)>(layer);
      list_.emplace_back(*kept, name + "." + part, std::move(also_reads));
      owned_.push_back(std::move(kept));
    };
    workspace<Real>& s = m.shared();
    put(fine_norm<Real>(s, m.plan(), first), "norm1");
    put(fine_linear<Real, false>(s, m.plan(), first + 2, w, 3 * w), "qkv");
    put(fine_attention<Real>(s, m.plan()), "attention");
    put(fine_linear<Real, true>(s, m.plan(), first + 4, w, w), "out", {before});
    put(fine_norm<Real>(s, m.plan(), first + 6), "norm2");
    put(fine_linear<Real, false>(s, m.plan(), first + 8, w, 4 * w), "up");
    put(fine_gelu<Real>(s, m.plan()), "gelu");
    put(fine_linear<Real, true>(s, m.plan(), first + 10, 4 * w, w), "down", {middle});
  }

  std::vector<hd::recompute::layer> list_;
  std::vector<std::shared_ptr<void>> owned_;
  std::size_t cut_ = 0;
};

}  // namespace gpt
