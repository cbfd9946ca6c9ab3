// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace heddle {
inline namespace v0 {

namespace detail {
inline std::uint64_t fnv1a(const void* data, std::size_t n, std::uint64_t h = 0xcbf29ce484222325ull) noexcept {
  const auto* const p = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < n; ++i) h = (h ^ p[i]) * 0x100000001b3ull;
  return h;
}
// A file that is closed when it goes out of scope.
class file {
 public:
  file(const std::string& path, const char* mode) : file_(std::fopen(path.c_str(), mode)) {}
  file(const file&) = delete;
  file& operator=(const file&) = delete;
  ~file() { close(); }
  explicit operator bool() const noexcept { return file_ != nullptr; }
  std::FILE* get() const noexcept { return file_; }
  bool close() noexcept { return !file_ || std::fclose(std::exchange(file_, nullptr)) == 0; }

 private:
  std::FILE* file_;
};

// Puts a file that is written to the end under its name: synchronised to disk, closed, renamed. Throws file_error; then
// neither it nor anything new under that name is there.
inline void publish(file& f, const std::string& temporary, const std::string& path) {
  const bool good = std::fflush(f.get()) == 0 && ::fsync(::fileno(f.get())) == 0;
  // Closing can still fail where the file system writes late.
  if (!f.close() || !good) {
    std::remove(temporary.c_str());
    throw file_error("heddle: can't write " + temporary);
  }
  if (std::rename(temporary.c_str(), path.c_str()) != 0) {
    std::remove(temporary.c_str());
    throw file_error("heddle: can't rename " + temporary + " to " + path);
  }
  // The name is safe when the directory is; some file systems know no such call, which is no failure of ours.
  const std::size_t slash = path.rfind('/');
  const int directory = ::open(slash == std::string::npos ? "." : path.substr(0, slash + 1).c_str(), O_RDONLY);
  if (directory >= 0) {
    ::fsync(directory);
    ::close(directory);
  }
}
}  // namespace detail

/// @brief Collects a checkpoint in memory, then writes it whole: to a temporary name, synchronised to disk,
/// renamed.
///
/// Format: "HEDDLE" and a 2-byte version, 8 bytes of length, the content, 8 bytes of FNV-1a over all before. Integers
/// are little-endian as the machine's; a reader on a machine of other order refuses the version.
class archive_writer {
 public:
  /// Version of the format.
  static constexpr std::uint16_t version = 2;

  /// Appends a trivially copyable value.
  template <class Value> void put(const Value& v) {
    static_assert(std::is_trivially_copyable_v<Value>);
    append(&v, sizeof v);
  }
  /// Appends a length and that many elements.
  template <class Value> void put(const Value* p, std::size_t count) {
    static_assert(std::is_trivially_copyable_v<Value>);
    put(static_cast<std::uint64_t>(count));
    append(p, count * sizeof(Value));
  }
  /// Appends a string.
  void put(const std::string& s) { put(s.data(), s.size()); }

  /// @brief Writes the file; an older one of that name is replaced at once or not at all.
  /// Throws: file_error naming the path.
  void write(const std::string& path) const {
    const std::string temporary = path + ".tmp";
    char head[8] = {'H', 'E', 'D', 'D', 'L', 'E'};
    std::memcpy(head + 6, &version, 2);
    const std::uint64_t length = content_.size();
    std::uint64_t sum = detail::fnv1a(head, sizeof head);
    sum = detail::fnv1a(&length, sizeof length, sum);
    sum = detail::fnv1a(content_.data(), content_.size(), sum);
    detail::file f(temporary, "wb");
    if (!f || std::fwrite(head, 1, sizeof head, f.get()) != sizeof head ||
        std::fwrite(&length, sizeof length, 1, f.get()) != 1 ||
        std::fwrite(content_.data(), 1, content_.size(), f.get()) != content_.size() ||
        std::fwrite(&sum, sizeof sum, 1, f.get()) != 1) {
      std::remove(temporary.c_str());
      throw file_error("heddle: can't write " + temporary);
    }
    detail::publish(f, temporary, path);
  }

 private:
  void append(const void* p, std::size_t n) {
    content_.append(static_cast<const char*>(p), n);
  }
  std::string content_;
};

/// @brief Reads what archive_writer wrote; nothing is returned before the whole file has been checked.
class archive_reader {
 public:
  /// @brief Reads and checks a file.
  /// Throws: file_error naming the path and what is wrong: missing, not a Heddle file, version, length, checksum.
  explicit archive_reader(std::string path) : path_(std::move(path)) {
    detail::file f(path_, "rb");
    if (!f) throw file_error("heddle: can't open " + path_);
    char chunk[1 << 16];
    for (std::size_t n; (n = std::fread(chunk, 1, sizeof chunk, f.get())) > 0;)
      content_.append(chunk, n);
    if (std::ferror(f.get())) throw file_error("heddle: can't read " + path_);
    if (content_.size() < 24 || std::memcmp(content_.data(), "HEDDLE", 6) != 0)
      refuse("it is not a Heddle checkpoint, or is cut short");
    std::uint16_t version;
    std::memcpy(&version, content_.data() + 6, 2);
    if (version != archive_writer::version) {
      refuse("its version is " + std::to_string(version) + ", allowed is " + std::to_string(archive_writer::version));
    }
    std::uint64_t length, sum;
    std::memcpy(&length, content_.data() + 8, 8);
    if (length != content_.size() - 24) {
      refuse("it holds " + std::to_string(content_.size() - 24) + " bytes, its header says " + std::to_string(length));
    }
    std::memcpy(&sum, content_.data() + content_.size() - 8, 8);
    if (sum != detail::fnv1a(content_.data(), content_.size() - 8)) refuse("its checksum is wrong");
    at_ = 16;
  }

  /// The path.
  const std::string& path() const noexcept { return path_; }

  /// Next value.
  template <class Value> Value get() {
    Value v;
    take(&v, sizeof v);
    return v;
  }
  /// Next elements, which must be `count` many.
  template <class Value> void get(Value* p, std::size_t count) {
    const auto n = get<std::uint64_t>();
    if (n != count) refuse("a block has " + std::to_string(n) + " elements, expected " + std::to_string(count));
    take(p, count * sizeof(Value));
  }
  /// Next string.
  std::string get_string() {
    const auto n = get<std::uint64_t>();
    if (n > content_.size() - 8 - at_) refuse("a string runs past its end");
    std::string s(static_cast<std::size_t>(n), '\0');
    take(s.data(), s.size());
    return s;
  }
  /// Throws file_error unless everything has been read.
  void finish() const {
    if (at_ != content_.size() - 8) refuse("it holds more than was expected");
  }
  /// Throws file_error naming the file.
  [[noreturn]] void refuse(const std::string& why) const { throw file_error("heddle: " + path_ + ": " + why); }

 private:
  void take(void* p, std::size_t n) {
    if (n > content_.size() - 8 - at_) refuse("it ends early");
    if (n) std::memcpy(p, content_.data() + at_, n);
    at_ += n;
  }
  std::string path_;
  std::string content_;
  std::size_t at_ = 0;
};

}  // namespace v0
}  // namespace heddle
