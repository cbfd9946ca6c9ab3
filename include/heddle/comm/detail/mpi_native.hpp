// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <heddle/comm/detail/mpi_rounds.hpp>
#include <heddle/core/convert.hpp>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace mpi {
namespace detail {

// MPI's own type; null where it has none.
inline MPI_Datatype type_of(dtype t) noexcept {
  switch (t) {
    case dtype::f32: return MPI_FLOAT;
    case dtype::f64: return MPI_DOUBLE;
    case dtype::i32: return MPI_INT32_T;
    case dtype::i64: return MPI_INT64_T;
    case dtype::u8: return MPI_UINT8_T;
    default: return MPI_DATATYPE_NULL;
  }
}

// A sum or a mean in the type's own accumulator.
inline bool adds(const leaf& l) noexcept {
  return l.id == heddle::detail::reduction_id<sum> || l.id == heddle::detail::reduction_id<mean>;
}

// MPI's own operation that gives what the leaf gives, up to rounding; null where there is none: MPI's minimum and
// maximum of floating-point numbers may lose a NaN. A mean is a sum here.
inline MPI_Op operation_of(const leaf& l) noexcept {
  if (type_of(l.type) == MPI_DATATYPE_NULL) return MPI_OP_NULL;
  const bool floating = l.type == dtype::f32 || l.type == dtype::f64;
  if (adds(l)) return MPI_SUM;
  if (l.id == heddle::detail::reduction_id<heddle::min> && !floating) return MPI_MIN;
  if (l.id == heddle::detail::reduction_id<heddle::max> && !floating) return MPI_MAX;
  return MPI_OP_NULL;
}

// How many elements go into MPI call number `call`, 0 when all are done: no call has more than `piece` bytes, where one
// element does not, and no count exceeds int.
constexpr std::size_t elements_of_call(std::size_t count, std::size_t bytes, std::size_t piece, std::size_t call) {
  const std::size_t most = (std::max<std::size_t>)(1, (std::min<std::size_t>)(piece, INT_MAX) / bytes);
  const std::size_t calls = count / most + (count % most != 0);
  return call >= calls ? 0 : call + 1 < calls ? most : count - (calls - 1) * most;
}

// A leaf as an operation of MPI. MPI hands its function nothing but the type, so the type's name says where the leaf
// is; the type is a block of bytes.
class own_operation {
 public:
  own_operation(const own_operation&) = delete;
  own_operation& operator=(const own_operation&) = delete;
  explicit own_operation(const leaf& l) : leaf_(l) {
    MPI_Type_contiguous(static_cast<int>(l.bytes), MPI_BYTE, &type_);
    MPI_Type_commit(&type_);
    char name[32] = {};
    std::to_chars(name, name + sizeof name - 1, reinterpret_cast<std::uintptr_t>(this), 16);
    MPI_Type_set_name(type_, name);
    MPI_Op_create(&reduce, 1, &op_);
  }
  ~own_operation() {
    MPI_Op_free(&op_);
    MPI_Type_free(&type_);
  }
  MPI_Datatype type() const noexcept { return type_; }
  MPI_Op op() const noexcept { return op_; }
  bool left_range() const noexcept { return left_range_; }

 private:
  static void reduce(void* in, void* inout, int* count, MPI_Datatype* type) {
    char name[MPI_MAX_OBJECT_NAME] = {};
    int length = 0;
    MPI_Type_get_name(*type, name, &length);
    std::uintptr_t self = 0;
    std::from_chars(name, name + length, self, 16);
    own_operation& o = *reinterpret_cast<own_operation*>(self);
    const operand both[2] = {{in, 0}, {inout, 0}};  // of the lower rank, of the higher one
    const leaf& l = o.leaf_;
    o.left_range_ |= l.reduce(l.context, both, 2, inout, static_cast<std::size_t>(*count), 0, 1.0);
  }

