#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this: bench/reader.sh BINARY JSON [REPETITIONS]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$1" "$folder" "${@:3}" | tee "$folder/log"
awk 'BEGIN { print "{\"ratios\": [" }
     $1 == "RATIO" { printf "%s{\"case\": \"%s\", \"ours\": %s, \"other\": %s, \"unit\": \"%s\", \"ratio\": %s}", n++ ? ",\n" : "", $2, $3, $4, $5, $6 }
     END { print "\n]}" }' "$folder/log" >"$2"
