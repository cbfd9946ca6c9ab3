#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this: bench/recompute.sh BINARY JSON [ROUNDS].
set -euo pipefail
cd "$(dirname "$0")/.."
exec "$1" "$2" "${2%.json}.svg" "${@:3}"
