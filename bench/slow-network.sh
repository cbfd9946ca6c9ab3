#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# bench/run.sh runs this: bench/slow-network.sh BINARY JSON [RATE | real]. First ranks in threads over throttled links; then
# processes of two network namespaces that a veth pair joins, MPI over TCP, the link limited by a token bucket (tc tbf).
# With `real` only that, with a RATE such as unlimited or 2x2-1Gbit only that one of threads. It needs root; what can't be had is a line SKIP.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/tests/support/install.sh"
cd "$root"
binary=$1 json=$2
[ "${3-}" = real ] || "$binary" "$json" ${3+"$3"}
[ "${3-real}" = real ] || exit 0

skip() {
  echo "SKIP real $*"
  exit 0
}
[ "$(id -u)" = 0 ] || skip "network namespaces need root: sudo bash bench/run.sh slow-network real"
{ have ip && have tc; } || (install iproute2 "two network namespaces") || skip "iproute2 can't be had here"
(need_mpi "processes that talk over TCP") && mpirun --version | grep -qE "Open MPI|OpenRTE" ||
  skip "Open MPI can't be had here"

# Two machines, as far as Open MPI can tell: a network namespace and a host name each.
a=heddle-a-$$ b=heddle-b-$$ work=$(mktemp -d)
cleanup() {
  ip netns del "$a" 2>/dev/null || true  # its end of the veth pair goes with it, and so the other one
  ip netns del "$b" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT
try() {
  local why
  why=$("$@" 2>&1) || skip "this machine refuses '$*': $(echo "$why" | head -n 1)"
}
try ip netns add "$a"
try ip netns add "$b"
try ip link add heddle0 netns "$a" type veth peer name heddle0 netns "$b"
try ip -n "$a" address add 10.210.77.1/24 dev heddle0
try ip -n "$b" address add 10.210.77.2/24 dev heddle0
for space in "$a" "$b"; do
  try ip -n "$space" link set lo up
  try ip -n "$space" link set heddle0 up
done
try ip netns exec "$a" unshare --uts true
cat >"$work/enter" <<END
#!/bin/sh
# What mpirun calls in place of ssh: HOST COMMAND...
shift
exec ip netns exec $b unshare --uts sh -c "hostname $b; \$*"
END
chmod +x "$work/enter"

step "building slow_network_mpi" mpicxx -DOMPI_SKIP_MPICXX -O3 -DNDEBUG -std=c++20 -Iinclude \
  bench/peers/slow_network_mpi.cpp -o "$work/slow_network_mpi" -lz
run() {  # run NAME BYTES-PER-SECOND
  ip netns exec "$a" unshare --uts sh -c 'hostname "$0"; exec "$@"' "$a" timeout 600 \
    mpirun --allow-run-as-root --bind-to none --host 10.210.77.1:2,10.210.77.2:2 --mca plm_rsh_agent "$work/enter" \
    --mca pml ob1 --mca btl self,tcp --mca btl_tcp_if_include 10.210.77.0/24 --mca oob_tcp_if_include 10.210.77.0/24 \
    "$work/slow_network_mpi" "${json%.json}_real-$1.json" "$1" "$2"
}
for limit in "100Mbit 12.5e6 64kb" "1Gbit 125e6 512kb"; do
  read -r name bytes burst <<<"$limit"
  for space in "$a" "$b"; do
    try tc -n "$space" qdisc replace dev heddle0 root tbf rate "${name,,}" burst "$burst" latency 200ms
  done
  run "$name" "$bytes"
done
for space in "$a" "$b"; do tc -n "$space" qdisc del dev heddle0 root; done
run unlimited 0
