// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace heddle {
inline namespace v0 {

/// @brief How a multi_queue_reader reads.
struct reader_options {
  std::size_t readers = 2;        ///< Threads that read and parse, at least 1.
  std::size_t queues = 1;         ///< Queues to pop from, at least 1: one per consumer.
  std::size_t capacity = 4;       ///< Batches in a queue before readers wait, at least 1.
  std::size_t batch = 1024;       ///< Records in a batch, at least 1; fewer only where an epoch, or a piece, ends.
  std::uint64_t epochs = 1;       ///< How often everything is read; 0 is legal.
  std::uint64_t first_epoch = 0;  ///< Number of the first epoch: what follows of an earlier run. Below 2^32.
  std::size_t shuffle = 0;        ///< Records of the window in which order is random, 0 for the files' order.
  std::uint64_t seed = 0;         ///< Of the random order.
  bool deterministic = false;     ///< Whether batches depend on nothing but files and options.
  std::size_t rank = 0;           ///< Which part of the pieces this reader takes; with `shuffle` another each epoch.
  std::size_t ranks = 1;          ///< Into how many parts they are divided.
  std::uint64_t skip = 0;         ///< Malformed records of an epoch that are left out before one is an error.
  bool hash = true;               ///< Whether to sum up hashes of records.
  std::size_t block = 1 << 18;    ///< Bytes asked from the system at once, at least 1.
  std::uint64_t piece = 0;        ///< Bytes of a piece; 0: about 16 a rank, from 64 KiB to 4 MiB.
  std::size_t longest = 1 << 28;  ///< Bytes of the longest record that is legal.

  /// Throws argument_error for a number outside its range.
  void check() const {
    const auto at_least_1 = [](const char* name, std::size_t value) {
      if (value == 0) {
        throw argument_error(std::string("heddle::reader_options: ") + name + " is 0, allowed is 1 or more");
      }
    };
    at_least_1("readers", readers);
    at_least_1("queues", queues);
    at_least_1("capacity", capacity);
    at_least_1("batch", batch);
    at_least_1("block", block);
    at_least_1("longest", longest);
    if (rank >= ranks) {
      throw argument_error("heddle::reader_options: rank is " + std::to_string(rank) +
                           ", allowed is 0 to ranks - 1, with " + std::to_string(ranks) + " ranks");
    }
    const auto below_2_32 = [](const char* name, std::uint64_t value) {
      if (value >> 32) {
        throw argument_error(std::string("heddle::reader_options: ") + name + " is " + std::to_string(value) +
                             ", allowed is less than 2^32");
      }
    };
    below_2_32("shuffle", shuffle);
    below_2_32("first_epoch", first_epoch);
  }
};

/// @brief What was read in one epoch.
struct epoch_report {
  std::uint64_t records = 0;    ///< Records parsed.
  std::uint64_t hash = 0;       ///< Sum of their `record_hash`, modulo 2^64: over all ranks the same in every epoch.
  std::uint64_t bytes = 0;      ///< Bytes of the pieces; at the end those of all files of this rank.
  std::uint64_t blank = 0;      ///< Empty places that are no records.
  std::uint64_t malformed = 0;  ///< Records left out.
  std::uint64_t delivered = 0;  ///< Records popped; at the end equal to `records`.
  bool complete = false;        ///< Whether all was read.

  /// Adds what another part has read.
  epoch_report& operator+=(const epoch_report& other) noexcept {
    records += other.records;
    hash += other.hash;
    bytes += other.bytes;
    blank += other.blank;
    malformed += other.malformed;
    delivered += other.delivered;
    return *this;
  }
};

/// @brief What a multi_queue_reader has done.
struct reader_report {
  std::vector<epoch_report> epochs;  ///< Those that were begun.
  std::uint64_t pieces = 0;          ///< Pieces of this rank.
  std::uint64_t files = 0;           ///< Hash of the files' sizes in order: compare it between ranks.
  std::uint64_t full_waits = 0;      ///< How often a reader waited for room: consumers are slower.
  std::uint64_t empty_waits = 0;     ///< How often a consumer waited for a batch: readers are slower.
  std::size_t most_queued = 0;       ///< Most batches that were in one queue.
  std::string first_malformed;       ///< What is wrong with the first record left out.
};

}  // namespace v0
}  // namespace heddle
