#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

usage() {
  cat <<'END'
usage: bash tests/run.sh [--all | --preset NAME] [--jobs N] [FILTER]

Installs what is missing, builds, and runs the tests.

  (no option)    preset release: all tests, those under mpirun too, and the tests of headers, messages, consumers
                 and documentation
  --all          also asan-ubsan and tsan and, where there is nvcc, cuda
  --preset NAME  only this one: release, asan-ubsan, tsan or cuda
  --jobs N       compile and test N things at a time (default: the number of cores)
  FILTER         a regular expression: only the tests whose name matches, e.g. comm or '^build'
END
}

presets=(release) jobs=$(nproc) filter=() all=no
source "$root/tests/support/install.sh"
while [ $# -gt 0 ]; do
  taken=1
  case $1 in
    --all) presets=(release asan-ubsan tsan cuda) all=yes ;;
    --preset)
      case ${2-} in
        release | asan-ubsan | tsan | cuda) presets=("$2") ;;
        *) echo "tests/run.sh: --preset takes release, asan-ubsan, tsan or cuda, not '${2-}'" >&2; exit 2 ;;
      esac
      taken=2 ;;
    *) common_option tests/run.sh "$@" ;;
  esac
  shift $taken
done

cd "$root"
need_compiler
has_header catch2/catch_all.hpp || has_header catch2/catch.hpp || install catch2 "the tests"
has_header boost/context/detail/fcontext.hpp || install libboost-context-dev "the emulated device, on which CUDA code is tested"
have doxygen || install doxygen "checking the documentation"
have git || install git "the test that fetches this repository"
has_header zlib.h || install zlib1g-dev "the example that reads images"
has_header zmq.h || install libzmq3-dev "the tests of messengers between processes"
[[ " ${presets[*]} " != *" release "* ]] || need_mpi "the tests of ranks that are processes"
[ $all = no ] || has_header benchmark/benchmark.h || install libbenchmark-dev "compiling the benchmarks"

passed=0 failed=0 skipped=0 broken=()

# run_tests PRESET: ctest's closing lines, or on failure everything it said.
run_tests() {
  local log=build/$1/ctest.log start=$SECONDS status=0 total bad idle wrap=()
  # ThreadSanitizer can't place its memory where the kernel shuffles addresses over more than 28 bits.
  if [ "$1" = tsan ] && [ "$(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 28)" -gt 28 ] &&
    setarch -R true 2>/dev/null; then
    wrap=(setarch -R)
  fi
  "${wrap[@]}" ctest --preset "$1" -j "$jobs" "${filter[@]}" >"$log" 2>&1 </dev/null || status=$?
  if [ $status = 0 ]; then
    grep -E '\*\*\*Skipped' "$log" | sed -E 's/^.*Test +#[0-9]+: /  skipped: /; s/ \.*\*+Skipped.*//' || true
    grep -E 'tests passed|No tests were found' "$log" || true
  else
    cat "$log"
  fi
  total=$(sed -nE 's/.*tests failed out of ([0-9]+).*/\1/p' "$log")
  bad=$(sed -nE 's/.*tests passed, ([0-9]+) tests? failed.*/\1/p' "$log")
  idle=$(grep -cE '\*\*\*Skipped' "$log" || true)
  passed=$((passed + ${total:-0} - ${bad:-0} - idle)) failed=$((failed + ${bad:-0})) skipped=$((skipped + idle))
  [ $status = 0 ] || [ "${bad:-0}" != 0 ] || failed=$((failed + 1))
  echo "testing $1: $((SECONDS - start)) s"
  if [ "$1" = cuda ]; then
    idle=$(grep -E '\*\*\*Skipped' "$log" | grep -c '\.cuda' || true)
    [ "$idle" = 0 ] || echo "gpu tests skipped: $idle, because: $(ctest --test-dir build/cuda -L gpu -V 2>/dev/null |
      sed -nE 's/^[0-9]+: SKIP: //p' | sort -u | head -n 1)"
  fi
  return $status
}

for preset in "${presets[@]}"; do
  if [ "$preset" = cuda ] && ! have nvcc; then
    [ $all = yes ] || die "preset cuda needs nvcc: install the CUDA Toolkit, or put its bin folder on PATH"
    echo "no nvcc on this machine: nothing was compiled for CUDA, and every gpu test is skipped"
    continue
  fi
  targets=()
  [ $all$preset != yesrelease ] || targets=(all heddle_bench)
  if configure_and_build "$preset" "${targets[@]}"; then
    run_tests "$preset" || broken+=("$preset")
  else
    broken+=("$preset")
    failed=$((failed + 1))
  fi
done

echo "total time: $((SECONDS / 60)) min $((SECONDS % 60)) s"
[ ${#broken[@]} = 0 ] || echo "failed: ${broken[*]}"
echo "$passed passed, $failed failed, $skipped skipped"
[ ${#broken[@]} = 0 ]
