#!/bin/sh
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# sh examples/ctr/formats.sh PROGRAM: the same rows as libffm, libsvm and Criteo's TSV. A row is a click if two of its
# three categories are odd, so every model can learn it from any of them.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
program=$1
said=$folder/said

# rows FORMAT SEED COUNT
rows() {
  awk -v format="$1" -v seed="$2" -v count="$3" '
    function next_below(n) { seed = (seed * 16807) % 2147483647; return seed % n }
    BEGIN {
      for (i = 0; i < count; i++) {
        odd = 0
        for (k = 0; k < 3; k++) { x[k] = next_below(20); odd += x[k] % 2 }
        click = odd >= 2
        if (format == "libffm") printf "%d 0:%d:1 1:%d:1 2:%d:1\n", click, x[0], x[1], x[2]
        if (format == "libsvm") printf "%s %d:1 %d:1 %d:1\n", click ? "+1" : "-1", x[0] + 1, x[1] + 101, x[2] + 201
        if (format == "criteo") {
          printf "%d", click
          for (k = 0; k < 13; k++) if (next_below(4) == 0) printf "\t"; else printf "\t%d", next_below(30) - 1
          for (k = 0; k < 26; k++) {
            if (k < 3) printf "\t%08x", x[k] * 2654435 + k
            else if (next_below(5) == 0) printf "\t"
            else printf "\t%08x", next_below(8)
          }
          printf "\n"
        }
      }
    }'
}
for format in libffm libsvm criteo; do
  rows $format 1 4000 >"$folder/$format.train"
  rows $format 2 1000 >"$folder/$format.test"
  for model in linear fm wide-deep; do
    rate=0.05
    [ $model != linear ] || rate=0.3
    "$program" --data "$folder/$format.train" --test "$folder/$format.test" --format $format --model $model --fields 3 \
      --threads 1 --batch 32 --epochs 4 --rate $rate --l1 0 --l2 0 --least-accuracy 97 >"$said" 2>&1 ||
      { cat "$said" >&2; echo "failed: $model on $format" >&2; exit 1; }
    echo "$format: $(grep checksum "$said")"
  done
  # With servers the rows are shared out.
  "$program" --data "$folder/$format.train" --test "$folder/$format.test" --format $format --model fm --fields 3 \
    --mode async_ps --servers 2 --batch 32 --epochs 4 --least-accuracy 97 >"$said" 2>&1 ||
    { cat "$said" >&2; echo "failed: servers on $format" >&2; exit 1; }
  # A damaged row ends the program, and is named.
  { cat "$folder/$format.train"; echo 'nonsense here'; } >"$folder/damaged"
  if "$program" --data "$folder/damaged" --test "$folder/$format.test" --format $format --epochs 1 >"$said" 2>&1; then
    echo "a damaged file of $format was read" >&2
    exit 1
  fi
  grep -q damaged "$said" || { cat "$said" >&2; exit 1; }
  # A file without a row ends it, too.
  printf '\r\n\n' >"$folder/blank"
  for files in "--data $folder/blank --test $folder/$format.test" "--data $folder/$format.train --test $folder/blank"; do
    code=0
    "$program" $files --format $format --epochs 1 >"$said" 2>&1 || code=$?
    if [ $code != 1 ] || ! grep -q 'blank has no row' "$said"; then
      cat "$said" >&2
      echo "a file of $format without a row was read" >&2
      exit 1
    fi
  done
done
