#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bash examples/word2vec/gensim_test.sh PROGRAM: gensim reads the vectors that the program writes, as text and binary, and
# finds the same in both, and the neighbours that the program names. Ends with 77 where there is no gensim.
set -euo pipefail
program=$1
python=/usr/bin/python3
"$python" -c "import gensim" 2>/dev/null || exit 77
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
awk 'BEGIN { srand(1); for (i = 0; i < 4000; i++) { line = ""
       for (k = 0; k < 8; k++) line = line " w" i % 5 * 4 + int(4 * rand())
       print line " \303\251t\303\251" } }' >"$folder/corpus"
for form in text binary; do
  flags=(--train "$folder/corpus" --output "$folder/$form" --size 20 --window 3 --sample 0 --epochs 3 --threads 1)
  [ $form = text ] || flags+=(--binary)
  "$program" "${flags[@]}" --nearest w5 >"$folder/said"
done
"$python" - "$folder" <<'END'
import sys
from gensim.models import KeyedVectors
import numpy

folder = sys.argv[1]
text = KeyedVectors.load_word2vec_format(folder + "/text", binary=False)
binary = KeyedVectors.load_word2vec_format(folder + "/binary", binary=True)
assert text.index_to_key == binary.index_to_key and len(text) == 22 and text.vector_size == 20, text
assert "\u00e9t\u00e9" in text and text.index_to_key[0] == "</s>"
assert numpy.array_equal(text.vectors, binary.vectors) and numpy.abs(text.vectors).max() > 0.05
ours = [l.split(":")[1].split() for l in open(folder + "/said") if l.startswith("w5:")][0]
theirs = text.most_similar("w5", topn=8)
for (word, cosine), name, value in zip(theirs, ours[::2], ours[1::2]):
    assert word == name and abs(cosine - float(value)) < 0.006, (theirs, ours)
END
