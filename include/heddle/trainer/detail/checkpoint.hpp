// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/archive.hpp>

#include <cerrno>
#include <cstdio>
#include <string>
#include <tuple>
#include <utility>

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
    if (::mkdir(directory_.c_str(), 0777) != 0 && errno != EEXIST) throw file_error("heddle: can't make directory " + directory_);
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

}  // namespace detail
}  // namespace v0
}  // namespace heddle
