// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/concept.hpp>

#include <unistd.h>

#include <exception>
#include <type_traits>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// Tells a record to all ranks and gives theirs, in rank order. Collective.
template <class Record, communicator Comm> std::vector<Record> tell_ranks(Comm& comm, const Record& mine) {
  static_assert(std::is_trivially_copyable_v<Record>);
  std::vector<Record> all(static_cast<std::size_t>(comm.size()), mine);
  std::vector<outgoing> out;
  std::vector<incoming> in;
  for (int r = 0; r < comm.size(); ++r) {
    if (r == comm.rank()) continue;
    out.push_back({r, &mine, sizeof mine, 1});
    in.push_back({r, &all[static_cast<std::size_t>(r)], sizeof mine});
  }
  const header h = begin_call(comm, {operation_kind::control, dtype::other, 0, 0, 0, 1, sizeof mine});
  comm.exchange(h, out, in, [](std::span<const arrival>) {});
  return all;
}

// Throws comm_error unless all ranks tell the same.
template <communicator Comm> void require_same(Comm& comm, const char* who, std::uint64_t mine, const char* what) {
  const std::vector<std::uint64_t> all = tell_ranks(comm, mine);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r] != mine) throw comm_error(who, comm.rank(), static_cast<int>(r), what);
  }
}

// Runs f on all ranks. Where one throws, it tells the others, and they throw comm_error instead of waiting for it.
template <communicator Comm, class Function> void run_everywhere(Comm& comm, const char* who, Function&& f) {
  std::exception_ptr failure;
  try {
    f();
  } catch (...) {
    failure = std::current_exception();
  }
  std::vector<std::uint32_t> failed;
  try {
    failed = tell_ranks(comm, static_cast<std::uint32_t>(failure != nullptr));
  } catch (const comm_error&) {
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
  for (std::size_t r = 0; r < failed.size(); ++r) {
    if (failed[r]) throw comm_error(who, comm.rank(), static_cast<int>(r), "it failed to open; nothing is open here");
  }
}

// A number of this process, other than that of any other process on any machine, as far as host names differ.
inline std::uint64_t process_number() noexcept {
  char host[256] = {};
  (void)::gethostname(host, sizeof host - 1);
  std::uint64_t h = static_cast<std::uint64_t>(::getpid());
  for (const char c : host) h = h * 0x100000001b3u ^ static_cast<unsigned char>(c);
  return h;
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle
