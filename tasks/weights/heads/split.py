"""A value head off its policy: what is served must not hold it, and what trains on wants it.

vLLM streams every weight file of a folder into the model and fails on `v_head.summary.weight`; so
the head goes into an artifact of its own, `value_head.safetensors` with the keys that TRL and
LLaMA-Factory read and `value_head.json`, which says what it is. It never lies in the served folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tasks.core.errors import ContractError, first_and_more
from tasks.weights.files.source import Renamed, Source
from tasks.weights.heads.detect import WRAPPER, Found, Head
from tasks.weights.plan.layout import as_is
from tasks.weights.plan.operations import Dropped, Plan

STEM = "value_head"
KEYS = ("v_head.summary.weight", "v_head.summary.bias")
"""What weight and bias are called in the artifact."""
KEPT_APART = "the value head: kept apart, in value_head.safetensors"
_SHOWN = 50


def require_head(found: Found, *, stage: str) -> Head:
    """The head, or a ContractError that lists everything that is wrong with it."""
    if found.findings:
        raise ContractError(
            f"{stage}: {found.folder.root}: {first_and_more(found.findings)}",
            details=found.findings[:_SHOWN],
        )
    if found.head is None:
        raise ContractError(f"{stage}: {found.folder.root}: no head of any kind: a language model")
    return found.head


def plan_policy(found: Found, *, max_shard_bytes: int | None = None) -> Plan:
    """The model (or adapter) without its head, under its own keys; input names as of the folder.

    Raises:
        ContractError: there is no head, it cannot be used, or keys that collide once TRL's prefix
            is gone.
    """
    head = require_head(found, stage="split")
    name = found.folder.weights
    source = found.folder.sources[name]
    out = {*head.sources, *found.normalisation.buffers}
    kept = [op for op in as_is(source, name).ops if op.source not in out]
    _refuse_collisions({op.key: op.name.removeprefix(WRAPPER) for op in kept})
    ops = tuple(replace(op, name=op.name.removeprefix(WRAPPER)) for op in kept)
    dropped = tuple(Dropped(one, KEPT_APART) for one in sorted(out) if one.startswith(f"{name}:"))
    return Plan(ops, dropped, max_shard_bytes)


def policy_sources(found: Found) -> dict[str, Source]:
    """The inputs of `plan_policy`: not a head that lies in a file of its own."""
    name = found.folder.weights
    return {name: found.folder.sources[name]}


def plan_value_head(found: Found) -> Plan:
    """The head alone, bit for bit; inputs of `head_sources`. Raises ContractError."""
    head = require_head(found, stage="split")
    (name,) = sources = head_sources(found)
    whole = {op.source: op for op in as_is(sources[name], name).ops}
    pairs = zip(KEYS, head.sources, strict=False)
    return Plan(
        tuple(replace(whole[old], name=new) for new, old in pairs), notes=describe_head(found)
    )


def head_sources(found: Found) -> dict[str, Source]:
    """The inputs of `plan_value_head`: the head's tensors and nothing else."""
    head = require_head(found, stage="split")
    name = head.weight.partition(":")[0]
    keys = [one.partition(":")[2] for one in head.sources]
    return {name: Renamed(found.folder.sources[name], dict(zip(keys, keys, strict=True)))}


def describe_head(found: Found) -> dict[str, Any]:
    """`value_head.json`: what the head is and where it was."""
    head = require_head(found, stage="split")
    normalisation = found.normalisation
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
    """TRL's prefix is on every key of a model or on none."""
    twice = [new for new, count in Counter(names.values()).items() if count > 1]
    mixed = 0 < sum(old != new for old, new in names.items()) < len(names)
    if twice or mixed:
        odd = [old for old, new in names.items() if old == new]
        findings = [f"{new}: with and without {WRAPPER}" for new in twice]
        findings += [f"{old}: without {WRAPPER}, which others have" for old in odd]
        raise ContractError(f"split: {first_and_more(findings)}", details=findings[:_SHOWN])
