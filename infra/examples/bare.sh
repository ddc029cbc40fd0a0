#!/usr/bin/env bash
# Several bare machines: run this on every one of them, node 0 first or last.
#
#   infra/examples/bare.sh 0 node0.lan +exp=lora_zero3 train.nodes=2 paths.runs=/shared/runs
#   infra/examples/bare.sh 1 node0.lan +exp=lora_zero3 train.nodes=2 paths.runs=/shared/runs
#
# First argument: number of this machine. Second: address of machine 0. The rest: arguments of the
# run, the same on every machine. The project, its environment and paths.runs need the same path on
# all machines (NFS will do). PORT (29500) has to be open between them. If a machine has several
# networks, INTERFACE names the one to use.
set -euo pipefail
(($# >= 3)) || {
    sed -n '2,10p' "$0" >&2
    exit 2
}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export NODE_RANK=$1 MASTER_ADDR=$2 MASTER_PORT=${PORT:-29500}
if [[ -n ${INTERFACE:-} ]]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi
shift 2
exec "${VENV:-.venv}/bin/python" flows/rlhf.py "$@"
