// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/data/detail/files.hpp>

namespace heddle {
inline namespace v0 {
namespace detail {

/// Cuts pieces of files into records, for one reader.
template <class Format> class cutter {
 public:
  /// @param block Bytes to read at once. @param longest Bytes that a record may have.
  cutter(const Format& format, std::size_t block, std::size_t longest)
      : format_(format), block_(block), longest_(longest) {}

  /// Calls `take(record, offset)` for each record that begins in a piece; its bytes are valid during the call. A
  /// fixed-width record that the file's end cuts is `cut(offset)`.
  template <class Take, class Cut> void read(const file_pieces& pieces, std::uint64_t piece, Take take, Cut cut) {
    const file_range range = pieces[piece];
    if (!file_.is_open() || file_number_ != range.file) {
      file_ = input_file(pieces.path(range.file));
      file_number_ = range.file;
    }
    const std::uint64_t size = pieces.size(range.file);
    std::uint64_t base = range.begin;  // the file's byte at text[0]
    bool skipping = false;             // within a record that began before, or a title
    if constexpr (delimited) {
      if (base > 0)
        skipping = true, --base;  // a delimiter just before the piece ends nothing that is in it
      else if constexpr (has_header<Format>)
        skipping = format_.header;
    } else {
      base += (format_.width() - base % format_.width()) % format_.width();
    }
    // A record begins at text[at]; no record ends in text[at, searched).
    std::size_t at = 0, searched = 0, filled = 0;
    while (base + (skipping ? searched : at) < range.end) {
      const std::size_t end = next_end(at, searched, filled);
      if (end + gap <= filled) {
        if (!skipping) {
          check_length(base + at, end - at);
          take(std::string_view(text_.data() + at, end - at), base + at);
        }
        skipping = false;
        at = searched = end + gap;
        continue;
      }
      searched = filled;
      if (base + filled >= size) {  // the file's last record needs no delimiter
        if (skipping || at == filled) break;
        check_length(base + at, filled - at);
        if constexpr (delimited)
          take(std::string_view(text_.data() + at, filled - at), base + at);
        else
          cut(base + at);
        break;
      }
      if (skipping) at = filled;
      std::copy(text_.data() + at, text_.data() + filled, text_.data());
      base += at, filled -= at, searched -= at, at = 0;
      check_length(base, filled);
      // Beyond the piece only what its last record needs: little at first.
      const std::uint64_t position = base + filled;
      std::uint64_t n = position < range.end ? range.end - position : (std::max)(filled, std::size_t{512});
      n = (std::min)({n, size - position, std::uint64_t{block_}});
      if (text_.size() < filled + n) text_.resize((std::max)(filled + n, 2 * filled));
      file_.read(position, text_.data() + filled, static_cast<std::size_t>(n));
      filled += static_cast<std::size_t>(n);
    }
  }

  /// The file that is being read.
  const std::string& path() const noexcept { return file_.path(); }

  /// Throws record_error about byte `column` of the record at `offset`.
  [[noreturn]] void fail(std::uint64_t offset, std::size_t column, const std::string& detail) const {
    throw record_error(path(), offset + column, delimited ? file_.line(offset) : 0, detail);
  }

 private:
  static constexpr bool delimited = has_delimiter<Format>;
  static constexpr std::size_t gap = delimited ? 1 : 0;  // bytes between records

  // Where the record that begins at text[at] ends; `filled` or more if that isn't in the text yet.
  std::size_t next_end(std::size_t at, std::size_t searched, std::size_t filled) const {
    if constexpr (delimited)
      return searched < filled ? searched + format_.delimiter(text_.data() + searched, filled - searched) : filled;
    else
      return filled - at >= format_.width() ? at + format_.width() : filled + 1;
  }

  void check_length(std::uint64_t offset, std::size_t n) const {
    if (n > longest_)
      fail(offset, 0, "a record of more than " + std::to_string(longest_) + " bytes, the option `longest`");
  }

  const Format& format_;
  std::size_t block_, longest_;
  input_file file_;
  std::size_t file_number_ = 0;
  std::vector<char> text_;  // what was read and not yet taken
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle
