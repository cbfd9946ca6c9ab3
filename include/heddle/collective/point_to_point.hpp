// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/collective/all_reduce.hpp>

namespace heddle {
inline namespace v0 {

namespace detail {
template <class Element> header message_header(std::size_t count, std::uint8_t tag) {
  static_assert(std::is_trivially_copyable_v<Element>, "heddle: an element type must be trivially copyable");
  return {operation_kind::send, dtype_of<Element>, 0, tag, 0, 1, count};  // not a call of all ranks: no number
}

// Throws argument_error unless the bytes of a and b are apart.
inline void check_apart(const char* what, const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
  const auto x = reinterpret_cast<std::uintptr_t>(a), y = reinterpret_cast<std::uintptr_t>(b);
  if (a_bytes && b_bytes && x < y + b_bytes && y < x + a_bytes) {
    throw argument_error(std::string("heddle::") + what + ": input and output overlap");
  }
}
}  // namespace detail

/// @brief Sends elements to one rank, which must call `receive` with as many.
///
/// Returns when they have arrived there, so two ranks that send to each other want `send_receive`.
/// @param comm Communicator. @param data Elements; none travel as nothing. @param peer Another rank.
/// @param tag Both sides must give the same.
/// Throws: argument_error if `peer` isn't another rank or the buffer is null; comm_error if the peer calls something
/// else, or with another count, type or tag.
template <communicator Comm, class Element, std::size_t Extent>
void send(Comm& comm, std::span<Element, Extent> data, int peer, std::uint8_t tag = 0) {
  detail::check_buffer("send", data.data(), data.size());
  const outgoing out{peer, data.data(), data.size_bytes(), 1};
  comm.exchange(detail::message_header<std::remove_const_t<Element>>(data.size(), tag),
                std::span<const outgoing>(&out, !data.empty()), {}, [](std::span<const arrival>) {});
}

/// @brief Receives elements from one rank, which must call `send` with as many; see there.
template <communicator Comm, class Element, std::size_t Extent>
void receive(Comm& comm, std::span<Element, Extent> data, int peer, std::uint8_t tag = 0) {
  detail::check_buffer("receive", data.data(), data.size());
  const incoming in{peer, data.data(), data.size_bytes()};
  comm.exchange(detail::message_header<Element>(data.size(), tag), {}, std::span<const incoming>(&in, !data.empty()),
                [](std::span<const arrival>) {});
}

/// @brief Sends to one rank and receives as many elements from one, perhaps another, at the same time.
/// Throws: argument_error if the sizes differ or the buffers overlap; see `send`.
template <communicator Comm, class In, std::size_t InExtent, class Element, std::size_t Extent>
  requires detail::reads<In, Element>
void send_receive(Comm& comm, std::span<In, InExtent> data, int to, std::span<Element, Extent> into, int from,
                  std::uint8_t tag = 0) {
  detail::check_buffer("send_receive", data.data(), data.size());
  detail::check_buffer("send_receive", into.data(), into.size());
  if (data.size() != into.size()) {
    throw argument_error("heddle::send_receive: " + std::to_string(data.size()) + " elements out, " +
                         std::to_string(into.size()) + " in; allowed is the same number");
  }
  detail::check_apart("send_receive", data.data(), data.size_bytes(), into.data(), into.size_bytes());
  const outgoing out{to, data.data(), data.size_bytes(), 1};
  const incoming in{from, into.data(), into.size_bytes()};
  comm.exchange(detail::message_header<Element>(data.size(), tag), std::span<const outgoing>(&out, !data.empty()),
                std::span<const incoming>(&in, !data.empty()), [](std::span<const arrival>) {});
}

/// @brief Every rank sends a block to every rank, in one round: block r of `in` goes to rank r, and block r of `out`
/// comes from there.
/// @param comm Communicator. @param in Blocks, one after the other. @param in_counts Elements of each, by destination.
/// @param out Blocks, one after the other. @param out_counts Elements of each, by source: what that rank sends here.
/// Where they aren't known, `all_to_all` of the counts, one for each rank, tells them.
/// Wire:   all but the own block.
/// Throws: argument_error if counts aren't one for each rank or don't sum to the buffer, the own counts differ, or the
/// buffers overlap; comm_error if a rank sends another number of elements than expected.
template <communicator Comm, class In, std::size_t InExtent, class Element, std::size_t Extent,
          class Outgoing = outgoing, class Incoming = incoming>
  requires detail::reads<In, Element>
void all_to_all(Comm& comm, std::span<In, InExtent> in, std::span<const std::size_t> in_counts,
                std::span<Element, Extent> out, std::span<const std::size_t> out_counts) {
  static_assert(std::is_trivially_copyable_v<Element>, "heddle: an element type must be trivially copyable");
  const auto size = static_cast<std::size_t>(comm.size()), me = static_cast<std::size_t>(comm.rank());
  const auto check = [size](const void* data, std::size_t elements, std::span<const std::size_t> counts) {
    detail::check_buffer("all_to_all", data, elements);
    std::size_t left = elements;
    bool good = counts.size() == size;
    for (const std::size_t n : counts) {
      good = good && n <= left;
      if (good) left -= n;
    }
    if (!good || left != 0) {
      throw argument_error("heddle::all_to_all: " + std::to_string(counts.size()) + " counts for " +
                           std::to_string(size) + " ranks, which must sum to the " + std::to_string(elements) +
                           " elements of the buffer, do not");
    }
  };
  check(in.data(), in.size(), in_counts);
  check(out.data(), out.size(), out_counts);
  detail::check_apart("all_to_all", in.data(), in.size_bytes(), out.data(), out.size_bytes());
  if (in_counts[me] != out_counts[me]) {
    throw argument_error("heddle::all_to_all: " + std::to_string(in_counts[me]) + " elements to this rank itself, " +
                         std::to_string(out_counts[me]) + " from it");
  }
  std::vector<Outgoing> to;
  std::vector<Incoming> from;
  std::size_t a = 0, b = 0;
  for (std::size_t r = 0; r < size; a += in_counts[r], b += out_counts[r], ++r) {
    if (r == me) {
      const std::size_t bytes = in_counts[r] * sizeof(Element);
      if constexpr (stream_ordered<Comm>)
        comm.copy(out.data() + b, in.data() + a, bytes);
      else if (bytes)
        std::memcpy(out.data() + b, in.data() + a, bytes);
      continue;
    }
    if (in_counts[r]) to.push_back({static_cast<int>(r), in.data() + a, in_counts[r] * sizeof(Element), 1});
    if (out_counts[r]) from.push_back({static_cast<int>(r), out.data() + b, out_counts[r] * sizeof(Element)});
  }
  const header h = begin_call(comm, {operation_kind::all_to_all, dtype_of<Element>, 0, 0, 0, 1, 0});
  comm.exchange(h, detail::as_span(to), detail::as_span(from), [](std::span<const arrival>) {});
}

/// @brief The same with equal blocks.
/// Throws: argument_error if the sizes differ or aren't a multiple of the number of ranks; see above.
template <communicator Comm, class In, std::size_t InExtent, class Element, std::size_t Extent>
  requires detail::reads<In, Element>
void all_to_all(Comm& comm, std::span<In, InExtent> in, std::span<Element, Extent> out) {
  const auto size = static_cast<std::size_t>(comm.size());
  if (in.size() != out.size() || in.size() % size) {
    throw argument_error("heddle::all_to_all: " + std::to_string(in.size()) + " elements in, " +
                         std::to_string(out.size()) + " out; allowed is the same multiple of " + std::to_string(size));
  }
  const std::vector<std::size_t> counts(size, in.size() / size);
  all_to_all(comm, in, detail::as_span(counts), out, detail::as_span(counts));
}

}  // namespace v0
}  // namespace heddle
