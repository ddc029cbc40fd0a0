"""Batch sizes that have to divide."""

from __future__ import annotations

from tasks.config.checks.finding import Finding


def divides(*, global_size: int, micro: int, nproc: int, nodes: int) -> list[Finding]:
    """Samples a step have to be a positive multiple of what all ranks hold at once."""
    if min(micro, nproc, nodes) < 1:
        return [Finding("train.micro_batch_size", str(micro), "at least 1", _TYPE_MICRO)]
    together = micro * nproc * nodes
    if global_size > 0 and global_size % together == 0:
        return []
    lower = max(global_size, 0) // together * together
    near = [str(size) for size in (lower, lower + together) if size > 0]
    return [
        Finding(
            "train.global_batch_size",
            str(global_size),
            f"a multiple of {micro} x {nproc} x {nodes} (micro x nproc x nodes) = {together}",
            " or ".join(f"train.global_batch_size={size}" for size in near),
        )
    ]


_TYPE_MICRO = "train.micro_batch_size=1"
