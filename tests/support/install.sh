# SPDX-FileCopyrightText: The Heddle authors
# SPDX-License-Identifier: Apache-2.0
#
# Sourced by tests/run.sh, examples/run.sh and bench/run.sh; the caller sets `root` to the repository.
# need_packages installs what a Debian or Ubuntu machine lacks and says so; step runs a command quietly.
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
PATH="$PATH:/usr/local/cuda/bin"

die() {
  echo "error: $*" >&2
  exit 1
}

# step "what" command...: silent but for one line with the seconds it took; the whole log and its exit code if it fails.
step() {
  local what=$1 log start status
  shift
  log=$(mktemp) start=$SECONDS
  echo "$what ..."
  if "$@" >"$log" 2>&1 </dev/null; then
    echo "$what: done ($((SECONDS - start)) s)"
    rm -f "$log"
    return 0
  else
    status=$?
  fi
  cat "$log"
  rm -f "$log"
  echo "$what: FAILED with exit code $status: $*" >&2
  return $status
}

have() { command -v "$1" >/dev/null 2>&1; }
has_mpi() { have mpirun && have mpicxx && echo "#include <mpi.h>" | mpicxx -x c++ -E - >/dev/null 2>&1; }
has_header() { echo "#include <$1>" | g++ -std=c++20 -x c++ -E - >/dev/null 2>&1; }

as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  else
    sudo "$@"
  fi
}

apt_updated=no

# install PACKAGE REASON
install() {
  echo "installing $1: needed for $2"
  if ! have apt-get; then
    die "this machine has no apt-get; install the equivalent of the Debian package $1 and run this again"
  fi
  if [ "$(id -u)" != 0 ] && ! { have sudo && sudo -n true 2>/dev/null; } && ! { have sudo && [ -t 0 ]; }; then
    die "installing needs root; run this as root, or first: sudo apt-get install $1"
  fi
  if [ $apt_updated = no ]; then
    step "apt-get update" as_root apt-get -q update || echo "going on with the old package lists" >&2
    apt_updated=yes
  fi
  step "apt-get install $1" as_root apt-get -qy install --no-install-recommends "$1" ||
    die "could not install $1; install it by hand and run this again"
}

# A CMake of 3.25 or newer: the distribution's, else one from PyPI in a virtual environment under build/.
cmake_is_new() {
  have cmake && [ "$(printf '%s\n3.25\n' "$(cmake --version | sed -n '1s/.* //p')" | sort -V | head -n 1)" = 3.25 ]
}

need_cmake() {
  local venv=$root/build/cmake-venv
  PATH="$venv/bin:$PATH"
  cmake_is_new && return
  have cmake || install cmake "configuring the build"
  hash -r
  cmake_is_new && return
  echo "$(cmake --version | sed -n 1p) is older than 3.25: installing the PyPI package cmake into $venv"
  have python3 || install python3 "installing a newer CMake"
  python3 -c "import ensurepip, venv" 2>/dev/null || install python3-venv "installing a newer CMake"
  step "pip install cmake" sh -c "python3 -m venv '$venv' && '$venv/bin/pip' -q install 'cmake>=3.25,<4'" ||
    die "could not install CMake 3.25 or newer; install it by hand and run this again"
  hash -r
  cmake_is_new || die "the CMake in $venv does not run"
}

# What every build needs.
need_compiler() {
  have g++ || install g++ "compiling"
  g++ -std=c++20 -x c++ -fsyntax-only - </dev/null 2>/dev/null || die "$(g++ --version | sed -n 1p) knows no C++20"
  have ninja || install ninja-build "building"
  need_cmake
}

# need_mpi REASON: mpirun, the compiler's wrapper, which the package of mpirun brings too, and the header.
need_mpi() {
  has_mpi || install openmpi-bin "$1"
  has_mpi || install libopenmpi-dev "$1"
}

# common_option SCRIPT WORD...: what every script of the tests takes. Sets `jobs` or `filter`, and `taken`, how many words.
common_option() {
  local script=$1
  shift
  taken=1
  case $1 in
    --jobs)
      [[ ${2-} =~ ^[1-9][0-9]*$ ]] || { echo "$script: --jobs takes a number, not '${2-}'" >&2; exit 2; }
      jobs=$2 taken=2 ;;
    -h | --help) usage; exit 0 ;;
    -*) echo "$script: unknown option $1" >&2; usage >&2; exit 2 ;;
    *) filter=(-R "$1") ;;
  esac
}

# configure_and_build PRESET TARGET...: with all targets of `all` when none is named.
configure_and_build() {
  local preset=$1 targets=()
  shift
  [ $# -gt 0 ] && targets=(--target "$@")
  step "configuring $preset" cmake --preset "$preset" || return
  step "building $preset" cmake --build --preset "$preset" -j "$jobs" "${targets[@]}" -- -k 0
}
