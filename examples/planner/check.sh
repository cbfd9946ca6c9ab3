#!/bin/sh
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# sh examples/planner/check.sh PROGRAM: what the command line promises of its files, and what it refuses.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
program=$1
said=$folder/said
fail() { cat "$said" >&2; echo "$1" >&2; exit 1; }
# refused STATUS TEXT ARGUMENTS...
refused() {
  status=$1 text=$2
  shift 2
  if "$program" "$@" >"$said" 2>&1; then code=0; else code=$?; fi
  [ $code = "$status" ] || fail "status $code, expected $status: $*"
  grep -q -e "$text" "$said" || fail "expected: $text"
}
input=$folder/buffers.csv
printf 'id,lower,upper,size\na,0,2,10\nb,1,3,20\nc,2,4,10\n' >"$input"

"$program" "$input" --output "$folder/planned.csv" --map "$folder/map.svg" >"$said" || fail "status $?"
[ "$(sed -n 1p "$folder/planned.csv")" = id,lower,upper,size,alignment,gaps,offset ] || fail "expected offsets"
grep -q '<svg' "$folder/map.svg" || fail "expected a drawing"

# A file that can't be written is refused before the search, and nothing is left behind.
echo old >"$folder/old"
mkdir "$folder/folder"
for option in --output --map; do
  other=--output
  [ $option = --map ] || other=--map
  refused 1 "$option can't write $folder/no/such (No such file or directory); it takes a file" \
    "$input" $option "$folder/no/such" $other "$folder/new"
  if grep -q 'lower bound' "$said"; then fail "it searched first"; fi
  refused 1 "$option can't write $folder/folder (Is a directory)" "$input" $option "$folder/folder" $other "$folder/old"
  refused 1 "$option can't write $folder/old/x (Not a directory)" "$input" $option "$folder/old/x"
done
[ ! -e "$folder/new" ] || fail "a file was left behind"
[ "$(cat "$folder/old")" = old ] || fail "a file was changed"
ln -s "$folder/target" "$folder/link"
refused 1 'the target was missed' "$input" --target 1 --output "$folder/link"
[ -s "$folder/target" ] && [ -L "$folder/link" ] || fail "a link was not followed"
"$program" "$input" --output /dev/null >"$said" || fail "status $?"

refused 1 "cannot read $folder/none" "$folder/none"
refused 2 'unknown option --outputs' "$input" --outputs x
refused 2 '--map needs a value' "$input" --map
