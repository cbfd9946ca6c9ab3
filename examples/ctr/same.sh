#!/bin/sh
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# sh examples/ctr/same.sh PROGRAM [LAUNCHER...]: training that was saved and resumed, and training whose server was killed,
# must end with the table of undisturbed training. With LAUNCHER, which starts ctr_mpi, so must its four processes, and
# replicas of geo_sgd must learn there.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
program=$1
shift
checksum() { "$program" --data mushroom "$@" >"$folder/said" && grep -o 'checksum .*' "$folder/said"; }
same() {
  echo "$1: $2, $3"
  [ "$2" = "$3" ]
}

whole=$(checksum --threads 1 --epochs 2)
checksum --threads 1 --epochs 1 --save "$folder/table" >/dev/null
same "resumed" "$whole" "$(checksum --threads 1 --epochs 1 --resume "$folder/table")"

in_step() { checksum --mode sync --servers 2 --workers 2 --batch 32 --epochs 1 "$@"; }
threads=$(in_step --over threads)
if killed=$(in_step --over processes --kill-server-at 60 --save-every 40); then
  cat "$folder/said"
  grep -q 'server 0 killed' "$folder/said"
  same "killed" "$threads" "$killed"
  in_step --over processes --kill-server-at 100000 2>&1 | grep 'was not reached'
else
  in_step --over processes 2>&1 | grep 'needs ZeroMQ' # else it has failed
fi

if [ $# != 0 ]; then
  "$@" --data mushroom --mode sync --servers 2 --workers 2 --batch 32 --epochs 1 >"$folder/said"
  same "MPI" "$threads" "$(grep -o 'checksum .*' "$folder/said")"
  "$@" --data mushroom --mode geo_sgd --servers 2 --workers 2 --batch 32 --epochs 3 --least-accuracy 97 >"$folder/said" ||
    { cat "$folder/said" >&2; exit 1; }
  grep checksum "$folder/said"
fi

"$program" --servers 2 2>&1 | grep -e '--servers needs servers'
