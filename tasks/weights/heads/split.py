"""Plan a policy and its value head as two outputs, and write the head.

vLLM loads every weight file of a folder and fails on `v_head.summary.weight`, but training needs
the head to continue. So the head gets an artifact of its own: `value_head.safetensors` with the
keys that TRL and LLaMA-Factory read, and `value_head.json` with its description.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.core.errors import ContractError, first_and_more
from tasks.weights.execute.execute import execute
from tasks.weights.execute.outcome import Executed
from tasks.weights.files.source import Renamed, Source
from tasks.weights.heads.detect import WRAPPER, Found, Head
from tasks.weights.plan.layout import as_is
from tasks.weights.plan.operations import Dropped, Plan
from tasks.weights.plan.validate import validate

STEM = "value_head"
KEYS = ("v_head.summary.weight", "v_head.summary.bias")
"""Keys of weight and bias in the artifact."""
KEPT_APART = "the value head: kept apart, in value_head.safetensors"
_SHOWN = 50


def require_head(detected: Found, *, stage: str) -> Head:
    """Return the head. Raises ContractError with all findings if it is missing or not usable.

    Args:
        detected: result of `detect`.
        stage: start of the error message.
    """
    if detected.findings:
        raise ContractError(
            f"{stage}: {detected.folder.root}: {first_and_more(detected.findings)}",
            details=detected.findings[:_SHOWN],
        )
    if detected.head is None:
        raise ContractError(
            f"{stage}: {detected.folder.root}: no head of any kind: a language model"
        )
    return detected.head


def plan_policy(detected: Found) -> Plan:
    """Plan the model (or adapter) without its head; inputs of `policy_sources`.

    Keys lose TRL's prefix and stay the same otherwise.

    Raises:
        ContractError: no usable head, or keys that collide without TRL's prefix.
    """
    head = require_head(detected, stage="split")
    name = detected.folder.weights
    source = detected.folder.sources[name]
    out = {*head.sources, *detected.normalisation.buffers}
    kept = [op for op in as_is(source, name).ops if op.source not in out]
    _refuse_collisions({op.key: op.name.removeprefix(WRAPPER) for op in kept})
    ops = tuple(replace(op, name=op.name.removeprefix(WRAPPER)) for op in kept)
    dropped = tuple(
        Dropped(source, KEPT_APART) for source in sorted(out) if source.startswith(f"{name}:")
    )
    return Plan(ops, dropped)


def policy_sources(detected: Found) -> dict[str, Source]:
    """Return the inputs of `plan_policy`, without a separate head file."""
    name = detected.folder.weights
    return {name: detected.folder.sources[name]}


def plan_value_head(detected: Found) -> Plan:
    """Plan a bit-identical copy of the head; inputs of `head_sources`. Raises ContractError."""
    head = require_head(detected, stage="split")
    (name,) = sources = head_sources(detected)
    whole = {op.source: op for op in as_is(sources[name], name).ops}
    pairs = zip(KEYS, head.sources, strict=False)
    return Plan(
        tuple(replace(whole[old], name=new) for new, old in pairs), notes=describe_head(detected)
    )


def head_sources(detected: Found) -> dict[str, Source]:
    """Return the inputs of `plan_value_head`: the head's tensors only."""
    head = require_head(detected, stage="split")
    name = head.weight.partition(":")[0]
    keys = [source.partition(":")[2] for source in head.sources]
    return {name: Renamed(detected.folder.sources[name], dict(zip(keys, keys, strict=True)))}


def describe_head(detected: Found) -> dict[str, Any]:
    """Return the content of `value_head.json`: role, shape and origin of the head."""
    head = require_head(detected, stage="split")
    normalisation = detected.normalisation
    return {
        "format": 1,
        "role": head.role,
        "dialect": head.dialect,
        "hidden_size": head.shape[1],
        "dtype": head.dtype,
        "bias": bool(head.bias),
        "source": dict(zip(KEYS, head.sources, strict=False)),
        "mean": normalisation.mean,
        "std": normalisation.std,
    }


def _refuse_collisions(names: Mapping[str, str]) -> None:
    """Refuse TRL's prefix on some keys only, and keys that collide without it."""
    twice = [new for new, count in Counter(names.values()).items() if count > 1]
    mixed = 0 < sum(old != new for old, new in names.items()) < len(names)
    if twice or mixed:
        odd = [old for old, new in names.items() if old == new]
        findings = [f"{new}: with and without {WRAPPER}" for new in twice]
        findings += [f"{old}: without {WRAPPER}, which other keys have" for old in odd]
        raise ContractError(f"split: {first_and_more(findings)}", details=findings[:_SHOWN])


def write_value_head(detected: Found, out: Path) -> Executed:
    """Write `value_head.safetensors` and `value_head.json`.

    Args:
        detected: result of `detect` for a folder with a value head.
        out: empty folder, such as the staging folder of a stage.

    Raises:
        ContractError: no usable head, or NaN or infinity in it.
        ArtifactError: the files cannot be read or written.
    """
    sources = head_sources(detected)
    plan = plan_value_head(detected)
    validate(plan, sources, out=out)
    done = execute(plan, sources, out, stem=STEM, scan=True)
    _require_finite(done, detected.folder.root)
    text = json.dumps(describe_head(detected), indent=2, sort_keys=True, ensure_ascii=False)
    (out / f"{STEM}.json").write_text(text + "\n")
    return done


def _require_finite(done: Executed, root: Path) -> None:
    findings = [f"{name}: {count} elements not finite" for name, count in done.nonfinite.items()]
    if findings:
        raise ContractError(f"{root}: {first_and_more(findings)}", details=findings[:_SHOWN])
