// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/backend.hpp>
#include <heddle/core/detail/temporary.hpp>
#include <heddle/core/host.hpp>
#include <heddle/table/detail/mix.hpp>
#include <heddle/table/detail/row_layout.hpp>
#include <heddle/table/eviction.hpp>
#include <heddle/table/guard.hpp>
#include <heddle/table/initial.hpp>
#include <heddle/table/row.hpp>
#include <heddle/table/rules.hpp>

#include <utility>

namespace heddle {
inline namespace v0 {

namespace detail {
/// @cond
// Figures that the queue keeps: of the table, and of the batch that is under way.
struct device_counts {
  std::uint64_t rows, refused, rejected;
  std::size_t distinct, missing;
  std::uint64_t bad;
};

// A table as functors see it.
template <class Layout> struct device_rows {
  static constexpr std::uint32_t none = 0xffffffffu;
  std::byte *records, *spilled;  // the first `near` records, and those behind them
  std::uint32_t* slots;          // 0, or a record's number plus 1
  std::uint32_t slot_count, near, capacity;
  device_counts* counts;

  HEDDLE_HD std::byte* at(std::uint32_t row) const {
    return row < near ? records + std::size_t{row} * Layout::bytes : spilled + std::size_t{row - near} * Layout::bytes;
  }
  HEDDLE_HD std::uint32_t home(std::uint64_t mixed) const { return place_among(mixed, slot_count); }
  HEDDLE_HD std::uint32_t after(std::uint32_t slot) const { return slot + 1 == slot_count ? 0 : slot + 1; }
  HEDDLE_HD std::uint32_t find(std::uint64_t mixed) const {
    for (std::uint32_t s = home(mixed); slots[s] != 0; s = after(s)) {
      std::uint64_t there;
      std::memcpy(&there, at(slots[s] - 1), 8);
      if (there == mixed) return slots[s] - 1;
    }
    return none;
  }
};

// A batch sorted by mixed key, and where each distinct key begins.
struct device_batch {
  std::uint64_t* mixed;
  std::uint32_t *items, *starts, *rows, *missing, *bad;
  std::size_t n;
};

template <class Key> struct enter_keys {
  const Key* keys;
  device_batch b;
  HEDDLE_HD void operator()(std::size_t i) const {
    b.mixed[i] = mix(widen_key(keys[i]));
    b.items[i] = static_cast<std::uint32_t>(i);
  }
};
struct is_first {
  device_batch b;
  HEDDLE_HD bool operator()(std::size_t i) const { return i == 0 || b.mixed[i] != b.mixed[i - 1]; }
};
struct note_start {
  device_batch b;
  HEDDLE_HD void operator()(std::size_t k, std::size_t i) const { b.starts[k] = static_cast<std::uint32_t>(i); }
};
template <class Rows> struct find_rows {
  Rows t;
  device_batch b;
  HEDDLE_HD void operator()(std::size_t u) const {
    if (u < t.counts->distinct) b.rows[u] = t.find(b.mixed[b.starts[u]]);
  }
};
template <class Rows> struct is_missing {
  Rows t;
  device_batch b;
  HEDDLE_HD bool operator()(std::size_t u) const { return u < t.counts->distinct && b.rows[u] == Rows::none; }
};
struct note_missing {
  device_batch b;
  HEDDLE_HD void operator()(std::size_t k, std::size_t u) const { b.missing[k] = static_cast<std::uint32_t>(u); }
};
// Makes the record of the k-th missing key. Its number depends on the batch alone; its slot on who is first.
template <class Rows, class Layout, class Rule, class Initial> struct make_record {
  Rows t;
  device_batch b;
  Rule rule;
  Initial initial;
  std::uint64_t seed;
  std::uint32_t table;
  // The record's number, none if there is no room. `mixed` becomes its key.
  HEDDLE_HD std::uint32_t make(std::size_t k, std::uint64_t& mixed) const {
    if (k >= t.counts->missing || t.counts->rows + k >= t.capacity) return Rows::none;
    const auto row = static_cast<std::uint32_t>(t.counts->rows + k);
    mixed = b.mixed[b.starts[b.missing[k]]];
    std::byte* const p = t.at(row);
    std::memcpy(p, &mixed, 8);
    Layout::stamp(p, 1);
    Layout::begin(rule, initial, p, seed, table, unmix(mixed));
    b.rows[b.missing[k]] = row;
    return row;
  }
};
// Finds a slot for it. Keys of a batch are distinct, so a slot that another one takes meanwhile isn't this key's, and
// taking is all that must be atomic.
template <class Backend, class Make> struct make_rows;
template <class Make> struct make_rows<host, Make> {
  Make m;
  void operator()(std::size_t k) const {
    std::uint64_t mixed = 0;
    const std::uint32_t row = m.make(k, mixed);
    if (row == m.t.none) return;
    std::uint32_t s = m.t.home(mixed);
    while (m.t.slots[s] != 0) s = m.t.after(s);
    m.t.slots[s] = row + 1;
  }
};
template <class Rows> struct count_made {
  Rows t;
  HEDDLE_HD void operator()(std::size_t) const {
    const std::uint64_t room = t.capacity - t.counts->rows;
    const std::uint64_t made = t.counts->missing < room ? t.counts->missing : room;
    t.counts->rows += made;
    t.counts->refused += t.counts->missing - made;
  }
};
template <class Rows> struct count_bad {
  Rows t;
  HEDDLE_HD void operator()(std::size_t) const { t.counts->rejected += t.counts->bad; }
};
template <class Rows> struct sum_bad {
  Rows t;
  device_batch b;
  HEDDLE_HD std::uint64_t operator()(std::size_t u) const { return u < t.counts->distinct ? b.bad[u] : 0; }
};
struct add_counts {
  HEDDLE_HD std::uint64_t operator()(std::uint64_t a, std::uint64_t b) const { return a + b; }
};

// Where the gradient of an item is, and what it counts.
template <std::size_t Dim> struct item_gradients {
  const float* g;
  HEDDLE_HD const float* of(std::size_t item, float& scale) const {
    scale = 1.0f;
    return g + item * Dim;
  }
};
// Bags: item i is in the bag k with offsets[k] <= i < offsets[k + 1].
template <std::size_t Dim> struct bag_gradients {
  const float* g;
  const std::size_t* offsets;
  std::size_t bags;
  bool mean;
  HEDDLE_HD const float* of(std::size_t item, float& scale) const {
    std::size_t low = 0, high = bags;  // the last bag that begins at or before the item
    while (high - low > 1) {
      const std::size_t middle = low + (high - low) / 2;
      if (offsets[middle] <= item)
        low = middle;
      else
        high = middle;
    }
    scale = mean ? 1.0f / static_cast<float>(offsets[low + 1] - offsets[low]) : 1.0f;
    return g + low * Dim;
  }
};

// Sums a key's gradients in the order of the batch, without those that aren't finite, and moves its row.
template <class Rows, class Layout, class Rule, std::size_t Dim, class Gradients> struct update_rows {
  Rows t;
  device_batch b;
  Rule rule;
  Gradients gradients;
  float lr;
  std::uint64_t step;
  HEDDLE_HD void operator()(std::size_t u) const {
    if (u >= t.counts->distinct) return;
    const std::size_t end = u + 1 < t.counts->distinct ? b.starts[u + 1] : b.n;
    float sum[Dim] = {};
    std::uint32_t bad = 0;
    bool any = false;
    for (std::size_t i = b.starts[u]; i < end; ++i) {
      float scale;
      const float* const g = gradients.of(b.items[i], scale);
      if (!guard::reject{}.template check<Dim>(g)) {
        ++bad;
        continue;
      }
      for (std::size_t c = 0; c < Dim; ++c) sum[c] = any ? sum[c] + g[c] * scale : g[c] * scale;
      any = true;
    }
    b.bad[u] = bad;
    if (!any || b.rows[u] == t.none) return;
    Layout::update(rule, t.at(b.rows[u]), b.mixed[b.starts[u]], sum, row_context{lr}, step);
  }
};
template <class Rows, class Layout, class Row, class Key> struct read_rows {
  Rows t;
  const Key* keys;
  float* out;
  HEDDLE_HD void operator()(std::size_t i) const {
    const std::uint32_t row = t.find(mix(widen_key(keys[i])));
    float* const to = out + i * Row::dim;
    if (row != t.none) return Row::load(t.at(row) + Layout::weights_at, to);
    for (std::size_t c = 0; c < Row::dim; ++c) to[c] = 0.0f;
  }
};
template <class Rows, class Layout, class Row, class Key> struct pool_rows {
  Rows t;
  const Key* keys;
  const std::size_t* offsets;
  bool mean;
  float* out;
  HEDDLE_HD void operator()(std::size_t k) const {
    float sum[Row::dim] = {}, one[Row::dim];
    for (std::size_t i = offsets[k]; i < offsets[k + 1]; ++i) {
      const std::uint32_t row = t.find(mix(widen_key(keys[i])));
      if (row == t.none) continue;
      Row::load(t.at(row) + Layout::weights_at, one);
      for (std::size_t c = 0; c < Row::dim; ++c) sum[c] += one[c];
    }
    const std::size_t n = offsets[k + 1] - offsets[k];
    const float scale = mean && n != 0 ? 1.0f / static_cast<float>(n) : 1.0f;
    for (std::size_t c = 0; c < Row::dim; ++c) out[k * Row::dim + c] = sum[c] * scale;
  }
};
/// @endcond
}  // namespace detail

/// @brief Settings of a table on a device.
template <class Rule, class Initial> struct device_table_settings {
  Rule rule{};               ///< How a push moves a row.
  Initial initial{};         ///< How a row begins: as in a `sparse_table` of the same seed and number; see `initial`.
  std::uint64_t seed = 0;    ///< Of the initial values.
  std::uint32_t table = 0;   ///< The table's number.
  std::size_t capacity = 0;  ///< Rows, 1 to 2^30. Later keys spill, or get no row: they read 0, and are counted.
};

/// Where the rows of a table on a device go that find no room there.
namespace spill {
/// Nowhere.
struct none {
  static constexpr std::size_t rows = 0;  ///< Room for them.
};
/// @brief To other memory that the device can read and write: `cuda_pinned` for one, the host's. The index stays on the
/// device. A row stays where it was made: the keys that come first are the near ones.
/// @tparam Resource A resource, as that of the table.
template <class Resource> struct to {
  Resource* resource = nullptr;  ///< Where the memory comes from; it outlives the table.
  std::size_t rows = 0;          ///< Rows, up to 2^30 with those on the device.
};
}  // namespace spill

/// @brief What a table on a device has done.
struct device_table_counts {
  std::uint64_t rows = 0;      ///< Rows that there are.
  std::uint64_t refused = 0;   ///< Keys that found no room, once in each batch.
  std::uint64_t rejected = 0;  ///< Gradients that weren't finite, and were left out.
};

/// @brief A sparse table in a backend's memory: rows, rules and initial values of `sparse_table`, fixed capacity.
///
/// A batch is sorted by mixed key; what is distinct is looked up, what is missing gets records in the order of the
/// sorted keys, all at once, and a key's gradients are summed in the order of the batch. So two runs agree to the bit.
/// Every value of Key can be used: whether a slot is taken is kept apart from the key.
///
/// State:   a record as in `sparse_table` and 8 bytes, for each row of the capacity; a spilled one's record lies in the
///          policy's memory.
/// Traffic: of a push per item: some 80 bytes of sorting, its gradient; per distinct key its record, read and written.
///          A thread works on a row, so rows of many weights are not read coalesced.
/// Sync:    all calls enqueue; counts() waits. Calls must be in one queue, or ordered by events.
/// Throws:  argument_error; what the backend and the resource throw.
/// @tparam Backend `host` (device_table.hpp) or `cuda` (device_table.cuh). @tparam Key Any integer type.
/// @tparam Row `row<Dim, Weight>`. @tparam Rule A table_rule. @tparam Initial How rows begin. @tparam Resource Memory.
/// @tparam Spill `spill::none` or `spill::to<...>`.
template <class Backend, class Key, class Row, class Rule, class Initial = initial::uniform,
          class Resource = typename Backend::memory, class Spill = spill::none>
class device_table {
  static_assert(table_rule<Rule>, "heddle::device_table: Rule must be a table_rule; see docs/table.md");
  static_assert(table_initial<Initial>, "heddle::device_table: Initial must be a table_initial; see docs/table.md");
  static_assert(Row::trainable, "heddle::device_table: rows of scaled_int8 can't be trained");
  using layout = detail::row_layout<Row, Rule, evict::never>;
  using rows = detail::device_rows<layout>;
  using queue = typename Backend::queue;
  static constexpr std::size_t dim = Row::dim;

 public:
  using settings = device_table_settings<Rule, Initial>;  ///< What it is made from.

  /// @param s Settings. @param resource Where memory comes from; it outlives the table. @param q Queue.
  /// @param spill Where rows go that find no room.
  device_table(const settings& s, Resource& resource, queue q, const Spill& spill = {})
      : settings_(s), resource_(&resource), queue_(q), spill_(spill) {
    if constexpr (requires { s.rule.check(); }) s.rule.check();
    constexpr std::size_t most = std::size_t{1} << 30;
    const std::size_t capacity = s.capacity;
    if (capacity < 1 || capacity > most || capacity + (std::min)(std::size_t{spill.rows}, most) > most)
      throw argument_error("heddle::device_table: capacity is " + std::to_string(capacity) + " and " +
                           std::to_string(spill.rows) + " rows spill, allowed is 1 to 2^30 together");
    if constexpr (spills) {
      if (spill.rows != 0 && !spill.resource)
        throw argument_error("heddle::device_table: " + std::to_string(spill.rows) +
                             " rows spill to no resource; allowed is one that isn't null, or 0 rows");
    }
    rows_.near = static_cast<std::uint32_t>(capacity);
    rows_.capacity = static_cast<std::uint32_t>(capacity + spill.rows);
    rows_.slot_count = 2 * rows_.capacity;
    records_at_ = detail::padded(sizeof(detail::device_counts));
    slots_at_ = records_at_ + detail::padded(capacity * layout::bytes);
    bytes_ = slots_at_ + std::size_t{rows_.slot_count} * sizeof(std::uint32_t);
    memory_ = static_cast<std::byte*>(resource.allocate(q, bytes_, alignment));
    try {
      if constexpr (spills) {
        if (spill.rows != 0)
          rows_.spilled = static_cast<std::byte*>(spill.resource->allocate(q, spilled_bytes(), alignment));
      }
      rows_.counts = reinterpret_cast<detail::device_counts*>(memory_);
      rows_.records = memory_ + records_at_;
      rows_.slots = reinterpret_cast<std::uint32_t*>(memory_ + slots_at_);
      Backend::fill(reinterpret_cast<std::uint8_t*>(memory_), records_at_, std::uint8_t{0}, q);
      Backend::fill(rows_.slots, rows_.slot_count, 0u, q);
    } catch (...) {
      release();
      throw;
    }
  }
  device_table(const device_table&) = delete;
  device_table& operator=(const device_table&) = delete;
  ~device_table() { release(); }

  /// @brief Reads rows; makes those of keys that have none. @param keys n keys. @param n How many, below 2^32 - 1.
  /// @param out n times dim floats. @param q Queue. All pointers lie in the backend's memory.
  void pull(const Key* keys, std::size_t n, float* out, queue q) {
    with_batch(keys, n, q, [](const detail::device_batch&) {});
    read(keys, n, out, q);
  }
  /// @brief Reads rows and makes none. @param keys n keys. @param n How many. @param out n times dim floats.
  /// @param q Queue.
  void read(const Key* keys, std::size_t n, float* out, queue q) const {
    Backend::for_each(n, detail::read_rows<rows, layout, Row, Key>{rows_, keys, out}, q);
  }
  /// @brief Moves rows by the rule, once for each distinct key. @param keys n keys. @param n How many.
  /// @param gradients n times dim floats. @param lr Learning rate. @param q Queue.
  void push(const Key* keys, std::size_t n, const float* gradients, float lr, queue q) {
    push_from(keys, n, detail::item_gradients<dim>{gradients}, lr, q);
  }

  /// @brief Embedding bag, forward: the sum or mean of the rows of each bag. Makes rows; an empty bag gives 0.
  /// @param keys Keys of all bags. @param n How many. @param offsets Where bags begin, bags + 1 of them, from 0 to n.
  /// @param bags How many. @param mean Whether to divide by the items of the bag. @param out bags times dim floats.
  /// @param q Queue.
  void pool(const Key* keys, std::size_t n, const std::size_t* offsets, std::size_t bags, bool mean, float* out,
            queue q) {
    with_batch(keys, n, q, [](const detail::device_batch&) {});
    Backend::for_each(bags, detail::pool_rows<rows, layout, Row, Key>{rows_, keys, offsets, mean, out}, q);
  }
  /// @brief Embedding bag, backward, and the update in one: pushes a bag's gradient to each of its items.
  /// @param keys Keys of all bags. @param n How many. @param offsets As given to `pool`. @param bags How many.
  /// @param mean As given to `pool`. @param gradients bags times dim floats. @param lr Learning rate. @param q Queue.
  void push_pooled(const Key* keys, std::size_t n, const std::size_t* offsets, std::size_t bags, bool mean,
                   const float* gradients, float lr, queue q) {
    push_from(keys, n, detail::bag_gradients<dim>{gradients, offsets, bags, mean}, lr, q);
  }

  /// @brief What it has done so far. Waits for the queue. @param q Queue.
  device_table_counts counts(queue q) const {
    detail::device_counts c{};
    Backend::copy(rows_.counts, &c, 1, q);
    q.synchronize();
    return {c.rows, c.refused, c.rejected};
  }
  /// Bytes held on the device.
  std::size_t bytes() const noexcept { return bytes_; }
  /// Bytes held where rows spill to.
  std::size_t spilled_bytes() const noexcept { return spill_.rows * layout::bytes; }

 private:
  static constexpr bool spills = !std::is_same_v<Spill, spill::none>;
  static constexpr std::size_t alignment = detail::temporary<Resource, queue>::alignment;

  void release() {
    if constexpr (spills) {
      if (rows_.spilled) spill_.resource->deallocate(queue_, rows_.spilled, spilled_bytes(), alignment);
    }
    resource_->deallocate(queue_, memory_, bytes_, alignment);
  }
  // Sorts a batch, makes rows, and hands it to use(batch).
  template <class Use> void with_batch(const Key* keys, std::size_t n, queue q, Use use) {
    detail::check_pointer("device_table", keys, n);
    if (n >= 0xffffffffu)
      throw argument_error("heddle::device_table: " + std::to_string(n) + " keys; allowed are fewer than 2^32 - 1");
    if (n == 0) return;
    const std::size_t words = detail::padded(4 * n);
    const detail::temporary block(*resource_, q, detail::padded(8 * n) + 5 * words);
    const auto part = [&](std::size_t k) {
      return reinterpret_cast<std::uint32_t*>(block.data() + detail::padded(8 * n) + k * words);
    };
    const detail::device_batch b{
        reinterpret_cast<std::uint64_t*>(block.data()), part(0), part(1), part(2), part(3), part(4), n};
    Backend::for_each(n, detail::enter_keys<Key>{keys, b}, q);
    Backend::sort_pairs(b.mixed, b.items, n, *resource_, q);
    Backend::select(n, detail::is_first{b}, detail::note_start{b}, &rows_.counts->distinct, *resource_, q);
    Backend::for_each(n, detail::find_rows<rows>{rows_, b}, q);
    Backend::select(n, detail::is_missing<rows>{rows_, b}, detail::note_missing{b}, &rows_.counts->missing, *resource_,
                    q);
    using make = detail::make_record<rows, layout, Rule, Initial>;
    Backend::for_each(n,
                      detail::make_rows<Backend, make>{
                          make{rows_, b, settings_.rule, settings_.initial, settings_.seed, settings_.table}},
                      q);
    Backend::for_each(1, detail::count_made<rows>{rows_}, q);
    use(b);
  }
  template <class Gradients> void push_from(const Key* keys, std::size_t n, const Gradients& g, float lr, queue q) {
    with_batch(keys, n, q, [&](const detail::device_batch& b) {
      using update = detail::update_rows<rows, layout, Rule, dim, Gradients>;
      Backend::for_each(n, update{rows_, b, settings_.rule, g, lr, ++steps_}, q);
      Backend::transform_reduce(n, std::uint64_t{0}, detail::add_counts{}, detail::sum_bad<rows>{rows_, b},
                                &rows_.counts->bad, *resource_, q);
      Backend::for_each(1, detail::count_bad<rows>{rows_}, q);
    });
  }

  settings settings_;
  Resource* resource_;
  queue queue_;
  [[maybe_unused]] Spill spill_;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0, records_at_ = 0, slots_at_ = 0;
  std::uint64_t steps_ = 0;
  rows rows_{};
};

}  // namespace v0
}  // namespace heddle
