"""Quantize a model to 8 bits for `convert.quantize`, with compressed-tensors' functions.

    plan = quantized_plan(plan, facts, "w8a8")        every linear layer: weights and scales
    config["quantization_config"] = library_config("w8a8", left_alone(facts))

The format is that of compressed-tensors, as vLLM and transformers read it: `X.weight` in 8 bits and
`X.weight_scale`, shape (rows, 1), for every linear layer X. Embeddings, norms, biases and the head
stay as they are.

There is no calibration: a row's scale follows from its largest magnitude, and activations are
quantized per token while the model runs. So the full matrix is never in memory.

Scales are rounded up to the next number of the model's own dtype: vLLM keeps them in fp32,
transformers in that dtype. Rounding to nearest could put a row's largest element beyond 8 bits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.contract import Expected, describe
from tasks.core.errors import ContractError, first_and_more
from tasks.weights.files.dtypes import is_float, torch_dtype
from tasks.weights.model import LINEAR, OTHER, Model
from tasks.weights.plan import Encoding, Op, Plan

if TYPE_CHECKING:
    import torch


class Scheme(NamedTuple):
    """A way to store weights in 8 bits: names in compressed-tensors, dtype of safetensors."""

    preset: str
    format: str
    dtype: str


SCHEMES = {
    "w8a8": Scheme("W8A8", "int-quantized", "I8"),
    "fp8": Scheme("FP8_DYNAMIC", "float-quantized", "F8_E4M3"),
}
"""Schemes by value of `convert.quantize`. Both are symmetric, with one scale per row and dynamic
activations."""
SCALE, SCALE_DTYPE = "_scale", "F32"
"""Suffix of the key of a weight's scales, after the weight's own key, and their dtype."""
GGUF = "gguf:"
"""Beginning of the formats that llama.cpp writes and serves."""
_SHOWN = 50


def quantized_plan(plan: Plan, facts: Model, scheme: str) -> Plan:
    """Return the same plan with every linear layer in 8 bits.

    Raises ContractError for a model without linear layers, or with ones that these formats do not
    support.
    """
    findings: list[str] = []
    if not facts.quantized:
        findings.append("the model has no linear layer besides its head (GPT-2's are Conv1D)")
    for name, shape in facts.parameters.items():
        if len(shape) == 3 and "expert" in name and facts.modules.get(_module(name)) == OTHER:
            findings.append(f"{name}: experts in one stacked tensor, which cannot be quantised")
    wanted = set(facts.quantized)
    ops: list[Op] = []
    for op in plan.ops:
        if op.name not in wanted:
            ops.append(op)
        elif len(op.shape) != 2 or not is_float(op.dtype):
            findings.append(f"{op.name}: {describe(op.shape, op.dtype)} is no float matrix")
        else:
            rows, columns = op.shape
            weight = Encoding(scheme, "weight", columns, op.dtype)
            scale = replace(weight, part="scale")
            ops += [
                replace(op, dtype=SCHEMES[scheme].dtype, encoding=weight),
                replace(
                    op, name=op.name + SCALE, shape=(rows, 1), dtype=SCALE_DTYPE, encoding=scale
                ),
            ]
    if findings:
        raise ContractError(
            f"convert.quantize={scheme}: {first_and_more(findings)}",
            details=findings[:_SHOWN],
            hint="convert.quantize=none",
        )
    return replace(plan, ops=tuple(ops), shards=None)


def quantized_contract(facts: Model, scheme: str) -> list[Expected]:
    """Return the tensors that the quantized checkpoint must contain."""
    contract: list[Expected] = []
    for tensor in facts.tensors:
        if tensor.name in facts.quantized:
            scale = Expected(tensor.name + SCALE, (tensor.shape[0], 1), SCALE_DTYPE)
            contract += [replace(tensor, dtype=SCHEMES[scheme].dtype), scale]
        else:
            contract.append(tensor)
    return contract


def library_config(scheme: str, ignore: Sequence[str]) -> dict[str, Any]:
    """Make `quantization_config`; linear layers that are in `ignore` stay as they are."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    config = QuantizationConfig(
        config_groups={"group_0": library_scheme(scheme)},
        format=SCHEMES[scheme].format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=list(ignore),
    )
    document: dict[str, Any] = json.loads(config.model_dump_json())
    return document


def left_alone(facts: Model) -> list[str]:
    """Return the linear layers that stay as they are, above all the head.

    Each under its name on disk, which vLLM uses, and in memory, which transformers uses.
    """
    disk = {slot.live: slot.key for slot in facts.slots if slot.is_all}
    disk |= facts.aliases
    names: set[str] = set()
    for module, kind in facts.modules.items():
        key = disk.get(f"{module}.weight", f"{module}.weight")
        if kind == LINEAR and key not in facts.quantized:
            names |= {module, _module(key)}
    return sorted(names)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


@cache
def library_scheme(name: str) -> Any:
    """Return compressed-tensors' `QuantizationScheme` of a scheme for linear layers."""
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(SCHEMES[name].preset, ["Linear"])
    scheme.format = SCHEMES[name].format
    return scheme


def encode(encoding: Encoding, block: torch.Tensor) -> torch.Tensor:
    """Quantize some rows of a matrix in fp32, shape (rows, columns).

    Returns their weights, in int8 or float8_e4m3fn, or their scales in fp32, shape (rows, 1); the
    scale of a row with a NaN or an infinity is not finite.
    """
    import torch
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = library_scheme(encoding.scheme).weights
    low, high = block.amin(1, keepdim=True), block.amax(1, keepdim=True)
    scale, zero = calculate_qparams(low, high, weights)
    scale, near = scale.float(), scale.float().to(torch_dtype(encoding.scale_dtype))
    above = torch.nextafter(near, torch.full_like(near, torch.inf))
    scale = torch.where(near.float() < scale, above, near).float()
    if encoding.part == "scale":
        return scale
    return quantize(block, scale, zero, weights, dtype=weights.pytorch_dtype())
