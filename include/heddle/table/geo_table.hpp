// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/table/sharded_table.hpp>

#include <optional>
#include <unordered_map>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief Settings of a geo_table.
struct geo_table_options {
  int workers = 1;          ///< How many replicas there are, at least 1.
  std::size_t period = 8;   ///< Pushes between exchanges with the servers, at least 1.
  double part = 0.0;        ///< Of its moves that an exchange sends, in (0, 1]; 0: 1 / workers. 1: nothing is kept.
  std::size_t oldest = 16;  ///< Exchanges that a row may have missed when it is used; then it is asked for before.
  /// Throws argument_error for a number outside its range.
  void check() const {
    if (workers < 1 || period == 0 || !(part >= 0.0 && part <= 1.0))
      throw argument_error("heddle::geo_table_options: workers " + std::to_string(workers) + ", period " +
                           std::to_string(period) + ", part " + std::to_string(part) +
                           "; allowed are 1 and above, 1 and above, 0 to 1");
  }
};

/// @brief A worker's replica of a sharded table under Geo-SGD: `pull` and `push` work on rows that it holds itself, and
/// every `period` pushes the rows that were used are exchanged with the servers while training goes on.
///
/// A key that the replica meets for the first time begins as what the servers have. With L a row of the replica, O what
/// it last knew of the servers' row S, and N workers:
///
///     push:    d = (L - O) part;  O = O + d;  the server: S = S + d      (part: 1 / N)
///     answer:  L = L + (S - O);   O = S
///
/// It is a sum: what isn't sent stays in the replica and is sent when the row moves again, or by `flush`, so t
/// exchanges leave (1 - part)^t of a move, and a worker that dies takes along what it hadn't sent. The effective
/// learning rate is N times that of averaging. Only plain SGD is coherent with it; the state of other rules stays with
/// the replica, and begins anew with it.
///
/// A row is used as the servers had it at an exchange of this replica, at most `oldest` + 2 exchanges ago: one that is
/// used between two exchanges is asked for by the second, whose answer is there at the third; one that has missed more
/// than `oldest` is asked for before it is used.
///
/// Wire:   per exchange, of each row that has moved: as a push and a pull of `sharded_table`; of one that was read,
///         that is new or too old: as a pull.
/// State:  two rows, the rule's state and about 70 bytes for each key that this worker has touched; none is dropped.
/// Sync:   one thread at a time. pull and push wait for the servers once if a key is new or its row too old; push also
///         for an answer, if an exchange takes longer than a period. flush, finish and read wait for the servers.
/// System: PaddlePaddle's Geo-SGD, whose servers send what others have changed instead; `async_geo_sgd` is the same for
///         dense parameters.
/// Throws: argument_error; comm_error as `sharded_table`.
/// @tparam Key Any integer type. @tparam Row `row<Dim>` of floats. @tparam Rule How the replica's rows move.
/// @tparam Initial How rows begin. @tparam Messenger Any messenger.
template <class Key, class Row, class Rule, class Initial, messenger Messenger> class geo_table {
  static_assert(table_rule<Rule>, "heddle::geo_table: Rule must be a table_rule; see docs/table.md");
  static_assert(Row::bytes == Row::dim * sizeof(float), "heddle::geo_table: Row must hold floats");

 public:
  static constexpr std::size_t dim = Row::dim;                      ///< Weights in a row.
  using server_table = sparse_table<Key, Row, rule::sum, Initial>;  ///< What the servers hold.

  /// @param s Settings of the servers' table, all shards. @param rule How the replica's rows move.
  /// @param m The messenger; this rank is a worker's. It outlives this object. @param o Settings of its requests;
  /// `gather`, `cached_rows` and `resumes` are not for replicas. @param g Settings.
  geo_table(const typename server_table::settings& s, const Rule& rule, Messenger& m, const worker_options& o,
            const geo_table_options& g)
      : rule_(rule), options_(g), half_(o.half), store_(s, m, checked(o, g, rule)) {
    if (options_.part == 0.0) options_.part = 1.0 / options_.workers;
  }

  /// @brief Reads the replica's rows. @param keys Any. @param out `dim` floats for each.
  void pull(std::span<const Key> keys, std::span<float> out) {
    detail::check_sizes("geo_table: pull", keys.size(), out.size(), dim, "floats of room");
    find(keys);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      std::memcpy(out.data() + i * dim, record(places_[i]), dim * sizeof(float));
      use(places_[i], was::read);
    }
  }
  /// @brief Reads the servers' rows: for evaluation. @param keys Any. @param out `dim` floats for each; 0 for a key
  /// without a row.
  void read(std::span<const Key> keys, std::span<float> out) { store_.read(keys, out); }

  /// @brief Moves the replica's rows by the rule, a batch's duplicates summed first; then exchanges, if that is due.
  /// @param keys Any. @param gradients `dim` floats for each; one that isn't finite is left out. @param o The rate.
  void push(std::span<const Key> keys, std::span<const float> gradients, const push_options& o = {}) {
    detail::check_sizes("geo_table: push", keys.size(), gradients.size(), dim, "floats of gradients");
    if (!std::isfinite(o.lr)) throw argument_error("heddle::geo_table: push: lr is " + std::to_string(o.lr));
    if (keys.size() >> 31 != 0)
      throw argument_error("heddle::geo_table: push: " + std::to_string(keys.size()) +
                           " keys; allowed are fewer than 2^31");
    const auto n = static_cast<std::uint32_t>(keys.size());
    detail::batch& b = batch_;
    b.entries.resize(n), b.sums.clear(), b.seen.clear();
    for (std::uint32_t i = 0; i < n; ++i) b.entries[i] = {detail::mix(detail::widen_key(keys[i])), i, 0};
    const auto gradient = [&](std::uint32_t i) {
      return i < n ? gradients.data() + std::size_t{i} * dim : b.sums.data() + std::size_t{i - n} * dim;
    };
    const auto finite = [&](const detail::batch_entry& e) { return guard::reject{}.check<dim>(gradient(e.item)); };
    rejected_ += std::erase_if(b.entries, [&](const auto& e) { return !finite(e); });
    b.merge(dim, n, gradient, [](std::uint32_t) { return sighting{}; });
    rejected_ += std::erase_if(b.entries, [&](const auto& e) { return !finite(e); });  // sums that have overflowed
    std::vector<Key> distinct;
    for (const detail::batch_entry& e : b.entries) distinct.push_back(static_cast<Key>(detail::unmix(e.mixed)));
    find(distinct);
    for (std::size_t i = 0; i < distinct.size(); ++i) {
      float* const row = record(places_[i]);
      rule_.template update<dim>(row, row + 2 * dim, gradient(b.entries[i].item), row_context{.lr = o.lr});
      use(places_[i], was::moved);
    }
    if (++since_ >= options_.period) exchange(static_cast<float>(options_.part));
  }
  /// Sends all that was kept, waits until the servers have it, and takes what they have of the rows that this replica
  /// has used since the last exchange. With `half` in two steps, as a step rounds: 2^-17 of it may stay.
  void flush() {
    take_answer();
    for (int steps = half_ ? 2 : 1; steps > 0; --steps) {
      for (std::uint32_t at = 0; at < index_.size(); ++at)
        if (std::memcmp(record(at), record(at) + dim, dim * sizeof(float)) != 0) use(at, was::moved);
      exchange(1.0f);
      take_answer();
    }
  }
  /// As `flush`, and tells the servers that this worker pushes no more.
  void finish() {
    flush();
    store_.finish();
  }

  /// Exchanges so far.
  std::uint64_t exchanges() const noexcept { return exchanges_; }
  /// Gradients left out since they, or their sum, weren't finite, and rows that weren't and went back to what the
  /// servers had.
  std::uint64_t rejected() const noexcept { return rejected_; }
  /// See `sharded_table::pushed_before`: in exchanges.
  std::uint64_t pushed_before() const noexcept { return store_.pushed_before(); }

 private:
  enum class was : std::uint8_t { idle, read, moved };
  static constexpr std::size_t stride = 2 * dim + Rule::slots(dim);  // L, O, the rule's state

  static const worker_options& checked(const worker_options& o, const geo_table_options& g, const Rule& rule) {
    g.check();
    detail::check_policies(rule);
    if (o.gather > 1 || o.cached_rows != 0 || o.resumes)
      throw argument_error("heddle::geo_table: gather " + std::to_string(o.gather) + ", cached_rows " +
                           std::to_string(o.cached_rows) + ", resumes " + std::to_string(o.resumes) +
                           "; allowed are at most 1, 0, 0: a replica gathers and keeps rows itself");
    return o;
  }
  float* record(std::uint32_t at) noexcept { return rows_.data() + std::size_t{at} * stride; }
  // Writes the records of keys to places_. The servers are asked, once, for rows that are new or too old.
  void find(std::span<const Key> keys) {
    places_.resize(keys.size());
    std::vector<Key> strange;
    std::vector<std::size_t> whose;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const auto found = index_.find(keys[i]);
      if (found != index_.end()) places_[i] = found->second;
      if (found != index_.end() && exchanges_ - known_[found->second] <= options_.oldest) continue;
      strange.push_back(keys[i]);
      whose.push_back(i);
    }
    if (strange.empty()) return;
    if (index_.size() + strange.size() > 0xffffffff)
      throw argument_error("heddle::geo_table: a replica holds at most 2^32 - 1 rows");
    std::vector<float> rows(strange.size() * dim);
    store_.pull(strange, rows);
    for (std::size_t k = 0; k < strange.size(); ++k) {
      const float* const row = rows.data() + k * dim;
      const std::size_t next = index_.size();  // its room first, lest a failure leaves a key without a record
      keys_.resize(next + 1), used_.resize(next + 1), known_.resize(next + 1), rows_.resize((next + 1) * stride);
      const auto [found, made] = index_.try_emplace(strange[k], static_cast<std::uint32_t>(next));
      const std::uint32_t at = places_[whose[k]] = found->second;
      if (made) {
        keys_[at] = strange[k];
        if constexpr (requires { rule_.template start<dim>(rows_.data()); })
          rule_.template start<dim>(record(at) + 2 * dim);
        std::memcpy(record(at), row, dim * sizeof(float));
        std::memcpy(record(at) + dim, row, dim * sizeof(float));
      }
      know(at, row);
      known_[at] = exchanges_;
    }
  }
  // Takes the servers' row.
  void know(std::uint32_t at, const float* row) { detail::follow(row, record(at), record(at) + dim, dim); }
  void use(std::uint32_t at, was how) {
    if (used_[at] == was::idle) due_.push_back(at);
    used_[at] = (std::max)(used_[at], how);
  }

  void exchange(float part) {
    take_answer();
    since_ = 0;
    if (due_.empty()) return;
    std::vector<Key> keys, moved;
    std::vector<float> moves;
    ++exchanges_;
    for (const std::uint32_t at : due_) {
      const bool only_read = used_[at] == was::read;
      used_[at] = was::idle;
      known_[at] = exchanges_;
      keys.push_back(keys_[at]);
      asked_rows_.push_back(at);
      if (only_read) continue;
      float *const l = record(at), *const o = l + dim;
      float move[dim];
      for (std::size_t i = 0; i < dim; ++i) {
        move[i] = part * (l[i] - o[i]);
        if (half_) move[i] = static_cast<float>(static_cast<bfloat16>(move[i]));
      }
      if (!guard::reject{}.check<dim>(move)) {
        std::memcpy(l, o, dim * sizeof(float));
        ++rejected_;
        continue;
      }
      for (std::size_t i = 0; i < dim; ++i) o[i] += move[i];
      moved.push_back(keys_[at]);
      moves.insert(moves.end(), move, move + dim);
    }
    due_.clear();
    store_.push(moved, moves);
    asked_.emplace(store_.start_pull(keys));
  }
  // The servers' rows of the last exchange.
  void take_answer() {
    if (!asked_) return;
    answer_.resize(asked_rows_.size() * dim);
    store_.finish_pull(std::move(*asked_), answer_);
    asked_.reset();
    for (std::size_t k = 0; k < asked_rows_.size(); ++k) know(asked_rows_[k], answer_.data() + k * dim);
    asked_rows_.clear();
  }

  using store = sharded_table<server_table, Messenger>;
  Rule rule_;
  geo_table_options options_;
  bool half_;
  std::unordered_map<Key, std::uint32_t> index_;
  std::vector<Key> keys_;
  std::vector<was> used_;             // since the last exchange
  std::vector<std::uint64_t> known_;  // the exchange that last asked for it
  std::vector<float> rows_, answer_;
  std::vector<std::uint32_t> due_, asked_rows_, places_;
  detail::batch batch_;
  std::size_t since_ = 0;
  std::uint64_t exchanges_ = 0, rejected_ = 0;
  store store_;
  std::optional<typename store::pending> asked_;  // after the store, which it must not outlive
};

}  // namespace v0
}  // namespace heddle
