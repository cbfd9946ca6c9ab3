#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this: bench/word2vec.sh BINARY JSON [REPETITIONS [MEGABYTES [EPOCHS]]], or ... JSON quality FOLDER [SEEDS]
# One epoch over the first 16 MB of the text of examples/word2vec/corpus.sh by two threads, dimension 100, window 5,
# 5 negatives, sample 1e-4, min-count 5: ours and each peer in turn, the median of the ratios. Counting the words first
# is left out on all sides. Words are those of the file. Cases `.processor` divide by processor time instead of the
# clock's: on a machine with other work they mean more. EPOCHS, 3: of the replicas on slow links, ten minutes.
# quality: what vectors are worth after five epochs over the whole text, the mean of SEEDS (3): of ours, of gensim's, and of
# replicas, by the questions-words.txt and wordsim353.csv in FOLDER; an hour.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/tests/support/install.sh"
cd "$root"
program=$1 json=$2 repetitions=${3-3} megabytes=${4-16} epochs=${5-3} threads=2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
corpus=build/bench/corpus.txt
[ -e $corpus ] || bash examples/word2vec/corpus.sh $corpus
json() {
  awk 'BEGIN { print "{\"ratios\": [" }
       $1 == "RATIO" { printf "%s{\"case\": \"%s\", \"ours\": %s, \"other\": %s, \"unit\": \"%s\", \"ratio\": %s}", n++ ? ",\n" : "", $2, $3, $4, $5, $6 }
       END { print "\n]}" }' "$folder/log" >"$json"
}

if [ "${3-}" = quality ]; then
  eval=${4?FOLDER is missing: where questions-words.txt and wordsim353.csv are} seeds=${5-3}
  words=$(wc -w <$corpus)
  # each NAME BOUND BOUND COMMAND...: prints seconds, percent and correlation with SEED for the seed
  each() {
    local name=$1 analogies=$2 similarities=$3 seed
    shift 3
    for ((seed = 1; seed <= seeds; seed++)); do "${@//SEED/$seed}"; done | awk -v name="$name" -v words=$((5 * words)) \
      -v a="$analogies" -v b="$similarities" '
      { s += $1; x += $2; y += $3; xx += $2 * $2; yy += $3 * $3 }
      function off(x, xx) { x = NR > 1 ? (xx - x * x / NR) / (NR - 1) : 0; return x > 0 ? sqrt(x) : 0 }
      END {
        printf "%s: %.0f words/s, analogies %.2f +- %.2f %%, similarities %.4f +- %.4f\n", name, words / s * NR, x / NR, off(x, xx), y / NR, off(y, yy)
        printf "RATIO quality.%s.analogies %.2f %.2f %% %.3f\n", name, x / NR, a, x / NR / a
        printf "RATIO quality.%s.similarities %.4f %.3f rho %.3f\n", name, y / NR, b, y / NR / b
      }' | tee -a "$folder/log"
  }
  replicas() { "$program" $corpus replicas "$1" "$2" 0 1 5 "$eval" "$3" | awk '{ print $1, $3, $4 }'; }
  gensim_quality() {
    local seconds
    seconds=$(/usr/bin/python3 bench/peers/word2vec.py $corpus "$1" $threads "$2" "$folder/vectors")
    echo "${seconds% *} $("$program" $corpus judge "$folder/vectors" "$eval" | cut -d' ' -f2-)"
  }
  : >"$folder/log"
  each skipgram 25 .65 "$program" $corpus quality skipgram $threads SEED "$eval"
  each cbow 27 .64 "$program" $corpus quality cbow $threads SEED "$eval"
  for workers in 2 4; do each geo.$workers 25 .65 replicas geo $workers SEED; done
  each async_ps.4 25 .65 replicas async 4 SEED
  each synchronous.4 25 .65 replicas sync 4 SEED
  if /usr/bin/python3 -c "import gensim" 2>/dev/null || (install python3-gensim "comparing with gensim"); then
    each gensim.skipgram 25 .65 gensim_quality skipgram SEED
    each gensim.cbow 27 .64 gensim_quality cbow SEED
  else
    echo "SKIP quality.gensim.skipgram python3-gensim can't be had here"
  fi
  json
  exit
fi

head -c "${megabytes}000000" $corpus | sed '$d' >"$folder/text"
words=$(wc -w <"$folder/text")
kept=$("$program" "$folder/text" count)

