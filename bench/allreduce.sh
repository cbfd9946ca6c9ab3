#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this: bench/allreduce.sh BINARY JSON [ROUNDS]. Builds the peers that can be had and measures in turn;
# or simulates clusters: bench/allreduce.sh BINARY JSON sim [CLUSTER...].
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/tests/support/install.sh"
cd "$root"
have python3 || install python3 "benchmark allreduce"
peers=build/bench/peers
mkdir -p "$peers"
if [ "${3-}" = sim ]; then
  if ! have smpicxx && ! (install libsimgrid-dev "simulating clusters"); then
    echo "SKIP sim.* SimGrid can't be had here"
    exit 0
  fi
  step "building allreduce_sim" smpicxx -O3 -DNDEBUG -std=c++20 -Iinclude bench/peers/allreduce_sim.cpp \
    -o "$peers/allreduce_sim"
  exec python3 bench/allreduce_sim.py "$peers/allreduce_sim" "${2%.json}_sim.json" "${@:4}"
fi
echo "SKIP sim.* these take minutes and don't depend on the machine: bash bench/run.sh allreduce sim"
rm -f "${2%.json}"_{mpi,overlap}.json
if (need_mpi "comparing with Open MPI") && mpirun --version | grep -qE "Open MPI|OpenRTE"; then
  step "building allreduce_openmpi" mpicxx -O3 -DNDEBUG -std=c++17 bench/peers/allreduce_openmpi.cpp -o "$peers/allreduce_openmpi"
  # Ours over MPI, and MPI_Allreduce, in one job.
  step "building allreduce_mpi" mpicxx -DOMPI_SKIP_MPICXX -O3 -DNDEBUG -std=c++20 -Iinclude bench/peers/allreduce_mpi.cpp \
    -o "$peers/allreduce_mpi"
  mpirun -np 4 --oversubscribe --allow-run-as-root --bind-to none "$peers/allreduce_mpi" "${2%.json}_mpi.json"
  mpirun -np 2 --oversubscribe --allow-run-as-root --bind-to none "$peers/allreduce_mpi" overlap \
    "${2%.json}_overlap.json"
else
  for cases in 'mpi.*' 'userop.*.openmpi' 'userop.<bytes>.builtin' 'overlap.mpi*'; do
    echo "SKIP $cases Open MPI can't be had here"
  done
fi
if has_header gloo/allreduce.h || (install libgloo-dev "comparing with Gloo"); then
  step "building allreduce_gloo" g++ -O3 -DNDEBUG -std=c++17 bench/peers/allreduce_gloo.cpp -o "$peers/allreduce_gloo" -lgloo -pthread
fi
exec python3 bench/allreduce.py "$1" "$peers" "$2" "${@:3}"
