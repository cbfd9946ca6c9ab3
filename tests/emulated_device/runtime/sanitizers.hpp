// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the sanitizers must be told, as plain functions that do nothing in a build without them. The runtime itself is
// compiled without ThreadSanitizer's instrumentation (its own bookkeeping would look like races), so the build says
// with EMULATED_TSAN whether the program as a whole has it.

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define EMULATED_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMULATED_ASAN 1
#endif
#endif
#if !defined(EMULATED_ASAN)
#define EMULATED_ASAN 0
#endif
#if !defined(EMULATED_TSAN)
#define EMULATED_TSAN 0
#endif

#if EMULATED_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if EMULATED_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace emulated {

inline constexpr bool asan = EMULATED_ASAN != 0;
inline constexpr bool tsan = EMULATED_TSAN != 0;

#if EMULATED_ASAN
inline void asan_poison(const void* p, std::size_t bytes) { __asan_poison_memory_region(p, bytes); }
inline void asan_unpoison(const void* p, std::size_t bytes) { __asan_unpoison_memory_region(p, bytes); }
inline void asan_leave(void** fake, const void* bottom, std::size_t bytes) {
  __sanitizer_start_switch_fiber(fake, bottom, bytes);
}
inline void asan_arrive(void* fake, const void** bottom, std::size_t* bytes) {
  __sanitizer_finish_switch_fiber(fake, bottom, bytes);
}
#else
inline void asan_poison(const void*, std::size_t) {}
inline void asan_unpoison(const void*, std::size_t) {}
inline void asan_leave(void**, const void*, std::size_t) {}
inline void asan_arrive(void*, const void**, std::size_t*) {}
#endif

// A tag is an address that stands for a point of order: what happened before a release happens before what follows an
// acquire. Contexts are ThreadSanitizer's fibers; switching to one orders nothing.
#if EMULATED_TSAN
inline void tsan_acquire(void* tag) { __tsan_acquire(tag); }
inline void tsan_release(void* tag) { __tsan_release(tag); }
inline void* tsan_create() { return __tsan_create_fiber(0); }
inline void tsan_destroy(void* context) { __tsan_destroy_fiber(context); }
inline void* tsan_current() { return __tsan_get_current_fiber(); }
inline void tsan_switch(void* context) { __tsan_switch_to_fiber(context, 1); }
inline void tsan_ignore(bool yes) {
  if (yes) {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  } else {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
}
#else
inline void tsan_acquire(void*) {}
inline void tsan_release(void*) {}
inline void* tsan_create() { return nullptr; }
inline void tsan_destroy(void*) {}
inline void* tsan_current() { return nullptr; }
inline void tsan_switch(void*) {}
inline void tsan_ignore(bool) {}
#endif

// Bookkeeping in a context of the device: what the C library does for it is nobody's race.
class unwatched {
 public:
  unwatched() { tsan_ignore(true); }
  ~unwatched() { tsan_ignore(false); }
  unwatched(const unwatched&) = delete;
};

}  // namespace emulated
