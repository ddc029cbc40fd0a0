"""Check that the files are those of all ranks, from one step of one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tasks.core.errors import Coded
from tasks.weights.deepspeed.layout import Layout
from tasks.weights.deepspeed.states import ModelState, OptimState


def rank_findings(
    layout: Layout, models: Sequence[ModelState], ranks: Sequence[OptimState]
) -> Iterator[str]:
    """Yield one line for everything that is wrong with the set of files.

    Args:
        layout: the files.
        models: model states that could be read, at least one.
        ranks: optimizer states that could be read; empty for a universal checkpoint.
    """
    first = models[0]
    if first.groups is None:
        if layout.optim:
            yield "parts of a ZeRO optimizer beside a model without ZeRO"
        return
    if not layout.optim and layout.zero is None:
        world = f"all {first.world_size} ranks"
        text = f"no *_optim_states.pt: the fp32 weights of {world} are absent"
        yield Coded(text, "ZERO_RANK_MISSING")
        return
    counts = {rank.partitions for rank in ranks}
    stages = {rank.stage for rank in ranks}
    if len(counts) > 1 or len(stages) > 1:
        text = f"ranks' files of ZeRO stages {sorted(stages)}, world sizes {sorted(counts)}"
        yield Coded(text, "ZERO_WORLD_DISAGREES")
        return
    if stages and (stages == {3}) != layout.partitioned:
        text = f"model states do not belong to optimizer states of ZeRO-{ranks[0].stage}"
        yield Coded(text, "ZERO_WORLD_DISAGREES")
    yield from _absent(layout, counts.pop() if counts else first.world_size or len(models))
    yield from _mixed(models, ranks)


def _absent(layout: Layout, world: int) -> Iterator[str]:
    for kind, files, due in (
        ("optim", layout.optim, layout.zero is None),
        ("model", layout.model, layout.partitioned),
    ):
        missing = [str(rank) for rank in range(world) if rank not in files]
        if due and missing:
            text = f"{kind} states of {world} ranks, absent: {', '.join(missing)}"
            yield Coded(text, "ZERO_RANK_MISSING")
        for rank in sorted(files):
            if due and rank >= world:
                text = f"{files[rank].name}: there are only {world} ranks"
                yield Coded(text, "ZERO_WORLD_DISAGREES")


def _mixed(models: Sequence[ModelState], ranks: Sequence[OptimState]) -> Iterator[str]:
    recorded: dict[str, set[object]] = {
        "step": {model.step for model in models},
        # A rank that holds only padding has no optimizer state and therefore no step.
        "optimizer step": {rank.step for rank in ranks},
        "DeepSpeed version": {model.version for model in models},
    }
    for what, values in recorded.items():
        if len(values - {None}) > 1:
            text = f"ranks' files of more than one {what}: an overwritten checkpoint"
            yield Coded(text, "ZERO_STEPS_MIXED")
    first = models[0]
    if any(model.groups != first.groups or model.frozen != first.frozen for model in models):
        yield Coded("ranks disagree on the parameters' shapes", "ZERO_STEPS_MIXED")
