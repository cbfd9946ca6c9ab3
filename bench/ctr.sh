#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this: bench/ctr.sh BINARY JSON [REPETITIONS [ROWS]]
# ROWS of the run with 100 M keys: 4 M by default, of 39 features each.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/tests/support/install.sh"
cd "$root"
program=$1 json=$2 repetitions=${3-7} rows=${4-4000000}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
log=$folder/log
median() { sort -n | awk '{ x[NR] = $1 } END { print x[int((NR + 1) / 2)] }'; }
now() { date +%s.%N; }

# By its file: this benchmark's program has the same name.
step "building the example" cmake --build build/bench -j "$(nproc)" --target examples/ctr
example=build/bench/examples/ctr
"$program" threads "$repetitions" | tee -a "$log"

# liblinear's L2-regularized logistic regression, with the best of five costs. Its training time: all less what the same
# command takes to read and to end at once.
if have liblinear-train || (install liblinear-tools "comparing with liblinear"); then
  "$program" write "$folder/train" "$folder/test"
  for solver in primal.0 dual.7; do
    options=(-s "${solver#*.}" -B 1 -q) best=9
    for cost in 0.01 0.03 0.1 0.3 1; do
      liblinear-train "${options[@]}" -c $cost "$folder/train" "$folder/model"
      loss=$("$program" loss "$folder/model" "$folder/test")
      if awk "BEGIN { exit !($loss < $best) }"; then best=$loss cheapest=$cost; fi
    done
    target=$(awk "BEGIN { print $best * 1.005 }")
    for ((i = 0; i < repetitions; i++)); do
      a=$(now)
      liblinear-train "${options[@]}" -c $cheapest "$folder/train" "$folder/model"
      b=$(now)
      liblinear-train "${options[@]}" -c $cheapest -e 1e9 "$folder/train" "$folder/none"
      c=$(now)
      ours=$("$program" reach "$target")
      awk -v theirs="$(awk "BEGIN { print $b - $a - ($c - $b) }")" '{ print theirs, $1, theirs / $1, $2, theirs / $2 }' <<<"$ours"
    done >"$folder/times"
    column() { awk -v "c=$1" '{ print $c }' "$folder/times" | median; }
    echo "liblinear, ${solver%.*}: cost $cheapest, test log loss $best, asked of ours: $target"
    for t in 1 2; do
      printf 'RATIO liblinear.%s.%d %.4f %.4f s %.3f\n' "${solver%.*}" $t "$(column $((2 * t)))" "$(column 1)" "$(column $((2 * t + 1)))"
    done | tee -a "$log"
  done
else
  echo "SKIP liblinear liblinear-tools can't be had here"
fi

# Parameter servers: each row for itself, and the rows of a batch merged.
generated=(--data generated --rows 60000 --epochs 1)
if (need_mpi "parameter servers") && mpirun --version | grep -qE "Open MPI|OpenRTE"; then
  mkdir -p build/bench/peers
  step "building ctr_mpi" mpicxx -DOMPI_SKIP_MPICXX -O3 -DNDEBUG -std=c++20 -DCTR_MPI=1 -Iinclude \
    -DCTR_DATA=\""$root/examples/data"\" examples/ctr/main.cpp -lz -o build/bench/peers/ctr_mpi
  launch=(--oversubscribe --allow-run-as-root --bind-to none --mca mpi_yield_when_idle 1 build/bench/peers/ctr_mpi)
  step "comparing final tables" sh examples/ctr/same.sh "$example" mpirun -np 4 "${launch[@]}"
  for n in 1 2; do
    for batch in 1 128; do
      few=("${generated[@]}") && [ $batch != 1 ] || few+=(--rows 6000)
      mpirun -np $((2 * n)) "${launch[@]}" "${few[@]}" --model fm --mode async_ps --servers $n --workers $n --batch $batch \
        >"$folder/said"
      awk '/rows\/s;/ { for (i = 2; i <= NF; i++) if ($i == "rows/s;") rate = $(i - 1) }
           /workers sent/ { bytes = $3; messages = $6 }
           END { print rate, bytes, messages }' "$folder/said" >"$folder/$batch"
    done
    awk -v n=$n 'NR == FNR { split($0, one); next }
      { printf "RATIO server.%d+%d.speed %.0f %.0f rows/s %.3f\n", n, n, $1, one[1], $1 / one[1]
        printf "RATIO server.%d+%d.bytes %.1f %.1f bytes/row %.3f\n", n, n, $2, one[2], one[2] / $2
        printf "RATIO server.%d+%d.messages %.5f %.5f messages/row %.3f\n", n, n, $3, one[3], one[3] / $3 }' \
      "$folder/1" "$folder/128" | tee -a "$log"
  done
else
  echo "SKIP server Open MPI can't be had here"
fi

# Synchronous training; a server, a process, is killed: until all workers have gone on. Against the longest pause between two
# tries of a worker.
for ((i = 0; i < repetitions; i++)); do
  "$example" --data generated --rows 40000 --epochs 1 --model fm --mode sync --over processes --servers 2 --workers 2 \
    --kill-server-at 150 --save-every 100 >"$folder/said" 2>&1 || break
  sed -nE 's/^server 0 killed.* after ([0-9.]+) s$/\1/p' "$folder/said"
done >"$folder/times"
if [ "$(wc -l <"$folder/times")" = "$repetitions" ]; then
  seconds=$(median <"$folder/times")
  awk -v s="$seconds" 'BEGIN { printf "RATIO recovery %.3f 1.000 s %.3f\n", s, 1 / s }' | tee -a "$log"
elif grep -q "needs ZeroMQ" "$folder/said"; then
  echo "SKIP recovery $(tail -n 1 "$folder/said")"
else
  cat "$folder/said" >&2
  die "a server that was killed was not recovered from, in run $((i + 1)) of $repetitions"
fi

# 100 M keys to draw from in fixed memory: the most that the process has at once, with all that isn't the table.
memory=64 cells=256
"$example" --data generated --keys 100000000 --rows "$rows" --epochs 1 --model linear --memory $memory --cells $cells |
  tee "$folder/said"
awk -v bound=$(((memory + cells) * 1048576)) \
  '/^the process had/ { printf "RATIO bounded.100M %.1f %.1f MB %.3f\n", $4, bound * 1.05e-6, bound * 1.05e-6 / $4 }' \
  "$folder/said" | tee -a "$log"
# The same rows: which keys are distinct, and which the filter lets in at their first sighting.
"$program" keys "$rows" 100000000 $cells | tee -a "$log"

awk 'BEGIN { print "{\"ratios\": [" }
     $1 == "RATIO" { printf "%s{\"case\": \"%s\", \"ours\": %s, \"other\": %s, \"unit\": \"%s\", \"ratio\": %s}", n++ ? ",\n" : "", $2, $3, $4, $5, $6 }
     END { print "\n]}" }' "$log" >"$json"
