#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this: bench/allocator.sh BINARY JSON.
set -euo pipefail
# jemalloc wants more thread-local memory than a library that is loaded later gets.
GLIBC_TUNABLES=glibc.rtld.optional_static_tls=65536 exec "$1" "$2"
