#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this after the benchmark: the same under AddressSanitizer.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/tests/support/install.sh"
cd "$root"
step "configuring with AddressSanitizer" cmake --preset release -DHEDDLE_BUILD_TESTS=OFF -B build/bench-asan \
  "-DCMAKE_CXX_FLAGS=-fsanitize=address -fno-omit-frame-pointer"
step "building with AddressSanitizer" cmake --build build/bench-asan -j "$(nproc)" --target bench_emulated_device
echo "under AddressSanitizer:"
ASAN_OPTIONS=detect_stack_use_after_return=1 build/bench-asan/bench/emulated_device --benchmark_repetitions=3 \
  --benchmark_report_aggregates_only=true
