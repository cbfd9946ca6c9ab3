#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

usage() {
  cat <<'END'
usage: bash tests/mutate.sh [--list] [--presets NAMES]

Deletes every event, wait, barrier and fence of the CUDA code under include/ in turn, in a copy of the repository, and runs the
tests on the emulated device: at least 95 % of the deletions must fail one. A survivor is listed with the reason that
its line, or the one before, gives as "mutation survives: <why>".

  --list           only say what would be deleted
  --presets NAMES  presets whose tests run, one after the other until one fails (default: release,tsan)
END
}

list=() presets=release,tsan
while [ $# -gt 0 ]; do
  case $1 in
    --list) list=(--list) ;;
    --presets) presets=${2:?--presets takes names}; shift ;;
    -h | --help) usage; exit 0 ;;
    *) echo "tests/mutate.sh: unknown option $1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

source "$root/tests/support/install.sh"
cd "$root"
have python3 || install python3 "deleting calls one at a time"
scratch=$root/build/mutate
if [ ${#list[@]} = 0 ]; then
  need_compiler
  has_header catch2/catch_all.hpp || has_header catch2/catch.hpp || install catch2 "the tests"
  has_header boost/context/detail/fcontext.hpp || install libboost-context-dev "the emulated device"
  mkdir -p "$scratch"
  tar -c --exclude=./build --exclude=./.git . | tar -x -C "$scratch"
  cd "$scratch"
  for preset in ${presets//,/ }; do
    step "configuring $preset" cmake --preset "$preset" -DHEDDLE_BUILD_EXAMPLES=OFF -DHEDDLE_BUILD_BENCH=OFF \
      -DHEDDLE_TEST_BUILD=OFF
  done
fi
exec python3 "$root/tests/support/mutate.py" "$root" "$scratch" --presets "$presets" --jobs "$(nproc)" "${list[@]}"
