// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/config.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>

namespace heddle {
inline namespace v0 {

/// @brief What a push tells about a key besides its gradient.
struct sighting {
  float times = 1.0f;  ///< How many items of the batch had this key.
  float show = 1.0f;   ///< Sum of their shows; their number where none were given.
  float click = 0.0f;  ///< Sum of their clicks.
};

/// @brief What a rule is told besides the numbers.
struct row_context {
  float lr = 0.0f;  ///< Learning rate of this push.
};

/// @name Requirements of a table rule, one by one
/// @{
/// Has `linear`: whether pushing two gradients equals pushing their sum. If so, the duplicates of a batch are applied
/// one after the other; if not, they are summed first.
template <class Rule>
concept has_linear = requires {
  { Rule::linear } -> std::convertible_to<bool>;
};
/// Has `slots(dim)`: floats of state for a row of `dim` weights, which start at 0, or as `start` leaves them.
template <class Rule>
concept has_row_slots = requires {
  { Rule::slots(std::size_t{4}) } -> std::convertible_to<std::size_t>;
};
/// Has `update<Dim>(weights, slots, gradient, context)`.
template <class Rule>
concept has_row_update = requires(const Rule& r, float* w, float* s, const float* g, const row_context& x) {
  r.template update<4>(w, s, g, x);
};
/// Has `name()`, which files carry.
template <class Rule>
concept has_table_name = requires(const Rule& r) {
  { r.name() } -> std::convertible_to<std::string>;
};
/// @}

/// @brief An update rule of a sparse table: it moves one row. The same definition serves host and device.
///
///     struct signed_descent {
///       static constexpr bool linear = false;
///       static constexpr std::size_t slots(std::size_t) { return 0; }
///       template <std::size_t Dim>
///       HEDDLE_HD void update(float* w, float*, const float* g, const hd::row_context& x) const {
///         for (std::size_t i = 0; i < Dim; ++i) w[i] -= g[i] > 0 ? x.lr : g[i] < 0 ? -x.lr : 0.0f;
///       }
///       std::string name() const { return "signed_descent"; }
///     };
///
/// It may have `start<Dim>(slots)`, which fills the state of a new row, and `check()`, which throws argument_error for
/// a number outside its range. `update` must not throw.
template <class Rule>
concept table_rule = has_linear<Rule> && has_row_slots<Rule> && has_row_update<Rule> && has_table_name<Rule>;

/// @brief How a new row begins: a function of the seed, the table's number, the key and the column, and so the same on
/// every shard, server, thread and device, and after the row was evicted.
///
///     struct ones {
///       template <std::size_t Dim> HEDDLE_HD void fill(float* w, std::uint64_t, std::uint32_t, std::uint64_t) const {
///         for (std::size_t i = 0; i < Dim; ++i) w[i] = 1.0f;
///       }
///       std::string name() const { return "ones"; }
///     };
template <class Initial>
concept table_initial = has_table_name<Initial> && requires(const Initial& i, float* w) {
  i.template fill<4>(w, std::uint64_t{}, std::uint32_t{}, std::uint64_t{});
};

/// @brief Which keys get a row. `state` is what it remembers of refused keys: one per shard, used under its lock.
///
///     struct even_keys {
///       struct state {
///         std::size_t bytes() const { return 0; }
///         template <class Out> void save(Out&) const {}
///         template <class In> void load(In&, const hd::admission_context&) {}
///       };
///       bool admit(state&, std::uint64_t mixed, const hd::sighting&, const hd::admission_context&) const {
///         return hd::detail::unmix(mixed) % 2 == 0;
///       }
///       bool admits_unseen(std::uint64_t mixed, std::uint64_t) const { return hd::detail::unmix(mixed) % 2 == 0; }
///       std::string name() const { return "even_keys"; }
///     };
///
/// `admit` is asked by a push of a key without a row, and may count it; `admits_unseen` is asked by a pull, which must
/// be repeatable and so counts nothing. Neither may draw random numbers: the answer after a retry must be the same.
template <class Admission>
concept table_admission = has_table_name<Admission> && requires(const Admission& a, std::uint64_t m) {
  typename Admission::state;
  { a.admits_unseen(m, m) } -> std::convertible_to<bool>;
};

/// @brief Which rows go. `words` numbers of 32 bits per row are its statistics; a push shows each row that it moved to
/// `touch`.
///
///     struct idle {  // goes when it was not pushed for `ticks`, see sparse_table::advance
///       std::uint32_t ticks = 100;
///       static constexpr std::size_t words = 1;
///       void touch(std::uint32_t* w, const hd::sighting&, std::uint32_t now, std::uint64_t) const { w[0] = now; }
///       bool expired(std::uint32_t* w, std::uint32_t now) const { return now > w[0] && now - w[0] > ticks; }
///       std::string name() const { return "idle"; }
///     };
///
/// It has `expired(words, now)`, asked of every row by `sparse_table::evict()`, where a server that has started again
/// may have rows of ticks that are still to come; or `bytes` and `rank(words, count)`: then the table drops the rows of
/// lowest rank by itself where it would grow past `bytes`; or neither, and nothing goes.
template <class Eviction>
concept table_eviction =
    has_table_name<Eviction> && requires(const Eviction& e, std::uint32_t* words, const sighting& s, std::uint32_t now) {
      { Eviction::words } -> std::convertible_to<std::size_t>;
      e.touch(words, s, now, std::uint64_t{});
    };
/// Rows can expire.
template <class Eviction>
concept expiring_eviction = table_eviction<Eviction> && requires(const Eviction& e, std::uint32_t* words) {
  { e.expired(words, std::uint32_t{}) } -> std::convertible_to<bool>;
};
/// The table has a bound in bytes.
template <class Eviction>
concept bounded_eviction = table_eviction<Eviction> && requires(const Eviction& e, std::uint32_t* words) {
  { e.bytes } -> std::convertible_to<std::size_t>;
  { e.rank(words, std::uint64_t{}) } -> std::convertible_to<std::uint32_t>;
};

/// @brief What becomes of a gradient that isn't finite. `check<Dim>(gradient)` says whether to apply it.
///
/// `edits` says that it may change the gradient, so the table hands it a copy; `throws` that the whole push is refused,
/// before anything has moved.
template <class Guard>
concept table_guard = has_table_name<Guard> && requires(const Guard& g, float* x) {
  { Guard::edits } -> std::convertible_to<bool>;
  { Guard::throws } -> std::convertible_to<bool>;
  { g.template check<4>(x) } -> std::convertible_to<bool>;
};

}  // namespace v0
}  // namespace heddle
