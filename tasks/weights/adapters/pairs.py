"""Pieces with a pair of LoRA factors: LoRA and DoRA on modules, LoRA on single parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tasks.weights.adapters.live import CONV1D, CONVOLUTION, EMBEDDING, LINEAR
from tasks.weights.adapters.piece import Ground, Piece, Shape
from tasks.weights.files.names import PEFT_PREFIX
from tasks.weights.plan.adapter_ops import Add, Dora, LowRank, Term


def module_pieces(ground: Ground, module: str, findings: list[str]) -> Iterator[Piece]:
    """Yield the pair on a linear layer or an embedding, and the bias of its B (`lora_bias`).

    Args:
        ground: adapter and model.
        module: live name of the module.
        findings: list to which reasons are added why the module cannot be merged.
    """
    config, name, kind = ground.config, f"{module}.weight", ground.live.modules[module]
    shape = ground.shape(name)
    if kind not in (LINEAR, CONV1D, EMBEDDING) or shape is None or len(shape) != 2:
        findings.append(_no_target(module, kind))
        return
    prefix, rank, scale = PEFT_PREFIX + module, config.rank_of(module), config.scale_of(module)
    turned = kind != LINEAR
    inner, outer = shape if turned else shape[::-1]
    infix, suffix = ("embedding_", "") if kind == EMBEDDING else ("", ".weight")
    a, b = (f"{prefix}.lora_{infix}{half}{suffix}" for half in "AB")
    wants: dict[str, Shape] = {a: (rank, inner), b: (outer, rank)}
    term: Term = LowRank(a, b, scale, transpose=turned)
    if config.dora:
        if config.tying and ground.is_tied(name):
            findings.append(
                f"{module}: DoRA trains separate magnitudes for each use of a tied embedding, so "
                "they are no longer tied; train without ensure_weight_tying"
            )
        magnitude = f"{prefix}.lora_magnitude_vector"
        wants[magnitude] = (outer,)
        term = Dora(a, b, magnitude, scale, transpose=turned)
    yield Piece(name, wants, term, alone=ground.is_alone(name))
    if config.lora_bias:
        yield from _bias_of_b(ground, module, outer, findings)


def _no_target(module: str, kind: str) -> str:
    if kind == CONVOLUTION:
        return (
            f"{module}: targeted, but a convolution, which cannot be merged here; merge the "
            "adapter with peft's merge_and_unload, or train with it in exclude_modules"
        )
    return f"{module}: targeted, but neither a linear layer nor an embedding: it cannot be merged"


def _bias_of_b(ground: Ground, module: str, outer: int, findings: list[str]) -> Iterator[Piece]:
    name, key = f"{module}.bias", f"{PEFT_PREFIX}{module}.lora_B.bias"
    if name not in ground.live.tensors:
        findings.append(
            f"{module}: lora_bias needs a layer with a bias, and this one has none; "
            "serve the adapter unmerged with transformers and peft (vLLM does not support "
            "lora_bias), or train without it"
        )
        return
    yield Piece(name, {key: (outer,)}, Add(key, ground.config.scale_of(module)))


def parameter_pieces(
    ground: Ground, module: str, names: Sequence[str], findings: list[str]
) -> Iterator[Piece]:
    """Yield the pairs on single parameters of one module (`target_parameters`).

    peft nests the wrappers of a module's parameters; the first parameter is innermost.

    Args:
        ground: adapter and model.
        module: live name of the module.
        names: live names of its targeted parameters, in the module's order.
        findings: list to which reasons are added why a parameter cannot be merged.
    """
    config, live = ground.config, ground.live
    if config.dora or config.lora_bias:
        findings.append(f"{module}: target_parameters supports neither use_dora nor lora_bias")
        return
    for index, name in enumerate(names):
        prefix = PEFT_PREFIX + module + ".base_layer" * (len(names) - 1 - index)
        a, b = (f"{prefix}.lora_{half}.weight" for half in "AB")
        shape = live.tensors[name].shape
        if len(shape) not in (2, 3):
            findings.append(f"{name}: targeted, but neither a matrix nor a stack of them")
            continue
        experts = shape[0] if len(shape) == 3 else 1
        rank = config.rank_of(name) * experts
        turned = len(shape) == 3 and _is_turned(ground, module, name, (a, b), rank, findings)
        inner, outer = shape[-2:] if turned else shape[:-3:-1]
        wants = {a: (rank, inner), b: (outer, rank)}
        term = LowRank(a, b, config.scale_of(name), transpose=turned, experts=experts)
        yield Piece(name, wants, term, alone=ground.is_alone(name))


_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(.*)")


def _is_turned(
    ground: Ground,
    module: str,
    name: str,
    pair: tuple[str, str],
    rank: int,
    findings: list[str],
) -> bool:
    """Return True if A works on the second to last axis of a stack of experts, and B on the last.

    peft changed this twice (`ParamWrapper.update_layer`): until 0.18 it is always so; in 0.19.0
    unless the module has `is_transposed`; since 0.19.1 if it has. If the version is not recorded,
    the shapes decide; a square parameter fits both, which is a finding.
    """
    is_transposed = module in ground.live.transposed
    match = _VERSION.match(ground.config.peft_version)
    if match and not (".dev" in match[4] and match.group(1, 2) in (("0", "18"), ("0", "19"))):
        version = tuple(int(number or 0) for number in match.group(1, 2, 3))
        if version < (0, 19):
            return True
        return is_transposed == (version != (0, 19, 0))
    *_, rows, columns = ground.live.tensors[name].shape
    if rows == columns and not is_transposed:
        recorded = ground.config.peft_version or "no version"
        findings.append(
            f"{name}: peft 0.18 and 0.19.1 lay out the factors of this square parameter "
            f"differently, and adapter_config.json records {recorded}: write the version of peft "
            'that trained it into adapter_config.json, e.g. "peft_version": "0.19.1"'
        )
    shapes = [
        tuple(tensor.shape) for key in pair if (tensor := ground.file_tensors.get(key)) is not None
    ]
    older = [(rank, rows), (columns, rank)]
    return is_transposed or (shapes == older and rows != columns)
