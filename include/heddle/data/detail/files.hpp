// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/data/concept.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <vector>

namespace heddle {
inline namespace v0 {
namespace detail {

/// A file that is read at any offset.
class input_file {
 public:
  input_file() = default;
  /// Throws record_error if it can't be opened or is no regular file.
  explicit input_file(std::string path) : path_(std::move(path)) {
    do descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    while (descriptor_ < 0 && errno == EINTR);
    struct stat about{};
    if (descriptor_ < 0 || ::fstat(descriptor_, &about) != 0) fail(0, "can't open it");
    if (!S_ISREG(about.st_mode)) {
      close();
      throw record_error(path_, 0, 0, "this is no regular file; pipes and directories can't be cut into pieces");
    }
    size_ = static_cast<std::uint64_t>(about.st_size);
  }
  input_file(const input_file&) = delete;
  input_file(input_file&& other) noexcept
      : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)), size_(other.size_) {}
  input_file& operator=(input_file other) noexcept {
    path_.swap(other.path_);
    std::swap(descriptor_, other.descriptor_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~input_file() { close(); }

  bool is_open() const noexcept { return descriptor_ >= 0; }
  const std::string& path() const noexcept { return path_; }
  std::uint64_t size() const noexcept { return size_; }

  /// Reads n bytes from `offset` on. Throws record_error if the system refuses or the file ends before.
  void read(std::uint64_t offset, char* to, std::size_t n) const {
    while (n > 0) {
      const ssize_t got = ::pread(descriptor_, to, n, static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) {
        throw record_error(path_, offset, 0, "can't read it: " + std::generic_category().message(errno));
      }
      if (got == 0) {
        throw record_error(path_, offset, 0,
                           "the file ends here, but had more bytes when reading began; it may not shrink");
      }
      offset += static_cast<std::uint64_t>(got);
      to += got;
      n -= static_cast<std::size_t>(got);
    }
  }

  /// The line, from 1, that holds the byte at `offset`; 0 beyond the first GiB, where counting takes too long, or if
  /// the file can't be read again.
  std::uint64_t line(std::uint64_t offset) const {
    if (offset >> 30) return 0;
    std::vector<char> text(1 << 16);
    std::uint64_t at = 0, count = 1;
    while (at < offset) {
      const std::size_t n = static_cast<std::size_t>((std::min)(offset - at, std::uint64_t{text.size()}));
      const ssize_t got = ::pread(descriptor_, text.data(), n, static_cast<off_t>(at));
      if (got <= 0) return 0;
      count += static_cast<std::uint64_t>(std::count(text.begin(), text.begin() + got, '\n'));
      at += static_cast<std::uint64_t>(got);
    }
    return count;
  }

 private:
  void close() noexcept {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
  }
  [[noreturn]] void fail(std::uint64_t offset, const std::string& what) {
    const int reason = errno;
    close();  // no destructor runs when the constructor throws
    throw record_error(path_, offset, 0, what + ": " + std::generic_category().message(reason));
  }

  std::string path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

/// A run of bytes of one file.
struct file_range {
  std::size_t file = 0;
  std::uint64_t begin = 0, end = 0;
};

/// Files cut into pieces of equal length, the last of each file shorter; an empty file has none.
class file_pieces {
 public:
  file_pieces(std::vector<std::string> paths, std::vector<std::uint64_t> sizes, std::uint64_t length)
      : paths_(std::move(paths)), sizes_(std::move(sizes)), length_(length) {
    for (const std::uint64_t size : sizes_) first_.push_back(count_ += size / length + (size % length != 0));
  }

  const std::string& path(std::size_t file) const noexcept { return paths_[file]; }
  std::uint64_t size(std::size_t file) const noexcept { return sizes_[file]; }
  std::uint64_t count() const noexcept { return count_; }
  std::uint64_t length(std::uint64_t i) const noexcept { return (*this)[i].end - (*this)[i].begin; }
  /// Piece i of all.
  file_range operator[](std::uint64_t i) const noexcept {
    const auto after = std::upper_bound(first_.begin(), first_.end(), i);
    const std::size_t file = static_cast<std::size_t>(after - first_.begin());
    const std::uint64_t begin = (i - (file ? first_[file - 1] : 0)) * length_;
    return {file, begin, begin + (std::min)(length_, sizes_[file] - begin)};
  }

 private:
  std::vector<std::string> paths_;
  std::vector<std::uint64_t> sizes_, first_;  // first_[f]: one past the last piece of file f
  std::uint64_t length_, count_ = 0;
};

}  // namespace detail
}  // namespace v0
}  // namespace heddle
