// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// A decoder-only transformer as a chain of layers: embedding, blocks, head. Each layer reads parameters through
// pointers, writes gradients into one flat buffer, and works on one sequence of the batch at a time, so its scratch
// stays small.

#pragma once

#include <heddle/recompute/concept.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numbers>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops.hpp"

namespace gpt {

namespace hd = heddle;

struct shape {
  std::size_t vocabulary = 65;
  std::size_t context = 64;
  std::size_t width = 64;
  std::size_t heads = 4;
  std::size_t layers = 2;
  std::size_t batch = 4;  // sequences of this rank
};

/// A parameter tensor: its name, how many elements, and the standard deviation of its initial values (or 0 and a
/// constant).
struct tensor_plan {
  std::string name;
  std::size_t count;
  double deviation;
  double constant = 0;
};

/// The tensors in the order of the forward pass: two of the embedding, twelve of each block, three of the head.
inline std::vector<tensor_plan> plan_tensors(const shape& s) {
  const std::size_t w = s.width;
  const double in = 1 / std::sqrt(static_cast<double>(w));  // keeps the variance
  const double residual = in / std::sqrt(2.0 * static_cast<double>(std::max<std::size_t>(s.layers, 1)));
  std::vector<tensor_plan> all{{"embedding.token", s.vocabulary * w, 0.1}, {"embedding.position", s.context * w, 0.1}};
  for (std::size_t i = 0; i < s.layers; ++i) {
    const std::string at = "block" + std::to_string(i) + ".";
    all.insert(all.end(), {{at + "norm1.gain", w, 0, 1},
                           {at + "norm1.bias", w, 0},
                           {at + "attention.qkv.weight", w * 3 * w, in},
                           {at + "attention.qkv.bias", 3 * w, 0},
                           {at + "attention.out.weight", w * w, residual},
                           {at + "attention.out.bias", w, 0},
                           {at + "norm2.gain", w, 0, 1},
                           {at + "norm2.bias", w, 0},
                           {at + "mlp.up.weight", w * 4 * w, in},
                           {at + "mlp.up.bias", 4 * w, 0},
                           {at + "mlp.down.weight", 4 * w * w, residual / 2},
                           {at + "mlp.down.bias", w, 0}});
  }
  all.insert(all.end(),
             {{"head.norm.gain", w, 0, 1}, {"head.norm.bias", w, 0}, {"head.weight", w * s.vocabulary, in / 4}});
  return all;
}

/// A counter-based hash (splitmix64): every random choice of the example is a function of a seed and a position.
inline std::uint64_t hash(std::uint64_t seed, std::uint64_t position) {
  std::uint64_t z = seed * 0xD1342543DE82EF95ull + position * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

/// What all layers of one rank share.
template <class Real> struct workspace {
  shape dims;
  std::vector<Real*> parameters;  // one pointer per tensor; they may move between steps
  std::vector<Real*> gradients;
  const std::int32_t* targets = nullptr;
  std::function<void(std::size_t)> ready;  // told of each tensor whose gradient is final
  Real* scratch = nullptr;                 // scratch_size(dims) elements

  std::size_t sequence() const { return dims.context * dims.width; }

  /// Before a layer's backward: its gradients are sums over the sequences.
  void clear(const std::vector<tensor_plan>& plan, std::size_t first, std::size_t count) const {
    for (std::size_t i = first; i < first + count; ++i) std::fill_n(gradients[i], plan[i].count, Real(0));
  }
};

/// Hands out consecutive parts of a flat buffer.
template <class Real> struct cutter {
  Real* next;
  Real* take(std::size_t count) { return std::exchange(next, next + count); }
};

/// Token and position embedding: int32 tokens in, batch x context x width out.
template <class Real> class embedding {
 public:
  embedding(workspace<Real>& shared, const std::vector<tensor_plan>& plan) : shared_{&shared}, plan_{&plan} {}

  std::size_t output_bytes() const { return shared_->dims.batch * shared_->sequence() * sizeof(Real); }
  std::size_t saved_bytes() const { return 0; }

  void add_gradient(const void* more, void* sum) const {  // where a skip reads its output, too
    add(output_bytes() / sizeof(Real), static_cast<const Real*>(more), static_cast<Real*>(sum));
  }

  void forward(const void* in, void* out, void*, hd::recompute::pass) {
    const auto& s = shared_->dims;
    const auto* tokens = static_cast<const std::int32_t*>(in);
    auto* y = static_cast<Real*>(out);
    for (std::size_t i = 0; i < s.batch * s.context; ++i) {
      const Real* token = shared_->parameters[0] + static_cast<std::size_t>(tokens[i]) * s.width;
      const Real* position = shared_->parameters[1] + (i % s.context) * s.width;
      for (std::size_t j = 0; j < s.width; ++j) y[i * s.width + j] = token[j] + position[j];
    }
  }

  void backward(const void* in, const void*, const void* grad_out, void*) {
    const auto& s = shared_->dims;
    const auto* tokens = static_cast<const std::int32_t*>(in);
    const auto* d = static_cast<const Real*>(grad_out);
    shared_->clear(*plan_, 0, 2);
    for (std::size_t i = 0; i < s.batch * s.context; ++i) {
      Real* token = shared_->gradients[0] + static_cast<std::size_t>(tokens[i]) * s.width;
      Real* position = shared_->gradients[1] + (i % s.context) * s.width;
      for (std::size_t j = 0; j < s.width; ++j) {
        token[j] += d[i * s.width + j];
        position[j] += d[i * s.width + j];
      }
    }
    for (const std::size_t i : {1, 0}) shared_->ready(i);
  }

 private:
  workspace<Real>* shared_;
  const std::vector<tensor_plan>* plan_;
};

/// Causal attention of one sequence, head by head: weights = softmax(Q K^T / sqrt(size)), attended = weights V, which
/// is left out where `attended` is null. Scratch: context x head size.
template <class Real>
void attend(const shape& s, const Real* qkv, Real* weights, Real* attended, cutter<Real> scratch) {
  const std::size_t rows = s.context, w = s.width, size = w / s.heads;
  const Real scale = Real(1) / std::sqrt(static_cast<Real>(size));
  Real* keys = scratch.take(size * rows);  // transposed
  for (std::size_t h = 0; h < s.heads; ++h, weights += rows * rows) {
    const Real* q = qkv + h * size;
    transpose(rows, size, q + w, 3 * w, keys);
    multiply<Real>(rows, rows, size, {q, 3 * w}, keys, rows, weights, rows);
    softmax(rows, rows, scale, weights, [](std::size_t t) { return t + 1; });
    if (attended) multiply<Real>(rows, size, rows, {weights, rows}, q + 2 * w, 3 * w, attended + h * size, w);
  }
}

/// Its backward: writes d_qkv. Scratch: context x (head size + context).
template <class Real>
void attend_backward(const shape& s, const Real* qkv, const Real* weights, const Real* d_attended, Real* d_qkv,
                     cutter<Real> scratch) {
  const std::size_t rows = s.context, w = s.width, size = w / s.heads;
  const Real scale = Real(1) / std::sqrt(static_cast<Real>(size));
  Real* values = scratch.take(size * rows);  // transposed
  Real* d_weights = scratch.take(rows * rows);
  for (std::size_t h = 0; h < s.heads; ++h, weights += rows * rows) {
    const Real* q = qkv + h * size;
    const Real* d = d_attended + h * size;
    Real* d_q = d_qkv + h * size;
    transpose(rows, size, q + 2 * w, 3 * w, values);
    multiply<Real>(rows, size, rows, view<Real>{weights, rows}.transposed(), d, w, d_q + 2 * w, 3 * w);
    multiply<Real>(rows, rows, size, {d, w}, values, rows, d_weights, rows);
    softmax_backward(rows, rows, scale, weights, d_weights);
    multiply<Real>(rows, size, rows, {d_weights, rows}, q + w, 3 * w, d_q, 3 * w);
    multiply<Real>(rows, size, rows, view<Real>{d_weights, rows}.transposed(), q, 3 * w, d_q + w, 3 * w);
  }
}

/// x + attention(norm(x)), then y + mlp(norm(y)).
template <class Real> class block {
 public:
  block(workspace<Real>& shared, const std::vector<tensor_plan>& plan, std::size_t first)
      : shared_{&shared}, plan_{&plan}, first_{first} {}

  std::size_t output_bytes() const { return shared_->dims.batch * shared_->sequence() * sizeof(Real); }
  std::size_t saved_bytes() const { return shared_->dims.batch * saved_size(shared_->dims) * sizeof(Real); }

  void forward(const void* in, void* out, void* saved, hd::recompute::pass) {
    const auto& s = shared_->dims;
    const std::size_t n = shared_->sequence();
    for (std::size_t b = 0; b < s.batch; ++b) {
      cutter<Real> scratch{shared_->scratch};
      Real* room = scratch.take(saved_size(s));  // for this sequence alone, when nothing is to be kept
      if (saved != nullptr) room = static_cast<Real*>(saved) + b * saved_size(s);
      forward_sequence(static_cast<const Real*>(in) + b * n, static_cast<Real*>(out) + b * n, kept{s, room}, scratch);
    }
  }

  /// What backward needs and no more: the MLP's activation and second product are left out.
  void restore(const void* in, void* saved) {
    const auto& s = shared_->dims;
    const std::size_t n = shared_->sequence();
    for (std::size_t b = 0; b < s.batch; ++b) {
      cutter<Real> scratch{shared_->scratch};
      Real* y = scratch.take(n);
      forward_sequence(static_cast<const Real*>(in) + b * n, y, kept{s, static_cast<Real*>(saved) + b * saved_size(s)},
                       scratch, false);
    }
  }

  void backward(const void*, const void* saved, const void* grad_out, void* grad_in) {
    const auto& s = shared_->dims;
    const std::size_t n = shared_->sequence();
    shared_->clear(*plan_, first_, tensor_count);
    cutter<Real> scratch{shared_->scratch};
    const std::size_t w = s.width;
    const turned weights{turn(scratch, qkv_weight, w, 3 * w), turn(scratch, out_weight, w, w),
                         turn(scratch, up_weight, w, 4 * w), turn(scratch, down_weight, 4 * w, w)};
    for (std::size_t b = 0; b < s.batch; ++b) {
      // The cast: `kept` serves both directions, and backward only reads through it.
      auto* room = const_cast<Real*>(static_cast<const Real*>(saved)) + b * saved_size(s);
      backward_sequence(kept{s, room}, static_cast<const Real*>(grad_out) + b * n, static_cast<Real*>(grad_in) + b * n,
                        weights, scratch);
    }
    for (std::size_t i = tensor_count; i-- > 0;) shared_->ready(first_ + i);
  }

  static constexpr std::size_t tensor_count = 12;

  static std::size_t saved_size(const shape& s) {
    return s.context * (10 * s.width + 2) + s.heads * s.context * s.context;
  }

  static std::size_t scratch_size(const shape& s) {
    const std::size_t n = s.context * s.width;
    const std::size_t head = n / s.heads;
    return std::max(saved_size(s) + 5 * n + head, 12 * s.width * s.width + 11 * n + 2 * head + s.context * s.context);
  }

 private:
  enum tensor : std::size_t {
    norm1_gain,
    norm1_bias,
    qkv_weight,
    qkv_bias,
    out_weight,
    out_bias,
    norm2_gain,
    norm2_bias,
    up_weight,
    up_bias,
    down_weight,
    down_bias
  };

  /// What backward needs of one sequence, in one contiguous piece.
  struct kept {
    kept(const shape& s, Real* room) {
      cutter<Real> from{room};
      const std::size_t n = s.context * s.width;
      normal1 = from.take(n);
      normal2 = from.take(n);
      qkv = from.take(3 * n);
      attended = from.take(n);
      hidden = from.take(4 * n);
      scale1 = from.take(s.context);
      scale2 = from.take(s.context);
      weights = from.take(s.heads * s.context * s.context);
    }
    Real *normal1, *normal2, *qkv, *attended, *hidden, *scale1, *scale2, *weights;
  };

  /// Weight matrices, transposed once per backward.
  struct turned {
    const Real *qkv, *out, *up, *down;
  };

  const Real* parameter(tensor t) const { return shared_->parameters[first_ + t]; }
  Real* gradient(tensor t) const { return shared_->gradients[first_ + t]; }

  const Real* turn(cutter<Real>& scratch, tensor t, std::size_t rows, std::size_t width) const {
    Real* to = scratch.take(rows * width);
    transpose(rows, width, parameter(t), width, to);
    return to;
  }

  void forward_sequence(const Real* x, Real* y, kept k, cutter<Real> scratch, bool whole = true) const {
    const auto& s = shared_->dims;
    const std::size_t rows = s.context;
    const std::size_t w = s.width;
    const std::size_t n = rows * w;
    Real* normal = scratch.take(n);
    normalise(rows, w, x, k.normal1, k.scale1);
    scale_and_shift(rows, w, k.normal1, parameter(norm1_gain), parameter(norm1_bias), normal);
    linear(rows, w, 3 * w, normal, parameter(qkv_weight), parameter(qkv_bias), k.qkv);
    attend(s, k.qkv, k.weights, k.attended, scratch);
    linear(rows, w, w, k.attended, parameter(out_weight), parameter(out_bias), y);
    add(n, x, y);

    normalise(rows, w, y, k.normal2, k.scale2);
    scale_and_shift(rows, w, k.normal2, parameter(norm2_gain), parameter(norm2_bias), normal);
    linear(rows, w, 4 * w, normal, parameter(up_weight), parameter(up_bias), k.hidden);
    if (!whole) return;
    Real* active = scratch.take(4 * n);
    gelu(4 * n, k.hidden, active);
    // The residual is in y already, so the product is added to it.
    multiply<Real>(rows, w, 4 * w, {active, 4 * w}, parameter(down_weight), w, y, w, true);
    add_to_rows(rows, w, parameter(down_bias), y);
  }

  void backward_sequence(kept k, const Real* d_y, Real* d_x, const turned& weights, cutter<Real> scratch) const {
    const auto& s = shared_->dims;
    const std::size_t rows = s.context;
    const std::size_t w = s.width;
    const std::size_t n = rows * w;
    Real* normal = scratch.take(n);
    Real* d_normal = scratch.take(n);
    std::copy_n(d_y, n, d_x);  // the residual path
    {
      cutter<Real> mlp = scratch;
      Real* active = mlp.take(4 * n);
      Real* d_hidden = mlp.take(4 * n);
      multiply<Real>(rows, 4 * w, w, {d_y, w}, weights.down, 4 * w, d_hidden, 4 * w);
      gelu_backward(4 * n, k.hidden, active, d_hidden);
      multiply<Real>(4 * w, w, rows, view<Real>{active, 4 * w}.transposed(), d_y, w, gradient(down_weight), w, true);
      add_rows(rows, w, d_y, gradient(down_bias));
      scale_and_shift(rows, w, k.normal2, parameter(norm2_gain), parameter(norm2_bias), normal);
      linear_backward(rows, w, 4 * w, normal, weights.up, d_hidden, gradient(up_weight), gradient(up_bias), d_normal);
      layer_norm_backward(rows, w, k.normal2, k.scale2, parameter(norm2_gain), d_normal, gradient(norm2_gain),
                          gradient(norm2_bias), d_x);
    }
    Real* d_attended = scratch.take(n);
    Real* d_qkv = scratch.take(3 * n);
    linear_backward(rows, w, w, k.attended, weights.out, d_x, gradient(out_weight), gradient(out_bias), d_attended);
    attend_backward(s, k.qkv, k.weights, d_attended, d_qkv, scratch);
    scale_and_shift(rows, w, k.normal1, parameter(norm1_gain), parameter(norm1_bias), normal);
    linear_backward(rows, w, 3 * w, normal, weights.qkv, d_qkv, gradient(qkv_weight), gradient(qkv_bias), d_normal);
    layer_norm_backward(rows, w, k.normal1, k.scale1, parameter(norm1_gain), d_normal, gradient(norm1_gain),
                        gradient(norm1_bias), d_x);
  }

  workspace<Real>* shared_;
  const std::vector<tensor_plan>* plan_;
  std::size_t first_;
};

/// Final norm, projection to the vocabulary, softmax and cross-entropy: its output is one double, the mean loss in
/// nats.
template <class Real> class head {
 public:
  head(workspace<Real>& shared, const std::vector<tensor_plan>& plan)
      : shared_{&shared}, plan_{&plan}, first_{plan.size() - tensor_count} {}

  std::size_t output_bytes() const { return sizeof(double); }
  std::size_t saved_bytes() const { return shared_->dims.batch * saved_size(shared_->dims) * sizeof(Real); }

  void forward(const void* in, void* out, void* saved, hd::recompute::pass) {
    const auto& s = shared_->dims;
    double loss = 0;
    for (std::size_t b = 0; b < s.batch; ++b) {
      cutter<Real> scratch{shared_->scratch};
      Real* room = scratch.take(saved_size(s));
      if (saved != nullptr) room = static_cast<Real*>(saved) + b * saved_size(s);
      const kept k{s, room};
      Real* normal = scratch.take(shared_->sequence());
      normalise(s.context, s.width, static_cast<const Real*>(in) + b * shared_->sequence(), k.normal, k.scale);
      scale_and_shift(s.context, s.width, k.normal, parameter(gain), parameter(bias), normal);
      multiply<Real>(s.context, s.vocabulary, s.width, {normal, s.width}, parameter(weight), s.vocabulary, k.chances,
                     s.vocabulary);
      softmax(s.context, s.vocabulary, Real(1), k.chances, [&](std::size_t) { return s.vocabulary; });
      for (std::size_t t = 0; t < s.context; ++t) {
        const auto target = static_cast<std::size_t>(shared_->targets[b * s.context + t]);
        loss -= std::log(static_cast<double>(std::max(k.chances[t * s.vocabulary + target], Real(1e-30))));
      }
    }
    *static_cast<double*>(out) = loss / static_cast<double>(s.batch * s.context);
  }

  void backward(const void*, const void* saved, const void* grad_out, void* grad_in) {
    const auto& s = shared_->dims;
    const Real share =
        static_cast<Real>(*static_cast<const double*>(grad_out) / static_cast<double>(s.batch * s.context));
    const std::size_t n = shared_->sequence();
    shared_->clear(*plan_, first_, tensor_count);
    cutter<Real> scratch{shared_->scratch};
    Real* turned = scratch.take(s.width * s.vocabulary);
    Real* normal = scratch.take(n);
    Real* d_normal = scratch.take(n);
    Real* d_scores = scratch.take(s.context * s.vocabulary);
    transpose(s.width, s.vocabulary, parameter(weight), s.vocabulary, turned);
    for (std::size_t b = 0; b < s.batch; ++b) {
      const kept k{s, const_cast<Real*>(static_cast<const Real*>(saved)) + b * saved_size(s)};
      cross_entropy_backward(s.context, s.vocabulary, share, k.chances, shared_->targets + b * s.context, d_scores);
      scale_and_shift(s.context, s.width, k.normal, parameter(gain), parameter(bias), normal);
      multiply<Real>(s.width, s.vocabulary, s.context, view<Real>{normal, s.width}.transposed(), d_scores, s.vocabulary,
                     gradient(weight), s.vocabulary, true);
      multiply<Real>(s.context, s.width, s.vocabulary, {d_scores, s.vocabulary}, turned, s.width, d_normal, s.width);
      Real* d_x = static_cast<Real*>(grad_in) + b * n;
      std::fill_n(d_x, n, Real(0));
      layer_norm_backward(s.context, s.width, k.normal, k.scale, parameter(gain), d_normal, gradient(gain),
                          gradient(bias), d_x);
    }
    for (std::size_t i = tensor_count; i-- > 0;) shared_->ready(first_ + i);
  }

  static constexpr std::size_t tensor_count = 3;
  static std::size_t saved_size(const shape& s) { return s.context * (s.width + s.vocabulary + 1); }
  static std::size_t scratch_size(const shape& s) {
    return s.width * s.vocabulary + s.context * (2 * s.width + s.vocabulary) + saved_size(s);
  }

 private:
  enum tensor : std::size_t { gain, bias, weight };

  struct kept {
    kept(const shape& s, Real* room) {
      cutter<Real> from{room};
      normal = from.take(s.context * s.width);
      chances = from.take(s.context * s.vocabulary);
      scale = from.take(s.context);
    }
    Real *normal, *chances, *scale;
  };

  const Real* parameter(tensor t) const { return shared_->parameters[first_ + t]; }
  Real* gradient(tensor t) const { return shared_->gradients[first_ + t]; }

  workspace<Real>* shared_;
  const std::vector<tensor_plan>* plan_;
  std::size_t first_;
};

/// One rank's model: its flat parameter and gradient buffers and the layers over them.
template <class Real> class model {
 public:
  model(const shape& dims, std::uint64_t seed) : plan_{plan_tensors(dims)} {
    shared_.dims = dims;
    shared_.ready = [](std::size_t) {};
    std::size_t total = 0;
    for (const auto& t : plan_) total += t.count;
    parameters_.resize(total);
    gradients_.resize(total);
    scratch_.resize(std::max(block<Real>::scratch_size(dims), head<Real>::scratch_size(dims)));
    shared_.scratch = scratch_.data();
    std::size_t at = 0;
    for (const auto& t : plan_) {
      shared_.parameters.push_back(parameters_.data() + at);
      shared_.gradients.push_back(gradients_.data() + at);
      for (std::size_t i = 0; i < t.count; ++i, ++at) {
        const double radius = std::sqrt(-2 * std::log(uniform(hash(seed, 2 * at))));  // Box and Muller
        const double normal = radius * std::cos(2 * std::numbers::pi * uniform(hash(seed, 2 * at + 1)));
        parameters_[at] = static_cast<Real>(t.constant + t.deviation * normal);
      }
    }
    embedding_.emplace_back(shared_, plan_);
    for (std::size_t i = 0; i < dims.layers; ++i)
      blocks_.emplace_back(shared_, plan_, 2 + i * block<Real>::tensor_count);
    head_.emplace_back(shared_, plan_);
  }
  model(const model&) = delete;
  model& operator=(const model&) = delete;

  /// Calls f(layer, name) from the input to the loss.
  template <class F> void for_each_layer(F f) {
    f(embedding_[0], std::string("embedding"));
    for (std::size_t i = 0; i < blocks_.size(); ++i) f(blocks_[i], "block" + std::to_string(i));
    f(head_[0], std::string("head"));
  }

  workspace<Real>& shared() { return shared_; }
  const std::vector<tensor_plan>& plan() const { return plan_; }
  std::vector<Real>& parameters() { return parameters_; }
  std::vector<Real>& gradients() { return gradients_; }

 private:
  static double uniform(std::uint64_t bits) { return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53; }

  std::vector<tensor_plan> plan_;
  std::vector<Real> parameters_, gradients_, scratch_;
  workspace<Real> shared_;
  std::vector<embedding<Real>> embedding_;
  std::vector<block<Real>> blocks_;
  std::vector<head<Real>> head_;
};

}  // namespace gpt
