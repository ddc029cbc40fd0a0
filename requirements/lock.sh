#!/usr/bin/env bash
# Makes every lock in this folder: `make lock`, or `requirements/lock.sh cpu dev`. The pins are those
# of pyproject.toml; an .in file has what else a lock needs.
#
# cpu comes first: the others take it as a constraint, so that a package has one version in the
# whole project. Not cuda: its torch asks for another release of triton. A lock that already
# satisfies its .in file keeps its versions; delete it to move everything to the newest. Hashes of all
# files of a release are kept, so one lock serves Python 3.11 to 3.14 on x86-64 and aarch64: what
# only some of them need is in the .in files, and gets a marker here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export UV_CACHE_DIR="$PWD/.cache/uv" PIP_CACHE_DIR="$PWD/.cache/pip"
tools=.cache/tools

lock() {
    local name=$1
    local -a args=() sources=(pyproject.toml)
    case $name in
        cpu)
            sources+=(requirements/cpu.in)
            args=(--extra train --extra serve-cpu --override requirements/overrides-cpu.txt)
            ;;
        cuda)
            sources+=(requirements/cuda.in)
            args=(--extra train --extra serve)
            ;;
        gate) args=(--constraint requirements/cpu.lock) ;;
        lm-eval | dev) # only what the profiles lack
            args=(--extra "$name" --constraint requirements/cpu.lock --override requirements/overrides-dev.txt)
            mapfile -t -O 6 args < <(sed -nE 's/^([^ #=]+)==.*/--no-emit-package=\1/p' requirements/cpu.lock)
            ;;
        torch)
            sources=(requirements/torch.in)
            args=(--no-deps --index-url "$(sed -n 's/^TORCH_CPU_INDEX=//p' infra/setup.sh)")
            ;;
        smollm2 | tools) sources=("requirements/$name.in") args=(--no-deps) ;;
        *) sources=("requirements/$name.in") args=(--constraint requirements/cpu.lock) ;;
    esac
    echo "locking requirements/$name.lock"
    "$tools/bin/uv" pip compile "${sources[@]}" "${args[@]}" \
        --output-file "requirements/$name.lock" --quiet --no-header --generate-hashes \
        --python-version 3.11 --python-platform x86_64-manylinux_2_28
    # Of vLLM, with wheels for x86-64 alone; and of Prefect.
    sed -i -E -e "s/^(intel-(openmp|cmplr-lib-ur)==[^ ]+) /\\1 ; platform_machine == 'x86_64' /" \
        -e "s/^(whenever==[^ ]+) /\\1 ; python_version >= '3.13' /" "requirements/$name.lock"
}

infra/setup.sh tools
names=("$@")
((${#names[@]})) || names=(cpu cuda server gate smollm2 lm-eval dev build tools torch)
for name in "${names[@]}"; do lock "$name"; done
