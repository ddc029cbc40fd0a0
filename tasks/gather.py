"""gather: every rank's slices of what was trained -> one `adapter`, or one `weights`.

Offline, without an accelerator and without torch: names are translated, bytes are stitched. What
must come out is asked of the model's own class on the meta device, so that an empty, a missing or a
leftover tensor is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.contract import Check, Expected, judge
from tasks.fingerprint import EXACT
from tasks.handoff import Trained, measure, write_json
from tasks.report import StageReport
from tasks.scoring import ModelRef, Score
from tasks.weights import bits
from tasks.weights.names import parse_peft, rename_all
from tasks.weights.partitions import Partitions, read_partitions
from tasks.weights.reader import ADAPTER, WEIGHTS, read_json
from tasks.weights.worker import Perform, ask_adapter_contract, ask_facts, perform
from tasks.weights.writer import CheckpointWriter, Spec

Log = logging.Logger | logging.LoggerAdapter[Any]

ADAPTER_CONFIG = "adapter_config.json"
SHARD_BYTES = 5 * 10**9


def gather(
    out: Path,
    *,
    trained: Path,
    base: Path,
    score: Score,
    log: Log,
    perform: Perform = perform,
) -> StageReport:
    """Stitch what training left into a PEFT adapter or a Hugging Face checkpoint.

    Args:
        out: empty staging directory.
        trained: the `shards` artifact.
        base: the `base` artifact it was trained from.
        score: who measures fingerprints.
        log: progress.
        perform: who derives the contract; this process, unless a warm one is given.

    Returns:
        Report of kind `adapter` or `weights`. When the contract fails nothing is written, and its
        checks say why.

    Raises:
        ArtifactError: shards that do not make whole tensors, another base, a full disk.
        ContractError: parameters that have no place in the output.
    """
    source = Trained.read(trained)
    source.require_base(base)
    parts = read_partitions(trained)
    is_adapter = parts.mode == "adapter"
    kind = "adapter" if is_adapter else "weights"
    keys = rename_all(parts.shapes, adapter=is_adapter)
    specs = {key: Spec(key, parts.shapes[name], parts.dtype) for name, key in keys.items()}
    expected = _contract(perform, trained, base, source, parts)
    checks = judge(expected, specs)
    if not all(check.ok for check in checks):
        return StageReport(kind, tuple(checks))
    log.info("gather: %d tensors from %d ranks", len(specs), parts.world_size)
    checks += _stitch(out, parts, keys, specs)
    _write_side_files(out, source, is_adapter=is_adapter)
    if not all(check.ok for check in checks):
        return StageReport(kind, tuple(checks))
    model = (
        ModelRef(base, adapter=out, quantization=source.quantization, dtype=source.dtype)
        if is_adapter
        else ModelRef(out, dtype=source.dtype)
    )
    measured, verdict = measure(score, model, trained=trained, out=out, limit=EXACT, exact=True)
    return StageReport(
        kind,
        (*checks, verdict),
        metrics={"tensors": len(specs), "bytes": sum(spec.nbytes for spec in specs.values())},
        notes={"mode": parts.mode, "world_size": parts.world_size},
        drift=measured,
    )


def _contract(
    perform: Perform, trained: Path, base: Path, source: Trained, parts: Partitions
) -> Sequence[Expected]:
    if parts.mode == "adapter":
        return ask_adapter_contract(perform, base, trained / ADAPTER_CONFIG, parts.dtype)
    return ask_facts(perform, trained, source.dtype).tensors


def _stitch(
    out: Path, parts: Partitions, keys: Mapping[str, str], specs: Mapping[str, Spec]
) -> list[Check]:
    """Write all tensors, and judge their values on the way."""
    stem = ADAPTER if parts.mode == "adapter" else WEIGHTS
    limit = None if stem == ADAPTER else SHARD_BYTES
    checks = []
    with CheckpointWriter(out, list(specs.values()), max_shard_bytes=limit, stem=stem) as writer:
        for name, key in keys.items():
            bad, zero = 0, True
            for piece in parts.pieces(name):
                bad += bits.nonfinite(piece, parts.dtype)
                zero = zero and bits.all_zero(piece, parts.dtype)
                writer.append(key, piece)
            checks.append(_value_check(key, specs[key], bad, zero))
    return checks


def _value_check(key: str, spec: Spec, bad: int, zero: bool) -> Check:
    lora = parse_peft(key)
    is_b = lora is not None and lora.half == "B"
    found = (
        "no elements" if not spec.nbytes
        else f"{bad} elements not finite" if bad
        else "all zero" if zero
        else "finite, not all zero"
    )  # fmt: skip
    # A whole lora_B of zeros says that the adapter is as it was initialised: it does nothing.
    ok = bool(spec.nbytes) and not bad and not (is_b and zero)
    wanted = "finite, not all zero" if is_b else "finite"
    return Check(f"values of {key}", wanted, found, ok=ok)


def _write_side_files(out: Path, source: Trained, *, is_adapter: bool) -> None:
    source.copy_side_files(out, config=not is_adapter)
    if is_adapter:
        config = read_json(source.root / ADAPTER_CONFIG)
        # PEFT keeps the targets in a set, and writes them in another order every time.
        if isinstance(config.get("target_modules"), list):
            config["target_modules"] = sorted(config["target_modules"])
        write_json(out / ADAPTER_CONFIG, {**config, "inference_mode": True})
