#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bash examples/run.sh [ARGUMENTS...]: builds examples/gpt in release and runs it with all the arguments.
# bash examples/run.sh --help and --list say what it takes; paths in the arguments are relative to the repository.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
jobs=$(nproc)
source "$root/tests/support/install.sh"

build() {
  cd "$root"
  need_compiler
  step "configuring" cmake --preset release -DHEDDLE_BUILD_TESTS=OFF -B build/examples
  step "building" cmake --build build/examples -j "$jobs" --target gpt
}

# What the build has to say goes to stderr, so that stdout is the example's alone.
(build) >&2
cd "$root"
exec "$root/build/examples/examples/gpt" "$@"
