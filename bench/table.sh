#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this: bench/table.sh BINARY JSON [REPETITIONS]
set -euo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$1" "${@:3}" | tee -a "$log"
for rule in row_adagrad adagrad; do "$1" bytes $rule | tee -a "$log"; done
awk 'BEGIN { print "{\"ratios\": [" }
     $1 == "RATIO" { printf "%s{\"case\": \"%s\", \"ours\": %s, \"other\": %s, \"unit\": \"%s\", \"ratio\": %s}", n++ ? ",\n" : "", $2, $3, $4, $5, $6 }
     END { print "\n]}" }' "$log" >"$2"
