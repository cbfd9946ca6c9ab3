#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this instead of a build by CMake: gpu.cu needs nvcc and a card.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

skip() {
  for case in gpu.native gpu.ring gpu.direct gpu.torus_2d gpu.halving_doubling gpu.recursive_doubling gpu.tree \
    gpu.double_tree gpu.hierarchical gpu.leaders gpu.pipelined_ring gpu.fused_adamw gpu.dgc_step; do
    echo "SKIP $case $*"
  done
  exit 0
}
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null) || skip "no nvcc: install the CUDA Toolkit"
cards=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null) || cards=
[ -n "$cards" ] || skip "no GPU: nvidia-smi lists none"
echo "$cards" | sed 's/^/card (name, memory, driver): /'
mkdir -p build/bench bench/results
"$nvcc" -std=c++20 -O3 -arch=native -I include bench/gpu.cu -o build/bench/gpu
build/bench/gpu bench/results/gpu.json "$@"
