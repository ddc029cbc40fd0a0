"""Find the value head or reward head of a folder, who wrote it, and its problems, from headers.

    detected = detect(read_folder(folder))
    detected.head.weight          "model:v_head.summary.weight"
    detected.findings             reasons why the head is missing or cannot be used

A head is one linear layer from the last hidden state to one number:

    dialect         where its weight is                                   role
    trl             v_head.summary.weight in the model                    either
    llamafactory    the same key in value_head.safetensors or .bin        either
    openrlhf        score.weight, or the module that config.json names    reward, of a critic: value
    transformers    score.weight of a *ForSequenceClassification          reward
    peft            the same in an adapter, by `modules_to_save`          reward

OpenRLHF stores mean and standard deviation of rewards, in config.json or as buffers:

    normalised reward = (score - mean) / std

`head_plans.py` plans the model to serve from what is detected here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tasks.core.contract import describe
from tasks.core.errors import ArtifactError, ContractError, first_and_more
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import NUMPY, is_float, widened
from tasks.weights.files.names import PEFT_PREFIX
from tasks.weights.files.reader import read_checkpoint, read_header
from tasks.weights.files.tensors import Reader, Sources, Tensors
from tasks.weights.lora import read_adapter
from tasks.weights.pickled.torch_file import MODEL as PICKLED
from tasks.weights.pickled.torch_file import is_pickled_model, read_model, read_state

Role = Literal["value", "reward", "either"]
Dialect = Literal["trl", "llamafactory", "openrlhf", "peft", "transformers"]

MODEL, ADAPTER, HEAD = "model", "adapter", "head"
"""Names of inputs in plans: weights of a model, weights of an adapter, a separate head file."""
SIDE_FILES = ("value_head.safetensors", "value_head.bin")
WRAPPER = "pretrained_model."
"""Prefix that TRL's wrapper adds to the keys of the model in it."""
SCORE = "score.weight"
OUTPUT_EMBEDDINGS = ("lm_head.weight", "lm_head.bias", "embed_out.weight")
"""Keys of the LM head of a language model."""
HEAD_MODULES = ("score", "value_head", "v_head", "classifier")
"""Module names of heads; OpenRLHF's config.json may name another one."""
OPENRLHF = ("RewardModel", "CriticModel")
"""Class names that OpenRLHF makes at run time; transformers does not know them."""
BUFFERS = ("mean", "std")
MANY_LABELS = "labels, but a reward is one number"
"""Part of the finding about a head of several labels; the audit reports those by itself."""

_V_HEAD = re.compile(r"(pretrained_model\.)?v_head\.summary\.(weight|bias)")
_SAVED_WHOLE = ("", "modules_to_save.", "modules_to_save.default.")
"""Parts of the keys of a head in an adapter, as versions of PEFT write them."""
_LAYERED = re.compile(
    r"(classifier|score)\.(?!weight$|bias$|lora_|base_layer)|(classification_head|sequence_summary|logits_proj)\."
    r"|perceiver\.decoder\."
)
"""Keys of heads with several layers, as in BERT-like encoders, T5, BART and XLNet."""
_LOST = "it was never saved, so it cannot be recovered: train again with the head saved whole"
_SHOWN, _LISTED = 40, 50
_MAX_F32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class HeadFolder:
    """Configuration and headers of a model folder or an adapter folder.

    `sources` has the weights as `MODEL` or `ADAPTER`; and as `HEAD` the first of the files with a
    head `beside` them. Without config.json, `config` is empty.
    """

    root: Path
    config: Mapping[str, Any]
    adapter_config: Mapping[str, Any] | None
    sources: Sources
    beside: tuple[str, ...] = ()

    @property
    def weights(self) -> str:
        """Name of the main input: `MODEL` or `ADAPTER`."""
        return MODEL if self.adapter_config is None else ADAPTER

    @property
    def main(self) -> Tensors:
        """Tensors of the model or adapter."""
        return self.sources[self.weights]


