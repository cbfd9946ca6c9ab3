// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/archive.hpp>
#include <heddle/trainer/tensor.hpp>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <sys/stat.h>

namespace heddle {
inline namespace v0 {
namespace detail {

// A directory of checkpoints: one file per rank and step, and a manifest that names the step that is whole.
class checkpoint {
 public:
  explicit checkpoint(std::string directory) : directory_(std::move(directory)) {}

  std::string rank_path(std::uint64_t step, int rank) const {
    return directory_ + "/step-" + std::to_string(step) + ".rank-" + std::to_string(rank);
  }

  void write_rank(std::uint64_t step, int rank, const archive_writer& content) const {
    if (::mkdir(directory_.c_str(), 0777) != 0 && errno != EEXIST)
      throw file_error("heddle: can't make directory " + directory_);
    content.write(rank_path(step, rank));
  }

  void publish(std::uint64_t step, int ranks) {
    try {
      std::tie(old_step_, old_ranks_) = published();
    } catch (const file_error&) {
      old_ranks_ = 0;  // the first checkpoint here
    }
    archive_writer out;
    out.put(step);
    out.put(static_cast<std::uint32_t>(ranks));
    out.write(directory_ + "/manifest");
  }

  // Step and number of ranks of the last whole checkpoint.
  std::pair<std::uint64_t, int> published() const {
    archive_reader in(directory_ + "/manifest");
    const auto step = in.get<std::uint64_t>();
    const auto ranks = in.get<std::uint32_t>();
    if (ranks < 1 || ranks > 65535) in.refuse("it names " + std::to_string(ranks) + " ranks");
    return {step, static_cast<int>(ranks)};
  }

  // Removes the older checkpoint after a newer one was published; only rank 0 knows it.
  void forget(std::uint64_t step) const {
    if (old_ranks_ == 0 || old_step_ == step) return;
    for (int r = 0; r < old_ranks_; ++r) std::remove(rank_path(old_step_, r).c_str());
  }

 private:
  std::string directory_;
  std::uint64_t old_step_ = 0;
  int old_ranks_ = 0;
};

// Numbers of a rank that are not per tensor.
struct counters {
  std::uint64_t steps, clock, skipped, meetings;
  double drift_samples;
};

// A rank's file in memory: values in the order in which `each` visits them.
struct saved {
  bool own = false;
  counters counts{};
  std::vector<float> values;
};

// In all of these each(i, f) calls f(pointer, held back by a compressor) for every state of tensor i, in a fixed order.
template <class Each> archive_writer pack(const counters& c, const std::vector<tensor>& tensors, Each&& each) {
  archive_writer out;
  out.put(c);
  out.put(static_cast<std::uint64_t>(tensors.size()));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    out.put(tensors[i].name);
    each(i, [&](const float* p, bool) { out.put(p, tensors[i].count); });
  }
  return out;
}

template <class Each> saved unpack(const std::string& path, bool own, const std::vector<tensor>& tensors, Each&& each) {
  archive_reader in(path);
  saved s{own, in.get<counters>(), {}};
  if (const auto n = in.get<std::uint64_t>(); n != tensors.size()) {
    in.refuse("it holds " + std::to_string(n) + " tensors, this model has " + std::to_string(tensors.size()));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (const std::string name = in.get_string(); name != tensors[i].name) {
      in.refuse("tensor " + std::to_string(i) + " is \"" + name + "\", this model's is \"" + tensors[i].name + "\"");
    }
    each(i, [&](float*, bool) {
      const std::size_t at = s.values.size();
      s.values.resize(at + tensors[i].count);
      in.get(s.values.data() + at, tensors[i].count);
    });
  }
  return s;
}

// Another number of ranks: what compressors held is summed and divided evenly, so that the sum over ranks is kept.
template <class Each>
void share_out(std::vector<saved>& old, int ranks, const std::vector<tensor>& tensors, Each&& each) {
  const auto mine = std::find_if(old.begin(), old.end(), [](const saved& s) { return s.own; });
  std::size_t at = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    each(i, [&](float*, bool held) {
      for (std::size_t k = at; held && k < at + tensors[i].count; ++k) {
        double sum = 0.0;
        for (const saved& s : old) sum += s.values[k];
        mine->values[k] = static_cast<float>(sum / ranks);
      }
      at += tensors[i].count;
    });
  }
}

template <class Each> void restore(const saved& s, const std::vector<tensor>& tensors, Each&& each) {
  const float* from = s.values.data();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    each(i, [&](float* p, bool) {
      std::copy_n(from, tensors[i].count, p);
      from += tensors[i].count;
    });
  }
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle
