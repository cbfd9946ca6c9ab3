#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

usage() {
  cat <<'END'
usage: bash bench/run.sh                      list the benchmarks
       bash bench/run.sh NAME [ARGUMENTS...]  build NAME in release and run it; Google Benchmark takes the arguments

Prints one line per case, a ratio above 1 meaning better than the peer or the floor:
    RATIO <case> <ours> <peer-or-floor> <unit> <ratio>
and writes bench/results/NAME.json. A peer that can't be had is a line SKIP <case> <why>.
END
}

# field NAME FIELD: the text after "// FIELD: " in bench/NAME.cpp, or NAME.cu
field() { sed -nE "s@^(//|#) *$2: *@@p" "$root/bench/$1".c*; }

list() {
  local source name found=no
  for source in "$root"/bench/*.cpp "$root"/bench/*.cu; do
    [ -e "$source" ] || continue
    name=$(basename "${source%.*}") found=yes
    printf '%-24s %s\n' "$name" "$(field "$name" about | head -n 1)"
  done
  [ $found = yes ] || echo "there is no benchmark yet"
}

case ${1-} in
  "") list; exit 0 ;;
  -h | --help) usage; exit 0 ;;
  -*) echo "bench/run.sh: unknown option $1" >&2; usage >&2; exit 2 ;;
esac
name=$1
shift
# One in CUDA is built and run by its own script.
[ ! -e "$root/bench/$name.cu" ] || exec bash "$root/bench/$name.sh" "$@"
if [ ! -e "$root/bench/$name.cpp" ]; then
  echo "bench/run.sh: no benchmark is called '$name'. There are:" >&2
  list >&2
  exit 2
fi

jobs=$(nproc)
source "$root/tests/support/install.sh"
cd "$root"
need_compiler
has_header benchmark/benchmark.h || install libbenchmark-dev "the benchmarks"
# Peers: lines "// needs: <Debian package> <header>" in the source.
while read -r package header; do
  [ -z "$package" ] || has_header "$header" || install "$package" "benchmark $name"
done < <(field "$name" needs)
# The same for what it can do without: lines "// wants: <Debian package> <header>".
while read -r package header; do
  [ -z "$package" ] || has_header "$header" || (install "$package" "benchmark $name") || echo "going on without $package"
done < <(field "$name" wants)

step "configuring" cmake --preset release -DHEDDLE_BUILD_TESTS=OFF -B build/bench
step "building $name" cmake --build build/bench -j "$jobs" --target "bench_$name"
mkdir -p bench/results
# A line "// driver: script" in the source: bench/NAME.sh runs everything.
if [ "$(field "$name" driver)" = script ]; then
  exec bash "bench/$name.sh" "build/bench/bench/$name" "bench/results/$name.json" "$@"
fi
"build/bench/bench/$name" --benchmark_repetitions=7 --benchmark_enable_random_interleaving=true \
  --benchmark_report_aggregates_only=true --benchmark_out="bench/results/$name.json" --benchmark_out_format=json "$@"
# What a benchmark adds that Google Benchmark can't measure.
[ ! -e "bench/$name.sh" ] || bash "bench/$name.sh" "build/bench/bench/$name" "bench/results/$name.json"
