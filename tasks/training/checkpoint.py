"""The last good state of a run: shares of the trained tensors, kept outside of the artifact.

    step-00000050/rank-00000-of-00002.safetensors ... state.json

A new one is complete (renamed) before an older one goes; one that holds NaN or infinity is never
made.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from torch import nn

from tasks.errors import TrainingError
from tasks.training.engine import Ranks
from tasks.training.partitions import not_finite, own_shares, write_shares

STATE = "state.json"


def last_good(root: Path) -> Path | None:
    """The newest complete checkpoint under `root`, if there is one."""
    complete = sorted(p.parent for p in root.glob(f"step-????????/{STATE}"))
    return complete[-1] if complete else None


def save(model: nn.Module, root: Path, *, step: int, ranks: Ranks) -> Path:
    """Write a checkpoint of this step, all ranks together, and drop the older ones.

    Raises:
        TrainingError: on every rank, when any rank's share is not finite.
    """
    shares = own_shares(model, rank=ranks.rank, world_size=ranks.world_size)
    broken = sorted({name for names in ranks.all_objects(not_finite(shares)) for name in names})
    if broken:
        raise TrainingError(
            f"after step {step} {len(broken)} trained tensors are not finite, first {broken[0]}",
            details=broken[:20],
        )
    final = root / f"step-{step:08d}"
    work = root / f".{final.name}.tmp"
    write_shares(shares, work, rank=ranks.rank, world_size=ranks.world_size)
    ranks.barrier()
    if ranks.rank == 0:
        document = {"step": step, "world_size": ranks.world_size}
        (work / STATE).write_text(json.dumps(document) + "\n")
        older = [p for p in root.glob("step-????????") if p != final]
        shutil.rmtree(final, ignore_errors=True)
        work.rename(final)
        for path in older:
            shutil.rmtree(path)
    ranks.barrier()
    return final
