#!/usr/bin/env bash
# Create the environment: `infra/setup.sh` for running, `infra/setup.sh lm-eval` to evaluate models
# with lm-evaluation-harness, `infra/setup.sh smollm2` with the real model of the demo (93 MB),
# `infra/setup.sh dev` with the test tools,
# `infra/setup.sh tools` for uv alone, in .cache/tools.
#
# Steps: venv, build tools, torch, the profile's lock, the project itself, the test tools. Each step
# leaves a stamp with the checksum of its inputs: a second call takes milliseconds and needs no
# network, and an edited lock is installed again. All files are in $VENV and .cache/.
#
#   PROFILE=cpu|cuda  profile of the lock (default: that of $VENV, or cpu)
#   VENV=.venv        folder of the environment
#   PYTHON=...        interpreter (default: the first of python3.11 ... python3 that is 3.11 to 3.14)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
STAMPS=$VENV/.plumbline
TOOLS=.cache/tools
PYTHONS="python3.11 python3.12 python3.13 python3"
DRIVER=580 # the first with CUDA 13, which torch 2.13 is built for
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
export PIP_CACHE_DIR="$PWD/.cache/pip" UV_CACHE_DIR="$PWD/.cache/uv" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-$PYTHONS}; do
        # Run it: version managers put names on PATH that only print an error.
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
            2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 to 3.14 among: ${PYTHON:-$PYTHONS}. \
Install one, or name it: make setup PYTHON=/path/to/python3.11"
}

at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

# Check the needs of the locked wheels before gigabytes are downloaded.
check_machine() {
    local machine glibc needed
    machine=$(uname -m)
    case $machine in
        x86_64) needed=2.31 ;;
        aarch64) needed=2.34 ;;
        *) fail "there are no wheels for $machine: a Linux machine with x86_64 or aarch64 is needed" ;;
    esac
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null) ||
        fail "this system has no glibc, which the wheels need: use a Debian, Ubuntu or RHEL image"
    at_least "${glibc#glibc }" $needed || fail "the wheels need glibc $needed on $machine (Ubuntu \
22.04, Debian 12 or RHEL 9 have it), and this is $glibc: use a newer image"
}

# triton compiles the C code that starts CUDA kernels, and needs a compiler and Python's headers.
check_cuda() {
    local headers driver
    [[ -n ${CC:-} ]] || command -v gcc >/dev/null || command -v clang >/dev/null ||
        fail "PROFILE=cuda needs a C compiler at run time, for triton: apt-get install gcc"
    headers=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [[ -f $headers/Python.h ]] || fail "PROFILE=cuda needs Python's headers at run time, for triton, \
and $headers/Python.h is not there: apt-get install python3-dev"
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) ||
        return 0
    at_least "${driver:-$DRIVER}" $DRIVER || echo "setup: NVIDIA's driver here is $driver, and \
CUDA 13 needs $DRIVER or newer: update it before a run (cuda-compat will do on data centre GPUs)" >&2
}

make_venv() {
    [[ -x $VENV/bin/python ]] && return
    local python
    check_machine
    python=$(find_python)
    [[ $PROFILE == cpu ]] || check_cuda "$python"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments (on Debian: apt-get install python3-venv)"
    "$python" -m venv "$VENV"
}

# step NAME FILE... -- COMMAND...: run COMMAND unless it has run for FILEs with this content.
step() {
    local name=$1 inputs=() wanted
    shift
    while [[ $1 != -- ]]; do
        inputs+=("$1")
        shift
    done
    shift
    wanted=$(sha256sum "${inputs[@]}")
    [[ -f $STAMPS/$name && $(<"$STAMPS/$name") == "$wanted" ]] && return
    local began=$SECONDS
    echo "setup: $name"
    "$@"
    ((SECONDS - began < 5)) || echo "setup: $name took $((SECONDS - began)) s"
    worked=$name
    mkdir -p "$STAMPS"
    printf '%s\n' "$wanted" >"$STAMPS/$name"
}

# On a terminal both installers draw bars; in a log they say nothing.
quiet=(-qq)
[[ ! -t 2 ]] || quiet=()
pip_install() { "$VENV/bin/python" -m pip install "${quiet[@]}" --no-deps --no-compile "$@"; }
pip_locked() { pip_install --no-build-isolation --require-hashes "${@:2}" -r "$1"; }

# install_uv PYTHON: the release of its lock, never into $VENV.
install_uv() {
    local wanted
    wanted=$(sha256sum requirements/tools.lock)
    [[ -f $TOOLS/stamp && $(<"$TOOLS/stamp") == "$wanted" ]] && return
    "$1" -m venv --clear "$TOOLS" &&
        "$TOOLS/bin/python" -m pip install -qq --no-deps --require-hashes -r requirements/tools.lock &&
        printf '%s\n' "$wanted" >"$TOOLS/stamp"
}

# uv installs the same files, by the same hashes, in a quarter of pip's time (12 s instead of 49 s
# for cpu.lock). It does not read pip's configuration, so where it fails pip tries with that.
locked() {
    local index
    index=${PIP_INDEX_URL:-$("$VENV/bin/python" -m pip config get global.index-url 2>/dev/null || true)}
    [[ -z $index ]] || export UV_DEFAULT_INDEX=$index
    install_uv "$VENV/bin/python" &&
        "$TOOLS/bin/uv" pip install "${quiet[@]}" --python "$VENV/bin/python" --no-deps \
            --no-build-isolation --require-hashes -r "$1" && return
    echo "setup: uv cannot install $1; trying pip" >&2
    pip_locked "$1"
}

install_torch() {
    pip_locked requirements/torch.lock 2>/dev/null && return
    echo "setup: the configured package sources have no CPU build of torch with a hash of \
requirements/torch.lock, trying $TORCH_CPU_INDEX"
    pip_locked requirements/torch.lock --index-url "$TORCH_CPU_INDEX"
}

# pip compiles one file after the other; this takes all cores. Some packages have files that are no
# Python of this version: templates, tests.
compile_all() { "$VENV/bin/python" -m compileall -qq -j 0 "$VENV/lib" flows tasks || true; }

# Setuptools warns about every editable installation.
install_project() { PYTHONWARNINGS=ignore pip_install --no-build-isolation --editable .; }

if [[ ${1:-} == tools ]]; then
    install_uv "$(find_python)"
    exit
fi
worked=
installed=$(cat "$STAMPS/profile" 2>/dev/null || true)
PROFILE=${PROFILE:-${installed:-cpu}}
[[ $PROFILE == cpu || $PROFILE == cuda ]] || fail "PROFILE=$PROFILE: it is cpu or cuda"
[[ -z $installed || $installed == "$PROFILE" ]] || fail "$VENV holds profile $installed; make another one: make setup PROFILE=$PROFILE VENV=.venv-$PROFILE"
make_venv

step build requirements/build.lock -- pip_locked requirements/build.lock
mkdir -p "$STAMPS" && printf '%s\n' "$PROFILE" >"$STAMPS/profile"
[[ $PROFILE == cuda ]] || step torch requirements/torch.lock -- install_torch
step "$PROFILE" "requirements/$PROFILE.lock" -- locked "requirements/$PROFILE.lock"
step project pyproject.toml -- install_project
case ${1:-} in
    "") extras=() ;;
    lm-eval | smollm2) extras=("$1") ;;
    dev) extras=(dev) ;;
    *) fail "unknown argument $1: nothing, lm-eval, smollm2, dev or tools" ;;
esac
for name in "${extras[@]}"; do
    step "$name" "requirements/$name.lock" -- locked "requirements/$name.lock"
done
mapfile -t made < <(find "$STAMPS" -type f ! -name bytecode | sort)
step bytecode "${made[@]}" -- compile_all
if [[ -n $worked ]]; then
    echo "setup: done in $SECONDS s. What to type next:
  make demo                                 SFT, reward model and PPO of a toy, 2 to 7 minutes
  $VENV/bin/plumbline audit DIR             what is wrong with a checkpoint
  $VENV/bin/plumbline deliver DIR base=DIR out=DIR
  $VENV/bin/plumbline help                  every command"
fi
