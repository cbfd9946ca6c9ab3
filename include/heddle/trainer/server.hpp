// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/mode/async_geo_sgd.hpp>
#include <heddle/mode/async_ps.hpp>
#include <heddle/mode/geo_replica.hpp>
#include <heddle/trainer/data_parallel.hpp>
#include <heddle/trainer/detail/ready_rows.hpp>

namespace heddle {
inline namespace v0 {
namespace detail {
template <class Strategy>
concept uses_servers = std::remove_cvref_t<decltype(Strategy::mode)>::averages == average::server;
// Replicas that train alone push their moves; else ranks push gradients.
template <class Mode> inline constexpr bool pushes_moves = requires(const Mode& m) { m.period; };
}  // namespace detail

/// @brief `data_parallel` under `async_ps` and `async_geo_sgd`: some or all ranks serve the parameters.
/// Each rank has a thread that serves. The communicator is used by the constructor, save() and load() alone; all else
/// goes through messengers that the mode's connection opens.
///
///     hd::data_parallel dp{hd::strategy{.mode = hd::async_ps{.staleness = 4}}, comm, model.tensors(), hd::adamw{}};
///
/// Sync:   under `async_ps` step() waits for servers, and for ranks that are too far behind; under `async_geo_sgd` it
///         never waits. join(), synchronize(), save() and load() wait for all ranks, however long these train.
/// Throws: as `data_parallel`; comm_error from any call that waits if a rank has failed, or left without join().
template <class Strategy, class Comm, class Optimizer>
  requires(detail::uses_servers<Strategy>)
class data_parallel<Strategy, Comm, Optimizer> {
  using mode_type = std::remove_cvref_t<decltype(Strategy::mode)>;
  using memory_type = std::remove_cvref_t<decltype(Strategy::memory)>;
  static_assert(communicator<Comm>,
                "heddle::data_parallel: the second argument must be a communicator; see docs/comm.md");
  static_assert(
      optimizer<Optimizer>,
      "heddle::data_parallel: the fourth argument must be an update rule with slots and update(); see docs/optim.md");
  static_assert(std::is_same_v<std::remove_cvref_t<decltype(Strategy::compressor)>, none>,
                "heddle::data_parallel: .mode sends to servers, so .compressor must be none{}; see docs/mode.md");
  static_assert(std::is_same_v<std::remove_cvref_t<decltype(Strategy::precision)>, full_precision>,
                "heddle::data_parallel: .mode sends to servers, so .precision must be full_precision{}; see "
                "docs/mode.md");
  static constexpr bool moves = detail::pushes_moves<mode_type>;
  static_assert(!moves || !has_derived_parameter<Optimizer>,
                "heddle::data_parallel: this update rule makes parameters of its own state, so .mode must average "
                "gradients, such as every_step{}; see docs/optim.md");
  static constexpr int slots = Optimizer::slots;
  using messenger_type =
      typename decltype(std::declval<const mode_type&>().connection.open(std::declval<Comm&>()))::element_type;
  using server_type = detail::row_server<Optimizer, memory_type>;
  using node_type = detail::row_node<messenger_type, server_type>;
  using replica_type = geo_replica<messenger_type, memory_type>;

 public:
  /// Element type of parameters and gradients.
  using element = float;

  /// As the other data_parallel.
  data_parallel(const Strategy& plan, Comm& comm, std::span<const tensor> tensors, Optimizer rule,
                unused missing = unused::error)
      : plan_(checked(plan, rule, comm.size())),
        tensors_(detail::checked(tensors, dtype::f32, rule)),
        rule_(rule),
        step_(tensors_, missing),
        comm_(comm.duplicate()),
        servers_(plan.mode.servers == 0 ? comm.size() : plan.mode.servers),
        whole_(detail::whole(tensors_)),
        map_(shapes(), servers_),
        update_(rule, plan.memory, moves ? detail::extent(whole_) : 0, tensors_.size()),
        unwinding_(std::uncaught_exceptions()) {
    if (map_.rows() >= detail::all_rows)
      throw argument_error("heddle::data_parallel: " + std::to_string(map_.rows()) +
                           " rows, allowed are fewer than 2^32 - 1");
    for (const tensor& t : tensors_) parameters_.push_back(static_cast<float*>(t.parameter));
    for (int k = 0; k < servers_; ++k) links_.push_back({.rows = {map_, k}});
    std::string kind = signature() + ", servers " + std::to_string(servers_) + ", ";
    if constexpr (moves) {
      kind += std::to_string(plan_.mode.period);
    } else {
      const mode_type& m = plan_.mode;
      kind += std::to_string(m.staleness) + ", " + std::to_string(m.merge) + ", " +
              std::to_string(std::bit_cast<std::uint32_t>(m.compensation)) + ", " + std::to_string(m.sparse) + ", " +
              std::to_string(m.background) + ", " + std::to_string(static_cast<int>(m.on_death));
    }
    detail::require_same(comm_, "data_parallel", detail::fingerprint(tensors_, kind),
                         "they bring tensors of different names, sizes or types, or different strategies");
    if constexpr (moves) {
      std::vector<geo_rows> rows;
      for (std::size_t i = 0; i < tensors_.size(); ++i)
        rows.push_back({parameters_[i], tensors_[i].count, width(i), in_rows(i)});
      replica_ =
          std::make_unique<replica_type>(plan_.mode.connection, comm_, std::move(rows),
                                         geo_options{.servers = servers_, .period = plan_.mode.period}, plan_.memory);
    } else {
      for (std::size_t i = 0; i < tensors_.size(); ++i)
        broadcast(comm_, std::span<float>(parameters_[i], tensors_[i].count));
      std::unique_ptr<server_type> server;
      if (comm_.rank() < servers_) {
        server = std::make_unique<server_type>(
            rule, plan_.memory, map_, comm_.rank(), comm_.size(), tensors_.size(),
            detail::row_server_settings{
                .staleness = plan_.mode.staleness,
                .background = plan_.mode.background,
                .merge = plan_.mode.merge,
                .compensation = plan_.mode.compensation,
                .dispensable = plan_.mode.on_death == worker_death::go_on ? servers_ : comm_.size()});
        server->assign([&](std::size_t t) { return parameters_[t]; }, 0);
        tell_groups(*server);
      }
      detail::open_rows(comm_, "data_parallel", node_, plan_.mode.connection, std::move(server), servers_);
    }
  }

  data_parallel(const data_parallel&) = delete;
  data_parallel& operator=(const data_parallel&) = delete;
  /// Leaves. Ranks that still train learn it, and if an exception is on its way, those in save() or load() too.
  ~data_parallel() {
    if (std::uncaught_exceptions() > unwinding_)
      comm_.fail("rank " + std::to_string(comm_.rank()) + " left its training loop by an exception");
  }

  /// Parameters to read in forward and backward, one pointer per tensor.
  std::span<float* const> parameters() const noexcept { return detail::as_span(parameters_); }
  /// 1.
  float loss_scale() const noexcept { return 1.0f; }

  /// As the other data_parallel; the same on all ranks, after the same steps.
  void groups(std::span<const group_options> options) {
    step_.groups(options);
    with_server([&](server_type& s) { tell_groups(s); });
  }

  /// As the other data_parallel. Under `async_geo_sgd`, and without `merge` and a bound of 0, a weight of 0 means that
  /// the gradient doesn't count, and others are not used.
  void begin(const begin_options& o = {}) { step_.begin(o); }

  /// As the other data_parallel. Gradient i may travel, so it mustn't change any more.
  void ready(std::size_t i) {
    step_.ready(i, [&] { begin(); });
    if constexpr (!moves) send_ready(i);
  }

  /// @brief Under `async_ps` ends the push and takes the parameters that have changed; under `async_geo_sgd` updates
  /// the replica, and exchanges what can be without waiting. Limits are on this rank's own gradient, `max_value` with
  /// staleness 0 on the mean. Skipped if the gradient isn't finite, or, with staleness 0, anybody's.
  /// Throws: argument_error as the other data_parallel, for `max_norm` with staleness 0 on several ranks too; comm_error.
  step_result step(const step_options& o) {
    detail::check_step(o, nullptr);
    detail::check_limits(plan_.mode, o, comm_.size());
    if (!step_.is_open()) begin();
    step_.close([&]([[maybe_unused]] std::size_t i) {
      if constexpr (!moves) send_ready(i);
    });
    double squares = 0.0;
    const bool counted = step_.samples() > 0.0;
    for (std::size_t i = 0; counted && i < tensors_.size(); ++i)
      squares += detail::squares(gradient(i), tensors_[i].count);
    step_result result{.norm = std::sqrt(squares)};
    const bool finite = std::isfinite(result.norm);
    const double clip = o.max_norm > 0.0f && result.norm > o.max_norm ? o.max_norm / result.norm : 1.0;
    const detail::scaling scale{static_cast<float>(clip), o.max_value};
    bool updated = counted && finite;
    result.skipped = !finite;
    if constexpr (moves) {
      if (updated) local_step(o, scale);
      replica_->batch();
    } else {
      result.skipped |= push_all(o, scale, counted, finite);
      result.met = updated = !result.skipped && (counted || plan_.mode.staleness == 0);
    }
    skipped_ += result.skipped;
    steps_ += updated;
    return result;
  }

  /// @brief Waits until every rank is here; then all replicas are equal. Collective.
  /// Throws: argument_error if a step is open; comm_error.
  void synchronize() {
    step_.require_closed("synchronize");
    if constexpr (moves) {
      replica_->join();
    } else {
      take_all();
      for (int k = 0; k < servers_; ++k) post(k, detail::row_tag::join, {}, detail::row_writer(false));
      take_all();
      for (link& l : links_) l.behind = 0;
    }
  }

  /// Says that this rank has no more batches, and waits until nobody has: as synchronize(). What this rank holds of the
  /// parameters is served meanwhile.
  void join() { synchronize(); }

  /// @brief What the servers had of a tensor when this rank last heard of them; `count` elements.
  /// Throws: argument_error if there is no such tensor.
  std::span<const float> agreed(std::size_t tensor) const
    requires(moves)
  {
    if (tensor >= tensors_.size())
      throw argument_error("heddle::data_parallel::agreed: tensor " + std::to_string(tensor) + " of " +
                           std::to_string(tensors_.size()));
    return replica_->agreed(tensor);
  }

  /// @brief Writes parameters and all state to a directory, after synchronize(). Collective.
  /// Throws: file_error on every rank if any rank can't write; the older checkpoint stays.
  void save(const std::string& directory) {
    synchronize();
    detail::save_all(comm_, directory, [&](const detail::generation& now) {
      detail::counters c{};
      c.steps = steps_;
      c.skipped = skipped_;
      with_server([&](server_type& s) { c.clock = s.clock(); });
      auto file = detail::pack(now, comm_.rank(), signature(), c, tensors_, visitor());
      if constexpr (!moves) {
        std::uint64_t servers = 0;
        with_server([&](server_type& s) {
          ++servers;
          detail::pack_shards(file, s.pieces(), slots, [&](auto k, auto at) { return s.state().state(k, at); });
        });
        if (servers == 0) file.put(servers);  // no pieces
      }
      return file;
    });
  }

  /// @brief Restores what save() wrote. Collective; also on another number of ranks or servers. The rule's state goes
  /// to whoever serves the parameter; under `async_geo_sgd` rank r takes that of old rank r modulo their number. With
  /// staleness 0, or on one rank, training goes on bit for bit.
  /// Throws: file_error on every rank if any file is missing, damaged, or of another model or kind of strategy; nothing
  /// has changed then.
  void load(const std::string& directory) {
    synchronize();  // nothing is under way any more
    std::vector<detail::piece> mine_to_serve;
    with_server([&](server_type& s) { mine_to_serve = s.pieces(); });
    detail::shards<detail::piece> state(mine_to_serve, slots);
    detail::saved mine;
    std::uint64_t clock = 0;  // of a rank without a server it is 0
    detail::together all(comm_, "load");
    all.succeed([&] {
      const detail::checkpoint files(directory);
      const detail::generation g = files.published();
      const int ranks = static_cast<int>(g.ranks), own = comm_.rank() % ranks;
      for (int k = 0; k < (moves ? 1 : ranks); ++k) {
        auto file = detail::unpack(files, g, (own + k) % ranks, k == 0, signature(), tensors_, visitor(),
                                   [&](archive_reader& in, const detail::counters& c) {
                                     if constexpr (!moves) state.read(in);
                                     clock = (std::max)(clock, c.clock);
                                   });
        if (k == 0) mine = std::move(file);
      }
      if (!moves && !state.complete())
        throw file_error("heddle::data_parallel::load: " + directory + " lacks the optimizer state of some elements");
    });
    all.check();
    steps_ = mine.counts.steps;
    skipped_ = mine.counts.skipped;
    detail::restore(mine, tensors_, visitor());
    if constexpr (moves) replica_->assign();
    with_server([&](server_type& s) {
      s.assign([&](std::size_t t) { return parameters_[t]; }, clock);
      for (std::size_t k = 0; k < static_cast<std::size_t>(slots); ++k)
        std::copy_n(state.values(k), state.elements(), s.state().state(k, 0));
    });
    for (link& l : links_) l.seen = clock;
    (void)detail::everywhere(comm_, true);  // nobody pushes before all have it
  }

  /// What this rank has done; of a rank that serves, with the bytes of its answers.
  heddle::report report() const {
    heddle::report r;
    r.steps = steps_;
    r.skipped = skipped_;
    r.state_bytes = update_.bytes();
    if constexpr (moves) {
      const geo_report g = replica_->report();
      r.bytes_sent = g.bytes_sent;
      r.messages = r.meetings = g.pushes;
      r.reverted = g.reverted;
      r.state_bytes += replica_->bytes();
      std::copy(std::begin(g.staleness), std::end(g.staleness), r.staleness);
    } else {
      const auto sent = node_->sent();
      r.bytes_sent = sent.bytes;
      r.messages = sent.requests;
      r.meetings = meetings_;
      std::copy(std::begin(staleness_), std::end(staleness_), r.staleness);
      node_->with_server([&](server_type& s) { r.state_bytes += s.bytes(); });
    }
    r.executor = "messengers, " + std::to_string(servers_) + " servers";
    return r;
  }

 private:
  struct link {
    std::uint64_t seen = 0;    // the server's clock
    std::uint64_t behind = 0;  // the clock less the one that the gradient under way was computed at
    detail::ready_rows rows;
  };

  static const Strategy& checked(const Strategy& plan, const Optimizer& rule, int ranks) {
    plan.check();
    detail::check_part(plan.mode);
    detail::check_part(rule);
    detail::check_servers(plan.mode, ranks);
    return plan;
  }

  std::string signature() const {
    return detail::name_or(plan_.mode, "mode") + ", " + detail::rule_signature(rule_, slots, tensors_);
  }
  auto visitor() {
    return [this](std::size_t i, auto&& f) {
      f(parameters_[i], detail::state_kind::parameter);
      for (std::size_t k = 0; moves && k < static_cast<std::size_t>(slots); ++k)
        f(update_.state(k, whole_[i].state), detail::state_kind::rule);
    };
  }

  float* gradient(std::size_t i) const noexcept { return static_cast<float*>(tensors_[i].gradient); }

  // Whether a tensor travels by rows that have a gradient; else as pieces that always do.
  bool in_rows(std::size_t i) const noexcept {
    const tensor& t = tensors_[i];
    if constexpr (!moves)
      if (layerwise<Optimizer> || !plan_.mode.sparse) return false;
    return t.rows > 0 && t.count > 0 && t.count % t.rows == 0;
  }
  std::size_t width(std::size_t i) const noexcept {
    const tensor& t = tensors_[i];
    if (in_rows(i)) return t.count / t.rows;
    return !moves && layerwise<Optimizer> ? (std::max<std::size_t>)(t.count, 1) : 1024;
  }
  std::vector<detail::row_map::shape> shapes() const {
    std::vector<detail::row_map::shape> all;
    for (std::size_t i = 0; i < tensors_.size(); ++i) all.push_back({tensors_[i].count, width(i)});
    return all;
  }
  template <class Function> void with_server(Function&& f) {
    if constexpr (!moves) node_->with_server(f);
  }

  std::size_t part_bytes() const noexcept {
    if constexpr (requires { plan_.buckets.first; })
      return plan_.buckets.first;
    else
      return buckets{}.first;
  }
  void tell_groups(server_type& s) const {
    for (std::size_t i = 0; i < tensors_.size(); ++i) s.context(i, step_.context(i, 1.0f, 0));
  }
  void post(int k, detail::row_tag tag, detail::row_request head, const detail::row_writer& rows) {
    head.seen = links_[static_cast<std::size_t>(k)].seen;
    node_->post(k, tag, rows.message(head, map_.first(k + 1) - map_.first(k)));
  }
  // Gradient i is ready: what is long enough for a message travels.
  void send_ready(std::size_t i) {
    if (!(step_.samples() > 0.0)) return;
    for (int k = 0; k < servers_; ++k) {
      detail::ready_rows& rows = links_[static_cast<std::size_t>(k)].rows;
      rows.add(i);
      if (rows.elements() && rows.elements() * sizeof(float) >= part_bytes())
        post(k, detail::row_tag::part, {}, take_ready(k));
    }
  }
  detail::row_writer take_ready(int k) {
    return links_[static_cast<std::size_t>(k)].rows.take([&](const detail::row_map::row& r) {
      const float* const g = gradient(r.tensor) + r.begin;
      return in_rows(r.tensor) && std::all_of(g, g + r.count, [](float x) { return x == 0.0f; }) ? nullptr : g;
    });
  }
  // Takes the answers that are under way; whether the update was skipped.
  bool take_all() {
    std::uint64_t stale = 0;
    bool skipped = false;
    for (int k = 0; k < servers_; ++k) {
      if (!node_->open(k)) continue;
      const payload body = node_->take(k);
      link& l = links_[static_cast<std::size_t>(k)];
      const auto head = detail::row_head<detail::row_reply>(body);
      for (detail::row_reader in(body, head, map_, k); !in.done(); in.next())
        std::copy_n(in.values(), in.row().count, parameters_[in.row().tensor] + in.row().begin);
      stale = (std::max)(stale, head.staleness + l.behind);
      if constexpr (!moves) l.behind = plan_.mode.background ? head.clock - l.seen : 0;
      l.seen = head.clock;
      skipped |= head.skipped != 0;
    }
    if (std::exchange(pushed_, false) && !skipped) {
      ++meetings_;
      ++staleness_[(std::min<std::uint64_t>)(stale, 15)];
    }
    return skipped;
  }

  // Under async_ps: whether the update was skipped.
  bool push_all(const step_options& o, const detail::scaling& scale, bool counted, bool finite) {
    if (plan_.mode.background) take_all();
    for (int k = 0; k < servers_; ++k) {
      post(k, detail::row_tag::push,
           {.samples = counted ? step_.samples() : 0.0,
            .lr = o.lr,
            .bad = counted && !finite,
            .factor = scale.factor,
            .limit = scale.limit},
           take_ready(k));
    }
    pushed_ = counted && finite;
    return !plan_.mode.background && take_all();
  }

  // Under async_geo_sgd.
  void local_step(const step_options& o, const detail::scaling& scale) {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (!in_rows(i)) continue;
      const std::size_t n = width(i);
      for (std::size_t r = 0; r < tensors_[i].rows; ++r) {
        const float* const g = gradient(i) + r * n;
        if (std::any_of(g, g + n, [](float x) { return x != 0.0f; })) replica_->touch(i, r);
      }
    }
    const auto view = [&](const detail::piece& p) {
      return detail::piece_view<>{parameters_[p.tensor], gradient(p.tensor), step_.context(p.tensor, o.lr, steps_)};
    };
    update_.advance(static_cast<Comm*>(nullptr), whole_, view, scale);
    for (const detail::piece& p : whole_) update_.apply(p, view, scale);
  }

  Strategy plan_;
  std::vector<tensor> tensors_;
  Optimizer rule_;
  detail::open_step<float> step_;
  std::vector<float*> parameters_;
  Comm comm_;
  int servers_;
  std::vector<detail::piece> whole_;  // every tensor as one piece
  detail::row_map map_;
  detail::piecewise<Optimizer, slots, memory_type> update_;  // of a replica that trains alone
  std::vector<link> links_;                                  // to each server
  int unwinding_;
  std::size_t steps_ = 0, skipped_ = 0, meetings_ = 0;
  std::uint64_t staleness_[16] = {};
  bool pushed_ = false;                    // a gradient whose answer isn't taken yet
  std::unique_ptr<node_type> node_;        // under async_ps
  std::unique_ptr<replica_type> replica_;  // under async_geo_sgd
};

}  // namespace v0
}  // namespace heddle
