// SPDX-FileCopyrightText: The Heddle authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace heddle {
inline namespace v0 {

/// @brief What a rank says before a backward pass.
struct begin_options {
  double samples = 1.0;  ///< Weight of this rank's gradient, usually the size of its batch; 0 .. 1e290.
  float lr = 0.0f;       ///< Rate that step() will be given, the same on all ranks: what error_feedback holds is then
                         ///< scaled to it before it is sent. 0: not said; step() scales what is left.
};

/// @brief Factors for the tensors of one group.
struct group_options {
  float lr_scale = 1.0f;     ///< Multiplies the learning rate.
  float decay_scale = 1.0f;  ///< Multiplies the weight decay; 0 for biases and norms.
};

/// @brief What an update needs.
struct step_options {
  float lr = 0.0f;         ///< Learning rate, the same on all ranks.
  float max_norm = 0.0f;   ///< Limit on the norm of the whole averaged gradient, or where steps are local of the rank's
                           ///< own; the same on all ranks; 0: none.
  float max_value = 0.0f;  ///< Limit on the magnitude of each element of the same gradient; the same on all ranks; 0:
                           ///< none. Not together with max_norm.
  double loss = 0.0;       ///< Loss of this rank's batch, for modes that adapt by it; 0 or less: not given.
};

/// @brief What a step did.
struct step_result {
  bool skipped = false;   ///< A gradient wasn't finite, or nobody had samples: no state has moved.
  bool met = false;       ///< Replicas met in this step.
  bool reverted = false;  ///< They met, but the average wasn't finite: all are back at what was agreed before.
  double norm = 0.0;      ///< Of the whole gradient before clipping, where it was computed: with max_norm, or shards.
};

/// @brief What a data_parallel has done so far, on this rank.
struct report {
  std::uint64_t steps = 0;          ///< Steps taken.
  std::uint64_t skipped = 0;        ///< Steps skipped.
  std::uint64_t meetings = 0;       ///< Exchanges that counted.
  std::uint64_t reverted = 0;       ///< Meetings whose average wasn't finite.
  std::uint64_t bytes_sent = 0;     ///< Payload bytes this rank sent.
  std::uint64_t control_bytes = 0;  ///< Bytes it sent to agree on samples, sizes and flags.
  std::uint64_t messages = 0;       ///< Messages that carried the payload.
  std::uint64_t elements_sent = 0;  ///< Elements that went into the exchange after compression.
  std::uint64_t state_bytes = 0;    ///< Bytes held: optimizer, compressor and mode state.
  double comm_seconds = 0.0;        ///< Time in exchanges, waiting for peers included.
  double exposed_seconds = 0.0;     ///< Part of it that step() waited for.
  std::uint64_t staleness[16]{};  ///< Pushes to a server by the updates that it had made since this rank last heard of
                                  ///< it; the last: 15 and more.
  std::string executor;           ///< What moved the bytes: "schedule: ring", "native".

  /// Fraction of the communication time that was hidden behind the caller's own work.
  double hidden() const noexcept { return comm_seconds > exposed_seconds ? 1.0 - exposed_seconds / comm_seconds : 0.0; }
};

/// @brief What to do in step() with tensors that were never ready.
enum class unused {
  error,         ///< Throw, naming them.
  treat_as_zero  ///< Their gradient is zero.
};

}  // namespace v0
}  // namespace heddle
