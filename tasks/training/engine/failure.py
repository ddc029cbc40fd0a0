"""Errors of a rank that a setting can fix: out of memory, a collective that timed out."""

from __future__ import annotations

import re
from pathlib import Path

from tasks.core.errors import PlumblineError, TrainingError
from tasks.core.files import is_full, write_refused
from tasks.core.machine import has_gpu
from tasks.serving.vllm.job import time_limit
from tasks.training.job import Settings, TrainJob

_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|bad_alloc|cannot allocate memory"
    # oneDNN, if it cannot map its code; a primitive *descriptor* is of an operation it lacks
    r"|could not create a primitive(?! descriptor)",
    re.I,
)
_TIMED_OUT = re.compile(r"timed out", re.I)
_PEER = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe|socket", re.I)
WATCHDOG = "Watchdog caught collective operation timeout"
"""NCCL ends the process with this line, and raises nothing."""
MARGIN_S = 300.0
"""Seconds beside rollouts, for scoring and syncing."""


def explain(error: Exception, job: TrainJob, rank: int) -> PlumblineError | None:
    """Return an error with a hint for the user, or None if only a traceback explains it."""
    if isinstance(error, PlumblineError):
        return error
    text = str(error)
    line = (text.strip() or type(error).__name__).splitlines()[0][:300]
    if ran_out_of_memory(error):
        return out_of_memory(f"rank {rank} ran out of memory: {line}", job)
    if isinstance(error, RuntimeError) and _TIMED_OUT.search(text) and _PEER.search(text):
        return waited(f"rank {rank}", line, job)
    if isinstance(error, OSError) and is_full(error):
        return write_refused(Path(error.filename or job.out), error)
    return None


def ran_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed, on the host or on an accelerator."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
    )


def out_of_memory(what: str, job: TrainJob, details: tuple[str, ...] = ()) -> TrainingError:
    """Return the error for a lack of memory, with the overrides that need less."""
    return TrainingError(what, details=details, hint=" or ".join(smaller(job.settings)))


def smaller(settings: Settings) -> list[str]:
    """Return overrides that need less memory, those that cost least first."""
    batch, zero, peft = settings.batch, settings.zero, settings.peft
    overrides, rollout = [], settings.online.get("rollout", {})
    if rollout.get("engine") == "vllm" and has_gpu(settings.launch.device):
        if zero.stage and not rollout["offload_trainer"]:
            overrides.append("rollout.offload_trainer=true")
        if rollout["gpu_memory"] > 0.3:
            overrides.append("rollout.gpu_memory=0.3")
    if batch.micro_batch_size > 1:
        overrides.append(f"train.micro_batch_size={batch.micro_batch_size // 2}")
    if not settings.gradient_checkpointing:
        overrides.append("train.gradient_checkpointing=true")
    highest = 2 if peft.kind == "qlora" else 3
    if zero.stage < highest and settings.world_size > 1:
        overrides.append(f"zero=zero{highest}")
    if zero.offload_optimizer == "none" and zero.stage and settings.optim.optimizer == "adamw":
        overrides.append("zero.offload_optimizer=cpu")
    if peft.kind == "none":
        overrides.append("peft=lora")
    return [*overrides, f"train.max_len={max(2, batch.max_len // 2)}"]


def collective_timeout_s(job: TrainJob) -> float:
    """Return the seconds that ranks wait for each other: at least as long as rollouts may take."""
    seconds, online = job.settings.launch.collective_timeout_s, job.settings.online
    if not online:
        return seconds
    rollouts = online["rollout"]["timeout_s"] or time_limit([job.base])
    return max(seconds, rollouts + MARGIN_S)


def waited(who: str, line: str, job: TrainJob) -> TrainingError:
    """Return the error for a collective that ran into its timeout; `line` is the library's."""
    return TrainingError(
        f"{who} waited {collective_timeout_s(job):g} s for the other ranks",
        details=[line],
        hint="train.collective_timeout_s=<more> if a step or a checkpoint takes that long",
    )
