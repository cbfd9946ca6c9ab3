// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/mode/detail/row_map.hpp>
#include <heddle/table/detail/table_wire.hpp>

namespace heddle {
inline namespace v0 {
namespace detail {

// What workers and servers of rows say to each other. A request's id is its number among those of its worker to this
// server, from 1 on. A gradient may come in parts before the push that ends it; pushes and joins have a reply, which
// repeats the id, and the next one comes when it has come. Behind the head come the numbers of rows, counted from the
// server's first one, filled up to 8 bytes; then their floats. Where all rows come there are no numbers.
// Since messages mostly come in order, who sends a request that comes before others are there is told which are
// `missing`: so many as the reply's rows, from its clock on; once, when the gap shows. A probe asks whether a request
// has come, and for what is missing up to it; its body is its number among the probes of its worker to this server,
// from 1 on, and the reply's staleness repeats it. If the request has come and the reply is sent, `answered` says so:
// who doesn't have the reply by then has lost it, and asks for it `again`. A worker repeats a request only for a gap
// that shows the first time, or for a probe that it has sent after its last repetition; likewise with `again`. So
// nothing travels twice only because a link is slow, or because a server lets a worker wait for others. Thanks say that
// a join's reply has come.
enum class row_tag : std::uint32_t { push = 1, join = 2, probe = 3, reply = 4, thanks = 5, again = 6, part = 7 };
enum class row_status : std::uint32_t { done = 1, missing = 2, failed = 3, answered = 4 };

inline constexpr std::uint32_t all_rows = 0xffffffff;

struct row_request {
  std::uint64_t seen = 0;  // the server's clock in the last reply: rows that changed later are wanted
  double samples = 0.0;    // weight of a gradient; 0: it doesn't count
  float lr = 0.0f;         // of a gradient
  std::uint8_t bad = 0;    // the gradient isn't finite, here or in another server's rows
  std::uint8_t half = 0;   // floats of both directions travel as float16
  std::uint8_t whole = 0;  // all rows that have ever changed are wanted: the former replies were rounded
  std::uint8_t unused = 0;
  std::uint32_t rows = 0;  // that follow, or all_rows
  float factor = 1.0f;     // of a gradient, its parts too
  float limit = 0.0f;      // then on each of its elements; 0: none
  std::uint32_t unused_too = 0;
};
static_assert(sizeof(row_request) == 40);

struct row_reply {
  std::uint64_t clock = 0;      // updates so far
  std::uint64_t staleness = 0;  // updates between the reply that the gradient is of and its coming; a failure's rank
  row_status status = row_status::done;
  std::uint32_t skipped = 0;  // the update that the gradient was part of was left out
  std::uint32_t rows = 0;     // as in requests
  std::uint32_t half = 0;     // likewise
};
static_assert(sizeof(row_reply) == 32);

// Collects a message of rows.
class row_writer {
 public:
  explicit row_writer(bool half) : half_(half) {}

  void add(std::uint32_t number, const float* x, std::size_t n) {
    numbers_.push_back(number);
    values_.insert(values_.end(), x, x + n);
  }

  // The message, of a server that has so many rows: sets head.rows.
  template <class Head> std::vector<std::byte> message(Head head, std::size_t server_rows) const {
    const bool all = numbers_.size() == server_rows;
    head.rows = all ? all_rows : static_cast<std::uint32_t>(numbers_.size());
    byte_writer out;
    out.put(head);
    if (!all) {
      out.put(numbers_.data(), 4 * numbers_.size());
      if (numbers_.size() % 2) out.put(std::uint32_t{0});
    }
    put_floats<float16>(out, values_.data(), values_.size(), half_);
    return out.release();
  }

 private:
  bool half_;
  std::vector<std::uint32_t> numbers_;
  std::vector<float> values_;
};

template <class Head> Head row_head(const payload& body) {
  return byte_reader(body.data(), body.size(), "a message of rows").get<Head>();
}

// Goes through the rows of a message that has come, which it borrows. Throws file_error if it isn't well formed.
class row_reader {
 public:
  template <class Head>
  row_reader(const payload& body, const Head& head, const row_map& map, int server)
      : map_(&map),
        first_(map.first(server)),
        rows_(map.first(server + 1) - first_),
        all_(head.rows == all_rows),
        half_(head.half != 0),
        left_(all_ ? rows_ : head.rows),
        in_(body.data(), body.size(), "a message of rows") {
    in_.take(sizeof head);
    numbers_ = in_.take(all_ ? 0 : (left_ + 1) / 2 * 8);
    prepare();
  }

  bool done() const noexcept { return left_ == 0; }
  const row_map::row& row() const noexcept { return now_; }
  // The floats of the row, valid until the next one.
  const float* values() const noexcept { return floats_.data(); }
  void next() {
    ++index_;
    --left_;
    prepare();
  }

 private:
  void prepare() {
    if (done()) {
      if (in_.left() != 0) in_.refuse("it is longer than it says");
      return;
    }
    std::uint32_t number = static_cast<std::uint32_t>(index_);
    if (!all_) std::memcpy(&number, numbers_ + 4 * index_, sizeof number);
    if (number >= rows_ || (index_ > 0 && number <= now_.number - first_)) in_.refuse("its rows are out of order");
    now_ = (*map_)[first_ + number];
    floats_.resize(now_.count);
    take_floats<float16>(in_, floats_.data(), now_.count, half_);
  }

  const row_map* map_;
  std::size_t first_, rows_;
  bool all_, half_;
  std::size_t left_, index_ = 0;
  byte_reader in_;
  const std::byte* numbers_;
  row_map::row now_;
  std::vector<float> floats_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle
