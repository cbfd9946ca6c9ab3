#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bash examples/run.sh [ARGUMENTS...]: builds examples/gpt in release and runs it with all the arguments.
# bash examples/run.sh --mpi N [ARGUMENTS...]: the same with N processes for ranks, under mpirun. Before --example ctr: that.
# bash examples/run.sh --example NAME [ARGUMENTS...]: another example: vision, word2vec, ctr, planner or topology.
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
fi
if [ "${1-}" = --example ]; then
  case ${2-} in
    gpt | vision | word2vec | ctr | planner | topology) program=$2 ;;
    *) echo "examples/run.sh: --example takes gpt, vision, word2vec, ctr, planner or topology, not '${2-}'" >&2; exit 2 ;;
  esac
  shift 2
  if [ ${#launcher[@]} -gt 0 ]; then
    case $program in
      gpt | ctr) program=${program}_mpi ;;
      *) echo "examples/run.sh: --mpi goes with gpt and ctr, not with $program" >&2; exit 2 ;;
    esac
  fi
fi

build() {
  cd "$root"
  need_compiler
  if [ ${#launcher[@]} -gt 0 ]; then
    need_mpi "ranks that are processes"
  fi
  case $program in vision | ctr*) has_header zlib.h || install zlib1g-dev "reading gzipped data" ;; esac
  [ $program != ctr ] || has_header zmq.h || (install libzmq3-dev "servers that are processes") || echo "going on without ZeroMQ"
  step "configuring" cmake --preset release -DHEDDLE_BUILD_TESTS=OFF -DHEDDLE_BUILD_BENCH=OFF "${options[@]}" -B build/examples
  step "building" cmake --build build/examples -j "$jobs" --target $program
}

# What the build has to say goes to stderr, so that stdout is the example's alone.
(build) >&2
cd "$root"
# Open MPI refuses more ranks than cores, and root, unless asked.
if [ ${#launcher[@]} -gt 0 ] && mpirun --version | grep -q 'Open MPI'; then
  launcher+=(--oversubscribe --allow-run-as-root)
fi
exec "${launcher[@]}" "$root/build/examples/examples/$program" "$@"
