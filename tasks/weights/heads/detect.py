"""Find the head of a folder, who wrote it, and its problems, from headers and configuration.

detected = detect(read_folder(folder))
detected.head.weight          "model:v_head.summary.weight"
detected.findings             all reasons why the head cannot be used
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
"""Prefix that TRL's wrapper adds to the keys of the model in it."""
MANY_LABELS = "labels, but a reward is one number"
"""Part of the finding about a head of several labels; the audit reports those by itself."""
_V_HEAD = re.compile(r"(pretrained_model\.)?v_head\.summary\.(?P<part>weight|bias)")


@dataclass(frozen=True)
class Head:
    """A linear layer from the last hidden state to one number.

    Attributes:
        dialect: the program that wrote it.
        role: value head or reward head; "either" if the files do not tell (`v_head`).
        weight: "<input>:<key>" of its weight.
        shape: shape of the weight, (labels, hidden).
        dtype: dtype of the weight, safetensors name.
        bias: "<input>:<key>" of its bias; "" if it has none.
    """

    dialect: Dialect
    role: Role
    weight: str
    shape: tuple[int, ...]
    dtype: str
    bias: str = ""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of its tensors: the weight, then the bias if there is one."""
        return (self.weight, self.bias) if self.bias else (self.weight,)


@dataclass(frozen=True)
class Found:
    """Result of `detect`.

    Attributes:
        folder: the folder.
        head: its head; None if there is none or more than one.
        normalisation: normalisation of its rewards.
        lora_on: module of a head that the adapter changes by LoRA, usable only with a base that
            has this head; "" for none.
        findings: reasons why a head is missing or cannot be used; empty for a language model.
        notes: contradictions that were resolved, one line each.
    """

    folder: HeadFolder
    head: Head | None
    normalisation: Normalisation
    lora_on: str = ""
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def detect(folder: HeadFolder) -> Found:
    """Find the head of a folder. Raises ArtifactError if a file cannot be read."""
    findings, notes = list(folder.findings), list[str]()
    heads = [*_v_heads(folder, findings), *_linear_heads(folder)]
    lora_on = next(iter(lora_modules(folder)), "") if not heads else ""
    for head in heads:
        findings += _head_findings(head, folder)
    if len(heads) > 1:
        findings.append(
            f"{' and '.join(head.weight for head in heads)}: more than one head: keep one of them"
        )
    if not heads and not findings:
        findings += absence(folder, lora_on)
    notes += _name_notes(folder, heads)
    normalisation, wrong = read_normalisation(folder)
    only = heads[0] if len(heads) == 1 else None
    return Found(folder, only, normalisation, lora_on, (*findings, *wrong), tuple(notes))


def _v_heads(folder: HeadFolder, findings: list[str]) -> Iterator[Head]:
    """Yield `v_head.summary` heads: in the model (TRL) or in a file beside it (LLaMA-Factory)."""
    for name, source in folder.sources.items():
        keys: dict[str, str] = {}
        for key in source.tensors:
            match = _V_HEAD.fullmatch(key)
            if match and match["part"] in keys:
                findings.append(f"{key} and {keys[match['part']]}: the same head twice")
            elif match:
                keys[match["part"]] = key
            elif name == HEAD:
                findings.append(f"{folder.beside[0]}: {key} is not part of a value head")
        if "weight" in keys:
            info = source.tensors[keys["weight"]]
            bias = f"{name}:{keys['bias']}" if "bias" in keys else ""
            side = name == HEAD and folder.beside[0].startswith("value_head.")
            yield Head(
                "llamafactory" if side else "trl", "either", f"{name}:{keys['weight']}",
                tuple(info.shape), info.dtype, bias,
            )  # fmt: skip
        elif keys or name == HEAD:
            findings.append(f"{name}: a value head without v_head.summary.weight")


def _linear_heads(folder: HeadFolder) -> Iterator[Head]:
    """Yield heads such as `score`: in a model, or saved in full in an adapter."""
    source = folder.sources[folder.weights]
    prefix = "" if folder.adapter_config is None else PEFT_PREFIX
    names = module_names(folder.config)
    for module in names:
        keys = [
            f"{prefix}{module}.{infix}weight"
            for infix in ("", "modules_to_save.", "modules_to_save.default.")
        ]
        key = next((candidate for candidate in keys if candidate in source.tensors), None)
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
        yield f"{name}: is {list(head.shape)}, a head must be (1, hidden){empty}"
        return
    if not is_float(head.dtype):
        yield f"{name}: {describe(head.shape, head.dtype)} is not a float matrix"
    if head.shape[0] != 1:
        yield (
            f"{name}: {head.shape[0]} {MANY_LABELS}; transformers makes a new "
            "head of two labels if it is loaded without num_labels=1"
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
    prefix = folder.config.get("value_head_prefix")
    for head in heads:
        module = head.weight.partition(":")[2].removeprefix(PEFT_PREFIX).partition(".")[0]
        if isinstance(prefix, str) and module != prefix and head.dialect == "openrlhf":
            yield f"config.json names the head {prefix!r}; the head that was saved is {module!r}"
