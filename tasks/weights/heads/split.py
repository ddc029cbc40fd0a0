"""A value head off its policy: what is served must not hold it, and what trains on wants it.

vLLM streams every weight file of a folder into the model and fails on `v_head.summary.weight`; so
the head goes into an artifact of its own, `value_head.safetensors` with the keys that TRL and
LLaMA-Factory read and `value_head.json`, which says what it is. It never lies in the served folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.errors import ContractError
from tasks.weights.heads.detect import WRAPPER, Found, Head
from tasks.weights.heads.folder import Part
from tasks.weights.plan import Dropped, Op, Plan
from tasks.weights.source import Source

STEM = "value_head"
KEYS = ("v_head.summary.weight", "v_head.summary.bias")
"""What weight and bias are called in the artifact."""
KEPT_APART = "the value head: kept apart, in value_head.safetensors"
_SHOWN = 50


def require_head(found: Found, *, stage: str) -> Head:
    """The head, or a ContractError that lists everything that is wrong with it."""
    if found.findings:
        more = f" (and {len(found.findings) - 1} more)" if len(found.findings) > 1 else ""
        raise ContractError(
            f"{stage}: {found.folder.root}: {found.findings[0]}{more}",
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
    kept = [key for key in source.tensors if f"{name}:{key}" not in out]
    names = {key: key.removeprefix(WRAPPER) for key in kept}
    _refuse_collisions(names)
    ops = tuple(
        Op(names[key], tuple(info.shape), info.dtype, f"{name}:{key}", info.dtype)
        for key, info in source.tensors.items()
        if key in names
    )
    dropped = tuple(Dropped(one, KEPT_APART) for one in sorted(out) if one.startswith(f"{name}:"))
    return Plan(ops, dropped, max_shard_bytes)


def policy_sources(found: Found) -> dict[str, Source]:
    """The inputs of `plan_policy`: not a head that lies in a file of its own."""
    name = found.folder.weights
    return {name: found.folder.sources[name]}


def plan_value_head(found: Found) -> Plan:
    """The head alone, bit for bit; inputs of `head_sources`. Raises ContractError."""
    head = require_head(found, stage="split")
    return Plan(tuple(_head_ops(head, found)), notes=describe_head(found))


def head_sources(found: Found) -> dict[str, Source]:
    """The inputs of `plan_value_head`: the head's tensors and nothing else."""
    head = require_head(found, stage="split")
    name = head.weight.partition(":")[0]
    keys = tuple(one.partition(":")[2] for one in head.sources)
    return {name: Part(found.folder.sources[name], keys)}


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


def _head_ops(head: Head, found: Found) -> Iterator[Op]:
    for new, old in zip(KEYS, head.sources, strict=False):
        name, _, key = old.partition(":")
        info = found.folder.sources[name].tensors[key]
        yield Op(new, tuple(info.shape), info.dtype, old, info.dtype)


def _refuse_collisions(names: Mapping[str, str]) -> None:
    """TRL's prefix is on every key of a model or on none."""
    twice = [new for new, count in Counter(names.values()).items() if count > 1]
    mixed = 0 < sum(old != new for old, new in names.items()) < len(names)
    if twice or mixed:
        odd = [old for old, new in names.items() if old == new]
        findings = [f"{new}: with and without {WRAPPER}" for new in twice]
        findings += [f"{old}: without {WRAPPER}, which others have" for old in odd]
        raise ContractError(
            f"split: {findings[0]} (and {len(findings) - 1} more)", details=findings[:_SHOWN]
        )
