// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0

// What calibrate sends lies in the host's memory, which a communicator that works in a stream can't read.
// EXPECT: heddle::calibrate: this communicator works in a stream; give it a hosted(comm)
#include <heddle/comm/calibrate.hpp>
#include <heddle/comm/self.hpp>

struct in_a_stream : heddle::self {
  in_a_stream duplicate() { return *this; }
  void* scratch(std::size_t) { return nullptr; }
  void copy(void*, const void*, std::size_t) {}
};
static_assert(heddle::communicator<in_a_stream> && heddle::stream_ordered<in_a_stream>);

heddle::links of_host_memory(heddle::self& comm) { return heddle::calibrate(comm); }

#if FAIL == 1
heddle::links of_device_memory(in_a_stream& comm) { return heddle::calibrate(comm); }
#endif
