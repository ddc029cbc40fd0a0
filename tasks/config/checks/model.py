"""The base model, read without torch: config.json and safetensors headers."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.config.checks.finding import Finding
from tasks.toy.shape import CONTEXT, SHAPE
from tasks.training.memory.sizes import EXPERTS, Sizes
from tasks.training.model.packable import unpackable
from tasks.weights.files.folder import CONFIG, inspect_checkpoint
from tasks.weights.files.header import read_header
from tasks.weights.quantized.config_fields import is_packed, stored

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL_LINEAR = "all-linear"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM 0.32's CPU attention has kernels for (`CPUAttentionBackend`)."""
_EMBEDDINGS = (
    "embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight",
)  # fmt: skip
"""How families call their input embedding."""
_CONVOLUTIONS = ("gpt2", "openai-gpt")
"""Model types whose linear layers are `Conv1D` in transformers."""


@dataclass(frozen=True)
class Known:
    """What is known of a model before it is loaded.

    Attributes:
        modules: dotted names of modules with a 2-D weight; empty when unknown (a Hub id).
        owners: dotted names of all modules with a tensor; empty when unknown.
        parameters: number of them; None when unknown.
        context: longest sequence in tokens; None when unknown.
        config: contents of config.json; empty when unknown.
        score: shape of a score head's weight; None where there is none.
        rows: of the input embedding; None where it is not known.
    """

    modules: tuple[str, ...] = ()
    parameters: int | None = None
    context: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    owners: tuple[str, ...] = ()
    score: tuple[int, ...] | None = None
    rows: int | None = None


_LAYERS = tuple(
    f"model.layers.{i}.x.{name}" for i in range(SHAPE["num_hidden_layers"]) for name in _LINEAR
)
TOY = Known(
    modules=_LAYERS,
    parameters=918_000,
    context=CONTEXT,
    config=SHAPE,
    owners=("model.embed_tokens", *_LAYERS, "model.norm"),
)
"""The embedded model (`tasks/toy/pretrain.py`), which may not be there yet."""


def look(kind: str, path: str | None, revision: str | None = None) -> tuple[Known, list[Finding]]:
    """Facts about the base model, and problems with it.

    Nothing is fetched: of a Hugging Face id the local cache's config.json is read, if it is there.
    """
    if kind == "toy" and not path:
        return TOY, []
    if kind == "toy":
        found, allowed = f"{path} with model.kind=toy", "the embedded model has no path"
        return TOY, [Finding("model.path", found, allowed, "model=hf, or model.path=null")]
    if not path:
        return Known(), [
            Finding("model.path", "nothing", "has to be given", "model.path=<folder or hub id>")
        ]
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _read_folder(folder)
    if _HUB_ID.fullmatch(path) and not folder.exists():
        return _cached(path, revision), []
    allowed = "an existing folder, or a Hugging Face id like owner/name"
    return Known(), [_refused(f"{path} is neither", allowed)]


def look_at(model: Mapping[str, Any]) -> tuple[Known, list[Finding]]:
    """`look`, with section `model`."""
    return look(model["kind"], model["path"], model["revision"])


def _cached(hub_id: str, revision: str | None) -> Known:
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(hub_id, CONFIG, revision=revision)
        config = json.loads(Path(file).read_text(encoding="utf-8")) if isinstance(file, str) else {}
    except (OSError, ValueError):  # no id, or no JSON: the stage that fetches it says so
        return Known()
    text = config.get("text_config") or config
    try:
        parameters = Sizes.of(config).weights()
    except KeyError:  # an architecture that names its dimensions differently
        parameters = None
    context = text.get("max_position_embeddings")
    return Known(config=config, parameters=parameters, context=context)


def why_unknown(path: str | None) -> str:
    """Say why a model's dimensions are not known."""
    if path and not Path(path).expanduser().is_dir():
        where = f"no config.json of {path} in the Hugging Face cache"
        return f"{where}; hf download {path} config.json puts it there"
    return "no config.json whose dimensions can be read"


def embedded(model: Mapping[str, Any], data: Mapping[str, Any]) -> list[Finding]:
    """Warn where only one of model and data is the user's."""
    if model["kind"] != "toy" and data["kind"] == "toy":
        found, allowed = (
            f"embedded tasks for {model['path']}",
            "they are made for the embedded model",
        )
        return [Finding("data.kind", found, allowed, "data.path=<file>", "warning")]
    if model["kind"] == "toy" and data["kind"] != "toy":
        found, allowed = "the embedded model, of 0.9M parameters", "it knows its own tasks alone"
        return [Finding("model.kind", found, allowed, "model.path=<folder or hub id>", "warning")]
    return []


def _refused(found: str, allowed: str) -> Finding:
    return Finding("model.path", found, allowed, "model.path=<folder or hub id>")


