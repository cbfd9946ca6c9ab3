// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/gather.hpp>
#include <heddle/memory/host_resource.hpp>
#include <heddle/mode/detail/row_node.hpp>

#include <bit>
#include <limits>

namespace heddle {
inline namespace v0 {

/// @brief Parameters of a replica, borrowed: rows of equal width one after the other.
struct geo_rows {
  float* values = nullptr;  ///< `count` floats.
  std::size_t count = 0;    ///< Floats of all rows; the last row may be shorter.
  std::size_t width = 1;    ///< Floats of a row, at least 1.
  bool sparse = false;      ///< Only rows for which touch() was called are pushed; else all that have moved.
};

/// @brief Whether a replica waits for the answer to its push.
enum class geo_wait : std::uint8_t {
  never,        ///< It goes on, and pushes again when the answer has come and a push is due.
  before_next,  ///< It goes on until the next push is due: the exchange hides behind one period.
  at_once       ///< It waits.
};

/// @brief Settings of a geo_replica, the same on all ranks.
struct geo_options {
  int servers = 0;         ///< Ranks below it hold the parameters; 0: all ranks.
  std::size_t period = 8;  ///< Batches between pushes, at least 1.
  double part = 0.0;       ///< Of its moves that a push sends, in (0, 1]; 0: 1 / ranks. 1: nothing is kept.
  /// Of a sparse row that was touched t times since its last push, common / (ranks t) is sent, at least `part` and at
  /// most all. So what replicas move a rare row by adds up at once, and what all of them move a common one by, each as
  /// far as it should go, doesn't go that far several times. 0: `part` of every row. Below 2^32.
  std::size_t common = 0;
  /// Touches after which a sparse row is due: a push takes only rows touched so often since their last one, the common
  /// ones soon, the rare ones seldom; flush() and join() take all. At least 1, below 2^32.
  std::size_t least = 1;
  geo_wait wait = geo_wait::never;  ///< Whether batch() waits for the answer.
  bool synchronous = false;         ///< Servers answer when everybody has pushed. With wait other than never.
  /// Moves and parameters travel as float16, what is beyond 65504 as 65504; flush() and join() send floats.
  bool half = false;
};

/// @brief What a geo_replica has done.
struct geo_report {
  std::uint64_t pushes = 0;      ///< Messages with moves.
  std::uint64_t bytes_sent = 0;  ///< Of all messages that this rank sent, also as a server.
  std::uint64_t reverted = 0;    ///< Rows that weren't finite, and went back to what was agreed.
  std::uint64_t
      staleness[16]{};  ///< Pushes by the updates of others between the last answer and it; the last: 15 and more.
};

/// @brief One rank's replica of parameters that are added up on servers by the rules of `async_geo_sgd`: for programs
/// that change rows in place, as word vectors do. One thread at a time calls its members.
///
///     hd::geo_replica replica(hd::threads::connection{}, comm, rows, {.period = 4});
///     for (...) {
///       train on a batch, in place; replica.touch(0, row) for each row changed;
///       replica.batch();
///     }
///     replica.join();
///
/// Sync:   batch() never waits, unless asked; flush() waits for servers, if synchronous for all; join() for all ranks.
/// Throws: argument_error for numbers outside their range; comm_error when a rank has failed or left.
/// @tparam Messenger What the connection opens. @tparam Memory Where its own floats live.
template <class Messenger, class Memory = host_resource> class geo_replica {
  using server_type = detail::row_server<detail::no_rule, Memory>;

 public:
  /// @param connection Opens the messenger. @param comm All replicas; used by the constructor only. Collective.
  /// @param rows Parameters, the same shapes on all ranks; rank 0's values are copied to every rank.
  /// @param o Settings. @param memory Where its own floats live.
  template <class Connection, class Comm>
  geo_replica(const Connection& connection, Comm& comm, std::vector<geo_rows> rows, const geo_options& o,
              const Memory& memory = {})
      : options_(checked(o, comm.size())),
        rows_(checked(std::move(rows))),
        ranks_(comm.size()),
        map_(shapes(rows_), options_.servers),
        agreed_(memory, map_.elements()),
        flags_(map_.rows(), 0),
        touches_(options_.least > 1 || options_.common > 0 ? map_.rows() : 0, 0),
        seen_(static_cast<std::size_t>(options_.servers), 0),
        since_(seen_.size(), 0) {
    require_same(comm);
    for (const geo_rows& r : rows_) broadcast(comm, std::span<float>(r.values, r.count));
    restart();
    std::unique_ptr<server_type> server;
    if (comm.rank() < options_.servers) {
      server = std::make_unique<server_type>(
          detail::no_rule{}, memory, map_, comm.rank(), comm.size(), rows_.size(),
          detail::row_server_settings{.staleness = options_.synchronous ? 0 : detail::row_server_settings::unbounded,
                                      .moves = true,
                                      .half = options_.half});
      server->assign([&](std::size_t t) { return rows_[t].values; }, 0);
      server_bytes_ = server->bytes();
    }
    detail::open_rows(comm, "geo_replica", node_, connection, std::move(server), options_.servers);
  }

  /// @brief A row of sparse parameters has changed. @param which Index of the parameters. @param row Row.
  /// @param times As how many touches this counts: for rows of which one change is as large as several of others.
  /// Throws: argument_error if there is no such row.
  void touch(std::size_t which, std::size_t row, std::size_t times = 1) {
    if (which >= rows_.size() || row >= map_.rows_of(which))
      throw argument_error("heddle::geo_replica::touch: there is no row " + std::to_string(row) + " of parameters " +
                           std::to_string(which));
    const std::size_t at = map_.number(which, row);
    flags_[at] |= touched;
    if (!touches_.empty()) {
      const std::size_t now = touches_[at];
      touches_[at] = static_cast<std::uint32_t>(now + (std::min)(times, most_touches - now));
    }
  }

  /// @brief A batch is done: takes the answers that have come, and pushes if that is due and the last push is answered.
  void batch() {
    for (int k = 0; k < options_.servers; ++k) {
      if (node_->open(k) && node_->answered(k)) pull(k, false);
      std::size_t& waited = since_[static_cast<std::size_t>(k)];
      if (++waited < options_.period || ranks_ == 1) continue;
      if (node_->open(k)) {
        if (options_.wait == geo_wait::never) continue;
        pull(k, false);
      }
      push(k, detail::row_tag::push, options_.half, false);
      waited = 0;
    }
    for (int k = 0; options_.wait == geo_wait::at_once && k < options_.servers; ++k)
      if (node_->open(k)) pull(k, false);
    if (ranks_ == 1 && since_[0] >= options_.period) settle();  // nobody to meet
  }
  /// @brief Pushes all that was kept, and waits until the servers have it and what they know is here: if synchronous,
  /// until everybody has pushed.
  void flush() {
    if (ranks_ == 1) return settle();
    finish(detail::row_tag::push);
  }
  /// @brief Says that this rank has no more batches, and waits until nobody has. Then all replicas are equal.
  /// Collective.
  void join() {
    if (ranks_ == 1) return settle();
    finish(detail::row_tag::join);
  }
  /// @brief Takes the replica's values, the same on all ranks, for what is agreed. Collective: no rank may push
  /// meanwhile.
  void assign() {
    restart();
    node_->with_server([&](server_type& s) { s.assign([&](std::size_t t) { return rows_[t].values; }, s.clock()); });
  }

  /// @brief What the servers had when this rank last heard of them. @param which Index of the parameters.
  /// Throws: argument_error if there are no such parameters.
  std::span<const float> agreed(std::size_t which) const {
    if (which >= rows_.size())
      throw argument_error("heddle::geo_replica::agreed: parameters " + std::to_string(which) + " of " +
                           std::to_string(rows_.size()));
    return {agreed_.data() + map_.before(which), rows_[which].count};
  }
  /// What this rank has done.
  geo_report report() const {
    geo_report r = done_;
    r.bytes_sent = node_->sent().bytes;
    return r;
  }
  /// Bytes held here.
  std::size_t bytes() const noexcept {
    return agreed_.bytes() + flags_.size() + touches_.size() * sizeof(std::uint32_t) + server_bytes_;
  }

 private:
  using node = detail::row_node<Messenger, server_type>;
  static constexpr unsigned char touched = 1, owing = 2;
  static constexpr std::size_t most_touches = (std::numeric_limits<std::uint32_t>::max)();

  static geo_options checked(geo_options o, int ranks) {
    if (o.servers < 0 || o.servers > ranks)
      throw argument_error("heddle::geo_replica: servers is " + std::to_string(o.servers) + " of " +
                           std::to_string(ranks) + " ranks");
    if (o.period == 0) throw argument_error("heddle::geo_replica: period is 0, allowed is 1 or above");
    if (o.least == 0 || o.least > most_touches)
      throw argument_error("heddle::geo_replica: least is " + std::to_string(o.least) + ", allowed is 1 to 4294967295");
    if (o.common > most_touches)
      throw argument_error("heddle::geo_replica: common is " + std::to_string(o.common) +
                           ", allowed is 0 to 4294967295");
    if (!(o.part >= 0.0 && o.part <= 1.0))
      throw argument_error("heddle::geo_replica: part is " + std::to_string(o.part) + ", allowed is 0 to 1");
    if (o.synchronous && o.wait == geo_wait::never)
      throw argument_error("heddle::geo_replica: synchronous needs wait other than never");
    if (o.servers == 0) o.servers = ranks;
    return o;
  }
  static std::vector<geo_rows> checked(std::vector<geo_rows> rows) {
    std::size_t all = 0;
    for (const geo_rows& r : rows) {
      if (r.width == 0 || (r.count && !r.values))
        throw argument_error("heddle::geo_replica: rows of width " + std::to_string(r.width) + " at " +
                             (r.values ? "some" : "null") + " address");
      all += r.count / r.width + 1;
    }
    if (all >= detail::all_rows)
      throw argument_error("heddle::geo_replica: " + std::to_string(all) + " rows, allowed are fewer than 2^32 - 1");
    return rows;
  }
  template <class Comm> void require_same(Comm& comm) const {
    std::uint64_t h = 0;
    const auto mix = [&h](std::uint64_t x) { h = (h ^ x) * 0x100000001b3u; };
    mix(static_cast<std::uint64_t>(options_.servers));
    mix(options_.period);
    mix(std::bit_cast<std::uint64_t>(options_.part));
    mix(options_.common);
    mix(options_.least);
    mix(static_cast<std::uint64_t>(options_.wait));
    mix(options_.synchronous);
    mix(options_.half);
    for (const geo_rows& r : rows_) mix(r.count), mix(r.width), mix(r.sparse);
    detail::require_same(comm, "geo_replica", h, "it brings other settings, or rows of another shape");
  }
  static std::vector<detail::row_map::shape> shapes(const std::vector<geo_rows>& rows) {
    std::vector<detail::row_map::shape> all;
    for (const geo_rows& r : rows) all.push_back({r.count, r.width});
    return all;
  }

  // Of a row's move that a push sends.
  float part(std::size_t row) const noexcept {
    const double ranks = ranks_, least = options_.part > 0.0 ? options_.part : 1.0 / ranks;
    const double touches = options_.common > 0 ? touches_[row] : 0.0, common = static_cast<double>(options_.common);
    return static_cast<float>(touches > 0.0 ? std::clamp(common / (ranks * touches), least, 1.0) : least);
  }
  void restart() {
    std::fill(flags_.begin(), flags_.end(), 0);
    std::fill(touches_.begin(), touches_.end(), 0);
    settle();
  }
  float* known(const detail::row_map::row& r) noexcept { return agreed_.data() + map_.before(r.tensor) + r.begin; }
  // The replica is what is agreed.
  void settle() {
    std::fill(since_.begin(), since_.end(), 0);
    for (std::size_t t = 0; t < rows_.size(); ++t)
      std::copy_n(rows_[t].values, rows_[t].count, agreed_.data() + map_.before(t));
  }

  void finish(detail::row_tag tag) {
    for (int k = 0; k < options_.servers; ++k)
      if (node_->open(k)) pull(k, false);
    for (int k = 0; k < options_.servers; ++k)
      push(k, tag, false, true);  // in the end all replicas are the servers', which float16 has hidden so far
    for (int k = 0; k < options_.servers; ++k) pull(k, true);
    std::fill(since_.begin(), since_.end(), 0);
  }

  // rest: all moves, also of rows that weren't touched, but of which something was kept.
  void push(int k, detail::row_tag tag, bool half, bool rest) {
    const std::size_t first = map_.first(k), last = map_.first(k + 1);
    detail::row_writer out(half);
    map_.each(first, last, [&](const detail::row_map::row& r) {
      unsigned char& flag = flags_[r.number];
      const float share = rest ? 1.0f : part(r.number);
      if (rows_[r.tensor].sparse) {
        if (!(rest ? flag : flag & touched)) return;
        if (!touches_.empty()) {
          if (!rest && touches_[r.number] < options_.least) return;
          touches_[r.number] = 0;
        }
      }
      float *const now = rows_[r.tensor].values + r.begin, *const old = known(r);
      move_.resize(r.count);
      bool moved = false, finite = true;
      for (std::size_t i = 0; i < r.count; ++i) {
        float d = (now[i] - old[i]) * share;
        finite &= std::isfinite(d);
        if (half) d = static_cast<float>(static_cast<float16>(std::clamp(d, -detail::most_half, detail::most_half)));
        move_[i] = d;
        moved |= d != 0.0f;
      }
      const bool whole = share == 1.0f && !half;
      flag = whole ? 0 : owing;
      if (!finite) {
        std::copy_n(old, r.count, now);
        ++done_.reverted;
      } else if (moved) {
        for (std::size_t i = 0; i < r.count; ++i) old[i] += move_[i];
        if (whole) std::copy_n(old, r.count, now);  // but for rounding it is there already
        out.add(static_cast<std::uint32_t>(r.number - first), move_.data(), r.count);
      }
    });
    const detail::row_request head{
        .seen = seen_[static_cast<std::size_t>(k)], .samples = 1.0, .half = half, .whole = rest && options_.half};
    node_->post(k, tag, out.message(head, last - first));
    ++done_.pushes;
  }

  // Takes an answer: the replica moves by what others have moved; `settled`: nothing of its own is kept.
  void pull(int k, bool settled) {
    const payload body = node_->take(k);
    const auto head = detail::row_head<detail::row_reply>(body);
    seen_[static_cast<std::size_t>(k)] = head.clock;
    ++done_.staleness[(std::min<std::uint64_t>)(head.staleness, 15)];
    for (detail::row_reader in(body, head, map_, k); !in.done(); in.next()) {
      const auto& r = in.row();
      detail::follow(in.values(), rows_[r.tensor].values + r.begin, known(r), r.count, !settled);
    }
  }

  geo_options options_;
  std::vector<geo_rows> rows_;
  int ranks_;
  detail::row_map map_;
  buffer<float, Memory> agreed_;
  std::vector<unsigned char> flags_;    // of each row: touched since the last push; owing, as a part was kept
  std::vector<std::uint32_t> touches_;  // of each row since its last push, where that matters
  std::vector<std::uint64_t> seen_;     // each server's clock
  std::vector<float> move_;
  std::vector<std::size_t> since_;  // each server's batches since the last push
  std::size_t server_bytes_ = 0;
  geo_report done_;
  std::unique_ptr<node> node_;
};

}  // namespace v0
}  // namespace heddle
