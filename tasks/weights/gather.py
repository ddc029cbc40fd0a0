"""Plan the gathering of a full fine-tuning: tensors by live name -> keys of the checkpoint.

Tensors that transformers fuses in memory are written split, under the keys of the base on disk, so
that a program that can load the base can load the result.
"""

from __future__ import annotations

from dataclasses import replace

from tasks.core.errors import ContractError, first_and_more
from tasks.weights.files.tensors import Tensors
from tasks.weights.model import Model
from tasks.weights.plan import Op, Plan, cast_floats, plain_op

_SHOWN = 100


def plan_full(
    trained: Tensors,
    model: Model,
    *,
    base: Tensors | None = None,
    frozen: bool = False,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
) -> Plan:
    """Plan a checkpoint from the trained parameters.

    Args:
        trained: trained parameters by live name without wrapper prefixes; input "trained".
        model: the model, described with the keys of the base if there is one.
        base: header entries of the base checkpoint, input "base"; the source of buffers and of
            tensors that the model does not read.
        frozen: take parameters that are not in `trained` from the base, too.
        dtype: safetensors name for all floats; None keeps the dtype of each tensor.
        max_shard_bytes: limit of tensor data in one output file.

    Raises:
        ContractError: lists every finding: names that the model does not have, tensors that are
            missing, shapes that differ. What no text passes (`Model.towers`) may be missing.
    """
    towers, base = set(model.towers), base or {}
    known = {*model.parameters, *(slot.live for slot in model.slots)}
    findings = [
        *model.findings,
        *(f"{name}: the model has no such tensor" for name in trained if name not in known),
    ]
    ops: list[Op] = []
    for slot in model.slots:
        name = slot.live if slot.live in trained else model.ties.get(slot.live, slot.live)
        tensor, key = trained.get(name), slot.key
        if tensor is not None:
            if tuple(tensor.shape) != slot.live_shape:
                wanted = list(slot.live_shape)
                findings.append(f"{name}: is {list(tensor.shape)}, the model has {wanted}")
            if not slot.whole:
                findings.append(f"{key}: fuses {slot.live} with other tensors; cannot be written")
            op = plain_op(key, f"trained:{name}", tensor)
            op = replace(op, shape=slot.shape, start=slot.start, transpose=slot.transpose)
            ops.append(op)
        elif key in base:
            if slot.live in model.parameters and not frozen and slot.live not in towers:
                findings.append(f"{slot.live}: a parameter, but it was not trained")
            ops.append(plain_op(key, f"base:{key}", base[key]))
        else:
            findings.append(f"{slot.live}: missing, {list(slot.live_shape)}")
    ops += [plain_op(key, f"base:{key}", base[key]) for key in model.unread if key in base]
    if findings:
        raise ContractError(
            f"gather: trained tensors do not make a checkpoint: {first_and_more(findings)}",
            details=findings[:_SHOWN],
        )
    copied = {op.key for op in ops if op.input == "base"}
    unused = sorted(set(base) - copied) if copied else []
    dropped = {f"base:{key}": "trained" for key in unused}
    plan = Plan(tuple(ops), dropped, max_shard_bytes)
    return plan if dtype is None else cast_floats(plan, dtype, model.wide)
