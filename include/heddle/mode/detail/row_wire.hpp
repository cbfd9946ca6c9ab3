// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/comm/messenger.hpp>
#include <heddle/core/convert.hpp>
#include <heddle/mode/detail/row_map.hpp>
#include <heddle/table/detail/table_wire.hpp>

#include <cmath>
#include <limits>

namespace heddle {
inline namespace v0 {
namespace detail {

// What workers and servers of rows say to each other. A request's id is its number among those of its worker to this
// server, from 1 on; there is one at a time, and the reply repeats the id. Behind the head come the numbers of rows,
// counted from the server's first one, filled up to 8 bytes; then their floats. Where all rows come there are no
// numbers. A probe asks whether a request has come. If it has and the reply is sent, `answered` says so: since messages
// mostly come in order, who doesn't have the reply by then has lost it, and asks for it `again`. So no reply travels
// twice only because a link is slow. Thanks say that a join's reply has come.
enum class row_tag : std::uint32_t { push = 1, join = 2, probe = 3, reply = 4, thanks = 5, again = 6 };
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
  std::uint32_t unused_too = 0;
};
static_assert(sizeof(row_request) == 32);

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

  void reserve(std::size_t rows, std::size_t elements) {
    numbers_.reserve(rows);
    values_.reserve(elements);
  }
  void add(std::uint32_t number, const float* x, std::size_t n) {
    numbers_.push_back(number);
    values_.insert(values_.end(), x, x + n);
  }

  // The message, of a server that has so many rows: sets head.rows.
  template <class Head> std::vector<std::byte> message(Head head, std::size_t server_rows) const {
    const bool all = numbers_.size() == server_rows;
    head.rows = all ? all_rows : static_cast<std::uint32_t>(numbers_.size());
    const std::size_t index = all ? 0 : (numbers_.size() + 1) / 2 * 8, width = half_ ? 2 : 4;
    std::vector<std::byte> out(sizeof head + index + values_.size() * width);
    std::memcpy(out.data(), &head, sizeof head);
    if (!all && !numbers_.empty()) std::memcpy(out.data() + sizeof head, numbers_.data(), 4 * numbers_.size());
    std::byte* const to = out.data() + sizeof head + index;
    if (half_ && !values_.empty()) {
      std::vector<float> clamped(values_);
      for (float& x : clamped)
        if (std::isfinite(x)) x = std::clamp(x, -most_half, most_half);
      std::vector<float16> narrow(clamped.size());
      convert(clamped.data(), narrow.data(), clamped.size());
      std::memcpy(to, static_cast<const void*>(narrow.data()), 2 * narrow.size());
    } else if (!values_.empty()) {
      std::memcpy(to, values_.data(), 4 * values_.size());
    }
    return out;
  }

 private:
  bool half_;
  std::vector<std::uint32_t> numbers_;
  std::vector<float> values_;
};

// Goes through the rows of a message that has come, which it borrows. Throws argument_error if it isn't well formed.
class row_reader {
 public:
  template <class Head>
  row_reader(const payload& body, const Head& head, const row_map& map, int server)
      : map_(&map),
        first_(map.first(server)),
        rows_(map.first(server + 1) - first_),
        all_(head.rows == all_rows),
        half_(head.half != 0),
        left_(all_ ? rows_ : head.rows) {
    const std::size_t index = all_ ? 0 : (left_ + 1) / 2 * 8;
    if (body.size() < sizeof head + index) refuse();
    numbers_ = body.data() + sizeof head;
    values_ = numbers_ + index;
    end_ = body.data() + body.size();
    prepare();
  }

  bool done() const noexcept { return left_ == 0; }
  const row_map::row& row() const noexcept { return now_; }
  // The floats of the row, valid until the next one.
  const float* values() const noexcept { return floats_.data(); }
  void next() {
    values_ += now_.count * (half_ ? 2 : 4);
    numbers_ += 4;
    ++index_;
    --left_;
    prepare();
  }

 private:
  [[noreturn]] static void refuse() { throw argument_error("heddle: a message of a parameter server is damaged"); }
  void prepare() {
    if (done()) {
      if (values_ != end_) refuse();
      return;
    }
    std::uint32_t number = static_cast<std::uint32_t>(index_);
    if (!all_) std::memcpy(&number, numbers_, sizeof number);
    if (number >= rows_ || (index_ > 0 && number <= last_)) refuse();
    last_ = number;
    now_ = (*map_)[first_ + number];
    if (static_cast<std::size_t>(end_ - values_) < now_.count * (half_ ? 2 : 4)) refuse();
    floats_.resize(now_.count);
    if (half_) {
      narrow_.resize(now_.count);
      std::memcpy(static_cast<void*>(narrow_.data()), values_, 2 * now_.count);
      convert(narrow_.data(), floats_.data(), now_.count);
    } else {
      std::memcpy(floats_.data(), values_, 4 * now_.count);
    }
  }

  const row_map* map_;
  std::size_t first_, rows_;
  bool all_, half_;
  std::size_t left_, index_ = 0;
  std::uint32_t last_ = 0;
  row_map::row now_;
  const std::byte *numbers_ = nullptr, *values_ = nullptr, *end_ = nullptr;
  std::vector<float> floats_;
  std::vector<float16> narrow_;
};

template <class Head> Head row_head(const payload& body) {
  Head h;
  if (body.size() < sizeof h) throw argument_error("heddle: a message of a parameter server is too short");
  std::memcpy(&h, body.data(), sizeof h);
  return h;
}

}  // namespace detail
}  // namespace v0
}  // namespace heddle
