#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bash examples/word2vec/corpus.sh OUTPUT [FILE...]: a text of some 10 million words to learn from: two English
# dictionaries of the distribution (dict-gcide, dict-wn), the King James Bible, the Brown corpus where it is found
# (brown.norm.txt.gz in the folder HEDDLE_DATA, or in its brown/; it isn't shipped), and the files named. Lower-case
# letters only; an entry of a dictionary is a line.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/tests/support/install.sh"
output=${1-}
[ -n "$output" ] || { echo "usage: bash examples/word2vec/corpus.sh OUTPUT [FILE...]" >&2; exit 2; }
shift
for file in "${HEDDLE_DATA-}"{/brown,}/brown.norm.txt.gz; do
  if [ -n "${HEDDLE_DATA-}" ] && [ -e "$file" ]; then
    set -- "$file" "$@"
    break
  fi
done
for name in gcide wn; do
  [ -e /usr/share/dictd/$name.dict.dz ] || install dict-$name "the text"
done
{
  for name in gcide wn; do
    gzip -dc <"/usr/share/dictd/$name.dict.dz" | LC_ALL=C tr 'A-Z' 'a-z' |
      LC_ALL=C awk '/^[^ ]/ { printf "\n" } { gsub(/[^a-z]+/, " "); printf "%s ", $0 } END { printf "\n" }'
  done
  for file in "$root/examples/data/kjv/kjv.norm.txt" "$@"; do
    case $file in *.gz) gzip -dc "$file" ;; *) cat "$file" ;; esac | fold -s -w 600
    echo
  done
} | LC_ALL=C sed -E 's/ +/ /g; s/^ //; s/ $//; /^$/d' >"$output.partial"
mv "$output.partial" "$output"
wc "$output" | awk '{ printf "%s: %d lines, %d words, %d bytes\n", $4, $1, $2, $3 }'