  leaf leaf_;
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
  MPI_Op op_ = MPI_OP_NULL;
  bool left_range_ = false;
};

// Counts as MPI takes them, if all together are no more than `most`; else none.
inline std::vector<int> as_ints(std::span<const std::size_t> counts, std::size_t most) {
  std::vector<int> ints;
  std::size_t left = (std::min<std::size_t>)(most, INT_MAX);
  for (const std::size_t c : counts) {
    if (c > left) return {};
    left -= c;
    ints.push_back(static_cast<int>(c));
  }
  return ints;
}

// MPI's own collectives on a communicator of theirs, since those of one MPI communicator must come in one order on all
// ranks, and duplicates are used by several threads.
class natives : public rounds {
 public:
  // See has_native_all_reduce.
  bool reduce(const header& h, const void* in, void* out, std::size_t count, const leaf& l) {
    agree(h, l.bytes);
    own();
    const double factor = l.average ? 1.0 / size() : 1.0;
    const bool sums = adds(l);
    if (sums && l.type == dtype::f16) return reduce_wide<float16>(h, in, out, count, factor);
    if (sums && l.type == dtype::bf16) return reduce_wide<bfloat16>(h, in, out, count, factor);
    if (const MPI_Op op = operation_of(l); op != MPI_OP_NULL) {
      reduce_as(h, in, out, count, l.bytes, session_->piece(), type_of(l.type), op);
      const operand all{out, 0};
      return l.average && l.reduce(l.context, &all, 1, out, count, 0, factor);
    }
    const own_operation own(l);
    reduce_as(h, in, out, count, l.bytes, session_->piece(), own.type(), own.op());
    const operand all{out, 0};
    return (l.average && l.reduce(l.context, &all, 1, out, count, 0, factor)) || own.left_range();
  }

  // See has_native_halves.
  bool scatter(const header& h, void* data, std::span<const std::size_t> counts, leaf l) {
    l.average = false;
    const std::vector<int> ints = as_ints(counts, session_->piece() / l.bytes);
    if (ints.empty()) {
      std::size_t n = 0;
      for (const std::size_t c : counts) n += c;
      return reduce(h, data, data, n, l);
    }
    agree(h, l.bytes);
    const auto run_as = [&](MPI_Datatype type, MPI_Op op) {
      const MPI_Comm comm = own();
      complete(h, true, "MPI_Ireduce_scatter", [&](MPI_Request* r) {
        return MPI_Ireduce_scatter(MPI_IN_PLACE, data, ints.data(), type, op, comm, r);
      });
      // MPI leaves the block at the front.
      const auto mine = static_cast<std::size_t>(rank());
      std::size_t before = 0;
      for (std::size_t r = 0; r < mine; ++r) before += counts[r];
      std::memmove(static_cast<std::byte*>(data) + before * l.bytes, data, counts[mine] * l.bytes);
    };
    if (const MPI_Op op = operation_of(l); op != MPI_OP_NULL) return run_as(type_of(l.type), op), false;
    const own_operation own(l);
    run_as(own.type(), own.op());
    return own.left_range();
  }
  void gather(const header& h, void* data, std::span<const std::size_t> counts, std::size_t bytes) {
    agree(h, bytes);
    const MPI_Comm comm = own();
    MPI_Datatype element = MPI_DATATYPE_NULL;
    MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &element);
    MPI_Type_commit(&element);
    const auto freed = std::shared_ptr<void>(nullptr, [&](void*) { MPI_Type_free(&element); });
    const std::vector<int> ints = as_ints(counts, session_->piece() / bytes);
    if (!ints.empty()) {
      std::vector<int> places(ints.size());
      for (std::size_t r = 1; r < ints.size(); ++r) places[r] = places[r - 1] + ints[r - 1];
      complete(h, true, "MPI_Iallgatherv", [&](MPI_Request* r) {
        return MPI_Iallgatherv(MPI_IN_PLACE, 0, element, data, ints.data(), places.data(), element, comm, r);
      });
      return;
    }
    std::byte* to = static_cast<std::byte*>(data);
    for (std::size_t root = 0; root < counts.size(); ++root) {
      for (std::size_t call = 0; const std::size_t n = elements_of_call(counts[root], bytes, session_->piece(), call);
           ++call) {
        complete(h, true, "MPI_Ibcast", [&](MPI_Request* r) {
          return MPI_Ibcast(to, static_cast<int>(n), element, static_cast<int>(root), comm, r);
        });
        to += n * bytes;
      }
    }
  }

 protected:
  using rounds::rounds;

  // The MPI communicator for a duplicate. All ranks call it in the order in which they use this communicator.
  MPI_Comm another(int number) {
    return another(number, own());
  }

  // The session of a part of the ranks.
  std::shared_ptr<session> part(int color, int key) {
    agree({.kind = operation_kind::control, .count = 2}, 0);
    const MPI_Comm parent = own();
    auto held = session_->enter();
    MPI_Comm made = MPI_COMM_NULL;
    session_->check(MPI_Comm_split(parent, color, key, &made), "MPI_Comm_split");
    auto s = std::make_shared<session>(made, session_->settings(), false);
    MPI_Comm_free(&made);
    return s;
  }

