#!/usr/bin/env bash
# Makes the environment: `infra/setup.sh` for running, `infra/setup.sh dev` with the test tools too.
#
# Steps: venv, build tools, torch, the profile's lock, the project itself, the test tools. Each step
# leaves a stamp made of what it was made from, so that a second call costs milliseconds, touches no
# network, and an edited lock is installed again. Everything lands in this folder: $VENV and .cache/.
#
#   PROFILE=cpu|cuda  which lock (default: what $VENV already holds, else cpu)
#   VENV=.venv        where
#   PYTHON=...        which interpreter (default: the first of python3.11 ... python3 that is >= 3.11)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
STAMPS=$VENV/.plumbline
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
export PIP_CACHE_DIR="$PWD/.cache/pip" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        # Run it: version managers put names on PATH that only print an error.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python >= 3.11 among: ${PYTHON:-python3.11 python3.12 python3.13 python3}. \
Install one, or name it: make setup PYTHON=/path/to/python3.11"
}

make_venv() {
    [[ -x $VENV/bin/python ]] && return
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments (on Debian: apt-get install python3-venv)"
    "$python" -m venv "$VENV"
}

# step NAME FILE... -- COMMAND...: runs COMMAND unless it already ran for FILEs with this content.
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
    echo "setup: $name"
    "$@"
    mkdir -p "$STAMPS"
    printf '%s\n' "$wanted" >"$STAMPS/$name"
}

pip_install() { "$VENV/bin/python" -m pip install -qq --no-deps "$@"; }
pip_locked() { pip_install --no-build-isolation --require-hashes -r "$1"; }

install_torch() {
    local wanted=requirements/torch.in
    pip_install -r "$wanted" 2>/dev/null && return
    echo "setup: the configured package sources have no CPU build of torch, trying $TORCH_CPU_INDEX"
    pip_install --index-url "$TORCH_CPU_INDEX" -r "$wanted"
}

# Setuptools warns that an editable installation is one.
install_project() { PYTHONWARNINGS=ignore pip_install --no-build-isolation --editable .; }

make_venv
held=$(cat "$STAMPS/profile" 2>/dev/null || true)
PROFILE=${PROFILE:-${held:-cpu}}
[[ $PROFILE == cpu || $PROFILE == cuda ]] || fail "PROFILE=$PROFILE: it is cpu or cuda"
[[ -z $held || $held == "$PROFILE" ]] ||
    fail "$VENV holds profile $held; make another one: make setup PROFILE=$PROFILE VENV=.venv-$PROFILE"

step build requirements/build.lock -- pip_locked requirements/build.lock
mkdir -p "$STAMPS" && printf '%s\n' "$PROFILE" >"$STAMPS/profile"
[[ $PROFILE == cuda ]] || step torch requirements/torch.in -- install_torch
step "$PROFILE" "requirements/$PROFILE.lock" -- pip_locked "requirements/$PROFILE.lock"
step project pyproject.toml -- install_project
case ${1:-} in
    "") ;;
    dev) step dev requirements/dev.lock -- pip_locked requirements/dev.lock ;;
    *) fail "unknown argument $1: nothing, or dev" ;;
esac
