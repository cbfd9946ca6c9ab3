// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/archive.hpp>
#include <heddle/table/detail/bytes.hpp>
#include <heddle/table/detail/mix.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

// What a file of a table holds. whole: all rows, as a delta that needs none of those before it.
enum class file_kind : std::uint32_t { full = 1, delta = 2, serving = 3, whole = 4 };

// The first bytes of a file: what the rows are, so that a wrong table can't load them.
struct table_header {
  char magic[8] = {'H', 'D', 'L', 'T', 'A', 'B', 'L', 'E'};
  std::uint32_t version = 1;  // 2: the kind is whole, or what changes have done may follow the rows; 1 knows neither
  std::uint32_t byte_order = 0x01020304;
  file_kind kind = file_kind::full;
  std::uint32_t key_bytes = 0, dim = 0, slots = 0, words = 0, shard_bits = 0, table = 0;
  std::uint32_t now = 0;  // the table's tick
  std::uint64_t seed = 0;
  std::uint64_t base = 0, number = 0;  // of a delta: the full file that it belongs to, and its place after it
  char weight[8] = {}, rule[48] = {}, initial[16] = {}, admission[24] = {}, eviction[16] = {};
  std::uint64_t sum = 0;

  std::uint64_t expected_sum() const noexcept { return checksum(this, offsetof(table_header, sum)); }
  template <std::size_t Size> static void name(char (&to)[Size], const std::string& from) {
    std::memcpy(to, from.data(), (std::min)(from.size(), Size - 1));
  }
  template <std::size_t Size> static std::string text(const char (&from)[Size]) {
    return std::string(from, strnlen(from, Size));
  }
};

struct section_head {
  std::uint32_t mark = 0x54434553, shard = 0;
  std::uint64_t bytes = 0, sum = 0;
};

struct table_trailer {
  std::uint32_t mark = 0x21444e45, sections = 0;
  std::uint64_t sum = 0;  // over all that came before: names a full file to its deltas
};

// In what a file's rows differ from a table's; empty if they don't.
inline std::string difference(const table_header& file, const table_header& mine) {
  std::string out;
  const auto differ = [&](const char* what, const std::string& a, const std::string& b) {
    if (a != b) out += (out.empty() ? "" : "; ") + std::string(what) + " is " + a + ", the table's is " + b;
  };
  const auto text = [](auto x) { return std::to_string(x); };
  differ("bytes of a key", text(file.key_bytes), text(mine.key_bytes));
  differ("weights in a row", text(file.dim), text(mine.dim));
  differ("type of weights", file.text(file.weight), mine.text(mine.weight));
  differ("rule", file.text(file.rule), mine.text(mine.rule));
  differ("floats of state in a row", text(file.slots), text(mine.slots));
  differ("shard_bits", text(file.shard_bits), text(mine.shard_bits));
  if (file.kind == file_kind::serving) return out;
  differ("admission", file.text(file.admission), mine.text(mine.admission));
  differ("eviction", file.text(file.eviction), mine.text(mine.eviction));
  differ("words of statistics in a row", text(file.words), text(mine.words));
  differ("initial", file.text(file.initial), mine.text(mine.initial));
  differ("seed", text(file.seed), text(mine.seed));
  differ("number of the table", text(file.table), text(mine.table));
  return out;
}

// Writes a file beside its place, and puts it there when it is whole.
class replacing_file {
 public:
  explicit replacing_file(std::string path) : path_(std::move(path)), file_(path_ + ".tmp", "wb") {
    if (!file_) throw file_error("heddle: can't write " + path_ + ".tmp");
  }
  replacing_file(const replacing_file&) = delete;
  replacing_file& operator=(const replacing_file&) = delete;
  ~replacing_file() {
    if (!done_ && file_) std::remove((path_ + ".tmp").c_str());
  }
  void write(const void* p, std::size_t n) {
    if (n != 0 && std::fwrite(p, 1, n, file_.get()) != n) throw file_error("heddle: can't write " + path_ + ".tmp");
  }
  void finish() {
    publish(file_, path_ + ".tmp", path_);
    done_ = true;
  }

