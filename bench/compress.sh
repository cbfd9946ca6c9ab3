#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this: bench/compress.sh BINARY JSON [BEGINNING-OF-A-CASE].
set -euo pipefail
exec "$@"
