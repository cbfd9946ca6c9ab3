// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/archive.hpp>
#include <heddle/core/backend.hpp>
#include <heddle/core/detail/temporary.hpp>
#include <heddle/core/error.hpp>
#include <heddle/core/float16.hpp>
#include <heddle/optim/concept.hpp>

#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief A tensor of a multi_tensor, in the memory of its backend.
/// @tparam Element float, float16 or bfloat16. @tparam Gradient The same, or float.
template <class Element = float, class Gradient = Element> struct update_item {
  using element = Element;             ///< Of the parameter.
  Element* parameter = nullptr;        ///< `count` elements, updated.
  const Gradient* gradient = nullptr;  ///< `count` elements.
  std::size_t count = 0;               ///< Number of elements; 0 is legal.
  float lr_scale = 1.0f;               ///< Multiplies the rate.
  float decay_scale = 1.0f;            ///< Multiplies the decay.
};

namespace detail {
/// @cond
template <class Item> struct update_row {  // of the table in device memory; the last one ends it
  Item item;
  std::size_t begin;
};

// Which tensor element i is of: the last row that begins at or before it and isn't empty.
template <class Item> HEDDLE_HD std::size_t find_row(const update_row<Item>* rows, std::size_t tensors, std::size_t i) {
  std::size_t low = 0, high = tensors;
  while (high - low > 1) {
    const std::size_t middle = (low + high) / 2;
    if (rows[middle].begin <= i)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// f(tensor, its step, parameter, gradient, state...) for an element; where it `moves` the parameter, a 16-bit one is
// written, too.
template <class Step, class Item, int Slots> struct update_table {
  static constexpr bool narrow = !std::is_same_v<typename Item::element, float>;
  const update_row<Item>* rows;
  std::size_t tensors, total;
  float* state;
  Step step;
  float scale, limit;

  HEDDLE_HD Step step_of(std::size_t tensor) const {
    Step s = step;
    s.scale(rows[tensor].item.lr_scale, rows[tensor].item.decay_scale);
    return s;
  }
  template <class Function> HEDDLE_HD void with(std::size_t i, bool moves, const Function& f) const {
    of_tensor(find_row(rows, tensors, i), i, moves, f);
  }
  template <class Function>
  HEDDLE_HD void of_tensor(std::size_t tensor, std::size_t i, bool moves, const Function& f) const {
    const update_row<Item>& row = rows[tensor];
    const Step s = step_of(tensor);
    const std::size_t at = i - row.begin;
    float g = static_cast<float>(row.item.gradient[at]) * scale;
    if (limit > 0.0f) g = g > limit ? limit : g < -limit ? -limit : g;
    float* const slot = state + i;
    float* p;
    if constexpr (narrow)
      p = slot + Slots * total;
    else
      p = row.item.parameter + at;
    if constexpr (Slots == 0)
      f(tensor, s, *p, g);
    else if constexpr (Slots == 1)
      f(tensor, s, *p, g, slot[0]);
    else
      f(tensor, s, *p, g, slot[0], slot[total]);
    if constexpr (narrow) {
      if (moves) row.item.parameter[at] = typename Item::element(*p);
    }
  }
};

template <class Step, class Item, int Slots> struct update_one {
  struct whole {
    template <class... State>
    HEDDLE_HD void operator()(std::size_t, const Step& s, float& p, float g, State&... slots) const {
      s(p, g, slots...);
    }
  };
  update_table<Step, Item, Slots> table;
  HEDDLE_HD void operator()(std::size_t i) const { table.with(i, true, whole{}); }
};

// The halves of a layerwise rule. The first moves no state, since what adds up the squares may throw: the second makes
// the same move once more, which costs less than to write it down and to read it.
template <class Step, class Item, int Slots> struct square_one {
  struct look {
    layer_squares* to;
    template <class... State>
    HEDDLE_HD void operator()(std::size_t, const Step& s, const float& p, float g, State... slots) const {
      s.advance(p, g, slots...);
      const double a = static_cast<double>(p), b = static_cast<double>(s.direction(p, g, slots...));
      to->parameter = a * a, to->direction = b * b;
    }
  };
  update_table<Step, Item, Slots> table;
  HEDDLE_HD layer_squares operator()(std::size_t tensor, std::size_t i) const {
    layer_squares s{};
    table.of_tensor(tensor, i, false, look{&s});
    return s;
  }
};
template <class Step, class Item, int Slots> struct ratio_one {  // of a tensor, from its squares
  update_table<Step, Item, Slots> table;
  double* ratios;
  HEDDLE_HD void operator()(std::size_t t, const layer_squares& all) const {
    ratios[t] = table.step_of(t).ratio(all.parameter, all.direction);
  }
};
template <class Step, class Item, int Slots> struct apply_one {
  struct second {
    const double* ratios;
    template <class... State>
    HEDDLE_HD void operator()(std::size_t tensor, const Step& s, float& p, float g, State&... slots) const {
      s.advance(p, g, slots...);
      s.apply(p, g, slots..., ratios[tensor]);
    }
  };
  update_table<Step, Item, Slots> table;
  const double* ratios;
  HEDDLE_HD void operator()(std::size_t i) const { table.with(i, true, second{ratios}); }
};
struct add_squares {
  HEDDLE_HD layer_squares operator()(const layer_squares& a, const layer_squares& b) const {
    return {a.parameter + b.parameter, a.direction + b.direction};
  }
};

template <class Item> struct begin_of {
  const update_row<Item>* rows;
  HEDDLE_HD std::size_t operator()(std::size_t tensor) const { return rows[tensor].begin; }
};

template <class Item> struct begin_master {
  const update_row<Item>* rows;
  std::size_t tensors;
  float* master;
  HEDDLE_HD void operator()(std::size_t i) const {
    const update_row<Item>& row = rows[find_row(rows, tensors, i)];
    master[i] = static_cast<float>(row.item.parameter[i - row.begin]);
  }
};

template <class Item> struct end_master {  // the other way
  const update_row<Item>* rows;
  std::size_t tensors;
  const float* master;
  HEDDLE_HD void operator()(std::size_t i) const {
    const update_row<Item>& row = rows[find_row(rows, tensors, i)];
    row.item.parameter[i - row.begin] = typename Item::element(master[i]);
  }
};

template <class Item> struct gradient_square {
  const update_row<Item>* rows;
  std::size_t tensors;
  HEDDLE_HD double operator()(std::size_t i) const {
    const update_row<Item>& row = rows[find_row(rows, tensors, i)];
    const auto g = static_cast<double>(static_cast<float>(row.item.gradient[i - row.begin]));
    return g * g;
  }
};
struct add_doubles {
  HEDDLE_HD double operator()(double a, double b) const { return a + b; }
};
/// @endcond
}  // namespace detail

/// @brief An update rule over all tensors of a model in one pass (one kernel) of a backend, with its state.
///
///     hd::multi_tensor<hd::cuda, hd::adamw, hd::bfloat16> update(hd::adamw{}, items, pool, queue);
///     update.squares(norm, queue);                       // one more read: the norm, and whether it is finite
///     update.step(1e-3f, 1.0f / loss_scale, queue);
///
/// Where the model holds 16-bit parameters it keeps the float ones that are updated, and writes both in the same pass.
/// State:   that of the rule; 4 bytes more per element with 16-bit parameters.
/// Traffic: that of the rule; with 16-bit parameters and gradients 20 bytes per element for sgd with momentum, 28 for
///          adamw: the least possible. 2 or 4 bytes read for `squares`.
///          Layerwise rules (lars, lamb) take a pass more for the norms of all tensors: two launches, 28 and 44 bytes
///          per element in float.
/// Order:   after the exchange of gradients. Rules with element_step() or layer_step().
/// Sync:    the constructor, items(), save() and load() synchronise the queue, everything else only enqueues.
/// Throws:  argument_error for null pointers with a count, or numbers outside their range; what the resource throws. No
///          state has moved then.
/// @tparam Backend host or cuda. @tparam Rule An update rule. @tparam Element float, float16 or bfloat16.
/// @tparam Resource Where state and table come from. @tparam Gradient Of gradients: that of parameters, or float.
template <class Backend, class Rule, class Element = float, class Resource = typename Backend::memory,
          class Gradient = Element>
class multi_tensor {
  static_assert(backend<Backend>, "heddle::multi_tensor: the first argument must be a backend; see docs/core.md");
  static_assert(optimizer<Rule> && (has_element_step<Rule> || has_layer_step<Rule>),
                "heddle::multi_tensor: the rule must have slots, update() and element_step() or layer_step(); see "
                "docs/optim.md");
  static_assert(Rule::slots >= 0 && Rule::slots <= 2, "heddle::multi_tensor: a rule has at most two slots");
  static constexpr bool narrow = !std::is_same_v<Element, float>;
  static constexpr int slots = Rule::slots + narrow;  // the last one: parameters in float
  using item = update_item<Element, Gradient>;
  using row = detail::update_row<item>;
  using queue_type = typename Backend::queue;

 public:
  /// @param rule The rule. @param items The tensors; their memory is borrowed. @param resource Memory; must outlive
  /// this object. @param q Where the state is cleared.
  multi_tensor(const Rule& rule, std::span<const item> items, Resource& resource, queue_type q)
      : rule_(rule),
        tensors_(items.size()),
        total_(sum(items)),
        resource_(&resource),
        table_(resource, q, (items.size() + 1) * sizeof(row)),
        state_(resource, q, total_ * slots * sizeof(float)),
        ratios_(resource, q, has_layer_step<Rule> ? items.size() * sizeof(double) : 0) {
    if constexpr (requires { rule.check(); }) rule.check();
    begins_.push_back(0);
    for (const item& t : items) begins_.push_back(begins_.back() + t.count);
    this->items(items, q);
    Backend::fill(state(0), total_ * Rule::slots, 0.0f, q);
    if constexpr (narrow) {
      Backend::for_each(total_, detail::begin_master<item>{this->rows(), tensors_, state(Rule::slots)}, q);
    }
    q.synchronize();  // what clears them is done, whatever queue works on them next
  }

  /// @brief The same tensors with other factors, or at other places. Synchronises.
  /// Throws: argument_error if their number, or a count, isn't the same.
  void items(std::span<const item> items, queue_type q) {
    bool same = items.size() == tensors_ && sum(items) == total_;
    std::vector<row> rows;
    for (std::size_t t = 0; same && t < tensors_; ++t) {
      same = begins_[t] + items[t].count == begins_[t + 1];
      rows.push_back({items[t], begins_[t]});
    }
    if (!same) throw argument_error("heddle::multi_tensor::items: they are other tensors than before");
    rows.push_back({{}, total_});
    Backend::copy(rows.data(), this->rows(), rows.size(), q);
    q.synchronize();  // the rows are on this stack
  }

  /// Elements of all tensors.
  std::size_t size() const noexcept { return total_; }
  /// Steps taken.
  std::size_t steps() const noexcept { return steps_; }
  /// Goes on as if so many steps were taken: with state that was loaded.
  void steps(std::size_t taken) noexcept { steps_ = taken; }
  /// State of a slot, all tensors one after the other, in the backend's memory; with 16-bit parameters one slot more
  /// than the rule's: the parameters in float.
  float* state(int slot) noexcept {
    return reinterpret_cast<float*>(state_.data()) + static_cast<std::size_t>(slot) * total_;
  }

  /// @brief Writes steps and state; float parameters, which are the caller's, are not part of it. Synchronises.
  /// Throws: file_error; what the backend throws.
  void save(const std::string& path, queue_type q) {
    std::vector<float> values(total_ * slots);
    Backend::copy(static_cast<const float*>(state(0)), values.data(), values.size(), q);
    q.synchronize();
    archive_writer out;
    out.put(signature());
    out.put(begins_.data(), begins_.size());
    out.put(static_cast<std::uint64_t>(steps_));
    out.put(values.data(), values.size());
    out.write(path);
  }
  /// @brief Goes on with what was saved, bit for bit; 16-bit parameters are written, too. Replicas hold the same, so any
  /// rank's file will do, also on another number of ranks. Synchronises.
  /// Throws: file_error if it is missing, damaged, or of another rule or other tensors: nothing has changed then.
  void load(const std::string& path, queue_type q) {
    archive_reader in(path);
    if (in.get_string() != signature()) in.refuse("it is of another rule or type");
    std::vector<std::size_t> begins(begins_.size());
    in.get(begins.data(), begins.size());
    if (begins != begins_) in.refuse("its tensors have other sizes");
    const auto steps = static_cast<std::size_t>(in.get<std::uint64_t>());
    std::vector<float> values(total_ * slots);
    in.get(values.data(), values.size());
    in.finish();
    Backend::copy(static_cast<const float*>(values.data()), state(0), values.size(), q);
    if constexpr (narrow) Backend::for_each(total_, detail::end_master<item>{rows(), tensors_, state(Rule::slots)}, q);
    q.synchronize();  // the values are on this stack
    steps_ = steps;
  }

  /// @brief *result = sum of the squares of all gradients, in the backend's memory: not finite where one isn't.
  void squares(double* result, Resource& resource, queue_type q) {
    Backend::transform_reduce(total_, 0.0, detail::add_doubles{}, detail::gradient_square<item>{rows(), tensors_},
                              result, resource, q);
  }

  /// @brief One step of all tensors. @param lr Rate. @param scale Multiplies gradients: 1 over the loss scale, and a
  /// clip's factor. @param q Where the work goes.
  void step(float lr, float scale, queue_type q) { step(lr, scale, 0.0f, q); }
  /// @brief The same, and then no gradient's magnitude is above `limit`; 0: none.
  void step(float lr, float scale, float limit, queue_type q) {
    const auto good = [](float x) { return x >= 0.0f && x <= (std::numeric_limits<float>::max)(); };
    if (!good(lr) || !good(scale) || !good(limit)) {
      throw argument_error("heddle::multi_tensor::step: lr " + std::to_string(lr) + ", scale " + std::to_string(scale) +
                           ", limit " + std::to_string(limit) + "; allowed are finite numbers of 0 or above");
    }
    const update_context x{.lr = lr, .step = steps_};
    if constexpr (has_element_step<Rule>) {
      const auto one = rule_.element_step(x);
      using step_type = std::remove_const_t<decltype(one)>;
      Backend::for_each(total_, detail::update_one<step_type, item, Rule::slots>{table(one, scale, limit)}, q);
    } else {
      const auto one = rule_.layer_step(x);
      using step_type = std::remove_const_t<decltype(one)>;
      const auto all = table(one, scale, limit);
      auto* const ratios = reinterpret_cast<double*>(ratios_.data());
      Backend::reduce_segments(tensors_, total_, detail::begin_of<item>{rows()}, layer_squares{}, detail::add_squares{},
                               detail::square_one<step_type, item, Rule::slots>{all},
                               detail::ratio_one<step_type, item, Rule::slots>{all, ratios}, *resource_, q);
      Backend::for_each(total_, detail::apply_one<step_type, item, Rule::slots>{all, ratios}, q);
    }
    ++steps_;
  }

 private:
  std::string signature() const {
    std::string text = std::to_string(slots) + " slots";
    if constexpr (requires { rule_.name(); }) text += " of " + rule_.name();
    return text;
  }
  static std::size_t sum(std::span<const item> items) {
    std::size_t n = 0;
    for (const item& t : items) {
      if (t.count && (!t.parameter || !t.gradient))
        throw argument_error("heddle::multi_tensor: a null pointer with count " + std::to_string(t.count));
      if (t.count > static_cast<std::size_t>(-1) / 64 - n)
        throw argument_error("heddle::multi_tensor: the tensors are larger than memory can be");
      n += t.count;
    }
    return n;
  }
  template <class Step>
  detail::update_table<Step, item, Rule::slots> table(const Step& one, float scale, float limit) noexcept {
    return {rows(), tensors_, total_, state(0), one, scale, limit};
  }
  const row* rows() const noexcept { return reinterpret_cast<const row*>(table_.data()); }
  row* rows() noexcept { return reinterpret_cast<row*>(table_.data()); }

  Rule rule_;
  std::size_t tensors_, total_;
  std::vector<std::size_t> begins_;  // of the tensors, and where the last one ends
  Resource* resource_;
  detail::temporary<Resource, queue_type> table_, state_, ratios_;
  std::size_t steps_ = 0;
};

}  // namespace v0
}  // namespace heddle
