// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief What `sparse_table` does by itself and what its servers do for workers: changes that take effect once, and
/// rows for messages.

#include <heddle/table/detail/batch.hpp>
#include <heddle/table/detail/bytes.hpp>
#include <heddle/table/detail/shard.hpp>
#include <heddle/table/detail/table_files.hpp>
#include <heddle/table/row.hpp>
#include <heddle/table/settings.hpp>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// Whose change it is. With a sequence it takes effect in a shard only if none of this worker with this number or a
// later one has. `kept`: then the shard keeps what it has done, as its saves do, until this worker knows it.
struct change_origin {
  std::uint32_t worker = 0;
  std::uint64_t sequence = 0;
  std::uint64_t object = 0, command = 0;
  std::uint64_t open = 0;  // it knows what commands below this one have asked, and all that former objects have
  bool kept = false;
  std::uint64_t passed_over = 0;  // shards that had it already

  template <class Shard> bool known_to(Shard& s) {
    if (sequence == 0) return false;
    if (s.high_water(worker) >= sequence) return ++passed_over, true;
    s.prepare(worker);
    return false;
  }
  bool knows(const change_outcome& o) const noexcept {
    return o.worker == worker && (o.object < object || (o.object == object && o.command < open));
  }
  template <class Shard> void note(Shard& s, std::uint64_t rows = 0, std::vector<std::uint64_t> keys = {}) const {
    if (kept) std::erase_if(s.outcomes, [&](const change_outcome& o) { return knows(o); });
    if (kept && rows != 0) s.outcomes.push_back({worker, object, command, rows, std::move(keys)});
    if (sequence != 0) s.raise(worker, sequence);
  }
};

template <class Table> struct table_service {
  using shard = typename Table::shard;
  using layout = typename Table::layout;
  using key_type = typename Table::key_type;
  static constexpr std::size_t stored = layout::used - layout::state_at;

  static std::size_t erase(Table& t, std::span<const key_type> keys, change_origin& of) {
    std::size_t erased = 0;
    const borrowed_batch b(t.batches_);
    t.enter(*b, keys);
    b->sort_by_shard(t.settings_.shard_bits);
    t.visit(
        *b, [](batch_entry&) {}, [](shard&, std::span<batch_entry>) {},
        [&](shard& s, std::span<batch_entry> part) {
          if (of.known_to(s)) return;
          const std::size_t before = erased;
          for (const batch_entry& e : part) {
            const std::uint32_t row = s.rows.find(e.mixed, t.fraction(e.mixed));
            if (row == s.rows.none) continue;
            t.drop(s, row);
            ++erased;
          }
          of.note(s, erased - before);
        });
    return erased;
  }

  // A tick. The first shard remembers it: files take the tick and that shard together.
  static void advance(Table& t, change_origin& of) {
    shard& s = t.held_->shards[0];
    const spin_guard guard(s.lock);
    if (of.known_to(s)) return;
    t.now_.fetch_add(1, std::memory_order_relaxed);
    of.note(s);
  }

  static void evict(Table& t, change_origin& of, table_report<key_type>& r) {
    static_assert(expiring_eviction<decltype(t.settings_.eviction)>,
                  "heddle::sparse_table: evict() needs an Eviction whose rows expire");
    t.each_locked([&](shard& s) {
      if (of.known_to(s)) return;
      std::vector<std::uint64_t> keys;
      const std::uint32_t epoch = t.epoch_.load(std::memory_order_relaxed);
      s.rows.for_each([&](std::uint32_t row, std::byte* p) {
        const auto expired = [&](std::uint32_t* w) { return t.settings_.eviction.expired(w, t.now()); };
        if (!layout::judge(p, epoch, expired)) return;
        r.gone.push_back(Table::key_of(s.rows.mixed(row)));
        if (of.kept) keys.push_back(unmix(s.rows.mixed(row)));
        t.drop(s, row);
        ++r.evicted;
      });
      const std::size_t rows = keys.size();
      of.note(s, rows, std::move(keys));
    });
    t.count(r);
  }
  // Appends what such a change has done in all.
  static void put_outcome(const Table& t, const change_origin& of, byte_writer& out) {
    std::uint64_t rows = 0;
    std::vector<key_type> keys;
    t.each_locked([&](const shard& s) {
      for (const change_outcome& o : s.outcomes) {
        if (o.worker != of.worker || o.object != of.object || o.command != of.command) continue;
        rows += o.rows;
        for (const std::uint64_t k : o.keys) keys.push_back(static_cast<key_type>(k));
      }
    });
    out.put(rows);
    out.put(keys.data(), keys.size() * sizeof(key_type));
  }
  // Forgets the outcomes of which known(outcome).
  template <class Known> static void forget_outcomes(Table& t, Known known) {
    t.each_locked([&](shard& s) { std::erase_if(s.outcomes, known); });
  }

  // Sequences applied, all at once, in the first shard.
  static void note(Table& t, std::initializer_list<std::pair<std::uint32_t, std::uint64_t>> all) {
    shard& s = t.held_->shards[0];
    const spin_guard guard(s.lock);
    for (const auto& [worker, sequence] : all) s.prepare(worker);
    for (const auto& [worker, sequence] : all) s.raise(worker, sequence);
  }

  // A shard's rows, with their number before: keys and records, without stamp and padding.
  static void put_rows(const Table& t, std::uint32_t id, byte_writer& out) {
    shard& s = t.held_->shards[id - t.settings_.first_shard];
    const spin_guard guard(s.lock);
    out.put(static_cast<std::uint64_t>(s.rows.size()));
    s.rows.for_each([&](std::uint32_t row, const std::byte* p) {
      out.put(Table::key_of(s.rows.mixed(row)));
      out.put(p + layout::state_at, stored);
    });
  }
  // f(row_view) for each of them.
  template <class Function> static void take_rows(byte_reader& in, Function& f) {
    for (std::size_t n = in.count(sizeof(key_type) + stored); n > 0; --n) {
      const auto key = in.template get<key_type>();
      const std::byte* const p = in.take(stored);
      show(key, p, f);
    }
  }
  // f(row_view) of what stands behind the stamp in a record.
  template <class Function> static void show(key_type key, const std::byte* state, Function& f) {
    float weights[Table::dim];
    Table::row_type::load(state + (layout::weights_at - layout::state_at), weights);
    f(typename Table::row_view{
        key, std::span<const float, Table::dim>(weights, Table::dim), {state, layout::weights_at - layout::state_at}});
  }

  // A save for weights of the named type.
  static void save_serving(const Table& t, const std::string& weight, const std::string& path) {
    const auto as = [&]<class Weight>(Weight) {
      if (weight != row<Table::dim, Weight>::type_name()) return false;
      table_files<Table>::template save_serving<Weight>(t, path);
      return true;
    };
    if (!as(float{}) && !as(float16{}) && !as(bfloat16{}) && !as(scaled_int8{}))
      throw argument_error("heddle::table_server: there are no weights of type " + weight);
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle
