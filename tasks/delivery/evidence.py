"""Find the precision in which an adapter's base was loaded in training: 4 bits, 16 or other.

The adapter does not record it. Its trainer often left a file that does:

    plumbline.witness/                 a record of the live layers, which outranks all others
    training_args.bin                  TRL: model_init_kwargs; read without unpickling anything
    args.json, sft_args.json           ms-swift
    training_args.yaml, llamafactory_args.yaml, llamaboard_config.yaml     LLaMA-Factory
    axolotl*.yaml, config.yaml, README.md     axolotl, whose model card holds its configuration
    README.md                          peft's list of the quantization config; `base_model`
    config.json, adapter_config.json   quantization_config, or a base whose name tells (-bnb-4bit)

    for evidence in find_evidence(Path("out/checkpoint-500")):
        print(evidence)      # out/args.json: quant_bits: 4, quant_method: bnb
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from tasks.core.errors import ArtifactError
from tasks.drift.witness import find_witness
from tasks.weights.files.documents import optional_json, read_text
from tasks.weights.pickled.torch_file import read_torch_file
from tasks.weights.pickled.unpickler import Foreign, Global

_MAX_BYTES = 4 << 20
_STEP = re.compile(
    r"(checkpoint|global_?step|step|epoch|iter)[-_]?\d+|final.*|last|best.*|default|actor|policy|"
    r"(.*[-_])?(lora|adapter)([-_].*)?",
    re.IGNORECASE,
)
"""Names of folders in a run's folder; the parent of any other may hold several runs."""
_RUN_FILES = ("trainer_state.json", "training_args.bin")
_JSON = ("args.json", "sft_args.json")
_YAML = ("training_args", "llamafactory_args", "llamaboard_config", "axolotl*", "config")
_FENCE = re.compile(r"```ya?ml\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FRONT = re.compile(r"\A---\n(.*?)^---", re.DOTALL | re.MULTILINE)
_CARD = re.compile(r"quantization config was used during training:\n((?:\s*- [\w.]+: .*\n?)+)")
_PACKED = re.compile(r"(?<!unsloth-)bnb-4bit$", re.IGNORECASE)
_OTHERWISE = re.compile(
    r"[-_.](\w*-?bnb-4bit|gptq|awq|[48]-?bits?|(int|fp|mxfp|nvfp)[48]|hqq)\b", re.I
)
_MODEL_KEYS = ("base_model_name_or_path", "base_model", "model_name_or_path", "model")
_TRAINERS = ("finetuning_type", "adapter", "tuner_type", "train_type", "sft_type")
"""Keys of a full trainer configuration. Without a quantization key in it, none was used."""


class Precision(Enum):
    """Precision of the base during training. The value is the text shown to users."""

    FULL = "in full precision"
    FOUR = "in bitsandbytes' 4 bits"
    OTHER = "quantised in a way that cannot be reproduced here"


@dataclass(frozen=True)
class Evidence:
    """One record that a trainer left."""

    file: Path  # the file with the record
    text: str  # its settings, as they are written in the file
    precision: Precision  # precision of the base during training
    # for 4 bits: "type", "double_quant", "compute_dtype", as far as recorded
    quantization: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.file}: {self.text}"


def find_evidence(root: Path) -> tuple[Evidence, ...]:
    """Read the trainer's files beside an adapter, and up to two folders up in the same run."""
    witness = find_witness(root)
    if witness is not None and witness.quantization is not None:
        return (_witnessed(witness.folder / "witness.json", witness.quantization),)
    documents = chain.from_iterable(map(_documents, _folders(root)))
    records = (_read(path, document, whole=whole) for path, document, whole in documents)
    return tuple(record for record in records if record is not None)


def _witnessed(file: Path, layers: Mapping[str, Any]) -> Evidence:
    method = str(layers["method"])
    text = f"quantization: {method}"
    if method not in ("nf4", "fp4"):
        precision = Precision.FULL if method == "none" else Precision.OTHER
        return Evidence(file, text, precision)
    details = {"type": method, "double_quant": bool(layers.get("double_quant"))}
    if compute := layers.get("compute_dtype"):
        details["compute_dtype"] = compute
    return Evidence(file, text, Precision.FOUR, details)


def _folders(root: Path) -> Iterator[Path]:
    at = root.resolve()
    yield root
    for _ in range(2):
        above = at.parent
        if not (_STEP.fullmatch(at.name) or any((above / name).is_file() for name in _RUN_FILES)):
            return
        yield above
        at = above


def _documents(folder: Path) -> Iterator[tuple[Path, Mapping[str, Any], bool]]:
    """Yield (file, document, True if the document lists all settings of the trainer)."""
    yield folder / "training_args.bin", _arguments(folder / "training_args.bin"), False
    for name in _JSON:
        yield folder / name, optional_json(folder / name), True
    for pattern in _YAML:
        for path in sorted([*folder.glob(f"{pattern}.yaml"), *folder.glob(f"{pattern}.yml")]):
            # LLaMA-Factory's web page writes settings with the prefix `top.`.
            document = _yaml(_text(path)).items()
            yield path, {str(key).removeprefix("top."): value for key, value in document}, True
    card = _text(folder / "README.md")
    for text in _FENCE.findall(card) if "axolotl" in card else ():
        yield folder / "README.md", _yaml(text), True
    for text in _CARD.findall(card):
        yield folder / "README.md", _yaml(text.replace("- ", "")), False
    for text in _FRONT.findall(card):
        yield folder / "README.md", _yaml(text), False
    for name in ("config.json", "adapter_config.json"):
        yield folder / name, optional_json(folder / name), False
    adapter = optional_json(folder / "adapter_config.json")
    base = Path(str(adapter.get("base_model_name_or_path") or ""))
    if base.is_absolute():
        yield base / "config.json", optional_json(base / "config.json"), False


def _read(path: Path, document: Mapping[str, Any], *, whole: bool) -> Evidence | None:
    """Return the evidence in one document; None if it has none."""
    nested = document.get("quantization_config")
    merged = {**document, **nested} if isinstance(nested, Mapping) else document
    method = str(merged.get("quant_method") or merged.get("quantization_method") or "").lower()
    bits = _number(merged.get("quant_bits") or merged.get("quantization_bit"))
    four = any(merged.get(key) is True for key in _FOUR) or merged.get("adapter") == "qlora"
    if four or (bits == 4 and method in ("", "bnb", "bitsandbytes")):
        return _four_bits(path, merged)
    named = method not in ("", "none", *_BITS_AND_BYTES)
    if (
        any(merged.get(key) is True for key in _EIGHT)
        or bits
        or (nested and method)
        or (whole and named)
    ):
        return Evidence(path, _shown(merged, *_QUANTIZATION), Precision.OTHER)
    for key in _MODEL_KEYS:
        name = str(document.get(key) or "").rstrip("/")
        text = f"{key}: {name}"
        if _PACKED.search(name):
            details = {"type": "nf4", "double_quant": True}
            return Evidence(path, text, Precision.FOUR, details)
        if _OTHERWISE.search(name):
            return Evidence(path, text, Precision.OTHER)
    if whole and any(document.get(key) for key in _TRAINERS):
        keys = [key for key in _QUANTIZATION if key in document]
        none = _shown(document, *keys) if keys else "no quantization"
        return Evidence(path, f"{_shown(document, *_TRAINERS)}, {none}", Precision.FULL)
    return None


_BITS_AND_BYTES = ("bnb", "bitsandbytes")
_FOUR, _EIGHT = ("load_in_4bit", "_load_in_4bit"), ("load_in_8bit", "_load_in_8bit", "gptq")
_QUANTIZATION = (
    *_FOUR, *_EIGHT, "quant_bits", "quantization_bit", "quant_method", "quantization_method",
)  # fmt: skip


def _four_bits(path: Path, settings: Mapping[str, Any]) -> Evidence:
    text = _shown(settings, *_QUANTIZATION) or f"adapter: {settings.get('adapter')}"
    skipped = settings.get("llm_int8_skip_modules")
    if isinstance(skipped, list) and set(skipped) - {"lm_head"}:
        return Evidence(path, f"{text}, llm_int8_skip_modules: {skipped}", Precision.OTHER)
    nested = settings.get("bnb_config_kwargs")  # axolotl's
    settings = {**settings, **nested} if isinstance(nested, Mapping) else settings
    kind = settings.get("bnb_4bit_quant_type") or settings.get("quantization_type")
    double = settings.get("bnb_4bit_use_double_quant", settings.get("double_quantization"))
    compute = str(settings.get("bnb_4bit_compute_dtype") or "").rpartition(".")[2]
    details = {
        "type": kind if kind in ("nf4", "fp4") else None,
        "double_quant": double if isinstance(double, bool) else None,
        "compute_dtype": compute if compute in ("bfloat16", "float16", "float32") else None,
    }
    known = {key: value for key, value in details.items() if value is not None}
    return Evidence(path, text, Precision.FOUR, known)


def _shown(settings: Mapping[str, Any], *keys: str) -> str:
    """Return `key: value` of the keys that are set; of all that are present if none is set."""
    present = {key: settings[key] for key in keys if key in settings}
    shown = {k: v for k, v in present.items() if v not in (None, False, "", "none")} or present
    words = {k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in shown.items()}
    return ", ".join(f"{key}: {word[:80]}" for key, word in words.items())


def _number(value: Any) -> int:
    """Return the number of bits; LLaMA-Factory's web page writes "4", and "none" for none."""
    text = str(value)
    if value is None or isinstance(value, bool) or text.lower() in ("none", "null", ""):
        return 0
    return int(text) if text.isdecimal() else -1


def _arguments(path: Path) -> Mapping[str, Any]:
    """Return `model_init_kwargs` of pickled arguments, without running any code of the file."""

    def fields(value: Any) -> Mapping[str, Any]:
        value = value.state if isinstance(value, Foreign) else value
        return value if isinstance(value, dict) else {}

    def plain(value: Any) -> Any:  # of an enum's member; the path of a class or dtype
        if isinstance(value, Foreign):
            return value.args[0] if len(value.args) == 1 else None
        return value.path if isinstance(value, Global) else value

    try:
        arguments = fields(read_torch_file(path) if path.is_file() else None)
    except ArtifactError:
        return {}
    kwargs = fields(arguments.get("model_init_kwargs"))
    nested = fields(kwargs.get("quantization_config"))
    return {**kwargs, "quantization_config": {key: plain(value) for key, value in nested.items()}}


def _text(path: Path) -> str:
    """Return the text of a small file; "" if it cannot be read."""
    try:
        return read_text(path, _MAX_BYTES) if path.is_file() else ""
    except (ArtifactError, OSError):
        return ""


def _yaml(text: str) -> Mapping[str, Any]:
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
