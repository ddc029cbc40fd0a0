"""gather, merge and convert of a delivery: stage functions that run the plans of `plan/planning`.

The plans were validated before, so keys, shapes and dtypes fit. Each function writes tensors and
side files, and returns one verdict for each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.delivery.measuring import Measuring, measured
from tasks.delivery.plan.work import ADAPTER, TRAINED, Target, Work, in_files
from tasks.delivery.recognise import ADAPTER_CONFIG
from tasks.delivery.side_files import Tokens, write_served_files, write_weights_files
from tasks.evaluation.trained_artifact import write_json
from tasks.pipeline.report import StageReport
from tasks.weights.adapters.read import read_adapter
from tasks.weights.execute.execute import Executed, execute
from tasks.weights.execute.verdicts import (
    finite,
    gathered,
    merge_metrics,
    merged,
    quantization_notes,
)
from tasks.weights.files.opening import open_model
from tasks.weights.files.reader import ADAPTER as ADAPTER_STEM
from tasks.weights.files.reader import WEIGHTS, read_checkpoint, read_json
from tasks.weights.files.source import Source
from tasks.weights.heads.folder import read_folder
from tasks.weights.heads.split import write_value_head
from tasks.weights.plan.layout import as_is
from tasks.weights.plan.operations import Plan
from tasks.weights.plan.validate import validate
from tasks.weights.proof.recheck import recompute, recomputed_check
from tasks.weights.quantized.quantize import (
    check_quantize,
    left_alone,
    library_config,
    quantized_plan,
)


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
    is_adapter = work.merge is not None
    stem = ADAPTER_STEM if is_adapter else WEIGHTS
    log.info("gather: %d tensors from %s", len(work.gather.ops), trained)
    names = {op.input for op in work.gather.ops} | {
        entry.source.partition(":")[0] for entry in work.gather.dropped
    }
    sources = {name: work.opened[name] for name in names}
    done = execute(work.gather, sources, out, stem=stem, scan=True)
    if is_adapter:
        config = read_json(Path(work.gather.notes["adapter_config"]))
        write_json(out / ADAPTER_CONFIG, {**config, "inference_mode": True})
    else:
        write_weights_files(out, work, base or trained)
    checks = tuple(gathered(op, done.outcomes[op.name]) for op in work.gather.ops)
    return StageReport("adapter" if is_adapter else "weights", checks, _metrics(work.gather, done))


def merge(
    out: Path,
    *,
    adapter: Path,
    base: Path,
    work: Work,
    log: Any,
    weights: Mapping[str, float] | None = None,
    merge_base: Mapping[str, str] | None = None,
    reference: Path | None = None,
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
        reference: folder with the reference fingerprint.
        measuring: settings of the drift measurement; None measures nothing.
    """
    assert work.merge is not None
    folded = sum(bool(op.terms) for op in work.merge.ops)
    log.info("merge: %d of %d tensors change", folded, len(work.merge.ops))
    sources = {name: source for name, source in work.opened.items() if name != TRAINED}
    if work.gather is not None:
        sources[ADAPTER] = _adapter_tensors(adapter)
    done = execute(work.merge, sources, out)
    write_weights_files(out, work, base)
    checks = [merged(op, done.outcomes[op.name]) for op in work.merge.ops]
    written = read_checkpoint(out)
    checks.append(recomputed_check(recompute(work.merge, sources, written)))
    metrics = {**_metrics(work.merge, done), **merge_metrics(work.merge, done)}
    notes = {"plan": work.merge.as_json(), **quantization_notes(done)}
    if merge_base:
        notes["merge_base"] = dict(merge_base)
    if weights:
        notes["adapters"] = dict(weights)
    return measured(
        StageReport("weights", tuple(checks), metrics, notes), out, reference, measuring
    )


def convert(
    out: Path,
    *,
    weights: Path,
    work: Work,
    tokens: Tokens,
    dtype: str,
    max_shard_bytes: int,
    quantize: str,
    log: Any,
    merge_base: Mapping[str, str] | None = None,
    reference: Path | None = None,
    measuring: Measuring | None = None,
    **_: Any,
) -> StageReport:
    """Make the folder to serve; files that do not change are hard links.

    Args:
        out: staging directory.
        weights: folder of a full model: SOURCE, or the output of gather or merge.
        work: the plans.
        tokens: tokenizer and generation settings.
        dtype: torch dtype name of the served model.
        max_shard_bytes: maximum tensor data of one file, in bytes.
        quantize: "none", "w8a8" or "fp8".
        log: gets progress.
        merge_base: choice of the base and its reason, for the manifest.
        reference: folder with the reference fingerprint.
        measuring: settings of the drift measurement; None measures nothing.
    """
    plan, sources = work.model, work.opened
    if not work.converts:
        source = open_model(weights)
        sources = {WEIGHTS: source}
        plan = in_files(as_is(source), Target(dtype, max_shard_bytes), source)
    scheme = check_quantize(quantize)
    if scheme is not None:
        plan = quantized_plan(plan, work.facts, scheme)
        validate(plan, sources)
    done = execute(plan, sources, out)
    log.info("convert: %d tensors, %d files linked", len(plan.ops), len(done.linked))
    quantized = library_config(scheme, left_alone(work.facts)) if scheme is not None else None
    checks = [finite(op.name, done.outcomes[op.name]) for op in plan.ops]
    checks += write_served_files(out, work, tokens, dtype=dtype, plan=plan, quantized=quantized)
    metrics = {**_metrics(plan, done), "linked": float(len(done.linked))}
    notes: dict[str, Any] = {"linked": sorted(done.linked)}
    if merge_base:
        notes["merge_base"] = dict(merge_base)
    report = StageReport("served", tuple(checks), metrics, notes)
    same = all(sources[op.input].checksum(op.key) == done.checksums[op.name] for op in plan.ops)
    return measured(report, out, reference, measuring, earlier=weights if same else None)


def value_head(out: Path, *, source: Path, work: Work, log: Any, **_: Any) -> StageReport:
    """Write the value head of a policy into its own artifact, away from the served folder."""
    assert work.head is not None
    done = write_value_head(work.head, out)
    log.info("value head: %d tensors kept apart", len(done.outcomes))
    checks = tuple(finite(name, outcome) for name, outcome in done.outcomes.items())
    return StageReport("value_head", checks)


def _adapter_tensors(folder: Path) -> Source:
    beside = read_folder(folder).beside
    return read_adapter(folder, beside=beside).tensors


def _metrics(plan: Plan, done: Executed) -> dict[str, float]:
    files = {outcome.file for outcome in done.outcomes.values()}
    return {
        "tensors": float(len(plan.ops)),
        "bytes": float(plan.nbytes),
        "files": float(len(files)),
        "bytes_read": float(done.read),
        "bytes_written": float(done.written),
    }
