"""The base model, from config.json and safetensors headers, and what the objective needs of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.config.checks.context import Context, Known
from tasks.config.checks.memory import Sizes
from tasks.config.defaults import ONLINE
from tasks.core.errors import ArtifactError
from tasks.core.finding import Finding
from tasks.core.hub import hub_config
from tasks.toy import SHAPE
from tasks.training.model.families import (
    CAPPED,
    ROUTED,
    experts_of,
    router_coefficient,
    uncapped,
    why_padded,
)
from tasks.weights.files.documents import read_json
from tasks.weights.files.folder import CONFIG, foreign_entries, model_files
from tasks.weights.quantized.config_fields import stored

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LAYERS = tuple(
    f"model.layers.{i}.x.{name}" for i in range(SHAPE["num_hidden_layers"]) for name in _LINEAR
)
TOY = Known(
    modules=_LAYERS,
    parameters=918_000,
    config=SHAPE,
    owners=("model.embed_tokens", *_LAYERS, "model.norm"),
)
"""The embedded model (`tasks/toy/pretrain.py`), which may not be there yet."""


def problems(context: Context) -> Iterator[Finding]:
    """Yield the problems of the base model, beside those of `look_at`."""
    settings, known = context.settings, context.known
    model, train, data = settings["model"], settings["train"], settings["data"]
    if known.context is not None and train["max_len"] > known.context:
        allowed = f"at most the model's context, {known.context}"
        override = f"train.max_len={known.context}"
        yield Finding("train.max_len", str(train["max_len"]), allowed, override)
    served = settings["smoke"]["max_model_len"]
    if served is not None and served < train["max_len"]:
        allowed = f"at least train.max_len={train['max_len']}"
        override = f"smoke.max_model_len={train['max_len']}"
        yield Finding("smoke.max_model_len", str(served), allowed, override)
    if (how := stored(known.config)) is not None:
        value = f"the base is already quantised ({how})"
        override = "model.path=<the model in bfloat16>"
        yield Finding("model.path", value, "training starts from plain weights", override)
    yield from packed(model["attn_implementation"], known)
    yield from shared_rows(train, model["attn_implementation"], known)
    yield from head_exists(context.objective, known)
    yield from router_loss(train, known)
    if model["kind"] != "toy" and data["kind"] == "toy":
        value, allowed = f"embedded tasks for {model['path']}", "they are for the embedded model"
        yield Finding("data.kind", value, allowed, "data.path=<file>", "warning")
    if model["kind"] == "toy" and data["kind"] != "toy":
        value, allowed = "the embedded model, of 0.9M parameters", "it only knows its own tasks"
        yield Finding("model.kind", value, allowed, "model.path=<folder or hub id>", "warning")


def look_at(model: Mapping[str, Any]) -> tuple[Known, list[Finding]]:
    """Return facts about the base model of section `model`, and problems with it.

    Of a Hugging Face id only config.json is read, from the local cache or the Hub.
    """
    kind, path = model["kind"], model["path"]
    if kind == "toy" and not path:
        return TOY, []
    if kind == "toy":
        value, allowed = f"{path} with model.kind=toy", "the embedded model has no path"
        return TOY, [Finding("model.path", value, allowed, "model=hf, or model.path=null")]
    if not path:
        return Known(), [
            Finding("model.path", "nothing", "has to be given", "model.path=<folder or hub id>")
        ]
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _read_folder(folder)
    if _HUB_ID.fullmatch(path) and not folder.exists():
        return _on_hub(path, model["revision"]), []
    allowed = "give an existing folder, or a Hugging Face id like owner/name"
    return Known(), [_refused(f"no such folder: {path}", allowed)]


def _on_hub(hub_id: str, revision: str | None) -> Known:
    config, _ = hub_config(hub_id, revision)  # the stage that downloads it reports what fails
    try:
        parameters = Sizes.of(config).weights()
    except KeyError:  # an architecture that names its dimensions differently
        parameters = None
    return Known(config=config, parameters=parameters)


def why_unknown(model: Mapping[str, Any]) -> str:
    """Return the reason why the dimensions of the model of section `model` are not known."""
    path = model["path"]
    if path and _HUB_ID.fullmatch(path) and not Path(path).expanduser().is_dir():
        _, reason = hub_config(path, model["revision"])
        if reason:
            return f"no {CONFIG} of {path} in the Hugging Face cache: {reason}"
    return f"no {CONFIG} whose dimensions can be read"


def _refused(value: str, allowed: str) -> Finding:
    return Finding("model.path", value, allowed, "model.path=<folder or hub id>")


def _read_folder(folder: Path) -> tuple[Known, list[Finding]]:
    try:
        problems = foreign_entries(folder)
        try:
            _, tensors = model_files(folder)
        except ArtifactError as error:
            problems += error.details
        if problems:
            allowed = "complete files in Hugging Face's layout"
            return Known(), [_refused(f"{folder}: {p}", allowed) for p in problems]
        config = read_json(folder / CONFIG)
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        return Known(), [_refused(reason, "a folder that can be read")]
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    modules = tuple(
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    )
    known = Known(
        modules=modules,
        parameters=sum(map(math.prod, shapes.values())),
        config=config,
        owners=tuple(dict.fromkeys(name.rpartition(".")[0] for name in shapes)),
        score=shapes.get("score.weight"),
    )
    return known, []


def packed(attn_implementation: str, known: Known) -> list[Finding]:
    """Warn of a family whose sequences are padded; refuse attention that leaves out a cap."""
    cap = uncapped(known.config, attn_implementation)
    if cap is not None:
        value = f"{attn_implementation} leaves out the cap of the attention logits at {cap}"
        allowed = "training computes what the model computes"
        return [Finding("model.attn_implementation", value, allowed, CAPPED)]
    why = why_padded(known.config)
    if not why:
        return []
    allowed = "its sequences are padded to the longest of a micro-batch instead of packed"
    override = "train.micro_batch_size=1 pads nothing"
    return [Finding("model.path", why, allowed, override, "warning")]


def shared_rows(
    train: Mapping[str, Any], attn_implementation: str, known: Known
) -> Iterator[Finding]:
    """Refuse rows divided over ranks (Ulysses) where ranks, heads or attention do not allow it."""
    key, sharing = "train.sequence_parallel", train["sequence_parallel"]
    if sharing <= 1:
        return
    ranks, heads = train["nproc"] * train["nodes"], known.text.get("num_attention_heads")
    for wrong, allowed in (
        (ranks % sharing, f"a divisor of the {ranks} ranks, nproc x nodes"),
        (heads and heads % sharing, f"a divisor of the model's {heads} attention heads"),
        (train["objective"] in ONLINE, "responses are sampled and scored in whole rows"),
        (attn_implementation != "sdpa", "only with model.attn_implementation=sdpa"),
    ):
        if wrong:
            yield Finding(key, str(sharing), allowed, f"{key}=1")


def head_exists(objective: str, known: Known) -> Iterator[Finding]:
    """Refuse encoders, and a score head that the objective would lose or cannot use."""
    config, override = known.config, "model.path=<a causal language model>"
    classes = [str(name) for name in config.get("architectures") or ()]
    masked = bool(classes) and all(name.endswith("ForMaskedLM") for name in classes)
    if config.get("is_encoder_decoder") or masked:
        value = f"{objective} on {config.get('model_type')}"
        allowed = "only decoders, which predict the next token, are trained here"
        yield Finding("train.objective", value, allowed, override)
    if known.score is not None and (objective != "reward" or known.score[0] != 1):
        value = f"{objective} on a base with a score head of {known.score[0]} labels"
        allowed = "one label is a reward, no score head a language model"
        yield Finding("train.objective", value, allowed, override)


def router_loss(train: Mapping[str, Any], known: Known) -> Iterator[Finding]:
    """Refuse a router loss that the objective, the family or the checkpointing does not have."""
    key, without = "train.router_aux_loss_coef", "train.router_aux_loss_coef=0"
    family, wanted = str(known.text.get("model_type", "")), train["router_aux_loss_coef"]
    if wanted and known.text and experts_of(known.text) <= 1:
        allowed = "only a mixture of experts has routers"
        yield Finding(key, f"{wanted:g} with {family}", allowed, without)
        return
    if not (weight := router_coefficient(known.config, wanted)):
        return
    again = train["gradient_checkpointing"] and train["gradient_checkpointing_reentrant"]
    for wrong, allowed in (
        (train["objective"] not in ROUTED, f"only {', '.join(ROUTED)} have a router loss"),
        (again, "reentrant checkpointing loses the gradient of the routers' outputs"),
    ):
        if wrong:
            yield Finding(key, f"{weight:g}", allowed, without)
