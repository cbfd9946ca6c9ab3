// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heddle/core/error.hpp>
#include <heddle/core/host.hpp>
#include <heddle/memory/concept.hpp>
#include <heddle/memory/detail/checked.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>

namespace heddle {
inline namespace v0 {

/// @brief Where a byte of a `shared_memory` block lies, in words that other processes understand.
struct shared_place {
  std::string segment;     ///< Name of the POSIX shared-memory object.
  std::size_t offset = 0;  ///< Bytes from its beginning.
  std::size_t bytes = 0;   ///< Size of the whole segment.

  friend bool operator==(const shared_place&, const shared_place&) = default;
};

/// @brief Memory that other processes of this machine can map too: each block is a POSIX shared-memory object.
///
/// A block is whole pages, and a call some microseconds: put a `pool` on it for small blocks. Tell the other process
/// `locate(p)`, by a message or a file; it maps that with a `shared_view`. Who maps it may do so until the block is
/// given back, and keep the mapping longer. Nothing orders the processes: use atomics, or messages.
///
/// @code{.cpp}
/// heddle::shared_memory segments{"/trainer"};
/// heddle::pool memory{segments};
/// float* x = static_cast<float*>(memory.allocate_sync(4096, 64));
/// heddle::shared_place place = segments.locate(x);          // elsewhere: heddle::shared_view view{place.segment};
/// @endcode
///
/// State:   the names and sizes of live blocks, shared by all copies; they are removed with the last copy.
/// Order:   below all adaptors.
/// Sync:    nothing waits. Thread-safe.
/// Throws:  `argument_error` on a bad prefix or alignment; `memory_error` when the system has no room, with the size of
///          its shared memory, bytes in use here and what is left there; `file_error` when it refuses for another
///          reason, which is named.
class shared_memory {
 public:
  /// @param prefix Begins the names of its segments: a slash, then at least one character that is none. The process's
  /// number and a count follow.
  explicit shared_memory(std::string prefix) : state_(std::make_shared<state>()) {
    if (prefix.size() < 2 || prefix.size() > 200 || prefix[0] != '/' || prefix.find('/', 1) != std::string::npos) {
      throw argument_error("heddle::shared_memory: the prefix \"" + prefix +
                           "\" is not a slash and 1 to 199 characters that are none");
    }
    state_->prefix = std::move(prefix);
  }

  /// Memory usable at once, filled with zeros.
  void* allocate_sync(std::size_t bytes, std::size_t alignment) {
    detail::check_alignment("shared_memory", alignment);
    if (bytes == 0) return nullptr;
    (void)detail::round_up("shared_memory", bytes, detail::max_alignment);
    return state_->add(bytes);
  }
  /// Gives memory of `allocate_sync` or `allocate` back; other processes can't map it any more.
  void deallocate_sync(void* p, std::size_t /*bytes*/, std::size_t /*alignment*/) noexcept {
    if (p) state_->remove(static_cast<std::byte*>(p));
  }
  /// As `allocate_sync`: the host's queue does everything at once.
  void* allocate(host::queue, std::size_t bytes, std::size_t alignment) { return allocate_sync(bytes, alignment); }
  /// As `deallocate_sync`.
  void deallocate(host::queue, void* p, std::size_t bytes, std::size_t alignment) noexcept {
    deallocate_sync(p, bytes, alignment);
  }

  /// @brief Where an address lies, which may be anywhere in a live block.
  /// Throws: argument_error if it lies in none.
  shared_place locate(const void* p) const {
    std::lock_guard lock(state_->mutex);
    const auto* const at = static_cast<const std::byte*>(p);
    auto next = state_->live.upper_bound(at);
    if (next != state_->live.begin()) {
      const auto& [begin, s] = *std::prev(next);
      const auto offset = static_cast<std::size_t>(at - begin);
      if (offset < s.bytes) return {s.name, offset, s.bytes};
    }
    throw argument_error("heddle::shared_memory::locate: the address is in no live block");
  }

  /// Whether both are copies of one.
  friend bool operator==(const shared_memory& a, const shared_memory& b) noexcept { return a.state_ == b.state_; }

 private:
  struct segment {
    std::string name;
    std::size_t bytes;
  };

  struct state {
    state() = default;
    state(const state&) = delete;
    state& operator=(const state&) = delete;
    ~state() {
      while (!live.empty()) remove(const_cast<std::byte*>(live.begin()->first));
    }

    void* add(std::size_t bytes) {
      std::lock_guard lock(mutex);
      std::string name;
      int file;
      do {  // the next number, where another object or an earlier process of this number left one
        name = prefix + "." + std::to_string(getpid()) + "." + std::to_string(++count);
        file = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
      } while (file < 0 && errno == EEXIST);
      if (file < 0) refuse(errno, bytes, name, file);
      // Unlike ftruncate alone, this fails here and not with a signal at the first access when there is no room.
      int code;
      do code = posix_fallocate(file, 0, static_cast<off_t>(bytes));
      while (code == EINTR);
      void* const p = code ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      if (p == MAP_FAILED && !code) code = errno;
      if (code) {
        shm_unlink(name.c_str());
        refuse(code, bytes, name, file);
      }
      close(file);
      try {
        live.emplace(static_cast<std::byte*>(p), segment{name, bytes});
      } catch (...) {
        munmap(p, bytes);
        shm_unlink(name.c_str());
        throw;
      }
      return p;
    }

    void remove(std::byte* p) noexcept {
      std::lock_guard lock(mutex);
      const auto found = live.find(p);
      if (found == live.end()) return;
      if (getpid() == owner) shm_unlink(found->second.name.c_str());  // not from a forked child's copy
      munmap(p, found->second.bytes);
      live.erase(found);
    }

    // Closes the file. The limit and what is left of it are those of the file system behind all shared memory.
    [[noreturn]] void refuse(int code, std::size_t bytes, const std::string& name, int file) const {
      struct statvfs room{};
      const bool known = file >= 0 && fstatvfs(file, &room) == 0;
      if (file >= 0) close(file);
      if (code == ENOSPC || code == ENOMEM || code == EFBIG) {
        std::size_t used = 0;
        for (const auto& [begin, s] : live) used += s.bytes;
        const auto size = [&](auto blocks) {
          return known ? static_cast<std::size_t>(blocks) * room.f_frsize : memory_error::unknown;
        };
        throw memory_error("shared_memory", bytes, size(room.f_blocks), used, size(room.f_bavail));
      }
      throw file_error("heddle::shared_memory: " + name + ": " + std::generic_category().message(code));
    }

    std::string prefix;
    const pid_t owner = getpid();
    mutable std::mutex mutex;
    std::map<const std::byte*, segment> live;
    std::size_t count = 0;
  };

  std::shared_ptr<state> state_;
};

static_assert(resource<shared_memory>);

/// @brief Another process's `shared_memory` block, mapped into this one.
///
/// Throws:  `file_error` with the system's reason where there is no such segment or it can't be mapped.
class shared_view {
 public:
  /// Maps a whole segment. @param segment The name that `shared_memory::locate` gave its owner.
  explicit shared_view(const std::string& segment) {
    const int file = shm_open(segment.c_str(), O_RDWR | O_CLOEXEC, 0);
    if (file < 0) refuse(segment, errno);
    struct stat about{};
    int code = fstat(file, &about) == 0 ? 0 : errno;
    bytes_ = static_cast<std::size_t>(about.st_size);
    void* const p = code ? MAP_FAILED : mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (p == MAP_FAILED && !code) code = errno;
    close(file);
    if (code) refuse(segment, code);
    data_ = static_cast<std::byte*>(p);
  }
  /// Takes the mapping over; `other` is left empty.
  shared_view(shared_view&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, std::size_t{0})) {}
  shared_view(const shared_view&) = delete;
  shared_view& operator=(const shared_view&) = delete;
  shared_view& operator=(shared_view&&) = delete;
  ~shared_view() {
    if (data_) munmap(data_, bytes_);
  }

  /// The first byte; that of a place is at its offset.
  std::byte* data() const noexcept { return data_; }
  /// Bytes mapped.
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  [[noreturn]] static void refuse(const std::string& segment, int code) {
    throw file_error("heddle::shared_view: " + segment + ": " + std::generic_category().message(code));
  }

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace v0
}  // namespace heddle
