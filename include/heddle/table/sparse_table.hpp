// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/table/admission.hpp>
#include <heddle/table/detail/batch.hpp>
#include <heddle/table/detail/checks.hpp>
#include <heddle/table/detail/row_store.hpp>
#include <heddle/table/detail/shard.hpp>
#include <heddle/table/detail/table_files.hpp>
#include <heddle/table/detail/table_service.hpp>
#include <heddle/table/detail/visit.hpp>
#include <heddle/table/eviction.hpp>
#include <heddle/table/guard.hpp>
#include <heddle/table/initial.hpp>
#include <heddle/table/row.hpp>
#include <heddle/table/rules.hpp>
#include <heddle/table/settings.hpp>

#include <span>

namespace heddle {
inline namespace v0 {

/// @brief A sparse table: rows of weights and optimizer state that are made when their keys first occur.
///
/// A row is one record: key, statistics, optimizer state, weights. Keys are spread by a mixed hash over 2^shard_bits
/// virtual shards; a shard is an index and an arena of rows that never move. A batch is sorted by shard, and each
/// shard's lock is taken once for it. Every value of Key can be used.
///
/// State:   key, 4 bytes, statistics, state and weights of a row, rounded up to 8 bytes; 5 to 6.3 bytes of index.
/// Traffic: of a push per row: its record read and written, a line of the index, the gradient.
/// Order:   results are in the caller's order. One thread's batches take effect in order; a run with one thread, and
///          one whose threads touch different keys, is repeatable to the bit.
/// Sync:    any thread may call any member at any time, but for load, load_delta and the destructor. A row changes and
///          is read under its shard's lock: it is seen, and saved, as of one moment.
/// Throws:  argument_error, before anything has changed. std::bad_alloc, or argument_error as a shard is full: rows may
///          have been made, as a pull makes them, up to some shard; with a sequence the same push can be repeated.
/// @tparam Key Any integer type. @tparam Row `row<Dim, Weight>`. @tparam Rule A table_rule. @tparam Initial How rows
/// begin. @tparam Admission Which keys get one. @tparam Eviction Which rows go. @tparam Guard What becomes of gradients
/// that aren't finite. @tparam Changes `changes::tracked` or `changes::untracked`.
template <class Key, class Row, class Rule, class Initial = initial::uniform, class Admission = admit::always,
          class Eviction = evict::never, class Guard = guard::reject, class Changes = changes::tracked>
class sparse_table {
  static_assert(std::is_integral_v<Key>, "heddle::sparse_table: Key must be an integer type");
  static_assert(table_rule<Rule>, "heddle::sparse_table: Rule must be a table_rule; see docs/table.md");
  static_assert(table_initial<Initial>, "heddle::sparse_table: Initial must be a table_initial; see docs/table.md");
  static_assert(table_admission<Admission>,
                "heddle::sparse_table: Admission must be a table_admission; see docs/table.md");
  static_assert(table_eviction<Eviction>, "heddle::sparse_table: Eviction must be a table_eviction; see docs/table.md");
  static_assert(table_guard<Guard>, "heddle::sparse_table: Guard must be a table_guard; see docs/table.md");
  static_assert(Row::trainable || std::is_same_v<Rule, rule::frozen>,
                "heddle::sparse_table: rows of scaled_int8 can't be trained; their Rule is rule::frozen");

  using layout = detail::row_layout<Row, Rule, Eviction>;
  using shard = detail::shard<layout, Admission>;
  using store = typename shard::store;
  using entry = detail::batch_entry;
  static constexpr std::uint32_t none = store::none, skip = none - 1;

 public:
  using row_type = Row;                                                        ///< Row.
  using key_type = Key;                                                        ///< Key.
  using settings = table_settings<Rule, Initial, Admission, Eviction, Guard>;  ///< What it is made from.
  using report = table_report<Key>;                                            ///< What push and pull return.
  static constexpr std::size_t dim = Row::dim;                                 ///< Weights in a row.
  static constexpr bool tracks_changes = Changes::on;                          ///< Whether deltas can be saved.
  static constexpr std::size_t record_bytes = layout::bytes;                   ///< Bytes of a row, without index.

  /// @brief A row as `for_each` shows it.
  struct row_view {
    Key key;                              ///< Its key.
    std::span<const float, dim> weights;  ///< Its weights, as floats.
    std::span<const std::byte> state;     ///< Statistics and optimizer state, as stored.
  };

  /// @param s Settings.
  /// Throws: argument_error for one outside its range.
  explicit sparse_table(const settings& s = {}) : settings_(s) {
    detail::check_policies(s.rule, s.initial, s.admission, s.eviction, s.guard);
    detail::check_shards(s);
    if constexpr (bounded_eviction<Eviction>)
      detail::check_bound(s.eviction.bytes, s.shard_bits, store::chunk_rows * record_bytes + store::page_slots * 4);
    if (settings_.last_shard == 0) settings_.last_shard = std::uint32_t{1} << settings_.shard_bits;
    held_ = make_held();
  }

  /// What it was made from.
  const settings& options() const noexcept { return settings_; }

  /// @brief Reads rows; makes those of keys that have none and are admitted. Other keys read 0.
  /// @param keys Any, also repeated. @param out Room for `dim` floats for each.
  report pull(std::span<const Key> keys, std::span<float> out) {
    detail::check_sizes("sparse_table: pull", keys.size(), out.size(), dim, "floats of room");
    report r;
    const detail::borrowed_batch b(batches_);
    enter(*b, keys);
    b->sort_by_shard(settings_.shard_bits);
    visit(
        *b, [](entry&) {},
        [&](shard& s, std::span<entry> part) {
          for (entry& e : part) {
            resolve(s, e);
            if (e.row == none && settings_.admission.admits_unseen(e.mixed, settings_.seed))
              e.row = create(s, e.mixed, r);
          }
        },
        [&](shard& s, std::span<entry> part) {
          read_part(s, part, out.data());
          enforce_bound(s, r);
        });
    count(r);
    return r;
  }

  /// @brief Reads rows and makes none: for evaluation.
  /// @param keys Any, also repeated. @param out Room for `dim` floats for each; 0 for a key without a row.
  /// @param found Empty, or room for a number for each: whether it has a row. @return Keys without a row.
  std::size_t read(std::span<const Key> keys, std::span<float> out, std::span<std::uint8_t> found = {}) const {
    if (!found.empty() && found.size() != keys.size())
      detail::throw_sizes("sparse_table: read", keys.size(), found.size(), "marks");
    std::size_t missing = 0;
    look(keys, out, [&](const entry& e) {
      missing += e.row == none;
      if (!found.empty()) found[e.item] = e.row != none;
    });
    return missing;
  }
  /// @brief Reads what `pull` would, and makes no rows: a key that it would give one reads how that row would begin.
  /// @param keys Any, also repeated. @param out Room for `dim` floats for each.
  void preview(std::span<const Key> keys, std::span<float> out) const {
    look(keys, out, [&](const entry& e) {
      if (e.row != none || !settings_.admission.admits_unseen(e.mixed, settings_.seed)) return;
      float* const to = out.data() + std::size_t{e.item} * dim;
      std::byte stored[Row::bytes];
      settings_.initial.template fill<dim>(to, settings_.seed, settings_.table, detail::unmix(e.mixed));
      Row::store(to, stored);
      Row::load(stored, to);
    });
  }

  /// @brief Moves rows by the rule; makes those of keys that have none and are admitted.
  /// @param keys Any, also repeated. @param gradients `dim` floats for each. @param o What comes with it.
  report push(std::span<const Key> keys, std::span<const float> gradients, const push_options& o = {}) {
    static_assert(!std::is_same_v<Rule, rule::frozen>, "heddle::sparse_table: rule::frozen takes no push");
    detail::check_sizes("sparse_table: push", keys.size(), gradients.size(), dim, "floats of gradients");
    detail::check_sightings("sparse_table: push", keys.size(), {o.shows, o.clicks, o.times});
    detail::check_worker(o.worker);
    if (!std::isfinite(o.lr)) throw argument_error("heddle::sparse_table: push: lr is " + std::to_string(o.lr));
    report r;
    const detail::borrowed_batch b(batches_);
    enter(*b, keys);
    const auto n = static_cast<std::uint32_t>(keys.size());
    const auto gradient = [&](std::uint32_t i) {
      return i < n ? gradients.data() + std::size_t{i} * dim : b->sums.data() + std::size_t{i - n} * dim;
    };
    const auto sight = [&](std::uint32_t i) {
      if (i >= n) return b->seen[i - n];
      const float times = o.times.empty() ? 1.0f : o.times[i];
      return sighting{times, o.shows.empty() ? times : o.shows[i], o.clicks.empty() ? 0.0f : o.clicks[i]};
    };
    if (!o.summed) r.rejected = detail::guard_batch<dim>(settings_.guard, *b, n, gradient, sight);
    if constexpr (!Rule::linear) b->merge(dim, n, gradient, sight);
    if constexpr (!std::is_same_v<Guard, guard::none>) {
      if (o.summed || (!Rule::linear && !b->sums.empty()))
        r.rejected += detail::drop_overflows<dim, Guard::throws>(*b, o.summed ? 0 : n, guard::reject{}, gradient);
    }
    b->sort_by_shard(settings_.shard_bits);
    const row_context context{.lr = o.lr};
    visit(
        *b,
        [&](entry& e) {
          const auto* const g = reinterpret_cast<const char*>(gradient(e.item));
          for (std::size_t k = 0; k < dim * sizeof(float); k += 64) __builtin_prefetch(g + k);
        },
        [&](shard& s, std::span<entry> part) {
          if (o.sequence != 0 && s.high_water(o.worker) >= o.sequence) {
            for (entry& e : part) e.row = skip;
            r.repeated += part.size();
            return;
          }
          for (entry& e : part) {
            resolve(s, e);
            if (e.row != none) continue;
            if (settings_.admission.admit(s.refused, e.mixed, sight(e.item), admission(*held_)))
              e.row = create(s, e.mixed, r);
            else
              ++r.refused;
          }
          if (o.sequence != 0) s.prepare(o.worker);
        },
        [&](shard& s, std::span<entry> part) {
          const std::uint32_t epoch = epoch_.load(std::memory_order_relaxed);
          for (const entry& e : part) {
            if (e.row >= skip) continue;
            std::byte* const p = s.rows.at(e.row);
            layout::update(settings_.rule, p, e.mixed, gradient(e.item), context, ++s.steps);
            if constexpr (layout::words != 0)
              settings_.eviction.touch(layout::statistics(p), sight(e.item), now(), s.steps);
            if constexpr (Changes::on) layout::stamp(p, epoch);
            ++r.applied;
          }
          if (o.sequence != 0) s.raise(o.worker, o.sequence);
          enforce_bound(s, r);
        });
    count(r);
    return r;
  }

  /// @brief Drops rows. @param keys Any. @return How many there were.
  std::size_t erase(std::span<const Key> keys) {
    detail::change_origin mine;
    return service::erase(*this, keys, mine);
  }

  /// @brief Lets a tick pass for `evict::ttl` and `evict::score`: a day, an epoch, what you like.
  void advance() noexcept {
    detail::change_origin mine;
    service::advance(*this, mine);
  }
  /// Ticks so far.
  std::uint32_t now() const noexcept { return now_.load(std::memory_order_relaxed); }

  /// @brief Drops the rows that have expired, a shard at a time. @return Their keys.
  std::vector<Key> evict() {
    detail::change_origin mine;
    report r;
    service::evict(*this, mine, r);
    return std::move(r.gone);
  }

  /// @brief f(row_view) for each row, a shard at a time under its lock, so f must not call the table.
  template <class Function> void for_each(Function f) const {
    each_locked([&](const shard& s) {
      s.rows.for_each([&](std::uint32_t row, const std::byte* p) {
        service::show(key_of(s.rows.mixed(row)), p + layout::state_at, f);
      });
    });
  }

  /// Rows.
  std::size_t size() const {
    std::size_t n = 0;
    each_locked([&](const shard& s) { n += s.rows.size(); });
    return n;
  }
  /// @brief Bytes held: rows, index, what the admission remembers, working memory.
  std::size_t bytes() const {
    std::size_t n = sizeof *this + held_->memory.bytes() + held_->shards.size() * sizeof(shard) + batches_.bytes();
    each_locked([&](const shard& s) { n += s.bytes(); });
    return n;
  }
  /// A number that depends on all rows (keys, statistics, state, weights), not on their order or the number of servers.
  std::uint64_t checksum() const {
    std::uint64_t sum = 0;
    each_locked([&](const shard& s) {
      s.rows.for_each([&](std::uint32_t row, const std::byte* p) {
        sum += detail::checksum(p + layout::state_at, layout::used - layout::state_at, s.rows.mixed(row));
      });
    });
    return sum;
  }
  /// @brief The last sequence of a worker that has taken effect in any shard; 0 if none has.
  std::uint64_t sequence_of(std::uint32_t worker) const {
    std::uint64_t last = 0;
    each_locked([&](const shard& s) { last = (std::max)(last, s.high_water(worker)); });
    return last;
  }
  /// @brief Notes a sequence of a worker as applied, in one shard: for a push without keys. @param worker Below 65536.
  /// @param sequence Its number.
  void note_sequence(std::uint32_t worker, std::uint64_t sequence) {
    detail::check_worker(worker);
    service::note(*this, {{worker, sequence}});
  }
  /// Forgets which pushes it has: a new job begins from what a former one saved, and counts its own from 1.
  void forget_sequences() {
    each_locked([](shard& s) {
      s.applied.clear();
      s.outcomes.clear();
    });
  }
  /// What it has done since it was made.
  table_counts counts() const {
    const detail::spin_guard guard(counting_);
    return counts_;
  }

  /// @brief A number that tables share whose rows have the same layout, rule, shards and beginnings: what workers and
  /// servers compare.
  std::uint64_t layout_number() const { return files::layout_number(*this); }

  /// @name Files
  /// A save goes on beside training: each shard is copied under its lock, so every row is of one moment, and each
  /// shard's rows are with the sequences applied to them. Files are written beside their place and renamed.
  /// Throws: file_error naming the file; the table, and what it knows of former saves, are as before.
  /// @{

  /// @brief Saves all rows, and what the admission remembers.
  void save(const std::string& path) { files::save(*this, path); }
  /// @brief Saves the rows changed, and the keys erased, since the last `save` or `save_delta`. Deltas count from 1
  /// after each `save`.
  /// Throws: argument_error if nothing was saved or loaded before, or if more keys were erased since than are kept:
  /// twice the places for rows.
  void save_delta(const std::string& path) { files::save_delta(*this, path); }
  /// @brief Saves keys and weights for a table of `rule::frozen` and the same shard_bits.
  /// @tparam Weight How weights are stored there: float, float16, bfloat16, scaled_int8.
  template <class Weight = float> void save_serving(const std::string& path) const {
    files::template save_serving<Weight>(*this, path);
  }
  /// @brief Replaces everything by what was saved, also by other numbers of servers.
  /// @param paths Files of one table that together hold each shard of this one once; other shards are passed over.
  void load(std::span<const std::string> paths) { files::load(*this, paths); }
  void load(const std::string& path) { load(std::span(&path, 1)); }  ///< The same, of one file.
  /// @brief Adds a delta to what was loaded. Deltas of a file must come in order, each once. Rows that were pushed since
  /// and aren't in it stay, and are in the next delta; but one that holds all rows (see `sharded_table::save_delta`)
  /// replaces everything, also rows and sequences that came since.
  /// Throws: file_error naming the delta that is due, or if its full file isn't what was loaded.
  void load_delta(const std::string& path) { files::load_delta(*this, path); }
  /// Saves a line per row: key, weights, each behind a tab, with digits enough to read the same floats.
  void export_text(const std::string& path) const { files::export_text(*this, path); }
  /// @}

 private:
  template <class Table> friend struct detail::table_files;
  template <class Table> friend struct detail::table_service;
  using files = detail::table_files<sparse_table>;
  using service = detail::table_service<sparse_table>;
  using held = detail::held_shards<shard>;

  auto make_held() const { return std::make_unique<held>(settings_.last_shard - settings_.first_shard); }
  std::uint64_t fraction(std::uint64_t mixed) const noexcept { return mixed << settings_.shard_bits; }
  static Key key_of(std::uint64_t mixed) noexcept { return static_cast<Key>(detail::unmix(mixed)); }
  admission_context admission(held& h) const noexcept { return {settings_.seed, settings_.shard_bits, h.memory}; }

  void enter(detail::batch& b, std::span<const Key> keys) const {
    if (keys.size() >> 31 != 0) detail::throw_sizes("sparse_table: erase", keys.size(), 0, "numbers");
    b.entries.resize(keys.size());
    bool elsewhere = false;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::uint64_t mixed = detail::mix(detail::widen_key(keys[i]));
      b.entries[i] = {mixed, static_cast<std::uint32_t>(i), none};
      const std::uint32_t s = detail::shard_of(mixed, settings_.shard_bits);
      elsewhere |= s < settings_.first_shard || s >= settings_.last_shard;
    }
    if (elsewhere)
      throw argument_error("heddle::sparse_table: a key belongs to none of the shards [" +
                           std::to_string(settings_.first_shard) + ", " + std::to_string(settings_.last_shard) + ")");
  }

  // See detail::visit.
  template <class Near, class Resolve, class Apply>
  void visit(detail::batch& b, Near near, Resolve resolve, Apply apply) const {
    detail::visit(b, std::span(held_->shards), settings_.first_shard, settings_.shard_bits, near, resolve, apply);
  }
  // Whether the candidate is the key's row; an earlier entry may also have made it meanwhile.
  void resolve(const shard& s, entry& e) const noexcept {
    if (e.row == none || s.rows.mixed(e.row) != e.mixed) e.row = s.rows.find(e.mixed, fraction(e.mixed));
  }
  // Reads rows, then calls each(entry), and makes none.
  template <class Each> void look(std::span<const Key> keys, std::span<float> out, Each each) const {
    detail::check_sizes("sparse_table: read", keys.size(), out.size(), dim, "floats of room");
    const detail::borrowed_batch b(batches_);
    enter(*b, keys);
    b->sort_by_shard(settings_.shard_bits);
    visit(
        *b, [](entry&) {},
        [&](shard& s, std::span<entry> part) {
          for (entry& e : part) resolve(s, e);
        },
        [&](shard& s, std::span<entry> part) {
          read_part(s, part, out.data());
          for (const entry& e : part) each(e);
        });
  }
  void read_part(const shard& s, std::span<const entry> part, float* out) const noexcept {
    for (const entry& e : part) {
      float* const to = out + std::size_t{e.item} * dim;
      if (e.row != none)
        Row::load(s.rows.at(e.row) + layout::weights_at, to);
      else
        std::memset(to, 0, dim * sizeof(float));
    }
  }
  std::uint32_t create(shard& s, std::uint64_t mixed, report& r) {
    const std::uint32_t row = s.rows.insert(mixed, fraction(mixed), settings_.shard_bits, held_->memory);
    std::byte* const p = s.rows.at(row);
    layout::begin(settings_.rule, settings_.initial, p, settings_.seed, settings_.table, detail::unmix(mixed));
    settings_.eviction.touch(layout::statistics(p), sighting{0, 0, 0}, now(), s.steps);
    if constexpr (Changes::on) layout::stamp(p, epoch_.load(std::memory_order_relaxed));
    ++r.created;
    return row;
  }
  void drop(shard& s, std::uint32_t row) {
    if (Changes::on && logging_.load(std::memory_order_relaxed))
      s.note_erased(s.rows.mixed(row), epoch_.load(std::memory_order_relaxed));
    s.rows.erase(row, settings_.shard_bits);
  }
  // Brings a shard that has outgrown its part of a bound down to seven eighths of it.
  void enforce_bound(shard& s, report& r) {
    if constexpr (bounded_eviction<Eviction>) {
      const std::size_t part = (settings_.eviction.bytes >> settings_.shard_bits) / (record_bytes + 7);
      const std::uint32_t epoch = epoch_.load(std::memory_order_relaxed);
      for (const std::uint32_t row : s.lowest(settings_.eviction, (std::max<std::size_t>)(1, part), epoch)) {
        r.gone.push_back(key_of(s.rows.mixed(row)));
        drop(s, row);
        ++r.evicted;
      }
    }
  }
  template <class Function> void each_locked(Function f) const {
    for (shard& s : held_->shards) {
      const detail::spin_guard guard(s.lock);
      f(s);
    }
  }
  void count(const table_counts& c) const noexcept {
    const detail::spin_guard guard(counting_);
    counts_ += c;
  }

  settings settings_;
  std::unique_ptr<held> held_;
  mutable detail::batch_pool batches_;
  std::atomic<std::uint32_t> epoch_{1}, now_{0};
  std::atomic<bool> logging_{false};  // erased keys are kept for the next delta
  std::mutex saving_;
  detail::save_chain chain_;
  mutable detail::spin_lock counting_;
  mutable table_counts counts_;
};

}  // namespace v0
}  // namespace heddle
