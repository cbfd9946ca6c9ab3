// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/gather.hpp>
#include <heddle/core/convert.hpp>
#include <heddle/memory/buffer.hpp>
#include <heddle/optim/concept.hpp>

namespace heddle {
inline namespace v0 {
namespace detail {

// Neighbouring elements of a tensor that an update rule is given together.
struct piece {
  std::size_t tensor = 0, begin = 0, count = 0;  // elements [begin, begin + count) of it
  std::size_t bucket = 0, position = 0;          // where its first element travels
  std::size_t state = 0;                         // where its first element's state is
  bool own = true;                               // whether this rank's squares count
};

// Every tensor as one piece.
template <class Tensor, class Piece = piece> std::vector<Piece> whole(const std::vector<Tensor>& tensors) {
  std::vector<Piece> all;
  std::size_t at = 0;
  for (const Tensor& t : tensors) {
    all.push_back({.tensor = all.size(), .count = t.count, .state = at});
    at += t.count;
  }
  return all;
}

// Elements of state that pieces need.
template <class Piece> std::size_t extent(const std::vector<Piece>& all) noexcept {
  return all.empty() ? 0 : all.back().state + all.back().count;
}

// Cuts tensors that lie in a buffer one after the other where tensors end and where what this rank owns ends:
// f(piece) for each, in order. sizes(i) is that of tensor i in [first, last).
template <class Sizes, class Function>
void cut(std::span<const interval> owned, std::size_t first, std::size_t last, Sizes&& sizes, Function&& f) {
  std::vector<interval> own(owned.begin(), owned.end());
  sort_intervals(own);
  std::size_t k = 0, start = 0;
  for (std::size_t i = first; i < last; ++i) {
    const std::size_t end = start + sizes(i);
    for (std::size_t at = start, stop; at < end; at = stop) {
      while (k < own.size() && own[k].end() <= at) ++k;
      const bool mine = k < own.size() && own[k].begin <= at;
      stop = k == own.size() ? end : (std::min)(end, mine ? own[k].end() : own[k].begin);
      f(piece{.tensor = i, .begin = at - start, .count = stop - at, .position = at, .own = mine});
    }
    start = end;
  }
}

// What a rule is told of a piece.
struct piece_view {
  float* parameter;
  float* gradient;
  update_context context;
};

// An update rule and the state of the pieces that it is applied to. In a step, advance() for all pieces comes before
// apply() for each. Gradients are scaled by a factor first.
template <class Rule, int Slots, class Memory> class piecewise {
 public:
  piecewise(const Rule& rule, const Memory& memory, std::size_t elements, std::size_t tensors)
      : rule_(rule), elements_(elements), state_(memory, elements * Slots), squares_(layerwise<Rule> ? tensors : 0) {
    std::fill(state_.begin(), state_.end(), 0.0f);
  }

  std::size_t bytes() const noexcept { return state_.bytes(); }
  float* state(std::size_t slot, std::size_t at) noexcept { return state_.data() + slot * elements_ + at; }
  const float* state(std::size_t slot, std::size_t at) const noexcept { return state_.data() + slot * elements_ + at; }

  // Layerwise rules: the first half, and sums of squares over the ranks of `comm`, in rank order; null is this rank
  // alone. view(piece) gives its piece_view.
  template <class Comm, class View>
  void advance(Comm* comm, const std::vector<piece>& pieces, View&& view, float factor) {
    if constexpr (layerwise<Rule>) {
      std::fill(squares_.begin(), squares_.end(), layer_squares{});
      for (const piece& p : pieces) {
        each_block(p, view(p), factor, [&](const piece_view& v, float* const* state, std::size_t n) {
          const layer_squares part = rule_.advance(v.parameter, v.gradient, state, n, v.context);
          if (p.own) squares_[p.tensor] += part;
        });
      }
      static_assert(sizeof(layer_squares) == 2 * sizeof(double));
      const std::span<double> numbers(reinterpret_cast<double*>(squares_.data()), 2 * squares_.size());
      if (comm) all_reduce(*comm, direct{}, numbers, sum{});
    }
  }

  template <class View> void apply(const piece& p, View&& view, float factor) {
    if constexpr (layerwise<Rule>) {
      each_block(p, view(p), 1.0f, [&](const piece_view& v, float* const* state, std::size_t n) {
        rule_.apply(v.parameter, v.gradient, state, n, v.context, squares_[p.tensor]);
      });
    } else {
      each_block(p, view(p), factor, [&](const piece_view& v, float* const* state, std::size_t n) {
        rule_.update(v.parameter, v.gradient, state, n, v.context);
      });
    }
  }

 private:
  // Blocks that stay in the first-level cache between their scaling and what follows.
  template <class Function> void each_block(const piece& p, piece_view v, float factor, Function&& f) {
    float* state_of[Slots ? Slots : 1] = {};
    for (int k = 0; k < Slots; ++k) state_of[k] = state(static_cast<std::size_t>(k), p.state);
    const std::size_t block = factor == 1.0f ? p.count : 2048;
    for (std::size_t left = p.count, n; left; left -= n) {
      n = (std::min)(left, block);
      if (factor != 1.0f) convert_scaled(v.gradient, v.gradient, n, factor);
      f(v, state_of, n);
      v.parameter += n;
      v.gradient += n;
      for (float*& s : state_of) s += Slots ? n : 0;
    }
  }

  Rule rule_;
  std::size_t elements_;
  buffer<float, Memory> state_;  // slot by slot
  std::vector<layer_squares> squares_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle
