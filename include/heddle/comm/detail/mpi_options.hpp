// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <heddle/comm/concept.hpp>

#if !__has_include(<mpi.h>)
#error "heddle/comm/mpi.hpp needs mpi.h: link the CMake target heddle::mpi, or compile with mpicxx"
#endif
#include <mpi.h>

#include <chrono>
#include <string>

namespace heddle {
inline namespace v0 {
/// @brief Ranks as MPI processes.
namespace mpi {

/// @brief What MPI promises about calls from several threads; each level includes those before it.
enum class thread_level : int {
  single = MPI_THREAD_SINGLE,          ///< The process has one thread.
  funneled = MPI_THREAD_FUNNELED,      ///< Only the thread that initialised MPI calls it.
  serialized = MPI_THREAD_SERIALIZED,  ///< Any thread calls it, one at a time.
  multiple = MPI_THREAD_MULTIPLE       ///< Any thread calls it at any time.
};

/// The name used in messages.
constexpr const char* name_of(thread_level l) noexcept {
  switch (l) {
    case thread_level::single: return "MPI_THREAD_SINGLE";
    case thread_level::funneled: return "MPI_THREAD_FUNNELED";
    case thread_level::serialized: return "MPI_THREAD_SERIALIZED";
    case thread_level::multiple: return "MPI_THREAD_MULTIPLE";
  }
  return "unknown";
}

/// @brief MPI promises less about threads than is needed.
class thread_level_error : public error {
 public:
  /// @param given What MPI was initialised with. @param needed The least that would do. @param why What needs it.
  thread_level_error(thread_level given, thread_level needed, const std::string& why)
      : error(std::string("heddle::mpi: MPI gives ") + name_of(given) + ", and " + why + " needs " + name_of(needed) +
              ", to be asked for with MPI_Init_thread"),
        given_(given),
        needed_(needed) {}
  /// What MPI was initialised with.
  thread_level given() const noexcept { return given_; }
  /// The least that would do.
  thread_level needed() const noexcept { return needed_; }

 private:
  thread_level given_, needed_;
};

/// @brief What deadlines and pauses are measured by, and how a call waits.
enum class time_source {
  steady,    ///< The machine's steady clock. Who waits looks again and again, yields and sleeps.
  engine,    ///< MPI_Wtime. Who waits looks again and again, without pauses.
  simulator  ///< MPI_Wtime of a simulator. Who waits does so inside MPI, since looks would cost time there. So there is
             ///< no deadline, and ranks hear of a failure at their next call only: a simulator reports by itself that
             ///< nobody can go on.
};

/// @brief Settings of a communicator.
struct options {
  std::chrono::nanoseconds deadline{30'000'000'000ll};  ///< How long a call waits without anything moving.
  /// The least level that is accepted. Below `serialized` only the thread that initialised MPI may use the
  /// communicator, which excludes data_parallel on more than one rank.
  thread_level level = thread_level::serialized;
  /// How long a call that waits looks again and again, before it sleeps 50 us between two looks. A long time keeps
  /// messages quick, a short one leaves the cores to threads that compute.
  std::chrono::nanoseconds spin{2'000'000};
  time_source time = time_source::steady;    ///< Equal on all ranks.
  /// `polled`: data_parallel communicates within the program's own calls, whatever the level, and hides nothing.
  heddle::progress progress = heddle::progress::thread;
  std::size_t piece = std::size_t{1} << 30;  ///< Bytes of the longest MPI message, 1 to 2^31 - 1, equal on all ranks.
  std::chrono::nanoseconds stall{0};         ///< When a wait is reported to `on_stall`; 0 is never.
  /// Called once in each wait in which nothing has moved for `stall`, on the thread that waits, with a text that names
  /// the operation and the ranks that are missing. It must not throw, nor use the communicator.
  void (*on_stall)(void* context, const std::string& report) = nullptr;
  void* stall_context = nullptr;  ///< Passed to `on_stall`.
};

}  // namespace mpi
}  // namespace v0
}  // namespace heddle
