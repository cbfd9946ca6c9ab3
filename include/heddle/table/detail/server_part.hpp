// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/table/detail/background.hpp>
#include <heddle/table/detail/server_worker.hpp>
#include <heddle/table/detail/table_wire.hpp>
#include <heddle/table/settings.hpp>
#include <heddle/table/sparse_table.hpp>

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// The part of the table that a server is given, if it is the right one.
template <class Table, class Messenger>
Table& checked_server(Table& table, const Messenger& m, const server_options& o) {
  if (o.servers < 1 || o.workers < 1 || o.workers > 0x3fff || m.rank() >= o.servers || m.size() < o.servers + o.workers)
    throw argument_error("heddle::table_server: " + std::to_string(o.servers) + " servers and " +
                         std::to_string(o.workers) + " workers; allowed are up to 16383 workers and together " +
                         std::to_string(m.size()) + " ranks, of which this is " + std::to_string(m.rank()));
  const auto part = settings_of_server(table.options(), m.rank(), o.servers);
  if (part.first_shard != table.options().first_shard || part.last_shard != table.options().last_shard)
    throw argument_error("heddle::table_server: the table doesn't hold this server's shards; use settings_of_server");
  return table;
}

// A server's part of a table: requests are applied to it and answered from it, and it is written, one file at a time,
// while that goes on.
template <class Table> class server_part {
  using op = table_op;
  using key_type = typename Table::key_type;
  using service = table_service<Table>;
  using files = table_files<Table>;
  static constexpr std::size_t dim = Table::dim;
  // Worker w + whole numbers the pushes of w that have taken effect in all shards: a table saved while a push is under
  // way may have it in some. Worker w + presence numbers how often w has left and come back. No worker is called
  // `served`: where that has a sequence, those in all shards are there.
  static constexpr std::uint32_t served = 0x3fff, whole = 0x4000, presence = 0x8000;

 public:
  // @param path Where its saves go; one that is there is loaded. May be empty.
  server_part(Table& table, const std::string& path) : table_(&table), kept_(!path.empty()) {
    files::load_aside(table, path);
  }
  server_part(const server_part&) = delete;
  server_part& operator=(const server_part&) = delete;
  ~server_part() {
    writing_.wait();
    files::leave_aside(*table_);
  }
  // What the table knows of its workers; from then on it is this server's.
  void recall(server_workers& workers) {
    for (std::uint32_t w = 0; w < workers.size(); ++w) {
      server_worker& x = workers[w];
      x.taken = table_->sequence_of(w + whole);
      // Nothing, if the shards were another server's: that one's pushes.
      if (x.taken == 0 && table_->sequence_of(served) == 0) x.taken = table_->sequence_of(w);
      x.applied = x.saved = x.taken;
      x.presence = table_->sequence_of(w + presence);
    }
    table_->note_sequence(served, 1);
  }
  // A worker leaves, or comes back.
  void turn(server_worker& w, std::uint32_t number) {
    service::note(*table_, {{number + presence, w.presence + 1}});
    ++w.presence;
  }

  // A push, which is the worker's next one. Returns the keys of rows that a bound has dropped.
  std::vector<key_type> apply(server_worker& w, std::uint32_t number, const payload& body) {
    byte_reader in(body.data(), body.size(), "a push of worker " + std::to_string(number));
    const auto head = in.get<table_request>();
    const std::uint64_t sequence = w.applied + 1;
    std::vector<key_type> gone;
    if (head.op == op::gradients)
      gone = push(head, in, number, sequence);
    else
      change(w, head, in, origin(w, number, head.object, sequence));
    const bool turns = head.last && !w.left();
    service::note(*table_, {{number, sequence},  // also of a push that touched no shard
                            {number + whole, sequence},
                            {turns ? number + presence : number, turns ? w.presence + 1 : 0}});
    w.presence += turns;
    return gone;
  }

  // Appends rows of keys as the head wants them; `marks`: and whether they have one. Else what a pull would see.
  void put_keys_rows(const table_request& head, byte_reader& in, bool marks, byte_writer& out) {
    take_keys(head, in);
    floats_.resize(keys_.size() * dim);
    found_.resize(keys_.size());
    if (marks)
      table_->read(keys_, floats_, found_);
    else
      table_->preview(keys_, floats_);  // makes no rows, as after this server's death nobody pulls again
    put_floats(out, floats_.data(), floats_.size(), head.half != 0);
    if (marks) out.put(found_.data(), found_.size());
  }
  // Appends the answer to a command that reads.
  // @param asked For `outcome`: whose change, which was applied by a former life.
  void put_answer(op what, byte_reader& in, const change_origin& asked, byte_writer& out) const {
    switch (what) {
      case op::outcome: return service::put_outcome(*table_, asked, out);
      case op::size: return out.put(static_cast<std::uint64_t>(table_->size()));
      case op::bytes: return out.put(static_cast<std::uint64_t>(table_->bytes()));
      case op::checksum: return out.put(table_->checksum());
      case op::rows: {
        const auto& s = table_->options();
        auto at = in.get<std::uint32_t>();
        if (at < s.first_shard || at >= s.last_shard) in.refuse("it asks for shard " + std::to_string(at));
        byte_writer rows;
        for (; at < s.last_shard && rows.size() < (std::size_t{1} << 20); ++at) service::put_rows(*table_, at, rows);
        out.put(at);
        return out.put(rows.data(), rows.size());
      }
      default: in.refuse("its operation is " + std::to_string(static_cast<int>(what)));
    }
  }

  // Begins to write what a command says.
  void begin_file(op what, byte_reader& in, int server, int servers) {
    const std::size_t n = in.left();
    std::string path(reinterpret_cast<const char*>(in.take(n)), n), weight;
    if (what == op::serving) {
      weight = path.substr(0, path.find('\0'));
      path.erase(0, weight.size() + 1);
    }
    const bool alone = what == op::delta && path.starts_with('\0');
    if (alone) path.erase(0, 1);
    path = files_of_servers(path, servers)[static_cast<std::size_t>(server)];
    writing_.start([t = table_, what, path, weight, alone] {
      if (what == op::full) return t->save(path);
      if (what == op::serving) return service::save_serving(*t, weight, path);
      if (what == op::text) return t->export_text(path);
      if constexpr (Table::tracks_changes) return files::save_delta(*t, path, alone);
      throw argument_error("heddle::table_server: save_delta needs a table of changes::tracked");
    });
  }
  // Begins a save of this part, which has at least what is applied now.
  void begin_save(server_workers& workers) {
    for (server_worker& w : workers) w.in_save = w.applied;
    service::forget_outcomes(*table_, [&](const change_outcome& o) {
      if (o.worker >= workers.size()) return true;  // of a former job with more workers
      const server_worker& w = workers[static_cast<std::size_t>(o.worker)];
      if (w.left()) return true;  // it asks no more
      return origin(w, workers.number_of(w), w.object).knows(o);
    });
    writing_.start([t = table_] { files::save_aside(*t); });
  }
  bool writes() const noexcept { return writing_.busy(); }
  bool has_written() const noexcept { return writing_.busy() && writing_.ready(); }
  // Waits until it is written. The answer to who has asked for it.
  server_answer end_writing() {
    server_answer a;
    const auto refused = [&](const std::exception& e, bool by_file) {
      a.status = reply_status::refused;
      a.body.push_back(std::byte{by_file});
      for (const char* c = e.what(); *c != '\0'; ++c) a.body.push_back(static_cast<std::byte>(*c));
    };
    try {
      writing_.finish();
    } catch (const file_error& e) {
      refused(e, true);
    } catch (const argument_error& e) {
      refused(e, false);
    }
    return a;
  }

 private:
  change_origin origin(const server_worker& w, std::uint32_t number, std::uint64_t object,
                       std::uint64_t sequence = 0) const noexcept {
    return {.worker = number,
            .sequence = sequence,
            .object = object,
            .open = object == w.object ? w.open : 0,
            .kept = kept_};
  }
  void take_keys(const table_request& head, byte_reader& in) {
    if (head.items > in.left() / sizeof(key_type)) in.refuse("it ends early");
    keys_.resize(static_cast<std::size_t>(head.items));
    const std::byte* const from = in.take(keys_.size() * sizeof(key_type));
    if (!keys_.empty()) std::memcpy(keys_.data(), from, keys_.size() * sizeof(key_type));
  }
  std::vector<key_type> push(const table_request& head, byte_reader& in, std::uint32_t number, std::uint64_t sequence) {
    take_keys(head, in);
    const std::size_t n = keys_.size();
    std::vector<float> sight[3];
    if (head.sightings) {
      for (auto& s : sight) {
        s.resize(n);
        take_floats(in, s.data(), n, false);
      }
    }
    floats_.resize(n * dim);
    take_floats(in, floats_.data(), floats_.size(), head.half != 0);
    const push_options o{.lr = head.lr,
                         .shows = sight[1],
                         .clicks = sight[2],
                         .times = sight[0],
                         .worker = number,
                         .sequence = sequence,
                         .summed = true};
    return table_->push(keys_, floats_, o).gone;
  }
  // Whatever else changes the table. What it has done is kept for the command that will ask.
  void change(server_worker& w, const table_request& head, byte_reader& in, change_origin of) {
    of.command = in.get<std::uint64_t>();
    take_keys(head, in);
    table_report<key_type> r;
    if (head.op == op::erase) r.evicted = service::erase(*table_, keys_, of);
    if (head.op == op::advance) return service::advance(*table_, of);
    if constexpr (expiring_eviction<decltype(Table::settings::eviction)>)
      if (head.op == op::evict) service::evict(*table_, of, r);
    if (head.object != w.object || of.command < w.open) return;
    byte_writer said;
    if (of.passed_over != 0) {  // with what a former life has done
      service::put_outcome(*table_, of, said);
    } else {
      said.put(r.evicted);
      said.put(r.gone.data(), r.gone.size() * sizeof(key_type));
    }
    w.answers[of.command].body = said.release();
  }

  Table* table_;
  bool kept_;  // its changes' outcomes are, in its saves
  std::vector<key_type> keys_;
  std::vector<float> floats_;
  std::vector<std::uint8_t> found_;  // of keys_, whether they have a row
  background writing_;               // last: it uses the table
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle
