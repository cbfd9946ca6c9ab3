#!/bin/sh
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# sh examples/ctr/check.sh PROGRAM [failing]: what the command line promises: modes, files, deaths, and what it refuses.
# With `failing` also that a thread that can't be started ends the program at once, whichever it is.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
program=$1
said=$folder/said
ctr() { "$program" --data mushroom --epochs 1 "$@" >"$said" 2>&1 || { cat "$said" >&2; echo "failed: $*" >&2; return 1; }; }
has() { grep -q -e "$1" "$said" || { cat "$said" >&2; echo "expected: $1" >&2; return 1; }; }
# refused STATUS TEXT ARGUMENTS...
refused() {
  status=$1 text=$2
  shift 2
  if "$program" --data mushroom --epochs 1 "$@" >"$said" 2>&1; then code=0; else code=$?; fi
  [ $code = "$status" ] || { cat "$said" >&2; echo "status $code, expected $status: $*" >&2; return 1; }
  has "$text"
}
number() { sed -nE "s/.*$1.*/\1/p" "$said" | tail -n 1; }

# Every mode says how good it is and how stale its rows were; one worker's replica is never stale.
for mode in hogwild async_ps geo_sgd; do
  ctr --mode $mode
  has '^staleness: [0-9.]* pushes of others on average between a pull and its push, [0-9]* at most'
  has 'checksum'
done
ctr --mode geo_sgd --workers 1 --period 3
[ "$(number 'push, ([0-9]+) at most')" = 0 ]
ctr --mode sync
has '^staleness: none'
# Two workers, one at most three pushes ahead: between a pull and its push the other one makes 7 at most.
ctr --mode async_ps --staleness 3 --batch 16
[ "$(number 'push, ([0-9]+) at most')" -le 7 ]

# With 16 bits fewer bytes travel.
ctr --mode async_ps --model fm --batch 32
whole=$(number 'workers sent ([0-9]+)')
ctr --mode async_ps --model fm --batch 32 --half
half=$(number 'workers sent ([0-9]+)')
[ $((half * 10)) -lt $((whole * 9)) ]
ctr --mode geo_sgd --half --epochs 3 --least-accuracy 95
ctr --mode async_ps --gather 1000 --least-accuracy 90

# A line a row: key, weight and eight factors, all of them numbers. The picture is whole.
for mode in hogwild sync geo_sgd; do
  ctr --mode $mode --model fm --export "$folder/text" --svg "$folder/picture" --save "$folder/table"
  rows=$(number 'table ([0-9]+) rows')
  [ "$(wc -l <"$folder/text")" = "$rows" ]
  awk -F '\t' 'NF != 10 { exit 1 } { for (i = 2; i <= NF; i++) if ($i + 0 != $i + 0 || $i !~ /^-?[0-9]/) exit 1 }' "$folder/text"
  [ "$(cut -f 1 "$folder/text" | sort -u | wc -l)" = "$rows" ]
  grep -q '^<svg' "$folder/picture" && grep -q '</svg>' "$folder/picture" && grep -q '<circle' "$folder/picture"
  if grep -q nan "$folder/picture"; then echo "nan in the picture" >&2; exit 1; fi
  sum=$(number '(checksum [0-9a-f]+)')
  ctr --mode $mode --model fm --resume "$folder/table"
  [ "$(number '(checksum [0-9a-f]+)')" != "$sum" ]
done

# Replicas that go on with a saved table begin with its rows: the loss is that of the end, not that of a beginning.
ctr --mode geo_sgd --model fm --epochs 3 --save "$folder/table"
ctr --mode geo_sgd --model fm --resume "$folder/table"
awk '$1 == 4 && NF == 7 { seen = 1; exit !($4 < 0.05) } END { if (!seen) exit 1 }' "$said"

# Files that are damaged, of another model, or can't be written.
"$program" --data mushroom --epochs 1 --model fm --threads 1 --save "$folder/table" >/dev/null
refused 1 "can't open" --resume "$folder/none"
refused 1 'table: ' --model linear --resume "$folder/table"
refused 1 'table: ' --mode geo_sgd --model fm --resume "$folder/table"
head -c 1000 "$folder/table" >"$folder/short"
cp "$folder/table.epochs" "$folder/short.epochs"
refused 1 'short' --model fm --resume "$folder/short"
refused 1 'short' --mode async_ps --model fm --resume "$folder/short"
for option in save export svg; do
  refused 1 'cannot write .*nowhere' --model fm --threads 1 --$option "$folder/nowhere/it"
  if grep -q '^epoch' "$said"; then echo "trained first, then: --$option" >&2; exit 1; fi
done
cp "$folder/table" "$folder/before"
refused=0
(
  trap '' XFSZ # as on a full disk, writing fails
  ulimit -f 8
  "$program" --data generated --rows 3000 --epochs 1 --model fm --threads 1 --save "$folder/table"
) >"$said" 2>&1 || refused=$?
[ $refused = 1 ]
has 'table'
cmp "$folder/table" "$folder/before"

# What goes with what.
refused 2 'allowed are hogwild, async_ps, sync, geo_sgd' --mode async
refused 2 '--period goes with --mode geo_sgd' --mode async_ps --period 4
refused 2 '--period needs servers' --period 4
refused 2 '--gather and --staleness go with' --mode geo_sgd --staleness 4
refused 2 '--gather and --staleness go with' --mode sync --gather 4
refused 2 'exclude each other' --mode async_ps --gather 4 --staleness 4
refused 2 '--memory goes with' --mode geo_sgd --memory 4
refused 2 'allowed are report, reassign' --mode async_ps --on-death shrug
refused 2 'needs a push a batch' --mode geo_sgd --on-death reassign
refused 2 '--over processes' --mode async_ps --kill-worker-at 4
refused 2 'needs another worker' --mode async_ps --over processes --workers 1 --kill-worker-at 4

# A worker, a process, is killed: others take over its rows, each once, or all end.
killed() { ctr --over processes --servers 2 --workers 3 --batch 8 --kill-worker-at 60 --on-death reassign "$@"; }
if ctr --mode async_ps --over processes; then
  for mode in async_ps sync; do
    killed --mode $mode
    has 'takes over the rows of worker 2'
    has '^of [0-9]* batches [0-9]* were pushed, each once'
  done
  killed --mode async_ps --staleness 4 --kill-server-at 90 --save-every 30
  has '^of [0-9]* batches [0-9]* were pushed, each once'
  refused 1 'ctr: ' --mode sync --over processes --workers 3 --batch 8 --kill-worker-at 60
else
  has 'needs ZeroMQ'
fi

[ "${2-}" = failing ] || exit 0
cat >"$folder/fail.c" <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
static int left;
int pthread_create(pthread_t* t, const pthread_attr_t* a, void* (*f)(void*), void* x) {
  static int (*real)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (!real) {
    real = dlsym(RTLD_NEXT, "pthread_create");
    left = atoi(getenv("FAILING_THREAD"));
  }
  return __sync_sub_and_fetch(&left, 1) == 0 ? EAGAIN : real(t, a, f, x);
}
END
cc -shared -fPIC "$folder/fail.c" -o "$folder/fail.so" -ldl || { echo "no C compiler: going on without failing threads"; exit 0; }
for mode in sync geo_sgd; do
  n=1
  while [ $n -lt 40 ]; do
    if FAILING_THREAD=$n LD_PRELOAD=$folder/fail.so timeout 20 "$program" --data mushroom --mode $mode --epochs 1 \
      >"$said" 2>&1; then break; else code=$?; fi
    [ $code = 1 ] || { cat "$said" >&2; echo "status $code where thread $n of $mode fails" >&2; exit 1; }
    n=$((n + 1))
  done
  [ $n -gt 8 ] && [ $n -lt 40 ]
done
