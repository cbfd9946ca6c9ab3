#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bash examples/run.sh [ARGUMENTS...]: builds examples/gpt in release and runs it with all the arguments.
# bash examples/run.sh --mpi N [ARGUMENTS...]: the same with N processes for ranks, under mpirun.
# bash examples/run.sh --example NAME [ARGUMENTS...]: another example: vision, word2vec, planner or topology.
# bash examples/run.sh --help and --list say what it takes; paths in the arguments are relative to the repository.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
jobs=$(nproc)
source "$root/tests/support/install.sh"

program=gpt launcher=() options=()
if [ "${1-}" = --mpi ]; then
  [[ ${2-} =~ ^[1-9][0-9]*$ ]] || { echo "examples/run.sh: --mpi takes a number, not '${2-}'" >&2; exit 2; }
  program=gpt_mpi launcher=(mpirun -np "$2") options=(-DHEDDLE_EXAMPLES_MPI=ON)
  shift 2
elif [ "${1-}" = --example ]; then
  case ${2-} in
    gpt | vision | word2vec | planner | topology) program=$2 ;;
    *) echo "examples/run.sh: --example takes gpt, vision, word2vec, planner or topology, not '${2-}'" >&2; exit 2 ;;
  esac
  shift 2
fi

build() {
  cd "$root"
  need_compiler
  if [ $program = gpt_mpi ]; then
    need_mpi "ranks that are processes"
  fi
  [ $program != vision ] || has_header zlib.h || install zlib1g-dev "reading gzipped images"
  step "configuring" cmake --preset release -DHEDDLE_BUILD_TESTS=OFF "${options[@]}" -B build/examples
  step "building" cmake --build build/examples -j "$jobs" --target $program
}

# What the build has to say goes to stderr, so that stdout is the example's alone.
(build) >&2
cd "$root"
# Open MPI refuses more ranks than cores, and root, unless asked.
if [ $program = gpt_mpi ] && mpirun --version | grep -q 'Open MPI'; then
  launcher+=(--oversubscribe --allow-run-as-root)
fi
exec "${launcher[@]}" "$root/build/examples/examples/$program" "$@"
