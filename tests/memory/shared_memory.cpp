// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

#include <heddle/memory/pool.hpp>
#include <heddle/memory/shared_memory.hpp>

#include "conformance.hpp"

#include <sys/wait.h>
#include <unistd.h>

namespace hd = heddle;

TEST_CASE("shared_memory conforms, alone and under a pool", "[memory]") {
  heddle_test::conforms_to_resource([] { return hd::shared_memory{"/heddle-test"}; });
  heddle_test::conforms_to_resource([] { return hd::pool{hd::shared_memory{"/heddle-test"}}; });
}

TEST_CASE("shared_memory: another process reads and writes the same bytes", "[memory]") {
  hd::shared_memory segments{"/heddle-test"};
  hd::pool memory{segments};
  memory.allocate_sync(100, 64);
  auto* const x = static_cast<int*>(memory.allocate_sync(1000 * sizeof(int), 64));
  for (int i = 0; i < 1000; ++i) x[i] = i;
  const hd::shared_place place = segments.locate(x + 10);
  CHECK(place.offset >= 40 + 100);
  CHECK(place.bytes >= place.offset + 990 * sizeof(int));
  const pid_t child = fork();
  if (child == 0) {  // has inherited the mapping; a view of its own must be the same memory
    const hd::shared_view view{place.segment};
    int* const y = reinterpret_cast<int*>(view.data() + place.offset);
    const bool same = view.bytes() == place.bytes && y[0] == 10 && y[989] == 999;
    y[5] = -7;
    _exit(same ? 0 : 1);
  }
  int how = 0;
  REQUIRE(waitpid(child, &how, 0) == child);
  CHECK((WIFEXITED(how) && WEXITSTATUS(how) == 0));
  CHECK(x[15] == -7);
  const pid_t other = fork();
  if (other == 0) {
    segments = hd::shared_memory{"/heddle-test"};  // the child's copies end: its parent's blocks keep their names
    memory = hd::pool{segments};
    _exit(0);
  }
  REQUIRE(waitpid(other, &how, 0) == other);
  CHECK(hd::shared_view{place.segment}.bytes() == place.bytes);
  hd::shared_memory twin{"/heddle-test"};  // counts from 1 too
  void* const y = twin.allocate_sync(10, 1);
  CHECK(twin.locate(y).segment != place.segment);
  twin.deallocate_sync(y, 10, 1);
  memory.deallocate_sync(x, 1000 * sizeof(int), 64);
}

TEST_CASE("shared_memory: names end with their blocks, and errors say why", "[memory]") {
  std::string name;
  {
    hd::shared_memory segments{"/heddle-test"};
    void* const p = segments.allocate_sync(10, 1);
    name = segments.locate(p).segment;
    hd::shared_view view{name};
    segments.deallocate_sync(p, 10, 1);
    CHECK_THROWS_AS(segments.locate(p), hd::argument_error);
    CHECK_THROWS_AS(hd::shared_view{name}, hd::file_error);
    view.data()[9] = std::byte{1};  // stays mapped
    name = segments.locate(segments.allocate_sync(10, 1)).segment;
  }
  CHECK_THROWS_AS(hd::shared_view{name}, hd::file_error);
  for (const char* bad : {"", "/", "x", "/a/b"}) CHECK_THROWS_AS(hd::shared_memory{bad}, hd::argument_error);
  try {
    hd::shared_memory{"/heddle-test"}.allocate_sync(std::size_t{1} << 62, 64);
    FAIL("an exbibyte was given");
  } catch (const hd::memory_error& e) {
    CHECK(e.requested() == std::size_t{1} << 62);
    CHECK(e.in_use() == 0);
    struct statvfs room{};  // of what is mounted there on Linux; others may change what is left of it
    REQUIRE(statvfs("/dev/shm", &room) == 0);
    CHECK(e.limit() == room.f_blocks * room.f_frsize);
    CHECK(e.largest_free() <= e.limit());
  }
}
