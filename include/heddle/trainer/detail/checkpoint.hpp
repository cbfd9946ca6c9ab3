// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/detail/shards.hpp>
#include <heddle/optim/mixed.hpp>
#include <heddle/trainer/detail/held.hpp>
#include <heddle/trainer/detail/tell.hpp>
#include <heddle/trainer/tensor.hpp>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <sys/stat.h>

namespace heddle {
inline namespace v0 {
namespace detail {

// A saved state of all ranks. Numbers rise; 0 with no ranks means that there is none.
struct generation {
  std::uint64_t number = 0;
  std::uint32_t ranks = 0;
  bool operator==(const generation&) const = default;
};

// A directory of checkpoints: one file per rank and generation, and a manifest that names the generation that is whole.
class checkpoint {
 public:
  explicit checkpoint(std::string directory) : directory_(std::move(directory)) {}

  std::string rank_path(const generation& g, int rank) const {
    return directory_ + "/checkpoint-" + std::to_string(g.number) + ".rank-" + std::to_string(rank);
  }

  void write_rank(const generation& g, int rank, const archive_writer& content) const {
    if (::mkdir(directory_.c_str(), 0777) != 0 && errno != EEXIST)
      throw file_error("heddle: can't make directory " + directory_);
    content.write(rank_path(g, rank));
  }

  void publish(const generation& g) const {
    archive_writer out;
    out.put(g.number);
    out.put(g.ranks);
    out.write(directory_ + "/manifest");
  }

  // The last whole generation.
  generation published() const {
    archive_reader in(directory_ + "/manifest");
    const auto number = in.get<std::uint64_t>();
    const auto ranks = in.get<std::uint32_t>();
    in.finish();
    if (ranks < 1 || ranks > 65535) in.refuse("it names " + std::to_string(ranks) + " ranks");
    return {number, ranks};
  }
  generation published_or_none() const {
    try {
      return published();
    } catch (const file_error&) {
      return {};
    }
  }

  void remove_rank(const generation& g, int rank) const { std::remove(rank_path(g, rank).c_str()); }
  void remove(const generation& g) const {
    for (std::uint32_t r = 0; r < g.ranks; ++r) remove_rank(g, static_cast<int>(r));
  }

 private:
  std::string directory_;
};

// Numbers of a rank that are not per tensor.
struct counters {
  std::uint64_t steps, clock, skipped, meetings;
  double drift_samples, drift_loss, drift_lr;  // since the last meeting
  std::uint64_t period[4];                     // of the mode: the same on all ranks
  loss_scale_state scale;                      // the same on all ranks
  std::uint32_t bad;                           // as announced
  float last_lr;                               // of the last step; 0: none
  std::uint32_t unused = 0;                    // no byte without a value
};

// What a block of floats in a checkpoint is.
enum class state_kind { parameter, rule, agreed };

// A rank's file in memory: values in the order in which `each` visits them.
struct saved {
  bool own = false;
  counters counts{};
  std::vector<float> values;
};

// In all of these each(i, f) calls f(pointer, kind) for every state of tensor i, in a fixed order.
template <class Each>
archive_writer pack(const generation& g, int rank, const std::string& signature, const counters& c,
                    const std::vector<tensor>& tensors, Each&& each) {
  archive_writer out;
  out.put(g.number);
  out.put(g.ranks);
  out.put(rank);
  out.put(signature);
  out.put(c);
  out.put(static_cast<std::uint64_t>(tensors.size()));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    out.put(tensors[i].name);
    each(i, [&](const float* p, state_kind) { out.put(p, tensors[i].count); });
  }
  return out;
}

// rest(reader, counters) reads what follows.
template <class Each, class Rest>
saved unpack(const checkpoint& files, const generation& g, int rank, bool own, const std::string& signature,
             const std::vector<tensor>& tensors, Each&& each, Rest&& rest) {
  archive_reader in(files.rank_path(g, rank));
  const auto number = in.get<std::uint64_t>();
  const auto ranks = in.get<std::uint32_t>();
  if (generation{number, ranks} != g || in.get<int>() != rank) in.refuse("it belongs to another checkpoint or rank");
  if (const std::string theirs = in.get_string(); theirs != signature) {
    in.refuse("it was written under " + theirs + "; here is " + signature);
  }
  saved s{own, in.get<counters>(), {}};
  if (const auto n = in.get<std::uint64_t>(); n != tensors.size()) {
    in.refuse("it holds " + std::to_string(n) + " tensors, this model has " + std::to_string(tensors.size()));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (const std::string name = in.get_string(); name != tensors[i].name) {
      in.refuse("tensor " + std::to_string(i) + " is \"" + name + "\", this model's is \"" + tensors[i].name + "\"");
    }
    each(i, [&](float*, state_kind) {
      const std::size_t at = s.values.size();
      s.values.resize(at + tensors[i].count);
      in.get(s.values.data() + at, tensors[i].count);
    });
  }
  rest(in, s.counts);
  in.finish();
  return s;
}

// Another number of ranks. Replicas that had drifted from what was agreed meet: the agreed values move by the mean of
// their differences, weighted as the mode weighs them.
template <class Each, class Drift>
void share_out(std::vector<saved>& old, const std::vector<tensor>& tensors, Each&& each, const Drift& drift) {
  saved& mine = *std::find_if(old.begin(), old.end(), [](const saved& s) { return s.own; });
  const std::vector<double> weights = drift.weights(old);
  for (const saved& s : old) {
    mine.counts.clock = (std::max)(mine.counts.clock, s.counts.clock);
  }
  std::size_t at = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::size_t n = tensors[i].count, parameter = at;  // each() begins with the parameter
    each(i, [&](float*, state_kind kind) {
      for (std::size_t k = 0; k < n; ++k) {
        double sum = 0.0;
        if (kind == state_kind::agreed) {
          const float agreed = mine.values[at + k];
          for (std::size_t r = 0; r < old.size(); ++r) sum += weights[r] * (agreed - old[r].values[parameter + k]);
          mine.values[at + k] = drift.settle(agreed, sum, old.size());
        }
      }
      at += n;
    });
    at = parameter;
    each(i, [&](float*, state_kind kind) {  // after all sums: the replica starts from what is agreed
      if (kind == state_kind::agreed) std::copy_n(&mine.values[at], n, &mine.values[parameter]);
      at += n;
    });
  }
  mine.counts.drift_samples = mine.counts.drift_loss = 0.0;
}

// Saves on all ranks, or on none: pack(generation) makes this rank's file. Collective; throws file_error on every rank.
template <class Comm, class Pack> void save_all(Comm& comm, const std::string& directory, Pack&& pack) {
  const checkpoint files(directory);
  // All ranks use the number that rank 0 finds, whatever they see of the directory.
  const auto old = tell_ranks(comm, files.published_or_none())[0];
  const generation now{old.number + 1, static_cast<std::uint32_t>(comm.size())};
  together all(comm, "save");
  const bool written = all.succeed([&] { files.write_rank(now, comm.rank(), pack(now)); });
  if (!written) files.remove_rank(now, comm.rank());
  all.check();
  all.succeed([&] {
    if (comm.rank() == 0) files.publish(now);
  });
  all.check();
  if (comm.rank() == 0) files.remove(old);
}

// What this rank goes on with, read from a directory: its own file, or its share of all if another number of ranks
// wrote them and `all_count`. Sharded optimizer state comes from as many files as hold parts of it. What compressors
// hold comes from the own file, if `exact` and as many ranks saved; else from all.
template <class Each, class Drift, class Averager>
std::vector<saved> unpack_all(const std::string& directory, int rank, int size, bool all_count,
                              const std::string& signature, const std::vector<tensor>& tensors, Each&& each,
                              const Drift& drift, shards<piece>* state, Averager& average, bool exact) {
  const checkpoint files(directory);
  const generation g = files.published();
  const int ranks = static_cast<int>(g.ranks), mine = rank % ranks;
  const bool every = all_count && ranks != size;
  exact = exact && ranks == size;
  auto& held = average.holding();
  const bool in_order = every || (held && !exact);
  std::optional<typename Averager::held_type::restored> holding;
  if (held) holding.emplace(*held, exact);
  std::vector<saved> old;
  for (int k = 0; k < ranks; ++k) {
    const int r = in_order ? k : (mine + k) % ranks;  // else the own file first: often it has everything
    if (r != mine && !in_order && !(state && !state->complete())) continue;
    saved file = unpack(files, g, r, r == mine, signature, tensors, each, [&](archive_reader& in, const counters& c) {
      if (holding) holding->read(in, [&](std::size_t i) { return average.sends_next(i, c); });
      if (state) state->read(in);
    });
    if (r == mine || every) old.push_back(std::move(file));
  }
  if (state && !state->complete())
    throw file_error("heddle::data_parallel::load: " + directory + " lacks the optimizer state of some elements");
  if (holding) held->stage(*holding);
  average.check_strays(directory);
  if (ranks != size) share_out(old, tensors, each, drift);
  return old;
}

template <class Each> void restore(const saved& s, const std::vector<tensor>& tensors, Each&& each) {
  const float* from = s.values.data();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    each(i, [&](float* p, state_kind) {
      std::copy_n(from, tensors[i].count, p);
      from += tensors[i].count;
    });
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle
