#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this: bench/hogwild.sh BINARY JSON [ROWS [REPETITIONS]]
set -euo pipefail
program=$1 json=$2
shift 2
"$program" "$@" | tee "$json.log"
awk 'BEGIN { print "{\"ratios\": [" }
     $1 == "RATIO" { printf "%s{\"case\": \"%s\", \"ours\": %s, \"other\": %s, \"unit\": \"%s\", \"ratio\": %s}", n++ ? ",\n" : "", $2, $3, $4, $5, $6 }
     END { print "\n]}" }' "$json.log" >"$json"
rm "$json.log"
