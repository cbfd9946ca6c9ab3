// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
//
// A replica of the vectors for each rank, whose moves are added up on parameter servers, a part of them on each rank.

#pragma once

#include <heddle/comm/threads.hpp>
#include <heddle/comm/threads_messenger.hpp>
#include <heddle/mode/geo_replica.hpp>
#ifdef WORD2VEC_MPI
#include <heddle/collective/all_reduce.hpp>
#include <heddle/collective/mixed_radix.hpp>
#include <heddle/comm/mpi.hpp>
#include <heddle/comm/mpi_messenger.hpp>
#endif

#include "training.hpp"

namespace word2vec {

/// @name Modes of replicas: how often they push, which vectors, and what they wait for
/// @{
/// Every `period` batches, vectors that were changed `least` times; never waits.
inline hd::geo_options geo_sgd(const options& o) {
  return {.period = o.period, .part = o.part, .common = o.common, .least = o.least};
}
/// Every batch, all vectors that were changed; waits for the answer.
inline hd::geo_options async_ps(const options& o) {
  return {.period = 1, .part = o.part, .common = o.common, .wait = hd::geo_wait::at_once};
}
/// The same, and servers answer when everybody has pushed; as float16, while the next batch is computed.
inline hd::geo_options synchronous(const options& o) {
  return {.period = 1,
          .part = o.part,
          .common = o.common,
          .wait = hd::geo_wait::before_next,
          .synchronous = true,
          .half = true};
}
/// @}

/// Tells a replica which rows have changed, by the terms of how many rows.
template <class Replica> struct watched {
  Replica* replica;
  void input(std::uint32_t word, std::size_t terms) const { replica->touch(0, word, terms); }
  void output(std::uint32_t word) const { replica->touch(1, word); }
};

/// One rank's part: trains `m`, its replica, on a queue of the text, a batch of 10,000 words at a time. done(words) counts
/// them and gives the rate to go on with.
template <class Format, class Comm, class Connection, class Reader, class Done>
hd::geo_report train_rank(const options& o, const vocabulary& v, const constants& c, model& m, Comm& comm,
                          const hd::geo_options& mode, const Connection& connection, Reader& reader, std::size_t queue,
                          Done done) {
  using messenger = typename decltype(connection.open(comm))::element_type;
  std::vector<hd::geo_rows> rows;
  for (const std::span<float> all : {m.inputs(), m.outputs()})
    rows.push_back({all.data(), all.size(), m.stride(), true});
  hd::geo_replica<messenger> replica(connection, comm, rows, mode);
  worker<hd::vector_asm, watched<hd::geo_replica<messenger>>> w(o, v, c, m, static_cast<std::size_t>(comm.rank()),
                                                                {&replica});
  train_queue<Format>(reader, queue, o, w, [&](std::uint64_t words) {
    if (words > 0) replica.batch();
    return done(words);
  });
  replica.join();
  return replica.report();
}

/// Trains by ranks that are threads; `m` is the first one's replica, and the result. Calls progress as train_shared
/// does. sent is given what the ranks have sent, in bytes.
template <class Format, class Connection, class Progress>
outcome train_replicas(const options& o, const vocabulary& v, model& m, const hd::geo_options& mode,
                       const Connection& connection, Progress progress, std::uint64_t* sent = nullptr) {
  const constants c(o, v);
  const auto reader = open_text<Format>(o);
  pace<Progress> done(o, v, progress);
  double seconds = 0.0;
  std::atomic<std::uint64_t> bytes{0};
  hd::threads::run({.ranks = static_cast<int>(o.threads), .deadline = std::chrono::minutes(10)}, [&](auto& comm) {
    try {
      const auto rank = static_cast<std::size_t>(comm.rank());
      std::unique_ptr<model> own;
      if (rank > 0) own = std::make_unique<model>(v.size(), o.size, o.seed);
      bytes +=
          train_rank<Format>(o, v, c, own ? *own : m, comm, mode, connection, *reader, rank, [&](std::uint64_t words) {
            return done(rank, words);
          }).bytes_sent;
      if (rank == 0) seconds = done.seconds();
    } catch (...) {
      reader->stop();
      throw;
    }
  });
  if (sent) *sent = bytes;
  return {done.words(), seconds, reader->report()};
}

#ifdef WORD2VEC_MPI
/// Trains by the processes of an MPI job, each with its part of the text; all end with the same vectors.
template <class Format, class Progress>
outcome train_processes(const options& o, const vocabulary& v, model& m, const hd::geo_options& mode,
                        Progress progress) {
  auto comm = hd::mpi::world({.level = hd::mpi::thread_level::multiple});
  const constants c(o, v);
  options here = o;
  here.threads = 1;
  const auto size = static_cast<std::size_t>(comm.size());
  const auto reader = open_text<Format>(here, static_cast<std::size_t>(comm.rank()), size);
  pace<Progress> done(here, v, progress, size);
  train_rank<Format>(here, v, c, m, comm, mode, hd::mpi::connection{}, *reader, 0,
                     [&](std::uint64_t words) { return done(0, words); });
  const double seconds = done.seconds();
  hd::reader_report read = reader->report();
  // A process reads other lines in each epoch: only what all have read is the same.
  std::vector<std::int64_t> sums{static_cast<std::int64_t>(done.words())};
  for (const hd::epoch_report& e : read.epochs) sums.push_back(static_cast<std::int64_t>(e.hash));
  hd::all_reduce(comm, hd::direct{}, std::span(sums));
  for (std::size_t e = 0; e < read.epochs.size(); ++e) read.epochs[e].hash = static_cast<std::uint64_t>(sums[e + 1]);
  return {static_cast<std::uint64_t>(sums[0]), seconds, read};
}
#endif

}  // namespace word2vec
