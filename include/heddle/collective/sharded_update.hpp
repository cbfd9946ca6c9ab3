// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/detail/shards.hpp>
#include <heddle/collective/halves.hpp>
#include <heddle/core/detail/squares.hpp>

#include <cmath>

namespace heddle {
inline namespace v0 {

/// @brief What a sharded update needs; the same on all ranks.
struct sharded_options {
  float lr = 0.0f;        ///< Learning rate, 0 or above.
  float max_norm = 0.0f;  ///< Limit on the norm of the whole mean gradient; 0: none.
  float scale = 1.0f;     ///< Multiplies the mean gradient: 1 over the loss scale. Above 0.
};

/// @brief What a sharded update did, the same on all ranks.
struct sharded_result {
  bool skipped = false;  ///< The gradient of some rank wasn't finite: neither parameters nor state have moved.
  double norm = 0.0;     ///< Of the scaled mean gradient, before clipping.
};

/// @brief The update inside the all-reduce (ZeRO, stage 1), on buffers: reduce-scatter the gradients, update what this
/// rank owns, all-gather the parameters.
///
///     hd::sharded_update update(hd::ring{}, hd::adamw{}, comm.rank(), comm.size(), sizes);
///     update(comm, std::span(gradients), std::span(parameters), {.lr = 1e-3f, .max_norm = 1.0f});
///
/// The mean is divided once, in the wide accumulator of the reduction; then it is scaled, its norm is agreed on by all
/// ranks, and only if that is finite state moves. With float buffers the result is, bit for bit, that of an all-reduce
/// on the same topology, the norm of its result summed up by owner, and the update of everything on every rank.
///
/// Wire:    n (P - 1) / P gradients and n (P - 1) / P parameters sent per rank, 8 bytes to each rank for the norm, and
///          with layerwise rules 16 bytes per tensor.
/// State:   that of the rule for n / P elements; 4 bytes more per owned element where parameters have 16 bits (the
///          float copy that is updated), and where gradients have.
/// Traffic: n / P of the rule's, and 4 bytes read per owned element for the norm.
/// Sync:    returns when this rank's parameters are complete.
/// Throws:  argument_error for sizes or numbers that can't be; what the topology throws; comm_error.
/// @tparam Topology One whose halves have owners. @tparam Rule An update rule. @tparam Parameter float, float16 or
/// bfloat16.
template <class Topology, class Rule, class Parameter = float> class sharded_update {
  static_assert(optimizer<Rule>, "heddle::sharded_update: the rule must have slots and update(); see docs/optim.md");
  static_assert(!has_groups<Rule>,
                "heddle::sharded_update: it isn't told the groups of tensors, so not per_group; use "
                "data_parallel");
  static constexpr bool narrow = !std::is_same_v<Parameter, float>;

 public:
  /// @param t The topology. @param rule The update rule. @param rank This rank. @param size Number of ranks.
  /// @param sizes Elements of each tensor in the buffers, where they lie one after the other. Only layerwise rules and
  /// `decay_scales` tell tensors apart. @param decay_scales Multiplies the weight decay of each tensor; empty: 1.
  sharded_update(const Topology& t, const Rule& rule, int rank, int size, std::span<const std::size_t> sizes,
                 std::span<const float> decay_scales = {})
      : sizes_(sizes.begin(), sizes.end()),
        decay_scales_(decay_scales.begin(), decay_scales.end()),
        plan_(t, rank, size, total()),
        pieces_(owned_pieces()),
        update_(rule, host_resource{}, detail::extent(pieces_), sizes_.size()) {
    if (decay_scales_.empty()) decay_scales_.assign(sizes_.size(), 1.0f);
    if (decay_scales_.size() != sizes_.size()) {
      throw argument_error("heddle::sharded_update: " + std::to_string(decay_scales_.size()) + " decay scales for " +
                           std::to_string(sizes_.size()) + " tensors; allowed is one for each, or none");
    }
    if constexpr (requires { rule.check(); }) rule.check();
  }

  /// What this rank updates.
  std::span<const interval> owned() const noexcept { return plan_.owned(); }
  /// Bytes of state.
  std::size_t state_bytes() const noexcept { return update_.bytes() + own_.size() * sizeof(float); }
  /// Steps taken.
  std::size_t steps() const noexcept { return steps_; }

  /// @brief One step. Parameters must be the same on all ranks at the first one.
  /// @param comm Communicator. @param gradients float, float16 or bfloat16; scratch afterwards.
  /// @param parameters What is updated. @param o Numbers of this step.
  template <communicator Comm, class Gradient>
  sharded_result operator()(Comm& comm, std::span<Gradient> gradients, std::span<Parameter> parameters,
                            const sharded_options& o) {
    static_assert(!stream_ordered<Comm>, "heddle::sharded_update: not for a communicator that works in a stream");
    check(gradients.size(), parameters.size(), o);
    plan_.reduce_scatter(comm, gradients.data(), leaf_of<Gradient>(mean{}));
    const auto gradient = [&](const detail::piece& p) {
      if constexpr (std::is_same_v<Gradient, float>)
        return gradients.data() + p.position;
      else
        return own_.data() + p.state;
    };
    if constexpr (!std::is_same_v<Gradient, float>) own_.resize(detail::extent(pieces_));
    double mine = 0.0;
    for (const detail::piece& p : pieces_) {
      if (o.scale != 1.0f || !std::is_same_v<Gradient, float>)
        convert_scaled(gradients.data() + p.position, gradient(p), p.count, o.scale);
      mine += detail::squares(gradient(p), p.count);
    }
    std::vector<double> theirs(static_cast<std::size_t>(comm.size()));
    all_gather(comm, direct{}, std::span<const double>(&mine, 1), std::span<double>(theirs));
    double all = 0.0;
    for (const double x : theirs) all += x;
    const sharded_result result{!std::isfinite(all), std::sqrt(all)};
    if (result.skipped) return result;

    const auto parameter = [&](const detail::piece& p) {
      if constexpr (narrow)
        return update_.state(Rule::slots, p.state);
      else
        return parameters.data() + p.position;
    };
    if constexpr (narrow) {
      for (const detail::piece& p : pieces_) {
        if (!begun_) convert(parameters.data() + p.position, parameter(p), p.count);
      }
    }
    begun_ = true;
    const auto view = [&](const detail::piece& p) {
      return detail::piece_view<>{parameter(p), gradient(p), {o.lr, steps_, decay_scales_[p.tensor]}};
    };
    const float factor =
        o.max_norm > 0.0f && result.norm > o.max_norm ? static_cast<float>(o.max_norm / result.norm) : 1.0f;
    update_.advance(&comm, pieces_, view, {.factor = factor});
    for (const detail::piece& p : pieces_) {
      update_.apply(p, view, {.factor = factor});
      if constexpr (narrow) convert(parameter(p), parameters.data() + p.position, p.count);
    }
    plan_.all_gather(comm, parameters.data());
    ++steps_;
    return result;
  }

  /// @brief Writes what this rank holds; not collective. Parameters of 32 bits are not part of it.
  /// Throws: file_error.
  void save(const std::string& path) const {
    archive_writer out;
    out.put(static_cast<std::uint64_t>(steps_));
    out.put(static_cast<std::uint64_t>(begun_));
    out.put(static_cast<std::uint64_t>(slots));
    out.put(sizes_.data(), sizes_.size());
    detail::pack_shards(out, pieces_, slots, [&](std::size_t k, std::size_t at) { return update_.state(k, at); });
    out.write(path);
  }

  /// @brief Takes over what all ranks of some run had saved, also another number of ranks on another topology. Not
  /// collective; every rank reads all of the files, and looks at the state in as many as it needs.
  /// @param paths The files of all ranks, in any order; put this rank's own first to save time.
  /// Throws: file_error if a file is missing, damaged, of other tensors or of another step than the one before, or the
  /// files lack something; nothing has changed then.
  void load(std::span<const std::string> paths) {
    detail::shards found(pieces_, slots);
    std::size_t steps = steps_;
    bool begun = begun_, any = false;
    for (const std::string& path : paths) {
      archive_reader in(path);
      const auto s = static_cast<std::size_t>(in.get<std::uint64_t>());
      const bool b = in.get<std::uint64_t>() != 0;
      if (any && (s != steps || b != begun)) in.refuse("it is of another step");
      steps = s;
      begun = b;
      if (in.get<std::uint64_t>() != slots) in.refuse("it has another number of slots");
      std::vector<std::size_t> sizes(sizes_.size());
      in.get(sizes.data(), sizes.size());
      if (sizes != sizes_) in.refuse("its tensors have other sizes");
      any = true;
      if (found.complete()) continue;
      found.read(in);
      in.finish();
    }
    if (!any || !found.complete())
      throw file_error("heddle::sharded_update::load: the files lack some elements' state");
    steps_ = steps;
    begun_ = begun;
    for (std::size_t k = 0; k < slots; ++k) std::copy_n(found.values(k), found.elements(), update_.state(k, 0));
  }

 private:
  static constexpr std::size_t slots = Rule::slots + narrow;  // the last one: parameters in float

  std::size_t total() const noexcept {
    std::size_t n = 0;
    for (const std::size_t x : sizes_) n += x;
    return n;
  }

  std::vector<detail::piece> owned_pieces() const {
    std::vector<detail::piece> all;
    detail::cut(
        plan_.owned(), 0, sizes_.size(), [&](std::size_t i) { return sizes_[i]; },
        [&](detail::piece p) {
          p.state = detail::extent(all);
          if (p.own) all.push_back(p);
        });
    return all;
  }

  void check(std::size_t gradients, std::size_t parameters, const sharded_options& o) const {
    if (gradients != plan_.count() || parameters != plan_.count()) {
      throw argument_error("heddle::sharded_update: " + std::to_string(gradients) + " gradients and " +
                           std::to_string(parameters) + " parameters, allowed are " + std::to_string(plan_.count()));
    }
    if (!(o.lr >= 0.0f) || !(o.max_norm >= 0.0f) || !(o.scale > 0.0f) || !std::isfinite(o.lr + o.max_norm + o.scale)) {
      throw argument_error("heddle::sharded_update: lr " + std::to_string(o.lr) + ", max_norm " +
                           std::to_string(o.max_norm) + ", scale " + std::to_string(o.scale) +
                           "; allowed are finite numbers, the scale above 0, the others 0 or above");
    }
  }

  std::vector<std::size_t> sizes_;
  std::vector<float> decay_scales_;
  halved_plan<Topology> plan_;
  std::vector<detail::piece> pieces_;
  detail::piecewise<Rule, static_cast<int>(slots), host_resource> update_;
  std::vector<float> own_;  // the owned gradients, where they travel in 16 bits
  std::size_t steps_ = 0;
  bool begun_ = false;
};

}  // namespace v0
}  // namespace heddle
