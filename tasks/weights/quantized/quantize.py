"""Plan 8-bit weights for `convert.quantize`, and the fields of config.json that describe them.

    plan = quantized_plan(plan, facts, "w8a8")        every linear layer: weights and scales
    config["quantization_config"] = library_config("w8a8", left_alone(facts))

The format is that of compressed-tensors, as vLLM and transformers read it: `X.weight` in 8 bits and
`X.weight_scale`, shape (rows, 1), for every linear layer X. Embeddings, norms, biases and the head
stay as they are. No calibration data is needed; see `encode.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tasks.core.contract import Expected, describe
from tasks.core.errors import ContractError, first_and_more
from tasks.weights.adapters.live import LINEAR, OTHER
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.plan.contracts import ModelFacts
from tasks.weights.plan.operations import Encoding, Op, Plan
from tasks.weights.quantized.encode import SCALE_DTYPE, SCHEMES, library_scheme

SCALE = "_scale"
"""Suffix of the key of a weight's scales, after the weight's own key."""
GGUF = "gguf:"
"""Beginning of the formats that llama.cpp writes and serves."""
GGUF_BITS = {"f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q6_k": 6.6, "q5_k_m": 5.7, "q4_k_m": 4.9}
"""Bits per weight of GGUF types, all weights and scales included, about."""
_SHOWN = 50


def quantized_plan(plan: Plan, facts: ModelFacts, scheme: str) -> Plan:
    """Return the same plan with every linear layer in 8 bits.

    Args:
        plan: a plan of a full model; operations in the order of its keys.
        facts: facts of that model.
        scheme: "w8a8" or "fp8".

    Raises:
        ContractError: the model has no linear layers, or layers that these formats do not support;
            lists every finding.
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
    """Yield the reasons why a model's linear layers cannot be quantized."""
    if not facts.quantized:
        yield "the model has no linear layer besides its head (GPT-2's are of class Conv1D)"
    for name, tensor in facts.live.tensors.items():
        stack = len(tensor.shape) == 3 and facts.live.modules.get(_module(name)) == OTHER
        if stack and "expert" in name:
            yield f"{name}: experts in one stacked tensor, which cannot be quantised"


def _halves(op: Op, scheme: str) -> tuple[Op, Op]:
    """Return the operations for a matrix's 8-bit weights and for the scales of its rows."""
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


def quantized_size(nbytes: int, linear: int, convert: Mapping[str, Any]) -> int:
    """Return the size of a quantised model in bytes, about.

    Args:
        nbytes: size of the model in 16 bits.
        linear: number of weights in its quantised layers.
        convert: section `convert`.
    """
    scheme = convert["quantize"]
    if scheme.startswith(GGUF):  # embeddings and head, too
        return int(nbytes * GGUF_BITS[scheme.removeprefix(GGUF)] / 16)
    bits = 8.0 if scheme in SCHEMES else 4 + 16 / convert["group_size"]
    return nbytes - int(linear * (2 - bits / 8))


def quantized_contract(facts: ModelFacts, scheme: str, *, group: int = 128) -> list[Expected]:
    """Return the tensors that the quantized checkpoint must contain.

    Args:
        facts: facts of the model.
        scheme: "w8a8", "fp8" or "w4a16".
        group: numbers of a row that share a scale, in 4 bits.
    """
    contract: list[Expected] = []
    for tensor in facts.tensors:
        if tensor.name not in facts.quantized:
            contract.append(tensor)
            continue
        if scheme not in SCHEMES:
            contract += _packed(tensor, group)
            continue
        contract.append(replace(tensor, dtype=SCHEMES[scheme].dtype))
        contract.append(Expected(tensor.name + SCALE, (tensor.shape[0], 1), SCALE_DTYPE))
    return contract


def _packed(tensor: Expected, group: int) -> Iterator[Expected]:
    """Yield the tensors of a matrix in 4 bits: 8 numbers to an int32, a scale for each group."""
    rows, columns = tensor.shape
    yield Expected(f"{tensor.name}_packed", (rows, -(-columns // 8)), "I32")
    yield Expected(tensor.name + SCALE, (rows, columns // group), tensor.dtype)
    yield Expected(f"{tensor.name}_shape", (2,), "I64")


def library_config(scheme: str, ignore: Sequence[str]) -> dict[str, Any]:
    """Make `quantization_config` with compressed-tensors' own classes, which check it.

    Args:
        scheme: "w8a8" or "fp8".
        ignore: names of linear layers that stay as they are, from `left_alone`.
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
    """Return the linear layers that stay as they are, above all the head.

    Each under its name on disk, which vLLM uses, and in memory, which transformers uses.
    """
    disk = _disk_keys(facts)
    names: set[str] = set()
    for module, kind in facts.live.modules.items():
        key = disk.get(f"{module}.weight", f"{module}.weight")
        if kind == LINEAR and key not in facts.quantized:
            names |= {module, _module(key)}
    return sorted(names)


def _disk_keys(facts: ModelFacts) -> Mapping[str, str]:
    disk = {place.live: place.disk for place in facts.places if place.is_all}
    return {**disk, **facts.aliases}


def _module(name: str) -> str:
    return name.rpartition(".")[0]