def read_folder(root: Path) -> HeadFolder:
    """Read a model folder or an adapter folder. Raises ArtifactError if it is neither."""
    is_adapter = (root / "adapter_config.json").is_file()
    config = read_json(root / "config.json") if (root / "config.json").is_file() else {}
    if not is_adapter and not config:
        raise ArtifactError(f"{root}: neither config.json nor adapter_config.json: no model here")
    # TRL saves the head of a PEFT model under the file name of a full model.
    names = (*SIDE_FILES, PICKLED) if is_adapter else SIDE_FILES
    beside = tuple(name for name in names if (root / name).is_file())
    sources: dict[str, Tensors] = {}
    adapter_config = None
    if is_adapter:
        adapter_config = read_json(root / "adapter_config.json")
        sources[ADAPTER] = read_adapter(root, beside=beside).tensors
    elif is_pickled_model(root):
        sources[MODEL] = read_model(root, beside=beside)
    else:
        sources[MODEL] = read_checkpoint(root, beside=beside)
    if beside:
        path = root / beside[0]
        sources[HEAD] = (
            read_header(path).tensors if path.suffix == ".safetensors" else read_state(path)
        )
    return HeadFolder(root, config, adapter_config, sources, beside)


@dataclass(frozen=True)
class Head:
    """A linear layer from the last hidden state to one number.

    `weight` and `bias` are "<input>:<key>", `bias` may be "". The weight's `shape` is (labels,
    hidden), its `dtype` a safetensors name.
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
class Normalisation:
    """Mean and standard deviation of a reward model's scores; None for no normalisation.

    `buffers` has the "<input>:<key>" of the tensors that store them.
    """

    mean: float | None = None
    std: float | None = None
    buffers: tuple[str, ...] = ()

    @property
    def is_there(self) -> bool:
        """Return True if rewards are normalised."""
        return self.mean is not None and self.std is not None

    def with_bias(self, bias: float) -> Normalisation:
        """Return the normalisation for the same head without its bias.

        The bias moves into the mean: `(w h + bias - mean) / std = (w h - (mean - bias)) / std`.
        Rewards are bit-identical if the mean is 0.
        """
        if bias == 0.0:
            return self
        return Normalisation((self.mean or 0.0) - bias, self.std or 1.0, self.buffers)


@dataclass(frozen=True)
class Detected:
    """The head of a folder; None if there is none or more than one."""

    folder: HeadFolder
    head: Head | None
    normalisation: Normalisation
    lora_on: str = ""  # head that the adapter changes by LoRA: usable only with a base that has it
    absence: str = ""  # why there is no head though there should be one; "" for a language model
    layered: str = ""  # first key of a head of several layers, which is not supported
    findings: tuple[str, ...] = ()  # why a head is missing or cannot be used
    notes: tuple[str, ...] = ()  # contradictions that were resolved

    @property
    def is_of_reward(self) -> bool:
        """Return True if an adapter was trained with a reward head, by configuration or tensors."""
        if self.head is not None:
            return self.head.dialect == "peft"
        return bool(self.lora_on) or (HEAD not in self.folder.sources and bool(self.findings))

    def require(self) -> Head:
        """Return the head. Raises ContractError with all findings if there is none to use."""
        root, findings = self.folder.root, self.findings
        if findings:
            text = f"{root}: the head cannot be used: {first_and_more(findings)}"
            raise ContractError(text, details=findings[:_LISTED])
        if self.head is None:
            raise ContractError(f"{root}: no head of any kind: a language model")
        return self.head


def detect(folder: HeadFolder) -> Detected:
    """Find the head of a folder. Raises ArtifactError if a file cannot be read."""
    findings, beside = list[str](), folder.beside
    if len(beside) > 1:
        findings.append(f"{' and '.join(beside)}: two files with a head: keep one of them")
    heads = [*_v_heads(folder, findings), *_linear_heads(folder)]
    for head in heads:
        findings += _head_findings(head, folder)
    if len(heads) > 1:
        names = " and ".join(head.weight for head in heads)
        findings.append(f"{names}: more than one head: keep one of them")
    lora_on = "" if heads else _lora_on(folder)
    signs = list(_signs(folder))
    # BERT and others have heads of several layers.
    keys = folder.main if signs else ()
    layered = next((key for key in keys if _LAYERED.match(key.removeprefix(PEFT_PREFIX))), "")
    absence = "" if heads or findings else _absence(signs, lora_on, layered)
    normalisation, wrong = _read_normalisation(folder)
    prefix = folder.config.get("value_head_prefix")
    notes = [
        f"config.json names the head {prefix!r}; the head that was saved is {module!r}"
        for head in heads
        if head.dialect == "openrlhf"
        and isinstance(prefix, str)
        and (module := head.weight.partition(":")[2].partition(".")[0]) != prefix
    ]
    return Detected(
        folder,
        heads[0] if len(heads) == 1 else None,
        normalisation,
        lora_on,
        absence,
        layered,
        (*findings, *filter(None, [absence]), *wrong),
        tuple(notes),
    )


def _v_heads(folder: HeadFolder, findings: list[str]) -> Iterator[Head]:
    """Yield `v_head.summary` heads: in the model (TRL) or in a file beside it (LLaMA-Factory)."""
    for name, source in folder.sources.items():
        keys = [key for key in source if _V_HEAD.fullmatch(key)]
        weights = [key for key in keys if key.endswith(".weight")]
        if name == HEAD:
            others = [key for key in source if key not in keys]
            findings += [f"{folder.beside[0]}: {key} is not part of a value head" for key in others]
        if not weights and (keys or name == HEAD):
            findings.append(f"{name}: a value head without v_head.summary.weight")
        is_side_file = name == HEAD and folder.beside[0] in SIDE_FILES
        for key in weights:
            yield _head(folder, name, key, "llamafactory" if is_side_file else "trl", "either")


def _linear_heads(folder: HeadFolder) -> Iterator[Head]:
    """Yield heads such as `score`: in a model, or saved in full in an adapter."""
    names = architectures(folder.config)
    is_openrlhf = {*OPENRLHF} & set(names) or "value_head_prefix" in folder.config
    dialect: Dialect = "openrlhf" if is_openrlhf else "transformers"
    prefix = ""
    if folder.adapter_config is not None:
        prefix, dialect = PEFT_PREFIX, "peft"
    for module in module_names(folder.config):
        keys = [f"{prefix}{module}.{infix}weight" for infix in _SAVED_WHOLE]
        key = next((key for key in keys if key in folder.main), None)
        if key is not None:
            labels = tuple(folder.main[key].shape[:1])
            # Critics: OpenRLHF's class, and verl's token classifiers of one label.
            is_critic = "CriticModel" in names or (
                labels == (1,) and any(name.endswith("ForTokenClassification") for name in names)
            )
            yield _head(folder, folder.weights, key, dialect, "value" if is_critic else "reward")


def _head(folder: HeadFolder, name: str, weight: str, dialect: Dialect, role: Role) -> Head:
    tensors = folder.sources[name]
    info, bias = tensors[weight], f"{weight.removesuffix('weight')}bias"
    bias = f"{name}:{bias}" if bias in tensors else ""
    return Head(dialect, role, f"{name}:{weight}", tuple(info.shape), info.dtype, bias)


def _head_findings(head: Head, folder: HeadFolder) -> Iterator[str]:
    name = head.weight
    if len(head.shape) != 2 or 0 in head.shape:
        empty = ": saved under ZeRO-3 without gathering it" if 0 in head.shape else ""
        yield f"{name}: is {list(head.shape)}, a head must be (1, hidden){empty}"
        return
    labels, columns = head.shape
    if not is_float(head.dtype):
        yield f"{name}: {describe(head.shape, head.dtype)} is not a float matrix"
    if labels != 1:
        yield (
            f"{name}: {labels} {MANY_LABELS}; transformers makes a new "
            "head of two labels if it is loaded without num_labels=1"
        )
    hidden = hidden_size(folder.config)
    if hidden is not None and columns != hidden:
        yield f"{name}: {columns} columns, config.json says hidden_size {hidden}"
    if head.bias:
        source, _, key = head.bias.partition(":")
        shape = tuple(folder.sources[source][key].shape)
        if shape != (labels,):
            yield f"{head.bias}: is {list(shape)}, the head has {labels} labels"


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the class names in config.json; empty if the entry is not a list."""
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def hidden_size(config: Mapping[str, Any]) -> int | None:
    """Return the size of the last hidden state from config.json; None if it is not stated."""
    text = config.get("text_config")
    fields = text if isinstance(text, Mapping) else config
    size = fields.get("hidden_size", fields.get("n_embd"))
    return size if type(size) is int and size > 0 else None


