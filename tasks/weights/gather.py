"""Plan the gathering of trained tensors, of our own ranks or of another trainer's checkpoint.

    ranks = read_ranks("deepspeed", folder)
    plan, tensors = plan_adapter_file(ranks)        # keys as PEFT names them
    plan = plan_full(renamed(ranks), model, ...)    # keys of the base on disk

Tensors that transformers fuses in memory are written split, under the keys of the base on disk, so
that a program that can load the base can load the result.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from tasks.core.errors import ContractError, first_and_more
from tasks.weights.distributed import DistributedCheckpoint, read_distributed
from tasks.weights.files.names import parse_peft, rename_all, unwrap
from tasks.weights.files.tensors import Tensors
from tasks.weights.model import Model
from tasks.weights.plan import Op, Plan, cast_floats, plain_op
from tasks.weights.shards import Partitions, read_partitions
from tasks.weights.zero import ZeroCheckpoint, read_zero

TRAINED = "trained"
"""Name of the trained tensors among the inputs of a plan."""
_SHOWN = 100
Ranks = Partitions | ZeroCheckpoint | DistributedCheckpoint


def read_ranks(kind: str, root: Path) -> Ranks:
    """Open the ranks' files: "shards" are ours, "deepspeed", "distributed" other trainers'."""
    if kind == "shards":
        return read_partitions(root)
    return read_zero(root) if kind == "deepspeed" else read_distributed(root)


def trained_names(ranks: Ranks) -> list[str]:
    """Return the names of what was trained: DeepSpeed also saves frozen parameters."""
    return [*getattr(ranks, "trained", ranks.tensors)]


def plan_adapter_file(ranks: Ranks) -> tuple[Plan, Tensors]:
    """Plan `adapter_model.safetensors`. Returns the plan, and the trained tensors by its keys."""
    names = trained_names(ranks)
    if any(parse_peft(unwrap(name)) for name in names):  # saved by peft's own names
        keys = {unwrap(name): name for name in names}
    else:
        keys = {key: name for name, key in rename_all(names, adapter=True).items()}
    view = {key: ranks.tensors[name] for key, name in keys.items()}
    ops = [plain_op(key, f"{TRAINED}:{keys[key]}", info) for key, info in view.items()]
    known = set(names)
    left = [f"{TRAINED}:{name}" for name in ranks.tensors if name not in known]
    return Plan(tuple(ops), dict.fromkeys(left, "frozen: belongs to the base")), view


def renamed(ranks: Ranks) -> Tensors:
    """Return the trained tensors of a full model by live name, without prefixes of wrappers."""
    keys = rename_all(ranks.tensors, adapter=False)
    return {key: ranks.tensors[name] for name, key in keys.items()}


def plan_full(
    trained: Tensors,
    model: Model,
    *,
    base: Tensors | None = None,
    frozen: bool = False,
    buffers: Collection[str] = (),
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
) -> Plan:
    """Plan a checkpoint from the trained parameters, by live name without wrapper prefixes.

    `base` is the source of buffers and of tensors that the model does not read, with `frozen` also
    of parameters that were not trained. Those of `buffers` that the class does not have are
    dropped. Raises ContractError with every finding: names that the model does not have, tensors
    that are missing, shapes that differ. What no text passes (`Model.towers`) may be missing.
    """
    towers, base = set(model.towers), base or {}
    known = {*model.parameters, *(slot.live for slot in model.slots)}
    foreign = {name for name in map(unwrap, buffers) if name not in known}
    unknown = [name for name in trained if name not in known and name not in foreign]
    findings = [*model.findings, *(f"{name}: the model has no such tensor" for name in unknown)]
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
            op = plain_op(key, f"{TRAINED}:{name}", tensor)
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
    used = {op.source for op in ops}
    from_base = any(op.input == "base" for op in ops)
    dropped = {f"base:{k}": "trained" for k in base if from_base and f"base:{k}" not in used}
    for name in trained:
        if f"{TRAINED}:{name}" not in used and (name in foreign or name in model.ties):
            why = "a buffer that the model's class does not have"
            same = f"the same as {model.ties.get(name)}"
            dropped[f"{TRAINED}:{name}"] = why if name in foreign else same
    plan = Plan(tuple(ops), dropped, max_shard_bytes)
    return plan if dtype is None else cast_floats(plan, dtype, model.wide)