 private:
  MPI_Comm own() {
    if (channel_->own == MPI_COMM_NULL) channel_->own = another(channel_->number, session_->comm());
    return channel_->own;
  }

  // After it all ranks are known to be in this call, with elements of as many bytes; MPI's collectives could not tell
  // who isn't.
  void agree(header h, std::size_t element) {
    const std::uint64_t mine = element;
    std::uint64_t theirs = 0;
    for (int reach = 1; reach < size(); reach *= 2) {
      const outgoing out{(rank() + reach) % size(), &mine, sizeof mine, 1};
      const incoming in{(rank() - reach + size()) % size(), &theirs, sizeof theirs};
      run(h, std::span(&out, 1), std::span(&in, 1), [&](std::span<const arrival>) {
        if (theirs != mine) mismatch(h, element, in.peer, {h, theirs}, true);
      });
      ++h.round;
    }
  }

  MPI_Comm another(int number, MPI_Comm parent) {
    MPI_Comm made = MPI_COMM_NULL;
    const header h{.kind = operation_kind::control};
    complete(h, false, "MPI_Comm_idup", [&](MPI_Request* r) { return MPI_Comm_idup(parent, &made, r); });
    MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
    session_->keep(number, made);
    return made;
  }

  void reduce_as(const header& h, const void* in, void* out, std::size_t count, std::size_t bytes, std::size_t piece,
                 MPI_Datatype type, MPI_Op op) {
    const std::byte* from = static_cast<const std::byte*>(in);
    std::byte* to = static_cast<std::byte*>(out);
    for (std::size_t call = 0; const std::size_t n = elements_of_call(count, bytes, piece, call); ++call) {
      complete(h, true, "MPI_Iallreduce", [&](MPI_Request* r) {
        return MPI_Iallreduce(from == to ? MPI_IN_PLACE : from, to, static_cast<int>(n), type, op, channel_->own, r);
      });
      from += n * bytes;
      to += n * bytes;
    }
  }

  // Sums of 16-bit types, widened to float: MPI has no such types, and partial sums would leave float16's range.
  template <class Half>
  bool reduce_wide(const header& h, const void* in, void* out, std::size_t count, double factor) {
    constexpr std::size_t most = std::size_t{1} << 20;
    std::vector<float> wide((std::min)(most, count));
    bool left_range = false;
    for (std::size_t i = 0; i < count; i += most) {
      const std::size_t n = (std::min)(most, count - i);
      convert(static_cast<const Half*>(in) + i, wide.data(), n);
      reduce_as(h, wide.data(), wide.data(), n, sizeof(float), session_->piece(), MPI_FLOAT, MPI_SUM);
      if (factor != 1.0) {
        for (std::size_t k = 0; k < n; ++k) wide[k] = static_cast<float>(wide[k] * factor);
      }
      Half* const to = static_cast<Half*>(out) + i;
      if (!convert_checked(wide.data(), to, n)) continue;
      for (std::size_t k = 0; k < n; ++k) left_range |= std::isfinite(wide[k]) && !std::isfinite(float(to[k]));
    }
    return left_range;
  }

  // Begins a non-blocking collective and polls until it has completed. If it holds memory of the caller, it can't be
  // left: after the deadline the job ends.
  template <class Begin> void complete(const header& h, bool holds_memory, const char* call, Begin&& begin) {
    MPI_Request request = MPI_REQUEST_NULL;
    const auto start = session_->now();
    rest pause = session_->resting();
    {
      auto held = session_->enter();
      session_->check(begin(&request), call, heddle::name_of(h.kind));
    }
    for (int done = 0;;) {
      {
        auto held = session_->enter();
        session_->check(session_->test(&request, &done), call, heddle::name_of(h.kind));
      }
      if (done) return;
      const auto now = session_->now();
      if (!holds_memory && session_->look(now)) throw_failure(h);
      if (now - start > session_->deadline()) {
        session_->fail(rank(), std::string(call) + " in " + describe(h, 0) + " of rank " + std::to_string(rank()) +
                                   " did not end within the deadline");
        if (holds_memory) session_->end_job();
        throw_failure(h);
      }
      pause(now - start);
    }
  }
};

}  // namespace detail
}  // namespace mpi
}  // namespace v0
}  // namespace heddle
