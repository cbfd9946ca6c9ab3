#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this: bench/table.sh BINARY JSON [REPETITIONS]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/tests/support/install.sh"
cd "$root"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$1" "${@:3}" | tee -a "$log"
for rule in row_adagrad adagrad; do "$1" bytes $rule | tee -a "$log"; done
"$1" bounded | tee -a "$log"
if (need_mpi "parameter servers") && mpirun --version | grep -qE "Open MPI|OpenRTE"; then
  program=build/bench/peers/table_processes
  mkdir -p build/bench/peers
  step "building table_processes" mpicxx -DOMPI_SKIP_MPICXX -O3 -DNDEBUG -std=c++20 -Iinclude \
    bench/peers/table_processes.cpp -o "$program"
  for servers in 1 2; do
    mpirun -np $((2 * servers)) --oversubscribe --allow-run-as-root --bind-to none --mca mpi_yield_when_idle 1 "$program" \
      $servers | tee -a "$log"
  done
else
  echo "SKIP server Open MPI can't be had here"
fi
# The lines as JSON.
awk 'BEGIN { print "{\"ratios\": [" }
     $1 == "RATIO" { printf "%s{\"case\": \"%s\", \"ours\": %s, \"other\": %s, \"unit\": \"%s\", \"ratio\": %s}", n++ ? ",\n" : "", $2, $3, $4, $5, $6 }
     END { print "\n]}" }' "$log" >"$2"
