"""Plan the gathering of a full fine-tuning: tensors by live name -> keys of the checkpoint.

Tensors that transformers fuses in memory are written split, under the keys of the base on disk, so
that a program that can load the base can load the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tasks.core.contract import TensorLike, describe
from tasks.core.errors import ContractError, first_and_more
from tasks.weights.families.places import Place
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.plan.contracts import ModelFacts
from tasks.weights.plan.operations import Dropped, Op, Plan

_SHOWN = 100


def plan_full(
    trained: Mapping[str, TensorLike],
    facts: ModelFacts,
    *,
    base: Mapping[str, TensorLike] | None = None,
    frozen: bool = False,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
) -> Plan:
    """Plan a checkpoint from the trained parameters.

    Args:
        trained: trained parameters by live name without wrapper prefixes; input "trained".
        facts: facts of the model, made with the keys of the base if there is one.
        base: header entries of the base checkpoint, input "base"; the source of buffers and of
            tensors that the model does not read.
        frozen: take parameters that are not in `trained` from the base, too.
        dtype: safetensors name for all floats; None keeps the dtype of each tensor.
        max_shard_bytes: limit of tensor data in one output file.

    Returns:
        the plan; `notes["from_base"]` lists the keys that are copied from the base.

    Raises:
        ContractError: lists every finding: names that the model does not have, tensors that are
            missing, shapes that differ. What no text passes (`ModelFacts.towers`) may be missing.
    """
    findings = list(facts.findings)
    towers = set(facts.towers)
    known = {*facts.live.tensors, *(place.live for place in facts.places)}
    findings += [f"{name}: the model has no such tensor" for name in trained if name not in known]
    ops: list[Op] = []
    from_base: list[str] = []
    for place in facts.places:
        op = _trained_op(place, trained, facts, findings)
        if op is None and base is not None and place.disk in base:
            if place.live in facts.live.tensors and not frozen and place.live not in towers:
                findings.append(f"{place.live}: a parameter, but it was not trained")
            from_base.append(place.disk)
            op = _copy(place.disk, base[place.disk])
        if op is None:
            findings.append(f"{place.live}: missing, {list(place.live_shape)}")
            continue
        ops.append(op)
    for key in facts.unread:
        if base is not None and key in base:
            from_base.append(key)
            ops.append(_copy(key, base[key]))
    _refuse(findings)
    notes: dict[str, Any] = {"from_base": from_base} if from_base else {}
    cast = tuple(_cast(op, dtype) for op in ops)
    unused = set(base or ()) - set(from_base) if from_base else set()
    dropped = [Dropped(f"base:{key}", "trained") for key in sorted(unused)]
    return Plan(cast, tuple(dropped), max_shard_bytes=max_shard_bytes, notes=notes)


def _trained_op(
    place: Place, trained: Mapping[str, TensorLike], facts: ModelFacts, findings: list[str]
) -> Op | None:
    """Return the operation that writes one key from a trained tensor; None if it is not trained."""
    holder = facts.live.tied.get(place.live, place.live)
    name = place.live if place.live in trained else holder
    tensor = trained.get(name)
    if tensor is None:
        return None
    if tuple(tensor.shape) != place.live_shape:
        wanted = describe(place.live_shape, tensor.dtype)
        findings.append(f"{name}: is {list(tensor.shape)}, the model has {wanted}")
    if not place.whole:
        findings.append(f"{place.disk}: fuses {place.live} with other tensors; cannot be written")
    return Op(
        name=place.disk,
        shape=place.shape,
        dtype=tensor.dtype,
        source=f"trained:{name}",
        source_dtype=tensor.dtype,
        start=place.start,
        transpose=place.transpose,
    )


def _copy(key: str, info: TensorLike) -> Op:
    return Op(key, tuple(info.shape), info.dtype, f"base:{key}", info.dtype)


def _cast(op: Op, dtype: str | None) -> Op:
    return replace(op, dtype=dtype) if dtype is not None and is_float(op.dtype) else op


def _refuse(findings: list[str]) -> None:
    if findings:
        raise ContractError(
            f"gather: trained tensors do not make a checkpoint: {first_and_more(findings)}",
            details=findings[:_SHOWN],
        )