def module_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the module names that may be a head, first the one that config.json names."""
    prefix = config.get("value_head_prefix")
    return tuple(dict.fromkeys((*((prefix,) if isinstance(prefix, str) else ()), *HEAD_MODULES)))


def wrapped_class(adapter_config: Mapping[str, Any]) -> str:
    """Return the class that peft wrapped; "" if not recorded (peft does so without a task type)."""
    auto_mapping = adapter_config.get("auto_mapping")
    name = auto_mapping.get("base_model_class") if isinstance(auto_mapping, Mapping) else None
    return name if isinstance(name, str) else ""


def _absence(signs: list[str], lora_on: str, layered: str) -> str:
    """Return the reason why a folder that should have a head has none; "" for a language model.

    A head that was never saved cannot be replaced: a new one would give random scores without an
    error.
    """
    if lora_on:
        return (
            f"{lora_on}: LoRA was trained on a head that is not in the adapter. If it was "
            f"initialised at random, {_LOST} (modules_to_save=[{lora_on}])"
        )
    if layered:
        return f"{layered}: a head of several layers; only heads of one linear layer are supported"
    names = ", ".join(f"{module}.weight" for module in HEAD_MODULES)
    return f"no head ({names}), though {signs[0]}: {_LOST}" if signs else ""


def _lora_on(folder: HeadFolder) -> str:
    """Return the head that the adapter changes by LoRA; "" for none."""
    for module in module_names(folder.config) if folder.adapter_config is not None else ():
        if any(key.startswith(f"{PEFT_PREFIX}{module}.lora_") for key in folder.main):
            return module
    return ""


def _signs(folder: HeadFolder) -> Iterator[str]:
    """Yield the entries of config.json and adapter_config.json that promise a head."""
    config, adapter = folder.config, folder.adapter_config or {}
    yield from (f"config.json says {name}" for name in architectures(config) if _scores(name))
    for field in ("value_head_prefix", "mean", "normalize_reward"):
        if config.get(field):
            yield f"config.json has {field}"
    if adapter.get("task_type") == "SEQ_CLS":
        yield "adapter_config.json says SEQ_CLS"
    if _scores(name := wrapped_class(adapter)):
        yield f"adapter_config.json says that it was trained on a {name}"
    for field in ("modules_to_save", "target_modules"):
        modules = adapter.get(field)
        if isinstance(modules, list):
            yield from (f"{field} names {module}" for module in HEAD_MODULES if module in modules)


def _scores(class_name: str) -> bool:
    """Return True for classes that score: transformers' classifiers, OpenRLHF's two classes."""
    return class_name in OPENRLHF or class_name.endswith("ForSequenceClassification")


def normalisation_from(config: Mapping[str, Any], where: str) -> Normalisation:
    """Return the normalisation in config.json; `where` begins the ArtifactError if it is wrong."""
    values, findings = _configured(config)
    findings += _pair_findings(values)
    if findings:
        raise ArtifactError(f"{where}: {first_and_more(findings)}", details=findings)
    return Normalisation(values.get("mean"), values.get("std"))


def _read_normalisation(folder: HeadFolder) -> tuple[Normalisation, list[str]]:
    """Return the normalisation in config.json, or else in the weights, and its findings."""
    values, findings = _configured(folder.config)
    buffers = [key for key in BUFFERS if key in folder.main]
    for key in buffers:
        try:
            value = read_scalar(folder.main, key)
        except ArtifactError as error:
            findings.append(error.message)
            continue
        if not math.isfinite(value):
            findings.append(f"{key}: {value} in the weights")
        elif np.float32(values.setdefault(key, value)) != np.float32(value):
            findings.append(f"{key}: {value} in the weights, {values[key]} in config.json")
    findings += _pair_findings(values)
    names = tuple(f"{folder.weights}:{key}" for key in buffers)
    return Normalisation(values.get("mean"), values.get("std"), names), findings


def _configured(config: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Return the numbers of config.json by key, and findings about what is no number in fp32."""
    values: dict[str, float] = {}
    findings = []
    for key in BUFFERS:
        value = config.get(key)
        if value is None:
            continue
        if type(value) in (int, float) and abs(value) <= _MAX_F32:
            values[key] = float(value)
        else:
            findings.append(f"config.json: {key}={str(value)[:_SHOWN]} is not a number in fp32")
    return values, findings


def _pair_findings(values: Mapping[str, float]) -> Iterator[str]:
    if len(values) == 1:
        yield f"{next(iter(values))} is there, the other of mean and std is not"
    if values.get("std", 1.0) <= 0:
        yield f"std is {values['std']}: rewards cannot be divided by it"


def read_scalar(source: Tensors, key: str) -> float:
    """Read a float tensor of one element. Raises ArtifactError for any other tensor."""
    info = source[key]
    if math.prod(info.shape) != 1 or info.dtype not in (*NUMPY, "F64"):
        raise ArtifactError(f"{key}: {describe(info.shape, info.dtype)} is not one number")
    with Reader(source[key].extents) as reader:
        raw = reader.read()
    return float(raw.view("<f8")[0] if info.dtype == "F64" else widened(raw, info.dtype)[0])
