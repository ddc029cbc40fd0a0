"""From a DeepSpeed checkpoint to a `Plan`: a whole model, or the adapter that was trained in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tasks.errors import ContractError
from tasks.weights import bits
from tasks.weights.deepspeed.checkpoint import ZeroCheckpoint
from tasks.weights.names import live_to_peft, unwrap
from tasks.weights.plan import Dropped, Op, Plan

INPUT = "zero"
"""What the plans call the checkpoint: `execute(plan, {INPUT: checkpoint}, ...)`."""
_OF_AN_ADAPTER = (".lora_", ".base_layer.", ".modules_to_save.", ".token_adapter.")


def plan_model(
    checkpoint: ZeroCheckpoint,
    *,
    dtype: str,
    max_shard_bytes: int | None = None,
    rename: Callable[[str], str] = unwrap,
) -> Plan:
    """Every tensor, floats in `dtype`. A tied tensor is written once, under its holder's name.

    Whether that is all that the model has only its class can tell: frozen weights may have been
    left out when the checkpoint was saved.

    Args:
        dtype: safetensors name: "BF16", "F16" or "F32".
        max_shard_bytes: upper bound of tensor data a file; None writes a single file.
        rename: live name to key of the output.

    Raises:
        ContractError: an adapter's checkpoint, weights stored in 4 bits, two tensors of one key.
    """
    findings = []
    names = list(checkpoint.tensors)
    adapter = [name for name in names if any(part in name for part in _OF_AN_ADAPTER)]
    if adapter:
        findings.append(f"{adapter[0]}: of an adapter, not of a model")
    integers = [
        name
        for name in names
        if name not in checkpoint.buffers and not bits.is_float(checkpoint.tensors[name].dtype)
    ]
    findings += [
        f"{name}: a parameter stored as {checkpoint.tensors[name].dtype}" for name in integers
    ]
    keys = {name: rename(name) for name in names}
    findings += _collisions(keys.items())
    _refuse(checkpoint, findings, "gather the adapter and merge it into its base instead")
    ops = tuple(_op(checkpoint, name, keys[name], dtype) for name in names)
    return Plan(ops, (), max_shard_bytes, _notes(checkpoint))


def plan_adapter(
    checkpoint: ZeroCheckpoint, *, dtype: str = "BF16", adapter: str = "default"
) -> Plan:
    """The trained parameters under the keys of `adapter_model.safetensors`, floats in `dtype`.

    Raises:
        ContractError: nothing of that adapter was trained, or something else was too.
    """
    findings = []
    keys: dict[str, str] = {}
    for name in checkpoint.trained:
        try:
            keys[name] = live_to_peft(name, adapter)
        except ContractError as error:
            findings.append(error.message)
    findings += _collisions(keys.items())
    if not checkpoint.trained:
        findings.append("no parameter was trained")
    _refuse(checkpoint, findings, "for a model that was trained whole, ask for the model")
    ops = tuple(_op(checkpoint, name, keys[name], dtype) for name in checkpoint.trained)
    dropped = tuple(
        Dropped(
            f"{INPUT}:{name}",
            "a buffer" if name in checkpoint.buffers else "frozen: belongs to the base",
        )
        for name in checkpoint.tensors
        if name not in keys
    )
    return Plan(ops, dropped, None, _notes(checkpoint))


def _op(checkpoint: ZeroCheckpoint, name: str, key: str, dtype: str) -> Op:
    held = checkpoint.tensors[name]
    return Op(
        name=key,
        shape=held.shape,
        dtype=dtype if bits.is_float(held.dtype) else held.dtype,
        source=f"{INPUT}:{name}",
        source_dtype=held.dtype,
    )


def _collisions(keys: Iterable[tuple[str, str]]) -> list[str]:
    owners: dict[str, str] = {}
    findings = []
    for name, key in keys:
        if owners.setdefault(key, name) != name:
            findings.append(f"{name} and {owners[key]} both become {key}")
    return findings


def _notes(checkpoint: ZeroCheckpoint) -> dict[str, object]:
    return {
        "zero_stage": checkpoint.stage,
        "world_size": checkpoint.world_size,
        "step": checkpoint.step,
        "tied": dict(checkpoint.tied),
    }


def _refuse(checkpoint: ZeroCheckpoint, findings: list[str], hint: str) -> None:
    if findings:
        raise ContractError(
            f"{checkpoint.root}: {findings[0]}"
            + (f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""),
            details=findings[:50],
            hint=hint,
        )
