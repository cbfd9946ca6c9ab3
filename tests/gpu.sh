#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

usage() {
  cat <<'END'
usage: bash tests/gpu.sh [--jobs N] [FILTER]

Builds the CUDA tests for this machine's GPU and runs them on it. Where there is no GPU or no nvcc it says so and exits
with 77; the same tests run on the emulated device in tests/run.sh.

  --jobs N       compile N things at a time (default: the number of cores)
  FILTER         a regular expression: only the tests whose name matches, e.g. emulated_device
END
}

jobs=$(nproc) filter=()
source "$root/tests/support/install.sh"
while [ $# -gt 0 ]; do
  common_option tests/gpu.sh "$@"
  shift $taken
done

cd "$root"

skip() {
  echo "SKIP: $*"
  exit 77
}
have nvidia-smi || skip "no NVIDIA driver on this machine: there is no nvidia-smi"
cards=$(nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader 2>&1) || skip "no usable GPU: $cards"
[ -n "$cards" ] || skip "no GPU: nvidia-smi lists none"
have nvcc || skip "a GPU, but no nvcc: install the CUDA Toolkit, or put its bin folder on PATH"

need_compiler
has_header catch2/catch_all.hpp || has_header catch2/catch.hpp || install catch2 "the tests"
step "configuring cuda" cmake --preset cuda -DCMAKE_CUDA_ARCHITECTURES=native -B build/gpu
step "building cuda" cmake --build build/gpu -j "$jobs" -- -k 0

log=build/gpu/ctest.log status=0
ctest --test-dir build/gpu -L gpu --no-tests=error --output-on-failure "${filter[@]}" >"$log" 2>&1 </dev/null || status=$?
[ $status = 0 ] || cat "$log"

echo
echo "$cards" | sed 's/^/card (name, compute capability, driver): /'
nvcc --version | sed -nE 's/.*release ([0-9.]+).*/CUDA Toolkit: \1/p'
echo
printf '%-40s %-10s %s\n' test result seconds
sed -nE 's@^ *[0-9]+/[0-9]+ Test +#[0-9]+: ([^ ]+) \.*[ *]*([A-Za-z]+(: [A-Za-z]+)?) +([0-9.]+) sec.*@\1|\2|\4@p' "$log" |
  while IFS='|' read -r name result seconds; do printf '%-40s %-10s %s\n' "$name" "$result" "$seconds"; done
grep -E 'tests passed|No tests were found' "$log" || true
exit $status