def _read_folder(folder: Path) -> tuple[Known, list[Finding]]:
    try:
        checkpoint = inspect_checkpoint(folder)
        weights = [f for name, f in checkpoint.files.items() if name.endswith(".safetensors")]
        if checkpoint.problems:
            allowed = "whole files in Hugging Face's layout"
            return Known(), [_refused(f"{folder}: {p}", allowed) for p in checkpoint.problems]
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        headers = [read_header(file) for file in weights]
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        return Known(), [_refused(reason, "a folder that can be read")]
    shapes = {name: info.shape for header in headers for name, info in header.tensors.items()}
    modules = tuple(
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    )
    text = config.get("text_config") or config  # a multimodal model nests its decoder's
    context = text.get("max_position_embeddings")
    known = Known(
        modules=modules,
        parameters=sum(map(math.prod, shapes.values())),
        context=context,
        config=config,
        owners=tuple(dict.fromkeys(name.rpartition(".")[0] for name in shapes)),
        score=shapes.get("score.weight"),
        rows=next((s[0] for name, s in shapes.items() if name.endswith(_EMBEDDINGS)), None),
    )
    return known, []


def objective_fits(objective: str, known: Known) -> list[Finding]:
    """A reward model can be trained on as a reward model only, and only with one label."""
    if known.score is None:
        return []
    if objective != "reward":
        found = f"{objective} on a base with a score head"
        allowed = "it has no head that answers with tokens"
        override = "train=reward, or model.path=<a causal language model>"
        return [Finding("train.objective", found, allowed, override)]
    if known.score[0] != 1:
        found = f"a score head of {known.score[0]} labels"
        allowed = "a reward is one number: one label, or none to begin with"
        return [Finding("model.path", found, allowed, "model.path=<a causal language model>")]
    return []


def packed(attn_implementation: str, known: Known) -> list[Finding]:
    """A family whose sequences cannot be packed without running into each other."""
    found = unpackable(known.config, attn_implementation)
    if found is None:
        return []
    key = "model.path" if found.hint.startswith("models") else "model.attn_implementation"
    allowed = "training packs sequences, and none may see its neighbour"
    return [Finding(key, found.problem, allowed, found.hint)]


def quantised(kind: str, known: Known) -> list[Finding]:
    """A base that is stored quantised: training here starts from plain weights.

    bitsandbytes' 4 bits are decoded where an adapter is merged into them, never to be trained.
    """
    how = stored(known.config)
    if how is None:
        return []
    found = f"the base is already quantised ({how})"
    allowed = "QLoRA quantises a base in bfloat16 itself" if kind == "qlora" else "bfloat16"
    if is_packed(known.config):
        allowed += "; 4 bits are decoded to merge into, not to train from"
    return [Finding("model.path", found, allowed, "model.path=<the model in bfloat16>")]


def quantisable(scheme: str, known: Known) -> list[Finding]:
    """Models whose linear layers the 8-bit formats do not reach."""
    if scheme == "none":
        return []
    text = known.config.get("text_config") or known.config
    reasons = [f"a mixture of experts ({key} {text[key]})" for key in EXPERTS if text.get(key)]
    if text.get("model_type") in _CONVOLUTIONS:
        reasons.append(f"{text['model_type']}, whose layers are stored as convolutions")
    allowed = f"{scheme} is for models of plain linear layers"
    return [Finding("convert.quantize", one, allowed, "convert=default") for one in reasons[:1]]


def head_size(engine: str, on_cpu: bool, known: Known) -> list[Finding]:
    """Attention heads of a size that vLLM's CPU engine has no kernel for."""
    text = known.config.get("text_config") or known.config
    heads = text.get("num_attention_heads")
    size = text.get("head_dim") or (text["hidden_size"] // heads if heads else None)
    if engine != "vllm" or not on_cpu or size is None or size in CPU_HEAD_SIZES:
        return []
    allowed = f"vLLM on a CPU serves {', '.join(map(str, CPU_HEAD_SIZES))}"
    return [Finding("smoke.engine", f"attention heads of {size}", allowed, "smoke=transformers")]


def targets(wanted: object, kind: str, known: Known) -> list[Finding]:
    """Adapter targets the model does not have. Matched as peft does: by the name's end."""
    if kind == "none" or wanted == ALL_LINEAR:
        return []
    example = "peft.target_modules=[q_proj,v_proj] or peft.target_modules=all-linear"
    if not isinstance(wanted, (list, tuple)) or not all(isinstance(w, str) for w in wanted):
        allowed = f'"{ALL_LINEAR}" or a list of module names'
        return [Finding("peft.target_modules", repr(wanted), allowed, example)]
    if not wanted:
        return [Finding("peft.target_modules", "an empty list", "at least one module", example)]
    leaves = sorted({name.rpartition(".")[2] for name in known.modules})
    findings = []
    for target in wanted if leaves else ():
        if any(name == target or name.endswith(f".{target}") for name in known.modules):
            continue
        near = difflib.get_close_matches(target, leaves, n=2, cutoff=0.5)
        override = f"peft.target_modules=[{','.join(near)}]" if near else example
        allowed = f"the model has {', '.join(leaves)}"
        findings.append(Finding("peft.target_modules", f"no {target!r} here", allowed, override))
    return findings