ours() { "$program" "$folder/text" "$1" "$2" $threads; }
gensim() { /usr/bin/python3 bench/peers/word2vec.py "$folder/text" "$1" $threads; }
# It prints words per second and thread, of the words that it keeps and the line ends. Its processor time has counting in it.
fasttext() {
  local TIMEFORMAT="%U %S" options=(-dim 100 -ws 5 -neg 5 -t 1e-4 -minCount 5 -maxn 0 -epoch 1 -thread $threads -lr 0.025)
  { time command fasttext "$1" -input "$folder/text" -output "$folder/vectors" "${options[@]}" >"$folder/said" 2>&1; } 2>"$folder/time"
  tr '\r' '\n' <"$folder/said" | awk -v kept="$kept" -v threads=$threads -v spent="$(<"$folder/time")" \
    '/words\/sec\/thread/ { rate = $4 } END { split(spent, s, " "); printf "%.4f %.4f\n", kept / (rate * threads), s[1] + s[2] }'
}
# compare CASE "OURS..." "OTHER..."
compare() {
  local i
  : >"$folder/pairs"
  for ((i = 0; i < repetitions; i++)); do
    echo "$($2) $($3)" >>"$folder/pairs"
  done
  awk -v name="$1" -v words="$words" -v threads=$threads '
    { a[NR] = $1; b[NR] = $3; r[NR] = $3 / $1; c[NR] = $2; d[NR] = $4; s[NR] = $4 / $2 }
    function median(x, n,   i, j, t) {
      for (i = 2; i <= n; i++) for (j = i; j > 1 && x[j] < x[j - 1]; j--) { t = x[j]; x[j] = x[j - 1]; x[j - 1] = t }
      return x[int((n + 1) / 2)]
    }
    END {
      printf "RATIO %s %.0f %.0f words/s %.3f\n", name, words / median(a, NR), words / median(b, NR), median(r, NR)
      printf "RATIO %s.processor %.0f %.0f words/s %.3f\n", name, words / median(c, NR), words / median(d, NR), median(s, NR)
    }' "$folder/pairs" | tee -a "$folder/log"
}

: >"$folder/log"
if /usr/bin/python3 -c "import gensim" 2>/dev/null || (install python3-gensim "comparing with gensim"); then
  compare skipgram.gensim "ours skipgram vector_asm" "gensim skipgram"
  compare cbow.gensim "ours cbow vector_asm" "gensim cbow"
else
  echo "SKIP skipgram.gensim python3-gensim can't be had here"
  echo "SKIP cbow.gensim python3-gensim can't be had here"
fi
if have fasttext || (install fasttext "comparing with fastText"); then
  compare skipgram.fasttext "ours skipgram vector_asm" "fasttext skipgram"
else
  echo "SKIP skipgram.fasttext fasttext can't be had here"
fi
compare skipgram.racy "ours skipgram vector_asm" "ours skipgram racy"
compare skipgram.relaxed "ours skipgram vector_asm" "ours skipgram relaxed"

# Replicas on parameter servers: four workers, each with a link of its own, as float16, batches of 10,000 words of a
# worker. Geo-SGD exchanges vectors once 80 terms have changed them; the others all that were touched, after each batch,
# synchronous ones while the next batch is computed. With their last exchange, of all as floats.
slow() {  # slow MODE MBIT: words per second
  "$program" "$folder/text" replicas "$1" 4 "$2" 1 $epochs | awk -v words="$((words * epochs))" '{ print words / $1 }'
}
for link in 1gbit:1000 100mbit:100; do
  geo=$(slow geo "${link#*:}")
  for mode in sync:synchronous async:async_ps; do
    awk -v name="geo.${link%:*}.${mode#*:}" -v a="$geo" -v b="$(slow "${mode%:*}" "${link#*:}")" \
      'BEGIN { printf "RATIO %s %.0f %.0f words/s %.3f\n", name, a, b, a / b }' | tee -a "$folder/log"
  done
done

# Beyond four workers by simulation: of the processor time of a batch, and of what workers of each mode send per batch, from
# the difference between two epochs and one over the first 4 MB.
head -c 4000000 "$folder/text" | sed '$d' >"$folder/short"
batches=$("$program" "$folder/short" count | awk '{ print $1 / 10000 }')
seconds=$("$program" "$folder/short" skipgram vector_asm 1 | awk -v n="$batches" '{ print $2 / n }')
for mode in sync async geo; do
  for workers in 2 4 8; do
    { for e in 1 2; do "$program" "$folder/short" replicas $mode $workers 0 1 $e; done; } |
      awk -v mode=$mode -v w=$workers -v n="$batches" \
        '{ m[NR] = $2 } END { printf "%s %d %.0f\n", mode, w, (m[2] - m[1]) * 1e6 * w / n }'
  done
done >"$folder/sent"
cat "$folder/sent"
python3 bench/word2vec_scale.py "$seconds" <"$folder/sent" | tee -a "$folder/log"

json
