"""gather, merge and convert of a delivery: plans carried out, side files, one verdict a tensor.

They are called by the stage mechanism, which publishes what they leave. What is to be done was
planned before (`planning.py`): no key, shape or dtype can turn out not to fit here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.contract import Check
from tasks.deliver.recognise import ADAPTER_CONFIG, CONFIG
from tasks.deliver.side_files import Tokens, write_served_files
from tasks.deliver.work import ADAPTER, BASE, Target, Work, in_files, open_model
from tasks.fingerprint import DriftLimit, Fingerprint, drift
from tasks.handoff import FINGERPRINT, GENERATION_CONFIG, judge_drift, write_json
from tasks.report import StageReport
from tasks.scoring import ModelRef, Score
from tasks.weights.adapters.read import read_adapter
from tasks.weights.execute import Executed, execute
from tasks.weights.heads.folder import read_folder
from tasks.weights.heads.writing import write_value_head
from tasks.weights.plan import Op, Plan
from tasks.weights.quantize import (
    check_quantize,
    quantization_config,
    quantized_plan,
)
from tasks.weights.reader import ADAPTER as ADAPTER_STEM
from tasks.weights.reader import DTYPE_NAMES, WEIGHTS, read_json
from tasks.weights.source import Source
from tasks.weights.validate import validate
from tasks.weights.vocabulary import vocabulary_of


@dataclass(frozen=True)
class Measuring:
    """Who measures drift, and how far is too far."""

    score: Score
    limit: DriftLimit


def gather(
    out: Path, *, trained: Path, work: Work, log: Any, base: Path | None = None, **_: Any
) -> StageReport:
    """Slices of ranks -> an adapter folder, or the tensors of a full model.

    Args:
        out: staging directory.
        trained: SOURCE.
        work: the plans.
        log: progress.
        base: the base, where a part of a full model comes from.
    """
    assert work.gather is not None
    is_adapter = work.merge is not None
    stem = ADAPTER_STEM if is_adapter else WEIGHTS
    log.info("gather: %d tensors from %s", len(work.gather.ops), trained)
    names = {op.input for op in work.gather.ops} | {
        one.source.partition(":")[0] for one in work.gather.dropped
    }
    sources = {name: work.opened[name] for name in names}
    done = execute(work.gather, sources, out, stem=stem, scan=True)
    if is_adapter:
        config = read_json(Path(work.gather.notes["adapter_config"]))
        write_json(out / ADAPTER_CONFIG, {**config, "inference_mode": True})
    else:
        _weights_files(out, work, base or trained)
    checks = tuple(_finite(op, done) for op in work.gather.ops)
    return StageReport("adapter" if is_adapter else "weights", checks, _metrics(work.gather, done))


def merge(
    out: Path,
    *,
    adapter: Path,
    base: Path,
    work: Work,
    log: Any,
    reference: Path | None = None,
    measuring: Measuring | None = None,
    **_: Any,
) -> StageReport:
    """Fold an adapter into its base, in the dtype and files that are served.

    Args:
        out: staging directory.
        adapter: adapter folder: SOURCE, or what gather made.
        base: folder of the base.
        work: the plans.
        log: progress.
        reference: folder with the fingerprint to compare with.
        measuring: None measures no drift.
    """
    assert work.merge is not None
    folded = sum(bool(op.terms) for op in work.merge.ops)
    log.info("merge: %d of %d tensors change", folded, len(work.merge.ops))
    sources = {BASE: open_model(base), ADAPTER: _adapter_tensors(adapter)}
    done = execute(work.merge, sources, out)
    _weights_files(out, work, base)
    checks = tuple(_merged(op, done) for op in work.merge.ops)
    metrics = {**_metrics(work.merge, done), "folded": float(folded)}
    notes: dict[str, Any] = {"plan": work.merge.as_json()}
    if done.overall_error is not None:
        metrics["quantization_error"] = done.overall_error
        notes["quantization_error"] = {
            "meaning": "|W - dequantised W| / |scale B A|, Frobenius norms",
            "by_tensor": done.quantization_error,
        }
    return _measured(StageReport("weights", checks, metrics, notes), out, reference, measuring)


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
    reference: Path | None = None,
    measuring: Measuring | None = None,
    **_: Any,
) -> StageReport:
    """Make the folder that is served: tensors linked where nothing changes, side files agreeing.

    Args:
        out: staging directory.
        weights: a full model: SOURCE, or what gather or merge made.
        work: the plans.
        tokens: tokenizer and generation settings.
        dtype: torch name.
        max_shard_bytes: of tensor data in one file.
        quantize: "none", "w8a8" or "fp8".
        log: progress.
        reference: folder with the fingerprint to compare with.
        measuring: None measures no drift.
    """
    plan, sources = work.model, work.opened
    if not work.converts:
        source = open_model(weights)
        sources = {WEIGHTS: source}
        plan = served_plan(source, Target(dtype, max_shard_bytes))
    scheme = check_quantize(quantize)
    if scheme is not None:
        plan = quantized_plan(plan, work.facts, scheme)
        validate(plan, sources)
    done = execute(plan, sources, out)
    log.info("convert: %d tensors, %d files linked", len(plan.ops), len(done.linked))
    config = dict(work.config)
    if scheme is not None:
        config["quantization_config"] = dict(quantization_config(scheme, work.facts))
    checks = [_finite(op, done) for op in plan.ops]
    checks += write_served_files(out, config, tokens, dtype)
    metrics = {**_metrics(plan, done), "linked": float(len(done.linked))}
    report = StageReport("served", tuple(checks), metrics, {"linked": sorted(done.linked)})
    same = all(sources[op.input].sha256(op.key) == done.sha256[op.name] for op in plan.ops)
    return _measured(report, out, reference, measuring, earlier=weights if same else None)


def value_head(out: Path, *, source: Path, work: Work, log: Any, **_: Any) -> StageReport:
    """The value head of a policy, in an artifact of its own: never in the served folder."""
    assert work.head is not None
    done = write_value_head(work.head, out)
    log.info("value head: %d tensors kept apart", len(done.outcomes))
    checks = tuple(
        Check(one.name, "finite", f"{one.nonfinite} are not" if one.nonfinite else "finite",
              ok=not one.nonfinite)
        for one in done.outcomes.values()
    )  # fmt: skip
    return StageReport("value_head", checks)


def _adapter_tensors(folder: Path) -> Source:
    beside = read_folder(folder).beside
    return read_adapter(folder, beside=beside).tensors


def served_plan(source: Source, target: Target) -> Plan:
    """Every tensor as it is, floats in the dtype, in files of the size that is asked for."""
    ops = tuple(
        Op(name, tuple(info.shape), info.dtype, f"{WEIGHTS}:{name}", info.dtype)
        for name, info in source.tensors.items()
    )
    return in_files(Plan(ops), target, source)


def _weights_files(out: Path, work: Work, base: Path) -> None:
    """config.json and generation settings beside the tensors: what transformers needs to load."""
    dtype = next(name for name, short in DTYPE_NAMES.items() if short == _dtype_of(work.model))
    config = {k: v for k, v in work.config.items() if k not in ("quantization_config",)}
    config.pop("torch_dtype", None)
    write_json(out / CONFIG, {**config, "dtype": dtype})
    if (base / GENERATION_CONFIG).is_file():
        shutil.copyfile(base / GENERATION_CONFIG, out / GENERATION_CONFIG)


def _dtype_of(plan: Plan) -> str:
    floats = [op.dtype for op in plan.ops if op.dtype in DTYPE_NAMES.values()]
    return floats[0] if floats else "BF16"


def _measured(
    report: StageReport,
    out: Path,
    reference: Path | None,
    measuring: Measuring | None,
    *,
    earlier: Path | None = None,
) -> StageReport:
    """The report with the drift; carried over where every byte is that of the folder before."""
    if measuring is None or reference is None or not all(check.ok for check in report.checks):
        return report
    if earlier is not None and (earlier / FINGERPRINT).is_file():
        shutil.copyfile(earlier / FINGERPRINT, out / FINGERPRINT)
        new = Fingerprint.load(out / FINGERPRINT)
    else:
        model = ModelRef(out, dtype=str(read_json(out / CONFIG)["dtype"]))
        new = measuring.score(model, reference / FINGERPRINT, out / FINGERPRINT)
    found = drift(Fingerprint.load(reference / FINGERPRINT), new)
    measured, verdict = judge_drift(found, measuring.limit)
    checks = (*report.checks, verdict)
    return StageReport(report.kind, checks, report.metrics, report.notes, measured)


def _metrics(plan: Plan, done: Executed) -> dict[str, float]:
    files = {one.file for one in done.outcomes.values()}
    return {
        "tensors": float(len(plan.ops)),
        "bytes": float(plan.nbytes),
        "files": float(len(files)),
        "bytes_read": float(done.read),
        "bytes_written": float(done.written),
    }


def _finite(op: Op, done: Executed) -> Check:
    bad = done.outcomes[op.name].nonfinite
    return Check(op.name, "finite", f"{bad} elements are not" if bad else "finite", ok=not bad)


def _merged(op: Op, done: Executed) -> Check:
    """The verdict on one tensor, as it was written."""
    outcome = done.outcomes[op.name]
    if outcome.nonfinite:
        return _finite(op, done)
    if op.terms and outcome.changed is not None:
        found = f"{outcome.changed:.2%} of elements changed"
        return Check(op.name, "changed by the adapter", found, ok=outcome.changed > 0)
    wanted = {"copy": "as it was", "cast": f"rounded once to {op.dtype}"}.get(op.kind, "computed")
    return Check(op.name, wanted, wanted, ok=True)


def side_findings(work: Work, tokens: Tokens) -> Iterator[str]:
    """Whether the tokenizer fits the embedding, before anything is written."""
    if tokens.facts is not None and work.facts.embedding:
        shapes = {op.name: op.shape for op in work.model.ops}
        yield from vocabulary_of(shapes, work.facts, tokens.facts, work.config).findings()
