#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bash examples/gpt/convergence.sh: SGD with Nesterov's momentum against DGC at 99.9 % on the GPT example, as a table of
# validation losses. The variables, with their defaults: RANKS="4 8" RATES="0.2 0.4 0.8" SEEDS="1 2 3" STEPS=6000. Both
# sides are tried with all rates; mean and standard deviation are over the seeds. It takes some minutes for each of the
# runs, so what was trained already, in build/convergence, isn't trained again.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
export OPENBLAS_NUM_THREADS=1 # ranks are threads, and matrices are small
ranks=${RANKS:-4 8} rates=${RATES:-0.2 0.4 0.8} seeds=${SEEDS:-1 2 3} steps=${STEPS:-6000}
bash examples/run.sh --list >/dev/null # builds it
kept=build/convergence
mkdir -p "$kept"

echo "| ranks | rate | dense | DGC |"
echo "|---|---|---|---|"
for n in $ranks; do
  for rate in $rates; do
    row="| $n | $rate |"
    for strategy in ring-sgd dgc-999; do
      losses=()
      for seed in $seeds; do
        file=$kept/$strategy-$n-$rate-$seed-$steps
        if [ ! -s "$file" ]; then
          build/examples/examples/gpt --ranks "$n" --strategy "$strategy" --steps "$steps" --sgd-rate "$rate" \
            --seed "$seed" --report "" >"$file.part"
          mv "$file.part" "$file"
        fi
        losses+=("$(sed -n 's/.* validation loss \([0-9.]*\) after.*/\1/p' "$file")")
      done
      row+=$(printf '%s\n' "${losses[@]}" | awk '{ sum += $1; squares += $1 * $1 }
        END { mean = sum / NR; v = NR > 1 ? (squares - NR * mean * mean) / (NR - 1) : 0
              printf " %.3f +- %.3f |", mean, sqrt(v > 0 ? v : 0) }')
    done
    echo "$row"
  done
done
