#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this: bench/messenger.sh BINARY JSON [REPETITIONS]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/tests/support/install.sh"
cd "$root"
log=$(mktemp)
folder=$(mktemp -d)
trap 'rm -rf "$log" "$folder"' EXIT
"$1" "${@:3}" | tee -a "$log"
has_header zmq.h || (install libzmq3-dev "comparing with ZeroMQ") || true
if (need_mpi "comparing with MPI") && mpirun --version | grep -qE "Open MPI|OpenRTE" && has_header zmq.h; then
  program=build/bench/peers/messenger_processes
  mkdir -p build/bench/peers
  step "building messenger_processes" mpicxx -DOMPI_SKIP_MPICXX -O3 -DNDEBUG -std=c++20 -Iinclude \
    bench/peers/messenger_processes.cpp -o "$program" -lzmq
  for processes in 2 5; do
    mpirun -np $processes --oversubscribe --allow-run-as-root --bind-to none --mca mpi_yield_when_idle 1 "$program" \
      "$folder" "${@:3}" | tee -a "$log"
    rm -rf "${folder:?}"/*
  done
else
  echo "SKIP mpi Open MPI or ZeroMQ can't be had here"
  echo "SKIP zmq Open MPI or ZeroMQ can't be had here"
fi
# The lines as JSON.
awk 'BEGIN { print "{\"ratios\": [" }
     $1 == "RATIO" { printf "%s{\"case\": \"%s\", \"ours\": %s, \"other\": %s, \"unit\": \"%s\", \"ratio\": %s}", n++ ? ",\n" : "", $2, $3, $4, $5, $6 }
     END { print "\n]}" }' "$log" >"$2"
