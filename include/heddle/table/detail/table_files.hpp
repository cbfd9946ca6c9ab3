// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// @brief Saving and loading of `sparse_table`.
///
/// A section, of one virtual shard: steps; sequences applied, with their number before; what the admission remembers;
/// keys erased, of a delta; records, without stamp and padding; of a server's own save, what changes have done.

#include <heddle/table/admission.hpp>
#include <heddle/table/detail/shard.hpp>
#include <heddle/table/detail/table_file.hpp>
#include <heddle/table/row.hpp>
#include <heddle/table/rules.hpp>

#include <charconv>
#include <memory>
#include <mutex>
#include <span>

#include <unistd.h>

namespace heddle {
inline namespace v0 {
namespace detail {

// What a table knows of its files.
struct save_chain {
  struct link {
    std::uint64_t base, number;  // sum of a full file, and the last of its deltas that is in the table
  };
  std::vector<link> loaded;  // what the rows came from
  bool own = false;          // they came from one file that holds what the table holds, so a delta may follow it
  bool whole = false;        // which rows are in it nobody knows any more, so the next delta has to hold all
  std::uint32_t saved = 0;   // epochs up to this one are in it
  std::string aside;         // where a server keeps its save, and beside it the link, for its next life; may be empty

  std::string link_file() const { return aside + ".chain"; }
  // Before a delta is written, lest a next life gives another one its number.
  void keep(link l) const {
    if (aside.empty()) return;
    archive_writer out;
    out.put(l);
    out.write(link_file());
  }
};

template <class Table> struct table_files {
  using shard = typename Table::shard;
  using layout = typename Table::layout;
  using key_type = typename Table::key_type;

  static table_header header(const Table& t, file_kind kind) {
    const auto& s = t.settings_;
    table_header h;
    h.version = kind == file_kind::whole ? 2 : 1;
    h.kind = kind;
    h.key_bytes = sizeof(key_type);
    h.dim = static_cast<std::uint32_t>(Table::dim);
    h.slots = static_cast<std::uint32_t>(layout::slots);
    h.words = static_cast<std::uint32_t>(layout::words);
    h.shard_bits = s.shard_bits;
    h.table = s.table;
    h.seed = s.seed;
    h.now = t.now();
    h.name(h.weight, Table::row_type::type_name());
    h.name(h.rule, s.rule.name());
    h.name(h.initial, s.initial.name());
    h.name(h.admission, s.admission.name());
    h.name(h.eviction, s.eviction.name());
    return h;
  }

  static std::uint64_t layout_number(const Table& t) {
    table_header h = header(t, file_kind::full);
    h.now = 0;
    std::uint64_t sum = h.expected_sum();
    for (std::uint64_t key = 0; key < 2; ++key) {  // how rows begin, in 8 bits, as the last ones may be a machine's own
      alignas(8) std::byte record[layout::bytes];
      float weights[Table::dim];
      layout::begin(t.settings_.rule, t.settings_.initial, record, t.settings_.seed, t.settings_.table, key);
      Table::row_type::load(record + layout::weights_at, weights);
      for (const float w : weights) sum = mix(sum ^ bfloat16(w).bits);
      sum = checksum(record + layout::slots_at, layout::weights_at - layout::slots_at, sum);
    }
    return sum;
  }

  // Everything of a shard with epochs above `after`.
  static void write_shard(const Table& t, const shard& s, std::uint32_t after, byte_writer& out) {
    if (after != 0 && s.lost > after)
      throw argument_error(
          "heddle::sparse_table: save_delta: more keys were erased since the last save than are kept; "
          "save the whole table");
    out.clear();
    out.put(s.steps);
    out.put(static_cast<std::uint64_t>(s.applied.size()));
    out.put(s.applied.data(), s.applied.size() * 8);
    s.refused.save(out);
    std::uint64_t gone = 0, rows = 0;
    std::size_t at = out.size();
    out.put(gone);
    for (const auto& e : s.erased) {
      if (after == 0 || s.rows.find(e.first, t.fraction(e.first)) != s.rows.none) continue;  // it is here again
      out.put(unmix(e.first));
      ++gone;
    }
    std::memcpy(out.data() + at, &gone, 8);
    at = out.size();
    out.put(rows);
    s.rows.for_each([&](std::uint32_t row, const std::byte* p) {
      if (layout::stamp(p) <= after) return;
      out.put(unmix(s.rows.mixed(row)));
      out.put(p + layout::state_at, layout::used - layout::state_at);
      ++rows;
    });
    std::memcpy(out.data() + at, &rows, 8);
  }

  static void write_outcomes(const shard& s, byte_writer& out) {
    for (const change_outcome& o : s.outcomes) {
      for (const std::uint64_t x : {o.worker, o.object, o.command, o.rows}) out.put(x);
      out.put(static_cast<std::uint64_t>(o.keys.size()));
      out.put(o.keys.data(), o.keys.size() * 8);
    }
  }
  static void read_outcomes(byte_reader& in, shard& s) {
    while (in.left() != 0) {
      auto& o = s.outcomes.emplace_back();
      for (std::uint64_t* const x : {&o.worker, &o.object, &o.command, &o.rows}) *x = in.get<std::uint64_t>();
      o.keys.resize(in.count(8));
      if (!o.keys.empty()) std::memcpy(o.keys.data(), in.take(o.keys.size() * 8), o.keys.size() * 8);
    }
  }

  // All shards, one after the other; the first one together with the table's tick. Returns the file's sum.
  static std::uint64_t write_shards(const Table& t, const std::string& path, table_header& h, std::uint32_t after,
                                    bool aside = false) {
    byte_writer section;
    const auto copy = [&](std::size_t i) {
      shard& s = t.held_->shards[i];
      const spin_guard guard(s.lock);
      write_shard(t, s, after, section);
      if (aside) write_outcomes(s, section);
      if (i == 0) h.now = t.now();
    };
    copy(0);
    table_writer file(path, h);
    for (std::size_t i = 0; i < t.held_->shards.size(); ++i) {
      if (i != 0) copy(i);
      file.section(static_cast<std::uint32_t>(i) + t.settings_.first_shard, section.data(), section.size());
    }
    return file.finish();
  }

  static void write(Table& t, const std::string& path, table_header h, std::uint32_t after) {
    const bool full = h.kind == file_kind::full;
    if (!t.chain_.aside.empty()) {  // no link without a save, or it would be that of a former table
      if (full) std::remove(t.chain_.link_file().c_str());
      if (::access(t.chain_.aside.c_str(), F_OK) != 0) write_aside(t);
    }
    if (!full) t.chain_.keep({h.base, h.number});
    t.logging_.store(true, std::memory_order_relaxed);
    // Under no lock: a push that still reads the former epoch holds its shard's lock, which is taken below.
    const std::uint32_t cut = t.epoch_.fetch_add(1);
    const std::uint64_t sum = write_shards(t, path, h, after);
    for (shard& s : t.held_->shards) {
      const spin_guard guard(s.lock);
      std::erase_if(s.erased, [&](const auto& e) { return e.second <= cut; });
    }
    t.chain_.saved = cut;
    t.chain_.own = true;
    t.chain_.whole = false;
    if (!full) return void(t.chain_.loaded[0].number = h.number);
    t.chain_.loaded = {{sum, 0}};
    t.chain_.keep(t.chain_.loaded[0]);
  }

  static void save(Table& t, const std::string& path) {
    const std::lock_guard lock(t.saving_);
    write(t, path, header(t, file_kind::full), 0);
  }
  // A full save that no delta follows: those of others go on behind the file that they belong to.
  static void save_aside(Table& t) {
    const std::lock_guard lock(t.saving_);
    write_aside(t);
  }
  static void write_aside(Table& t) {
    table_header h = header(t, file_kind::full);
    h.version = 2;
    write_shards(t, t.chain_.aside, h, 0, true);
  }
  // Loads such a save, if there is one; deltas go on where a former life has left them. Until `leave_aside`.
  static void load_aside(Table& t, const std::string& path) {
    save_chain chain;
    chain.aside = path;
    if (path.empty() || ::access(path.c_str(), F_OK) != 0) {
      if (!path.empty()) std::remove(chain.link_file().c_str());
      return void(t.chain_.aside = path);
    }
    load(t, std::span(&path, 1));
    if (::access(chain.link_file().c_str(), F_OK) == 0) {
      chain.loaded = {archive_reader(chain.link_file()).get<save_chain::link>()};
      chain.own = chain.whole = true;
    }
    t.chain_ = std::move(chain);
    t.logging_.store(false);
  }
  // The table is its owner's again, whose files are no business of the server's next life.
  static void leave_aside(Table& t) {
    const std::lock_guard lock(t.saving_);
    t.chain_.aside.clear();
  }

  // `whole`: it needs none of those before it.
  static void save_delta(Table& t, const std::string& path, bool whole = false) {
    static_assert(Table::tracks_changes, "heddle::sparse_table: save_delta needs changes::tracked");
    const std::lock_guard lock(t.saving_);
    if (!t.chain_.own)
      throw argument_error("heddle::sparse_table: save_delta: no full file of these rows was saved or loaded before");
    t.chain_.whole |= whole;
    table_header h = header(t, t.chain_.whole ? file_kind::whole : file_kind::delta);
    h.base = t.chain_.loaded[0].base;
    h.number = t.chain_.loaded[0].number + 1;
    write(t, path, h, t.chain_.whole ? 0 : t.chain_.saved);
  }

  template <class Weight> static void save_serving(const Table& t, const std::string& path) {
    using served = row<Table::dim, Weight>;
    table_header h = header(t, file_kind::serving);
    h.slots = h.words = 0;
    std::memset(h.rule, 0, sizeof h.rule);
    std::memset(h.weight, 0, sizeof h.weight);
    h.name(h.rule, rule::frozen{}.name());
    h.name(h.weight, served::type_name());
    table_writer file(path, h);
    byte_writer out;
    for (std::size_t i = 0; i < t.held_->shards.size(); ++i) {
      shard& s = t.held_->shards[i];
      out.clear();
      {
        const spin_guard guard(s.lock);
        for (int empty = 0; empty < 3; ++empty) out.put(std::uint64_t{0});
        out.put(static_cast<std::uint64_t>(s.rows.size()));
        s.rows.for_each([&](std::uint32_t row, const std::byte* p) {
          float weights[Table::dim];
          std::byte stored[served::bytes];
          Table::row_type::load(p + layout::weights_at, weights);
          served::store(weights, stored);
          out.put(unmix(s.rows.mixed(row)));
          out.put(stored, sizeof stored);
        });
      }
      file.section(static_cast<std::uint32_t>(i) + t.settings_.first_shard, out.data(), out.size());
    }
    file.finish();
  }

  // Takes a section into a shard: everything, or what has changed.
  static void read_shard(const Table& t, std::uint32_t id, shard& s, slabs& memory, byte_reader in, std::uint32_t epoch,
                         bool admission, bool aside = false) {
    const unsigned bits = t.settings_.shard_bits;
    const auto next_key = [&] {
      const auto key = in.get<std::uint64_t>();
      if (shard_of(mix(key), bits) != id || widen_key(static_cast<key_type>(key)) != key)
        in.refuse("shard " + std::to_string(id) + " has the key " + std::to_string(key) + ", which isn't one of its");
      return mix(key);
    };
    s.steps = (std::max)(s.steps, in.get<std::uint64_t>());
    const std::size_t workers = in.count(8);
    for (std::uint32_t w = 0; w < workers; ++w) {
      s.prepare(w);
      s.raise(w, in.get<std::uint64_t>());
    }
    const admission_context context{t.settings_.seed, bits, memory};
    if constexpr (requires { s.refused.clear(context); })
      s.refused.clear(context);
    else
      s.refused = {};
    if (admission) s.refused.load(in, context);
    for (std::size_t n = in.count(8); n > 0; --n) {
      const std::uint64_t mixed = next_key();
      const std::uint32_t row = s.rows.find(mixed, mixed << bits);
      if (row != s.rows.none) s.rows.erase(row, bits);
    }
    constexpr std::size_t stored = layout::used - layout::state_at;
    for (std::size_t n = in.count(8 + stored); n > 0; --n) {
      const std::uint64_t mixed = next_key();
      std::uint32_t row = s.rows.find(mixed, mixed << bits);
      if (row == s.rows.none) row = s.rows.insert(mixed, mixed << bits, bits, memory);
      std::byte* const p = s.rows.at(row);
      std::memset(p + layout::state_at, 0, layout::bytes - layout::state_at);
      std::memcpy(p + layout::state_at, in.take(stored), stored);
      layout::stamp(p, epoch);
    }
    if (aside) read_outcomes(in, s);
    if (in.left() != 0) in.refuse("a shard has more bytes than rows");
  }

  static void check_kind(const Table& t, const table_reader& file, bool delta) {
    const bool is_delta = file.head().kind == file_kind::delta || file.head().kind == file_kind::whole;
    if (is_delta != delta) file.refuse(is_delta ? "it is a delta, where a full file is expected" : "it is no delta");
    const std::string different = difference(file.head(), header(t, file.head().kind));
    if (!different.empty()) file.refuse(different);
  }

  static void load(Table& t, std::span<const std::string> paths) {
    auto held = t.make_held();
    std::vector<const std::string*> from(held->shards.size());
    save_chain chain;
    std::size_t sections = 0;
    std::uint32_t now = 0;
    const std::uint32_t epoch = t.epoch_.load();
    for (const std::string& path : paths) {
      table_reader file(path);
      check_kind(t, file, false);
      now = (std::max)(now, file.head().now);
      const std::uint64_t sum = file.each_section([&](std::uint32_t id, byte_reader in) {
        ++sections;
        if (id < t.settings_.first_shard || id >= t.settings_.last_shard) return;
        const std::uint32_t i = id - t.settings_.first_shard;
        if (from[i]) file.refuse("it holds shard " + std::to_string(id) + ", and so does " + *from[i]);
        from[i] = &path;
        const bool full = file.head().kind == file_kind::full;
        read_shard(t, id, held->shards[i], held->memory, in, epoch, full, full);
      });
      chain.loaded.push_back({sum, 0});
    }
    for (std::size_t i = 0; i < from.size(); ++i) {
      if (from[i] == nullptr)
        throw file_error("heddle: " + (paths.empty() ? std::string("no file") : paths.front()) + " and the " +
                         std::to_string(paths.size()) + " files in all: shard " +
                         std::to_string(i + t.settings_.first_shard) + " is in none");
    }
    chain.own = paths.size() == 1 && sections == from.size();
    chain.saved = epoch;
    chain.aside = std::move(t.chain_.aside);  // a server's, which goes on
    t.held_ = std::move(held);
    t.chain_ = std::move(chain);
    t.epoch_.store(epoch + 1);
    t.now_.store(now);
    t.logging_.store(true);
  }

  static void load_delta(Table& t, const std::string& path) {
    table_reader file(path);
    check_kind(t, file, true);
    save_chain::link* link = nullptr;
    for (auto& l : t.chain_.loaded) {
      if (l.base == file.head().base) link = &l;
    }
    if (link == nullptr) file.refuse("the full file that it belongs to isn't what was loaded");
    const bool whole = file.head().kind == file_kind::whole;
    if (whole ? file.head().number <= link->number : file.head().number != link->number + 1)
      file.refuse("it is delta " + std::to_string(file.head().number) + ", where delta " +
                  std::to_string(link->number + 1) + " is due");
    // Nothing changes before all of it is read once, into shards that are thrown away. Its rows have the epoch of what
    // is saved, so that what was pushed since is in the next delta.
    file.each_section([&](std::uint32_t id, byte_reader in) {
      held_shards<shard> trial(1);
      read_shard(t, id, trial.shards[0], trial.memory, in, 1, true);
    });
    file.each_section([&](std::uint32_t id, byte_reader in) {
      if (id < t.settings_.first_shard || id >= t.settings_.last_shard) return;
      shard& s = t.held_->shards[id - t.settings_.first_shard];
      if (whole) {
        s.rows.for_each([&](std::uint32_t row, std::byte*) { s.rows.erase(row, t.settings_.shard_bits); });
        s.steps = 0;
        s.applied.clear();
      }
      read_shard(t, id, s, t.held_->memory, in, t.chain_.saved, true);
    });
    link->number = file.head().number;
    t.now_.store((std::max)(t.now(), file.head().now));
  }

  static void export_text(const Table& t, const std::string& path) {
    replacing_file file(path);
    std::string lines;
    for (shard& s : t.held_->shards) {
      lines.clear();
      {
        const spin_guard guard(s.lock);
        s.rows.for_each([&](std::uint32_t row, const std::byte* p) {
          float weights[Table::dim];
          Table::row_type::load(p + layout::weights_at, weights);
          lines += std::to_string(Table::key_of(s.rows.mixed(row)));
          for (const float w : weights) {
            char text[32];
            lines.append(1, '\t').append(text, std::to_chars(text, text + sizeof text, w).ptr);
          }
          lines += '\n';
        });
      }
      file.write(lines.data(), lines.size());
    }
    file.finish();
  }
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle
