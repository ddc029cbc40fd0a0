"""Value heads and reward heads: find one in a folder, and plan the model to serve.

    detected = detect(read_folder(folder))
    detected.head.weight                            "model:v_head.summary.weight"
    detected.findings                               why the head is missing or cannot be used
    planned = separate(detected, dtype="bfloat16")  the model to serve, from a full model

A head is one linear layer from the last hidden state to one number:

    dialect         where its weight is                                   role
    trl             v_head.summary.weight in the model                    either
    llamafactory    the same key in value_head.safetensors or .bin        either
    openrlhf        score.weight, or the module that config.json names    reward, of a critic: value
    transformers    score.weight of a *ForSequenceClassification          reward
    peft            the same in an adapter, by `modules_to_save`          reward

A policy loses its value head, which only training needs: vLLM loads every weight file of a folder
and fails on `v_head.summary.weight`.

A reward model becomes `*ForSequenceClassification` with one label. A score is the head's output at
the last token, as before. config.json stores the settings that have no tensor:

    mean, std           normalised reward = (score - mean) / std; without them, the score itself.
                        `score` has no bias, so a head's bias b goes into the mean: mean - b
    value_head_prefix   "score", so that OpenRLHF can read the same folder
    problem_type        "regression", so that vLLM returns the score and not its sigmoid

OpenRLHF stores mean and standard deviation in config.json or as buffers. Its loader leaves the
buffers uninitialised under transformers 5, so both numbers are only in config.json; vLLM takes them
as `PoolerConfig(logit_mean=mean, logit_sigma=std)`.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tasks.core.contract import describe
from tasks.core.errors import ArtifactError, ContractError, first_and_more
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import NUMPY, is_float, widened
from tasks.weights.files.names import PEFT_PREFIX
from tasks.weights.files.reader import read_checkpoint, read_header
from tasks.weights.files.tensors import Sources, Tensor, Tensors, read_all
from tasks.weights.lora import Adapter, read_adapter
from tasks.weights.mapping import Shapes
from tasks.weights.model import Model, Perform, model_facts, perform
from tasks.weights.model_class import read_config
from tasks.weights.pickled.torch_file import MODEL as PICKLED
from tasks.weights.pickled.torch_file import is_pickled_model, read_model, read_state
from tasks.weights.plan import Plan, Planned, as_is

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
NO_LM_HEAD = "the language model's head: a reward model has none"

_V_HEAD = re.compile(r"(pretrained_model\.)?v_head\.summary\.(weight|bias)")
_SAVED_WHOLE = ("", "modules_to_save.", "modules_to_save.default.")
"""Parts of the keys of a head in an adapter, as versions of PEFT write them."""
_LAYERED = re.compile(
    r"(classifier|score)\.(?!weight$|bias$|lora_|base_layer)"
    r"|(classification_head|sequence_summary|logits_proj)\.|perceiver\.decoder\."
)
"""Keys of heads with several layers, as in BERT-like encoders, T5, BART and XLNet."""
_LOST = "it was never saved, so it cannot be recovered: train again with the head saved whole"
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
    adapter: Adapter | None = None  # the adapter as it was opened, by `read_folder`

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
    adapter = read_adapter(root, beside=beside) if is_adapter else None
    if adapter is not None:
        sources[ADAPTER] = adapter.tensors
    else:
        read = read_model if is_pickled_model(root) else read_checkpoint
        sources[MODEL] = read(root, beside=beside)
    if beside:
        path = root / beside[0]
        plain = path.suffix == ".safetensors"
        sources[HEAD] = read_header(path).tensors if plain else read_state(path)
    adapter_config = read_json(root / "adapter_config.json") if is_adapter else None
    return HeadFolder(root, config, adapter_config, sources, beside, adapter)


@dataclass(frozen=True)
class Head:
    """A linear layer from the last hidden state to one number."""

    dialect: Dialect
    role: Role
    weight: str  # "<input>:<key>"
    shape: tuple[int, ...]  # of the weight: (labels, hidden)
    dtype: str
    bias: str = ""  # "<input>:<key>"; "" for none

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of its tensors: the weight, then the bias if there is one."""
        return (self.weight, self.bias) if self.bias else (self.weight,)


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of a reward model's scores; None for no normalisation."""

    mean: float | None = None
    std: float | None = None
    buffers: tuple[str, ...] = ()  # "<input>:<key>" of the tensors that store them

    @property
    def is_there(self) -> bool:
        """Return True if rewards are normalised."""
        return self.mean is not None and self.std is not None


@dataclass(frozen=True)
class Detected:
    """The head of a folder; None if there is none or more than one."""

    folder: HeadFolder
    head: Head | None
    normalisation: Normalisation
    lora_on: str = ""  # head that the adapter changes by LoRA: usable only with a base that has it
    absence: str = ""  # why there is no head though there should be one; "" for a language model
    layered: bool = False  # the head has several layers, which is not supported
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
            raise ContractError(text, details=findings)
        if self.head is None:
            raise ContractError(f"{root}: no head of any kind: a language model")
        return self.head


def detect(folder: HeadFolder) -> Detected:
    """Find the head of a folder. Raises ArtifactError if a file cannot be read."""
    findings = list[str]()
    if len(folder.beside) > 1:
        findings.append(f"{' and '.join(folder.beside)}: two files with a head: keep one of them")
    heads = [*_v_heads(folder, findings), *_linear_heads(folder)]
    findings += [text for head in heads for text in _head_findings(head, folder)]
    if len(heads) > 1:
        names = " and ".join(head.weight for head in heads)
        findings.append(f"{names}: more than one head: keep one of them")
    lora_on, absence, layered = ("", "", False) if heads else _absence(folder)
    absence = "" if findings else absence
    normalisation, wrong = _normalisation(folder.config, folder)
    prefix = folder.config.get("value_head_prefix")
    saved = [
        head.weight.partition(":")[2].partition(".")[0]
        for head in heads
        if head.dialect == "openrlhf" and isinstance(prefix, str)
    ]
    return Detected(
        folder,
        heads[0] if len(heads) == 1 else None,
        normalisation,
        lora_on,
        absence,
        layered,
        (*findings, *filter(None, [absence]), *wrong),
        tuple(
            f"config.json names the head {prefix!r}; the head that was saved is {module!r}"
            for module in saved
            if module != prefix
        ),
    )


def _absence(folder: HeadFolder) -> tuple[str, str, bool]:
    """Return the head that LoRA is on, why there is none that can be used, and if it has layers.

    A head that was never saved cannot be replaced: a new one would give random scores.
    """
    for module in module_names(folder.config) if folder.adapter_config is not None else ():
        if any(key.startswith(f"{PEFT_PREFIX}{module}.lora_") for key in folder.main):
            reason = (
                f"{module}: LoRA was trained on a head that is not in the adapter. If it was "
                f"initialised at random, {_LOST} (modules_to_save=[{module}])"
            )
            return module, reason, False
    sign = next(_signs(folder), "")
    for key in folder.main if sign else ():
        if _LAYERED.match(key.removeprefix(PEFT_PREFIX)):
            return "", f"{key}: a head of several layers; only one linear layer is supported", True
    names = ", ".join(f"{module}.weight" for module in HEAD_MODULES)
    return "", f"no head ({names}), though {sign}: {_LOST}" if sign else "", False


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
    name, hidden = head.weight, _hidden_size(folder.config)
    if len(head.shape) != 2 or 0 in head.shape:
        empty = ": saved under ZeRO-3 without gathering it" if 0 in head.shape else ""
        yield f"{name}: is {list(head.shape)}, a head must be (1, hidden){empty}"
        return
    labels, columns = head.shape
    if not is_float(head.dtype):
        yield f"{name}: {describe(head.shape, head.dtype)} is not a float matrix"
    if labels != 1:
        yield f"{name}: {labels} {MANY_LABELS}"
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


def _hidden_size(config: Mapping[str, Any]) -> int | None:
    """Return the size of the last hidden state from config.json; None if it is not stated."""
    text = config.get("text_config")
    fields = text if isinstance(text, Mapping) else config
    size = fields.get("hidden_size", fields.get("n_embd"))
    return size if type(size) is int and size > 0 else None


def module_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the module names that may be a head, first the one that config.json names."""
    prefix = config.get("value_head_prefix")
    return tuple(dict.fromkeys((*((prefix,) if isinstance(prefix, str) else ()), *HEAD_MODULES)))


def _signs(folder: HeadFolder) -> Iterator[str]:
    """Yield the entries of config.json and adapter_config.json that promise a head."""

    def scores(class_name: str) -> bool:
        return class_name in OPENRLHF or class_name.endswith("ForSequenceClassification")

    config, adapter = folder.config, folder.adapter_config or {}
    yield from (f"config.json says {name}" for name in architectures(config) if scores(name))
    for field in ("value_head_prefix", "mean", "normalize_reward"):
        if config.get(field):
            yield f"config.json has {field}"
    if adapter.get("task_type") == "SEQ_CLS":
        yield "adapter_config.json says SEQ_CLS"
    mapping = adapter.get("auto_mapping")  # peft records the class if it has no task type
    wrapped = mapping.get("base_model_class") if isinstance(mapping, Mapping) else None
    if isinstance(wrapped, str) and scores(wrapped):
        yield f"adapter_config.json says that it was trained on a {wrapped}"
    for field in ("modules_to_save", "target_modules"):
        modules = adapter.get(field)
        listed = modules if isinstance(modules, list) else []
        for module in (name for name in HEAD_MODULES if name in listed):
            # LongCat's routers have a layer of that name.
            if not any(f".{module}." in key.removeprefix(PEFT_PREFIX) for key in folder.main):
                yield f"{field} names {module}"


# Normalisation.


def normalisation_from(config: Mapping[str, Any], where: str) -> Normalisation:
    """Return the normalisation in config.json; `where` begins the ArtifactError if it is wrong."""
    normalisation, findings = _normalisation(config)
    if findings:
        raise ArtifactError(f"{where}: {first_and_more(findings)}", details=findings)
    return normalisation


def _normalisation(
    config: Mapping[str, Any], folder: HeadFolder | None = None
) -> tuple[Normalisation, list[str]]:
    """Return the normalisation in config.json, or else in the weights, and its findings."""
    values: dict[str, float] = {}
    findings, buffers = list[str](), list[str]()
    for key in BUFFERS:
        value = config.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and is_number and abs(value) <= _MAX_F32:
            values[key] = float(value)
        elif value is not None:
            findings.append(f"config.json: {key}={str(value)[:40]} is not a number in fp32")
        if folder is None or key not in folder.main:
            continue
        buffers.append(f"{folder.weights}:{key}")
        try:
            stored = _read_scalar(folder.main[key], key)
        except ArtifactError as error:
            findings.append(error.message)
            continue
        if not math.isfinite(stored):
            findings.append(f"{key}: {stored} in the weights")
        elif np.float32(values.setdefault(key, stored)) != np.float32(stored):
            findings.append(f"{key}: {stored} in the weights, {values[key]} in config.json")
    if len(values) == 1:
        findings.append(f"{next(iter(values))} is there, the other of mean and std is not")
    if values.get("std", 1.0) <= 0:
        findings.append(f"std is {values['std']}: rewards cannot be divided by it")
    return Normalisation(values.get("mean"), values.get("std"), tuple(buffers)), findings


def _read_scalar(info: Tensor, key: str) -> float:
    """Read a float tensor of one element. Raises ArtifactError for any other tensor."""
    if info.numel != 1 or info.dtype not in (*NUMPY, "F64"):
        raise ArtifactError(f"{key}: {describe(info.shape, info.dtype)} is not one number")
    raw = read_all(info)
    return float(raw.view("<f8")[0] if info.dtype == "F64" else widened(raw, info.dtype)[0])


# The model to serve.


def separate(detected: Detected, *, dtype: str, perform: Perform = perform) -> Planned:
    """Plan the model to serve from a full model with a head: a reward model, or a policy.

    A `v_head` whose purpose the files do not tell counts as a value head. `dtype` is the torch name
    of the facts' dtype; tensors keep their own. Raises ContractError: no usable head, a critic's.
    """
    head, folder, how = detected.require(), detected.folder, detected.normalisation
    if head.role == "value":
        raise ContractError(
            f"{folder.root}: a critic: {head.weight} gives the value of every token, not the "
            "reward of a text",
            hint="source=<folder of the policy>: a critic is useful only to resume training",
        )
    is_reward = head.role == "reward"
    if is_reward:
        left_out = {
            f"{MODEL}:{key}": NO_LM_HEAD
            for key in folder.main
            if key.removeprefix(WRAPPER) in OUTPUT_EMBEDDINGS
        }
        left_out |= dict.fromkeys(how.buffers, "stored in config.json")
        if head.bias:
            left_out[head.bias] = "the head's bias: stored in config.json, as part of the mean"
            key = head.bias.partition(":")[2]
            # (w h + bias - mean) / std = (w h - (mean - bias)) / std
            if bias := _read_scalar(folder.main[key], key):
                how = Normalisation((how.mean or 0.0) - bias, how.std or 1.0)
    else:
        why = "the value head, which only training needs: it stays in SOURCE"
        left_out = dict.fromkeys((*head.sources, *how.buffers), why)
    # The model's tensors without TRL's prefix; the head comes last, as `score.weight`.
    whole = as_is(folder.main, MODEL).ops
    score = head.weight if is_reward else ""
    kept = [op for op in whole if op.source not in left_out and op.source != score]
    ops = [replace(op, name=op.key.removeprefix(WRAPPER)) for op in kept]
    ops += [replace(op, name=SCORE) for op in whole if op.source == score]
    dropped = {op.source: left_out[op.source] for op in whole if op.source in left_out}
    plan, disk = Plan(tuple(ops), dropped), {op.name: op.shape for op in ops}
    config: Mapping[str, Any] = folder.config
    if is_reward:
        name, facts = perform(reward_facts, config, dtype, disk)
        config = reward_config(config, name, how, endings(folder.root))
    else:
        facts = perform(model_facts, folder.root, dtype, disk)
    return Planned(plan, {MODEL: folder.main}, config, facts)


def endings(*folders: Path) -> list[int]:
    """Return the EOS ids of the first folder that has a tokenizer; empty if none has."""
    from tasks.weights.tokens.tokenizer import read_tokenizer  # an audit of headers needs neither

    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return read_tokenizer(folder).stops
    return []


_OF_OTHERS = ("quantization_config", "auto_map", "mean", "std")
_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def reward_config(
    config: Mapping[str, Any],
    architecture: str,
    normalisation: Normalisation,
    endings: Sequence[int] = (),
) -> dict[str, Any]:
    """Return config.json of a reward model of class `architecture`, from that of any model.

    transformers takes the score at the last token that is not `pad_token_id`. If the padding token
    also ends texts (pad = eos), this is one token too early. config.json then gets no padding
    token, so that transformers refuses to score batches instead of scoring them wrongly.
    """
    gone = (*_OF_OTHERS, "torch_dtype", "num_labels")
    document: dict[str, Any] = {key: value for key, value in config.items() if key not in gone}
    document |= {
        "architectures": [architecture],
        **_ONE_LABEL,
        "problem_type": "regression",
        "value_head_prefix": SCORE.partition(".")[0],
    }
    if normalisation.is_there:
        document |= {"mean": normalisation.mean, "std": normalisation.std, "normalize_reward": True}
    if document.get("pad_token_id") in endings:
        document["pad_token_id"] = None
    return document


def reward_facts(config: Mapping[str, Any], dtype: str, disk: Shapes) -> tuple[str, Model]:
    """Return the class name of a reward model of a family, and its facts with one label.

    Imports transformers; call it through a `Perform`. `config` is the config.json of any model of
    the family. Raises ArtifactError if the family has no such class.
    """
    from transformers import AutoModelForSequenceClassification

    plain = {key: value for key, value in config.items() if key not in _OF_OTHERS} | _ONE_LABEL
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(plain))
        described = read_config(Path(folder))
        classes = AutoModelForSequenceClassification._model_mapping
        if type(described) not in classes:
            raise ArtifactError(
                f"transformers has no {described.model_type} model for sequence classification, so "
                "a reward model of that family cannot be served"
            )
        name = str(classes[type(described)].__name__)
        path.write_text(json.dumps({**plain, "architectures": [name]}))
        return name, model_facts(Path(folder), dtype, disk)


def reward_base(
    base: Tensors, config: Mapping[str, Any], dtype: str, perform: Perform = perform
) -> tuple[dict[str, Tensor], str, Model]:
    """Return a base's tensors as those of its family's reward model, the class's name, its facts.

    The LM head is left out. A head that the base does not have is a placeholder, to be replaced by
    the adapter's.
    """
    hidden = _hidden_size(config)
    if hidden is None:
        raise ContractError(
            "reward: the base's config.json has no hidden_size, so the head's width is not known",
            hint="use a base with the config.json that save_pretrained wrote",
        )
    tensors = {key: info for key, info in base.items() if key not in OUTPUT_EMBEDDINGS}
    if SCORE not in tensors:
        of_base = next(iter(tensors.values())).dtype if tensors else "BF16"
        tensors[SCORE] = Tensor((1, hidden), of_base)
    disk = {key: tuple(info.shape) for key, info in tensors.items()}
    return tensors, *perform(reward_facts, config, dtype, disk)