 private:
  std::string path_;
  file file_;
  bool done_ = false;
};

class table_writer {
 public:
  table_writer(const std::string& path, table_header head) : file_(path) {
    head.sum = head.expected_sum();
    trailer_.sum = head.sum;
    file_.write(&head, sizeof head);
  }
  void section(std::uint32_t shard, const void* body, std::size_t bytes) {
    const section_head head{.shard = shard, .bytes = bytes, .sum = checksum(body, bytes, shard)};
    file_.write(&head, sizeof head);
    file_.write(body, bytes);
    trailer_.sum = checksum(&head, sizeof head, trailer_.sum);
    ++trailer_.sections;
  }
  // The file's sum.
  std::uint64_t finish() {
    file_.write(&trailer_, sizeof trailer_);
    file_.finish();
    return trailer_.sum;
  }

 private:
  replacing_file file_;
  table_trailer trailer_;
};

class table_reader {
 public:
  explicit table_reader(std::string path) : path_(std::move(path)), file_(path_, "rb") {
    if (!file_) throw file_error("heddle: can't open " + path_);
    read(&head_, sizeof head_);
    const table_header mine;
    if (std::memcmp(head_.magic, mine.magic, sizeof mine.magic) != 0) refuse("it is no file of a table");
    if (head_.version < 1 || head_.version > 2 || head_.byte_order != mine.byte_order)
      refuse("its version is " + std::to_string(head_.version) +
             " or its byte order is another; allowed are 1 and 2, and this machine's");
    if (head_.sum != head_.expected_sum()) refuse("the checksum of its header is wrong");
    if (head_.kind < file_kind::full || head_.kind > file_kind::whole)
      refuse("its kind is " + std::to_string(static_cast<std::uint32_t>(head_.kind)) + ", allowed is 1 to 4");
    if (head_.shard_bits > 20) refuse("its shard_bits are " + std::to_string(head_.shard_bits));
  }
  const table_header& head() const noexcept { return head_; }
  const std::string& path() const noexcept { return path_; }
  [[noreturn]] void refuse(const std::string& why) const { throw file_error("heddle: " + path_ + ": " + why); }

  // f(shard, reader of its section) for all sections, each checked before f sees it, the file's end before it returns;
  // returns the file's sum. May be called again.
  template <class Function> std::uint64_t each_section(Function f) {
    if (std::fseek(file_.get(), sizeof head_, SEEK_SET) != 0) refuse("it can't be read");
    table_trailer mine;
    mine.sum = head_.sum;
    for (;;) {
      section_head s;
      read(&s, 8);
      if (s.mark == mine.mark) {
        std::uint64_t sum;
        read(&sum, 8);
        if (s.shard != mine.sections || sum != mine.sum) refuse("the checksum at its end is wrong");
        if (std::fgetc(file_.get()) != EOF) refuse("it holds more than was expected");
        return sum;
      }
      if (s.mark != section_head{}.mark) refuse("section " + std::to_string(mine.sections) + " is damaged");
      read(&s.bytes, 16);
      if (s.shard >> head_.shard_bits != 0) refuse("it has a shard " + std::to_string(s.shard));
      body_.clear();
      for (std::uint64_t left = s.bytes; left > 0;) {  // piece by piece, as the length may be damaged
        const auto n = static_cast<std::size_t>((std::min<std::uint64_t>)(left, std::uint64_t{1} << 20));
        body_.resize(body_.size() + n);
        read(body_.data() + body_.size() - n, n);
        left -= n;
      }
      if (checksum(body_.data(), body_.size(), s.shard) != s.sum)
        refuse("the checksum of shard " + std::to_string(s.shard) + " is wrong");
      f(s.shard, byte_reader(body_.data(), body_.size(), path_));
      mine.sum = checksum(&s, sizeof s, mine.sum);
      ++mine.sections;
    }
  }

 private:
  void read(void* p, std::size_t n) {
    if (std::fread(p, 1, n, file_.get()) != n) refuse("it is cut short");
  }
  std::string path_;
  file file_;
  table_header head_;
  std::vector<std::byte> body_;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle
