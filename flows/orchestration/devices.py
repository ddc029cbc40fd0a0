"""Let a stage have its GPUs, or the CPUs of a machine without, to itself.

Stages of other runs in the folder wait for it, and nothing else does: preparing data goes on.
"""

from __future__ import annotations

import contextlib
import socket

from flows.cli.composed import Composed
from tasks.core import machine
from tasks.pipeline import locks
from tasks.pipeline.locks import Needs, Patience


def names(composed: Composed, needs: Needs) -> list[str]:
    """Return the devices that a stage of a run computes on: `GPU-<UUID>`, or `cpu-<host>`."""
    train, rollout, smoke = (composed.settings.get(k, {}) for k in ("train", "rollout", "smoke"))
    ranks, engine = train.get("nproc", 1), smoke.get("tensor_parallel", 1)
    if rollout.get("engine") == "server":
        ranks += rollout["servers"] * rollout["tensor_parallel"]
    count = {Needs.NOTHING: 0, Needs.DEVICE: 1, Needs.RANKS: ranks, Needs.ENGINE: engine}[needs]
    if count and machine.has_gpu(train.get("device", "auto")):
        return [gpu.uuid for gpu in machine.gpus()[:count]]
    return [f"cpu-{socket.gethostname()}"][:count]


def reserve(
    composed: Composed, needs: Needs, patience: Patience
) -> contextlib.AbstractContextManager[None]:
    """Wait until a stage has its devices, and keep them while the block runs. Raises BusyError."""
    return locks.devices(composed.runs, names(composed, needs), patience)
