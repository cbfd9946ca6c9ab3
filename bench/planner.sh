#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this: bench/planner.sh BINARY JSON.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "$1" examples/data/minimalloc "$2"
