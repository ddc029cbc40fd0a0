"""Where a folder's head is, who wrote it, what is wrong with it: from headers and configuration.

found = detect(read_folder(folder))
found.head.weight          "model:v_head.summary.weight"
found.findings             why it cannot be used; everything at once
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tasks.core.contract import describe
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.files.names import PEFT_PREFIX
from tasks.weights.heads.absence import OPENRLHF, absence, lora_modules, module_names
from tasks.weights.heads.folder import HEAD, HeadFolder, architectures, hidden_size
from tasks.weights.heads.normalisation import Normalisation, read_normalisation

Role = Literal["value", "reward", "either"]
Dialect = Literal["trl", "llamafactory", "openrlhf", "peft", "transformers"]

WRAPPER = "pretrained_model."
"""What TRL's wrapper puts before the keys of the model in it."""
_V_HEAD = re.compile(r"(pretrained_model\.)?v_head\.summary\.(?P<part>weight|bias)")


@dataclass(frozen=True)
class Head:
    """A linear layer from the last hidden state to a number.

    Attributes:
        dialect: who wrote it.
        role: what it was trained for; "either" where the files do not tell (`v_head`).
        weight: "<input>:<key>" of its weight.
        shape: of the weight, (labels, hidden).
        dtype: of the weight, safetensors name.
        bias: "<input>:<key>"; "" when it has none.
    """

    dialect: Dialect
    role: Role
    weight: str
    shape: tuple[int, ...]
    dtype: str
    bias: str = ""

    @property
    def sources(self) -> tuple[str, ...]:
        """Its tensors."""
        return (self.weight, self.bias) if self.bias else (self.weight,)


@dataclass(frozen=True)
class Found:
    """What a folder says of heads.

    Attributes:
        folder: the folder.
        head: its head; None when it has none that can be used as it is.
        normalisation: how rewards are normalised.
        lora_on: module of a head that the adapter changes by LoRA alone: usable only on a base
            that has that head; "" when there is none.
        findings: why a head is not there, or cannot be used. Empty for a plain language model.
        notes: what is odd and was settled, one line each.
    """

    folder: HeadFolder
    head: Head | None
    normalisation: Normalisation
    lora_on: str = ""
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def detect(folder: HeadFolder) -> Found:
    """Look for a head. Raises ArtifactError when a file cannot be read."""
    findings, notes = list(folder.findings), list[str]()
    heads = [*_v_heads(folder, findings), *_linear_heads(folder)]
    lora_on = next(iter(lora_modules(folder)), "") if not heads else ""
    for head in heads:
        findings += _head_findings(head, folder)
    if len(heads) > 1:
        findings.append(f"{' and '.join(one.weight for one in heads)}: which of them is the head?")
    if not heads and not findings:
        findings += absence(folder, lora_on)
    notes += _name_notes(folder, heads)
    normalisation, wrong = read_normalisation(folder)
    only = heads[0] if len(heads) == 1 else None
    return Found(folder, only, normalisation, lora_on, (*findings, *wrong), tuple(notes))


def _v_heads(folder: HeadFolder, findings: list[str]) -> Iterator[Head]:
    """`v_head.summary`: in the model (TRL), or in a file beside it (LLaMA-Factory; TRL on PEFT)."""
    for name, source in folder.sources.items():
        found: dict[str, str] = {}
        for key in source.tensors:
            match = _V_HEAD.fullmatch(key)
            if match and match["part"] in found:
                findings.append(f"{key} and {found[match['part']]}: the same head twice")
            elif match:
                found[match["part"]] = key
            elif name == HEAD:
                findings.append(f"{folder.beside[0]}: {key} is no part of a value head")
        if "weight" in found:
            info = source.tensors[found["weight"]]
            bias = f"{name}:{found['bias']}" if "bias" in found else ""
            side = name == HEAD and folder.beside[0].startswith("value_head.")
            yield Head(
                "llamafactory" if side else "trl", "either", f"{name}:{found['weight']}",
                tuple(info.shape), info.dtype, bias,
            )  # fmt: skip
        elif found or name == HEAD:
            findings.append(f"{name}: a value head without v_head.summary.weight")


def _linear_heads(folder: HeadFolder) -> Iterator[Head]:
    """`score` and its like: in a model, or saved whole in an adapter."""
    source = folder.sources[folder.weights]
    prefix = "" if folder.adapter_config is None else PEFT_PREFIX
    names = module_names(folder.config)
    for module in names:
        keys = [
            f"{prefix}{module}.{infix}weight"
            for infix in ("", "modules_to_save.", "modules_to_save.default.")
        ]
        key = next((one for one in keys if one in source.tensors), None)
        if key is None:
            continue
        info = source.tensors[key]
        bias = key.removesuffix("weight") + "bias"
        role = _role(folder.config, *info.shape[:1])
        yield Head(
            _dialect(folder), role, f"{folder.weights}:{key}", tuple(info.shape),
            info.dtype, f"{folder.weights}:{bias}" if bias in source.tensors else "",
        )  # fmt: skip


def _dialect(folder: HeadFolder) -> Dialect:
    if folder.adapter_config is not None:
        return "peft"
    names = {*OPENRLHF} & set(architectures(folder.config))
    ours = names or "value_head_prefix" in folder.config
    return "openrlhf" if ours else "transformers"


def _role(config: Mapping[str, Any], rows: int) -> Role:
    """Return "value" for critics: OpenRLHF's class, and verl's token classifiers of one label."""
    for name in architectures(config):
        if name == "CriticModel" or (name.endswith("ForTokenClassification") and rows == 1):
            return "value"
    return "reward"


def _head_findings(head: Head, folder: HeadFolder) -> Iterator[str]:
    name = head.weight
    if len(head.shape) != 2 or 0 in head.shape:
        empty = ": saved under ZeRO-3 without gathering it" if 0 in head.shape else ""
        yield f"{name}: is {list(head.shape)}, a head is (1, hidden){empty}"
        return
    if not is_float(head.dtype):
        yield f"{name}: {describe(head.shape, head.dtype)} is no float matrix"
    if head.shape[0] != 1:
        yield (
            f"{name}: {head.shape[0]} labels, a reward is one number; a head of two labels is what "
            "a loader makes up that was not told num_labels=1"
        )
    hidden = hidden_size(folder.config)
    if hidden is not None and head.shape[1] != hidden:
        yield f"{name}: {head.shape[1]} columns, config.json says hidden_size {hidden}"
    if head.bias:
        source, _, key = head.bias.partition(":")
        shape = tuple(folder.sources[source].tensors[key].shape)
        if shape != (head.shape[0],):
            yield f"{head.bias}: is {list(shape)}, the head has {head.shape[0]} labels"


def _name_notes(folder: HeadFolder, heads: list[Head]) -> Iterator[str]:
    said = folder.config.get("value_head_prefix")
    for head in heads:
        module = head.weight.partition(":")[2].removeprefix(PEFT_PREFIX).partition(".")[0]
        if isinstance(said, str) and module != said and head.dialect == "openrlhf":
            yield f"config.json says the head is {said!r}; what was trained and saved is {module!r}"
