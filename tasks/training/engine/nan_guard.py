"""NaN and infinity in losses and gradients: detect them before a weight changes, name the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tasks.core.errors import TrainingError
from tasks.training.engine import checkpoint
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.engine.partitions import trainable
from tasks.training.job import TrainJob

BROKEN = "gradients_not_finite"


class Watch:
    """Checks each gradient in a hook of the backward pass, before DeepSpeed reduces it."""

    def __init__(self, model: Any) -> None:
        self._seen: list[torch.Tensor] = []
        self._handles = [each.register_hook(self._look) for each in trainable(model).values()]

    def _look(self, gradient: torch.Tensor) -> None:
        self._seen.append(~torch.isfinite(gradient).all())

    def broken(self) -> Mapping[str, torch.Tensor]:
        """Return the number of gradients since the last call that are not finite, as a metric."""
        flags = torch.stack(self._seen)
        self._seen.clear()
        return {BROKEN: flags.sum().float()}

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def needs_watching(job: TrainJob) -> bool:
    """Return True if DeepSpeed would take a step with gradients that are not finite.

    DeepSpeed checks gradients itself for 16-bit weights, and under ZeRO-3 for all weights.
    """
    return job.settings.dtype == "float32" and job.settings.zero.stage < 3


def not_finite(
    what: str,
    samples: Sequence[Sequence[str]],
    losses: Sequence[float],
    *,
    ranks: Ranks,
    job: TrainJob,
) -> TrainingError:
    """Return the error of a step, the same on every rank. All ranks take part.

    Args:
        what: the problem, for example "loss is nan in step 3".
        samples: names of the samples in each row of this rank.
        losses: losses of these rows.
        ranks: the process group.
        job: settings and paths of the run.
    """
    mine = [
        f"rank {ranks.rank}, row {number} (samples {', '.join(names[:8])}"
        f"{', ...' * (len(names) > 8)}): loss {loss:.6g}"
        for number, (names, loss) in enumerate(zip(samples, losses, strict=True), 1)
        if not math.isfinite(loss)
    ]
    rows = [line for of_rank in ranks.all_objects(mine) for line in of_rank]
    first = f", from {rows[0].partition(' (')[0]}" if rows else ""
    good = checkpoint.last_good(job.checkpoints)
    return TrainingError(
        f"{what}{first}; last good checkpoint: {good or 'none yet'}",
        details=rows[:20],
        hint=f"train.lr={job.settings.optim.lr / 10:g}, or look at the data of this step",
    )
