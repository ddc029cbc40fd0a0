"""The base model, from config.json and safetensors headers: what objective and adapter need."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.config.checks import Context, Known
from tasks.config.checks.memory import Sizes
from tasks.config.defaults import ONLINE
from tasks.core.errors import ArtifactError, Finding
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
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.lora_config import ALL_LINEAR
from tasks.weights.model_class import loadable_attention
from tasks.weights.quantized.config_fields import stored
from tasks.weights.quantized.nf4 import BLOCKSIZE, LOST_ALLOWED, LOST_OVERRIDE, lost_in_4_bits
from tasks.weights.quantized.packed import CONV1D

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_ANOTHER = "model.path=<folder or hub id>"
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LAYERS = tuple(
    f"model.layers.{i}.x.{name}" for i in range(SHAPE["num_hidden_layers"]) for name in _LINEAR
)
TOY = Known(_LAYERS, 918_000, SHAPE, owners=("model.embed_tokens", *_LAYERS, "model.norm"))
"""The embedded model (`tasks/toy/pretrain.py`), which may not be there yet."""


def look_at(model: Mapping[str, Any]) -> tuple[Known, list[Finding]]:
    """Return facts about the base model of section `model`, and problems with it.

    Of a Hugging Face id only config.json is read, from the local cache or the Hub.
    """
    kind, path = model["kind"], model["path"]
    if kind == "toy":
        value, allowed = f"{path} with model.kind=toy", "the embedded model has no path"
        wrong = Finding("model.path", value, allowed, "model=hf, or model.path=null")
        return TOY, [wrong] if path else []
    if not path:
        return Known(), [Finding("model.path", "nothing", "has to be given", _ANOTHER)]
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _read_folder(folder)
    if _HUB_ID.fullmatch(path) and not folder.exists():
        # The stage that downloads it reports what fails.
        config, _ = hub_config(path, model["revision"])
        try:
            parameters = Sizes(config).weights()
        except KeyError:  # an architecture that names its dimensions differently
            parameters = None
        return Known(config=config, parameters=parameters), []
    allowed = "give an existing folder, or a Hugging Face id like owner/name"
    return Known(), [Finding("model.path", f"no such folder: {path}", allowed, _ANOTHER)]


def _read_folder(folder: Path) -> tuple[Known, list[Finding]]:
    try:
        problems = foreign_entries(folder)
        try:
            _, tensors = model_files(folder)
        except ArtifactError as error:
            problems += error.details
        if problems:
            allowed = "complete files in Hugging Face's layout"
            texts = (f"{folder}: {problem}" for problem in problems)
            return Known(), [Finding("model.path", text, allowed, _ANOTHER) for text in texts]
        config = read_json(folder / CONFIG)
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        return Known(), [Finding("model.path", reason, "a folder that can be read", _ANOTHER)]
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    matrices = (n for n, shape in shapes.items() if n.endswith(".weight") and len(shape) == 2)
    known = Known(
        modules=tuple(name.removesuffix(".weight") for name in matrices),
        parameters=sum(map(math.prod, shapes.values())),
        config=config,
        owners=tuple(dict.fromkeys(name.rpartition(".")[0] for name in shapes)),
        score=shapes.get("score.weight"),
    )
    return known, []


def why_unknown(model: Mapping[str, Any]) -> str:
    """Return the reason why the dimensions of the model of section `model` are not known."""
    path = model["path"]
    if path and _HUB_ID.fullmatch(path) and not Path(path).expanduser().is_dir():
        _, reason = hub_config(path, model["revision"])
        if reason:
            return f"no {CONFIG} of {path} in the Hugging Face cache: {reason}"
    return f"no {CONFIG} whose dimensions can be read"


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
    attention = loadable_attention(known.config, model["attn_implementation"])
    yield from packed(attention, train["micro_batch_size"], known)
    yield from _shared_rows(train, attention, known)
    yield from head_exists(context.objective, known)
    yield from _router_loss(train, known)
    yield from _adapter(context)
    if model["kind"] != "toy" and data["kind"] == "toy":
        value, allowed = f"embedded tasks for {model['path']}", "they are for the embedded model"
        yield Finding("data.kind", value, allowed, "data.path=<file>", "warning")
    if model["kind"] == "toy" and data["kind"] != "toy":
        value, allowed = "the embedded model, of 0.9M parameters", "it only knows its own tasks"
        yield Finding("model.kind", value, allowed, _ANOTHER, "warning")


def packed(attn_implementation: str, micro_batch_size: int, known: Known) -> Iterator[Finding]:
    """Warn of a family whose sequences are padded; refuse attention that leaves out a cap."""
    cap = uncapped(known.config, attn_implementation)
    if cap is not None:
        value = f"{attn_implementation} leaves out the cap of the attention logits at {cap}"
        allowed = "training computes what the model computes"
        yield Finding("model.attn_implementation", value, allowed, CAPPED)
    elif micro_batch_size > 1 and (why := why_padded(known.config, attn_implementation)):
        allowed = "its sequences are padded to the longest of a micro-batch instead of packed"
        override = "train.micro_batch_size=1 pads nothing"
        yield Finding("model.path", why, allowed, override, "warning")


def _shared_rows(train: Mapping[str, Any], attention: str, known: Known) -> Iterator[Finding]:
    """Refuse rows divided over ranks (Ulysses) where ranks, heads or attention do not allow it."""
    key, sharing = "train.sequence_parallel", train["sequence_parallel"]
    ranks, heads = train["nproc"] * train["nodes"], known.text.get("num_attention_heads")
    for wrong, allowed in (
        (ranks % sharing, f"a divisor of the {ranks} ranks, nproc x nodes"),
        (heads and heads % sharing, f"a divisor of the model's {heads} attention heads"),
        (train["objective"] in ONLINE, "responses are sampled and scored in whole rows"),
        (attention != "sdpa", "only with model.attn_implementation=sdpa"),
    ):
        if wrong and sharing > 1:
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


def _router_loss(train: Mapping[str, Any], known: Known) -> Iterator[Finding]:
    """Refuse a router loss that the objective, the family or the checkpointing does not have."""
    key, wanted = "train.router_aux_loss_coef", train["router_aux_loss_coef"]
    again = train["gradient_checkpointing"] and train["gradient_checkpointing_reentrant"]
    dense = wanted and known.text and experts_of(known.text) <= 1
    weight = wanted if dense else router_coefficient(known.config, wanted)
    for wrong, allowed in (
        (dense, "only a mixture of experts has routers"),
        (train["objective"] not in ROUTED, f"only {', '.join(ROUTED)} have a router loss"),
        (again, "reentrant checkpointing loses the gradient of the routers' outputs"),
    ):
        if wrong and weight:
            yield Finding(key, f"{weight:g}", allowed, f"{key}=0")


def _adapter(context: Context) -> Iterator[Finding]:
    """Refuse modules that the model does not have; peft reports one only if all are wrong."""
    settings, known = context.settings, context.known
    peft, new, targets = settings["peft"], settings["model"]["new_tokens"], "peft.target_modules"
    if peft["kind"] == "none":
        return
    wanted = peft["target_modules"]
    if isinstance(wanted, str) and wanted != ALL_LINEAR:
        override = f"{targets}=[{wanted}] or {targets}={ALL_LINEAR}"
        yield Finding(targets, wanted, "a list of names", override)
    for key in (
        "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "modules_to_save",
    ):  # fmt: skip
        present = known.owners if key == "modules_to_save" else known.modules
        for name in () if isinstance(peft[key], str) or not present else peft[key] or ():
            # As peft matches: by the end of a module's name, in dotted parts.
            if any(f".{module}".endswith(f".{name}") for module in present):
                continue
            leaves = sorted({module.rpartition(".")[2] for module in present})
            near = difflib.get_close_matches(name, leaves, n=1, cutoff=0.5) or ["<module>"]
            allowed = f"the model has {', '.join(leaves)}"
            yield Finding(f"peft.{key}", f"no {name!r} here", allowed, f"peft.{key}=[{near[0]}]")
    if settings["zero"]["stage"] == 3 and (new or "lm_head" in wanted):
        key = "model.new_tokens" if new else targets
        value = f"{', '.join(new or ['lm_head'])} with ZeRO-3"
        # Each portion of logits would gather the head.
        allowed = "ZeRO-3 divides embeddings and head, which these adapters read whole"
        yield Finding(key, value, allowed, "zero=zero2")
    if peft["use_dora"] and known.config.get("model_type") in CONV1D:
        value = f"true on {known.config['model_type']}"
        yield Finding("peft.use_dora", value, "DoRA is merged on linear layers only, not Conv1D",
                      "peft.use_dora=false")  # fmt: skip
    widths = ("hidden_size", "intermediate_size", "moe_intermediate_size")
    sizes = {name: known.text.get(name) or 0 for name in widths}
    odd = [f"{name}={size}" for name, size in sizes.items() if size % BLOCKSIZE]
    if odd and peft["kind"] == "qlora" and not context.gpu:
        # The AVX-512 kernel of bitsandbytes 0.50.2 takes wrong scales there, so that training would
        # use other weights than the base and the served model.
        allowed = f"bitsandbytes on a CPU needs multiples of {BLOCKSIZE}: others get wrong scales"
        yield Finding("peft.kind", f"qlora, and {', '.join(odd)}", allowed, "peft=lora")
    if peft["kind"] == "qlora":
        yield from merged(Path(settings["model"]["path"] or "").expanduser())


def merged(folder: Path) -> Iterator[Finding]:
    """Refuse QLoRA on a merged QLoRA model: quantising it again would undo that training.

    Other checks report a folder that cannot be read.
    """
    if (folder / CONFIG).is_file():
        with suppress(ArtifactError):
            if lost := lost_in_4_bits(read_checkpoint(folder)):
                value = f"a merged QLoRA model: {lost}"
                yield Finding("model.path", value, LOST_ALLOWED, LOST_OVERRIDE)
