"""gather, merge and convert of a delivery: run the plans of `plan/planning` with the chain's code.

Each function fills the request of `tasks/gather.py`, `tasks/merge.py` or `tasks/convert.py`. The
plans were validated before, so keys, shapes and dtypes fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.convert import PlannedConversion, convert_planned
from tasks.core.contract import Check
from tasks.delivery.plan.work import ADAPTER, TRAINED, Target, Work, in_files
from tasks.delivery.side_files import Tokens, serving_config, write_weights_files
from tasks.evaluation.planned import Measuring, Planned
from tasks.gather import PlannedGather, gather_planned
from tasks.merge import merge_planned
from tasks.pipeline.report import StageReport
from tasks.weights.files.reader import WEIGHTS
from tasks.weights.head_plans import write_value_head
from tasks.weights.heads import read_folder
from tasks.weights.lora import read_adapter
from tasks.weights.plan import as_is
from tasks.weights.quantized.source import open_model


def gather(
    out: Path, *, trained: Path, work: Work, log: Any, base: Path | None = None, **_: Any
) -> StageReport:
    """Gather the partitions of all ranks into an adapter folder or a full model.

    Args:
        out: staging directory.
        trained: SOURCE.
        work: the plans.
        log: gets progress.
        base: folder of the base, if part of a full model comes from it.
    """
    assert work.gather is not None
    names = {op.input for op in work.gather.ops} | {
        entry.source.partition(":")[0] for entry in work.gather.dropped
    }
    is_adapter = work.merge is not None
    if not is_adapter:
        write_weights_files(out, work, base or trained)
    planned = PlannedGather(
        plan=work.gather,
        sources={name: work.opened[name] for name in names},
        adapter_config=work.adapter_config,
    )
    return gather_planned(out, planned, log=log)


def merge(
    out: Path,
    *,
    adapter: Path,
    base: Path,
    work: Work,
    log: Any,
    weights: Mapping[str, float] | None = None,
    merge_base: Mapping[str, str] | None = None,
    measuring: Measuring | None = None,
    **_: Any,
) -> StageReport:
    """Merge adapters into their base, in the dtype and files that are served.

    Args:
        out: staging directory.
        adapter: adapter folder: SOURCE, or the output of gather; the first of several.
        base: folder of the base.
        work: the plans.
        log: gets progress.
        weights: weights of the adapters by role; None for one adapter with weight 1.
        merge_base: choice of the base and its reason, for the manifest.
        measuring: settings of the drift measurement; None measures nothing.
    """
    assert work.merge is not None
    sources = {name: source for name, source in work.opened.items() if name != TRAINED}
    if work.gather is not None:
        sources[ADAPTER] = read_adapter(adapter, beside=read_folder(adapter).beside).tensors
    write_weights_files(out, work, base)
    notes = {"merge_base": merge_base, "adapters": weights}
    planned = Planned(
        plan=work.merge,
        sources=sources,
        notes={name: dict(value) for name, value in notes.items() if value},
        measuring=measuring,
    )
    return merge_planned(out, planned, log=log)


def convert(
    out: Path,
    *,
    weights: Path,
    work: Work,
    tokens: Tokens,
    dtype: str,
    max_shard_bytes: int,
    log: Any,
    merge_base: Mapping[str, str] | None = None,
    measuring: Measuring | None = None,
    **_: Any,
) -> StageReport:
    """Make the folder to serve; files that do not change are linked or copied.

    Args:
        out: staging directory.
        weights: folder of a full model: SOURCE, or the output of gather or merge.
        work: the plans.
        tokens: tokenizer and generation settings.
        dtype: torch dtype name of the served model.
        max_shard_bytes: maximum tensor data of one file, in bytes.
        log: gets progress.
        merge_base: choice of the base and its reason, for the manifest.
        measuring: settings of the drift measurement; None measures nothing.
    """
    plan, sources = work.model, work.opened
    if not work.converts:
        source = open_model(weights)
        sources = {WEIGHTS: source}
        plan = in_files(as_is(source), Target(dtype, max_shard_bytes), source)
    planned = PlannedConversion(
        plan=plan,
        sources=sources,
        notes={"merge_base": dict(merge_base)} if merge_base else {},
        measuring=measuring,
        weights=weights,
        facts=work.facts,
        serving=serving_config(work, tokens, dtype),
        tokenizer=tokens.files(),
        judged=False,
    )
    return convert_planned(out, planned, log=log)


def value_head(out: Path, *, source: Path, work: Work, log: Any, **_: Any) -> StageReport:
    """Write the value head of a policy into its own artifact, away from the served folder."""
    assert work.head is not None
    names = write_value_head(work.head, out)
    log.info("value head: %d tensors kept apart", len(names))
    checks = tuple(Check(name, "finite", "finite", ok=True) for name in names)
    return StageReport("value_head", checks)
