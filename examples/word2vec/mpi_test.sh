#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bash examples/word2vec/mpi_test.sh MODE LAUNCHER... PROGRAM: processes learn the text shipped; in the mode geo-sgd one epoch, and
# then another one from its checkpoint.
set -euo pipefail
mode=$1
shift
[ "$mode" = geo-sgd ] || exec "$@" --check --epochs 2 --mode "$mode"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$@" --train "$(dirname "$0")/../data/kjv/kjv.norm.txt" --epochs 1 --mode "$mode" --checkpoint "$folder/saved"
"$@" --check --epochs 2 --mode "$mode" --checkpoint "$folder/saved" --resume | tee "$folder/said"
! grep -q " 0 words/s" "$folder/said"
