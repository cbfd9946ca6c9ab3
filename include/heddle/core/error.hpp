// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief Base of every exception Heddle throws. `what()` says what was given, where, and what is allowed.
struct error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// @brief A value outside its documented range; nothing has changed when it is thrown.
struct argument_error : error {
  using error::error;
};

/// @brief A file that can't be read, written or trusted (missing, truncated, checksum, other version).
struct file_error : error {
  using error::error;
};

/// @brief A collective that can't complete: a peer failed, called something else, or did not come in time.
class comm_error : public error {
 public:
  /// @param operation Name of the pending operation, for example "all_reduce".
  /// @param rank The rank that reports.
  /// @param peer The rank at fault, or -1 when it isn't known.
  /// @param detail What happened.
  comm_error(std::string operation, int rank, int peer, const std::string& detail)
      : error("heddle::" + operation + " on rank " + std::to_string(rank) +
              (peer >= 0 ? " (peer " + std::to_string(peer) + ")" : std::string{}) + ": " + detail),
        operation_(std::move(operation)),
        rank_(rank),
        peer_(peer) {}

  /// The pending operation.
  const std::string& operation() const noexcept { return operation_; }
  /// The rank that reports.
  int rank() const noexcept { return rank_; }
  /// The rank at fault, -1 when unknown.
  int peer() const noexcept { return peer_; }

 private:
  std::string operation_;
  int rank_;
  int peer_;
};

/// @brief Memory that can't be had. All figures are bytes, `unknown` where a resource has or knows none; the text names
/// those that are known.
class memory_error : public error {
 public:
  /// A figure that there isn't.
  static constexpr std::size_t unknown = static_cast<std::size_t>(-1);

  /// @param where The resource that refuses.
  /// @param requested Bytes asked for.
  /// @param limit The most it may hold.
  /// @param in_use Bytes handed out now.
  /// @param largest_free Largest block it could hand out now.
  memory_error(const std::string& where, std::size_t requested, std::size_t limit = unknown,
               std::size_t in_use = unknown, std::size_t largest_free = unknown)
      : error("heddle::" + where + ": can't allocate " + std::to_string(requested) + " bytes" +
              figures(limit, in_use, largest_free)),
        requested_(requested),
        limit_(limit),
        in_use_(in_use),
        largest_free_(largest_free) {}

  /// Bytes asked for.
  std::size_t requested() const noexcept { return requested_; }
  /// The limit.
  std::size_t limit() const noexcept { return limit_; }
  /// Bytes handed out when it failed.
  std::size_t in_use() const noexcept { return in_use_; }
  /// Largest free block when it failed.
  std::size_t largest_free() const noexcept { return largest_free_; }

 private:
  static std::string figures(std::size_t limit, std::size_t in_use, std::size_t largest_free) {
    std::string all;
    const auto add = [&all](const char* name, std::size_t bytes) {
      if (bytes != unknown) all += (all.empty() ? " (" : ", ") + std::string(name) + std::to_string(bytes);
    };
    add("limit ", limit);
    add("in use ", in_use);
    add("largest free block ", largest_free);
    return all.empty() ? all : all + ")";
  }

  std::size_t requested_, limit_, in_use_, largest_free_;
};

}  // namespace v0
}  // namespace heddle
