"""rollout_base: base -> weights that vLLM samples from while a QLoRA adapter on it is trained.

The values are those that training computes with, bit for bit; see `tasks/rl/rollout_base.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.contract import Check
from tasks.output import Log
from tasks.report import StageReport
from tasks.rl.rollout_base import write_rollout_base
from tasks.weights.folder import inspect_checkpoint
from tasks.weights.worker import Perform


def rollout_base(
    out: Path,
    *,
    base: Path,
    quantization: Mapping[str, Any],
    dtype: str,
    perform: Perform,
    log: Log,
) -> StageReport:
    """Fill `out` with the base as training holds it, dequantised.

    Args:
        out: empty staging directory.
        base: the `base` artifact.
        quantization: as `Peft.quantization()` says it.
        dtype: torch name in which training holds what is not quantised.
        perform: who computes.
        log: progress.

    Raises:
        ArtifactError: unreadable files, a full disk.
        ContractError: tensors that are not those of the model's class.
    """
    started = time.monotonic()
    write_rollout_base(out, base, quantization, dtype=dtype, perform=perform)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (base / name).is_file():
            (out / name).symlink_to((base / name).resolve())
    found = inspect_checkpoint(out)
    checks = [
        *found.checks,
        *(Check("folder", "usable", text, ok=False) for text in found.problems),
    ]
    seconds = time.monotonic() - started
    log.info("rollout_base: %d tensors dequantised in %.1f s", found.tensors, seconds)
    return StageReport("weights", checks=tuple(checks), metrics={"rollout_base/seconds": seconds})
