"""`convert.quantize`: which tensors become 8-bit ones, and what config.json then has to say.

    plan = quantized_plan(plan, facts, "w8a8")        every linear layer: numbers and scales
    config["quantization_config"] = quantization_config("w8a8", facts)

The format is that of compressed-tensors, as vLLM and transformers read it: `X.weight` in 8 bits and
`X.weight_scale`, (rows, 1), for every linear layer X; embeddings, norms, biases and the head stay
as they are. Data-free; see `encode.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tasks.core.contract import Expected, describe
from tasks.core.errors import ConfigError, ContractError, first_and_more
from tasks.weights.adapters.live import LINEAR, OTHER
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.plan.contracts import ModelFacts
from tasks.weights.plan.operations import Encoding, Op, Plan
from tasks.weights.quantized.encode import SCALE_DTYPE, SCHEMES, library_scheme

NONE = "none"
CHOICES = (NONE, *SCHEMES)
SCALE = "_scale"
"""What the key of a weight's scales ends in, after the weight's own key."""
_SHOWN = 50


def check_quantize(name: str) -> str | None:
    """`convert.quantize` as it was given; None for "none". Raises ConfigError."""
    if name not in CHOICES:
        raise ConfigError(
            f"convert.quantize={name!r} is not one of {', '.join(CHOICES)}",
            hint="convert.quantize=none",
        )
    return None if name == NONE else name


def quantized_plan(plan: Plan, facts: ModelFacts, scheme: str) -> Plan:
    """The same plan with every linear layer in 8 bits.

    Args:
        plan: of a whole model; operations in the order of its keys.
        facts: of that model.
        scheme: "w8a8" or "fp8".

    Raises:
        ContractError: the model has no such layers, or others that these formats do not reach;
            every finding in one error.
    """
    findings = list(quantize_findings(facts))
    wanted = set(facts.quantized)
    ops: list[Op] = []
    for op in plan.ops:
        if op.name not in wanted:
            ops.append(op)
        elif len(op.shape) != 2 or not is_float(op.dtype):
            findings.append(f"{op.name}: {describe(op.shape, op.dtype)} is no float matrix")
        else:
            ops += _halves(op, scheme)
    if findings:
        raise ContractError(
            f"convert.quantize={scheme}: {first_and_more(findings)}",
            details=findings[:_SHOWN],
            hint="convert.quantize=none",
        )
    notes = {**plan.notes, "quantized": len(wanted)}
    return replace(plan, ops=tuple(ops), shards=None, notes=notes)


def quantize_findings(facts: ModelFacts) -> Iterator[str]:
    """What of a model rules out that its linear layers are quantised."""
    if not facts.quantized:
        yield "the model has no linear layer besides its head (GPT-2's are convolutions in name)"
    for name, tensor in facts.live.tensors.items():
        stack = len(tensor.shape) == 3 and facts.live.modules.get(_module(name)) == OTHER
        if stack and "expert" in name:
            yield f"{name}: experts in one stack, which is not quantised here"


def _halves(op: Op, scheme: str) -> tuple[Op, Op]:
    """The operations for a matrix's numbers and for the scales of its rows."""
    rows, columns = op.shape
    encoding = Encoding(scheme, "weight", columns, op.dtype)
    weight = replace(op, dtype=SCHEMES[scheme].dtype, encoding=encoding)
    scale = replace(
        op,
        name=op.name + SCALE,
        shape=(rows, 1),
        dtype=SCALE_DTYPE,
        encoding=replace(encoding, part="scale"),
    )
    return weight, scale


def quantized_contract(facts: ModelFacts, scheme: str) -> list[Expected]:
    """What the quantised checkpoint has to hold."""
    found: list[Expected] = []
    for one in facts.tensors:
        if one.name not in facts.quantized:
            found.append(one)
            continue
        found.append(replace(one, dtype=SCHEMES[scheme].dtype))
        found.append(Expected(one.name + SCALE, (one.shape[0], 1), SCALE_DTYPE))
    return found


def quantization_config(scheme: str, facts: ModelFacts) -> dict[str, Any]:
    """`quantization_config` of config.json for a model of these facts; see `library_config`."""
    return library_config(scheme, left_alone(facts))


def library_config(scheme: str, ignore: Sequence[str]) -> dict[str, Any]:
    """The same from plain data, made and checked by compressed-tensors' own classes.

    Args:
        scheme: "w8a8" or "fp8".
        ignore: linear layers that stay as they are: `left_alone`.
    """
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    config = QuantizationConfig(
        config_groups={"group_0": library_scheme(scheme)},
        format=SCHEMES[scheme].format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=list(ignore),
    )
    document: dict[str, Any] = json.loads(config.model_dump_json())
    return document


def left_alone(facts: ModelFacts) -> list[str]:
    """Modules that are linear layers and stay as they are, the head above all.

    Under their names on disk, which vLLM goes by, and in memory, which transformers goes by.
    """
    disk = _disk_keys(facts)
    found: set[str] = set()
    for module, kind in facts.live.modules.items():
        key = disk.get(f"{module}.weight", f"{module}.weight")
        if kind == LINEAR and key not in facts.quantized:
            found |= {module, _module(key)}
    return sorted(found)


def _disk_keys(facts: ModelFacts) -> Mapping[str, str]:
    return {**{one.live: one.disk for one in facts.places if one.is_all}, **facts.aliases}


def _module(name: str) -> str:
    return name.rpartition(".")[0]
