#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this after the benchmark: bench/overhead.sh BINARY JSON. Counts instructions and compile time.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/tests/support/install.sh"
cd "$root"
if ! have python3 && ! (install python3 "counting instructions"); then
  echo "SKIP overhead.instructions there is no python3"
  echo "SKIP include.heddle there is no python3"
  exit 0
fi
exec python3 bench/overhead.py "$@"
