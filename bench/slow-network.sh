#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this: bench/slow-network.sh BINARY JSON.
set -euo pipefail
exec "$1" "$2"
