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
template <class Parameter = float, class Gradient = float> struct piece_view {
  Parameter* parameter;
  Gradient* gradient;
  update_context context;
};

// What becomes of a gradient before a rule is given it.
struct scaling {
  float factor = 1.0f;
  float limit = 0.0f;  // on the magnitude of an element, after the factor; 0: none
};

// An update rule and the state of the pieces that it is applied to. In a step, advance() for all pieces comes before
// apply() for each. Gradients are scaled first; float ones in place. Parameters of 16 bits have float masters, in the
// slot behind the rule's, and are written from these.
template <class Rule, int Slots, class Memory, class Parameter = float, class Gradient = float> class piecewise {
  static constexpr bool masters = !std::is_same_v<Parameter, float>;
  static constexpr bool wide = std::is_same_v<Gradient, float>;
  using view_type = piece_view<Parameter, Gradient>;

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
  void advance(Comm* comm, const std::vector<piece>& pieces, View&& view, const scaling& s) {
    if constexpr (layerwise<Rule>) {
      std::fill(squares_.begin(), squares_.end(), layer_squares{});
      for (const piece& p : pieces) {
        const view_type v = view(p);
        each_block(p, v, s, [&](float* parameter, float* gradient, float* const* state, std::size_t n) {
          const layer_squares part = rule_.advance(parameter, gradient, state, n, v.context);
          if (p.own) squares_[p.tensor] += part;
        });
      }
      static_assert(sizeof(layer_squares) == 2 * sizeof(double));
      const std::span<double> numbers(reinterpret_cast<double*>(squares_.data()), 2 * squares_.size());
      if (comm) all_reduce(*comm, direct{}, numbers, sum{});
    }
  }

  template <class View> void apply(const piece& p, View&& view, const scaling& s) {
    const view_type v = view(p);
    Parameter* to = v.parameter;
    const auto rounded = [&](const float* master, std::size_t n) {
      if constexpr (masters) {
        convert(master, to, n);
        to += n;
      }
    };
    if constexpr (layerwise<Rule>) {  // advance() has scaled what can be scaled in place
      each_block(p, v, wide ? scaling{} : s,
                 [&](float* parameter, float* gradient, float* const* state, std::size_t n) {
                   rule_.apply(parameter, gradient, state, n, v.context, squares_[p.tensor]);
                   rounded(parameter, n);
                 });
    } else {
      each_block(p, v, s, [&](float* parameter, float* gradient, float* const* state, std::size_t n) {
        rule_.update(parameter, gradient, state, n, v.context);
        rounded(parameter, n);
      });
    }
  }

 private:
  // f(parameter, gradient, state, n) for blocks that stay in the first-level cache between their scaling and what
  // follows.
  template <class Function> void each_block(const piece& p, view_type v, const scaling& s, Function&& f) {
    float* state_of[Slots ? Slots : 1] = {};
    for (int k = 0; k < Slots; ++k) state_of[k] = state(static_cast<std::size_t>(k), p.state);
    constexpr std::size_t most = 2048;
    [[maybe_unused]] float widened[wide ? 1 : most];
    const std::size_t block = wide && !masters && s.factor == 1.0f && s.limit == 0.0f ? p.count : most;
    for (std::size_t left = p.count, n; left; left -= n) {
      n = (std::min)(left, block);
      float* g;
      if constexpr (wide) {
        g = v.gradient;
        if (s.factor != 1.0f) convert_scaled(g, g, n, s.factor);
      } else {
        g = widened;
        convert_scaled(v.gradient, g, n, s.factor);
      }
      for (std::size_t i = 0; s.limit > 0.0f && i < n; ++i)
        g[i] = g[i] > s.limit ? s.limit : g[i] < -s.limit ? -s.limit : g[i];
      float* parameter;
      if constexpr (masters)
        parameter = state_of[Slots - 1];
      else
        parameter = v.parameter;
      f(parameter, g, state_of, n);
      v.parameter += n;
      v.gradient += n;
      for (float*& slot : state_of) slot += Slots ? n : 0;
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
