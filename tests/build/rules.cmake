# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0

# The rules about include/heddle that more than one test reads.

# Floors: a header includes only its own folder and folders with a smaller number.
set(floor_core 0)
foreach(folder IN ITEMS memory comm data trace)
  set(floor_${folder} 1)
endforeach()
foreach(folder IN ITEMS compress optim recompute)
  set(floor_${folder} 2)
endforeach()
foreach(folder IN ITEMS collective table)
  set(floor_${folder} 3)
endforeach()
foreach(folder IN ITEMS mode parallel)
  set(floor_${folder} 4)
endforeach()
set(floor_plan 5)
set(floor_trainer 6)
set(floor_. 7) # heddle.hpp itself

# The .hpp files that may include a dependency beyond the standard library, as paths below include/heddle.
set(dependent_headers
    "^(comm/(detail/)?(mpi|nccl|zmq)(_[a-z]+)?|core/cuda_queue|memory/cuda_[a-z0-9_]+|memory/nccl_mem)\\.hpp$")

# What counts as such a dependency.
set(dependencies "^(cuda|cub/|thrust/|cooperative_groups|cublas|curand|cudnn|nvtx|nccl|mpi\\.h|mpi/|zmq)")
