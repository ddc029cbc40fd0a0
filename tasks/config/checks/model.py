"""The base model, from config.json and safetensors headers, and what the objective needs of it."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tasks.config.checks.context import Context, Known
from tasks.config.defaults import ONLINE
from tasks.core.errors import ArtifactError
from tasks.core.finding import Finding
from tasks.core.hub import hub_config
from tasks.core.terminal import typed
from tasks.delivery.base import folder_identity
from tasks.delivery.examination import base_errors
from tasks.toy import CONTEXT, SHAPE
from tasks.training.memory import Sizes, experts_of
from tasks.training.model.packable import CAPPED, uncapped, why_padded
from tasks.training.model.router_loss import OBJECTIVES as ROUTED
from tasks.training.model.router_loss import coefficient as router_coefficient
from tasks.training.model.router_loss import has_router_loss
from tasks.weights.files.documents import read_json
from tasks.weights.files.folder import CONFIG, inspect_checkpoint
from tasks.weights.files.header import read_header
from tasks.weights.files.side_files import foreign_entries
from tasks.weights.quantized.config_fields import stored
from tasks.weights.tokens.prove_ids import is_leading, misread
from tasks.weights.tokens.tokenizer import token_ids

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_REPORTED = ("TOKENIZER_ROWS", "TOKENIZER_MISREAD")
"""Findings of an audit that `vocabulary` and `token_ids_as_loaded` report, by the real loader."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM 0.32 has CPU kernels for (`CPUAttentionBackend`)."""
_SOURCE = "transformers/models/auto/modeling_auto.py"
_TABLES = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
_EMBEDDINGS = (
    "embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight",
)  # fmt: skip
"""Names of the input embedding, by family."""


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


def problems(context: Context) -> Iterator[Finding]:
    """Yield the problems of the base model, beside those of `look`."""
    settings, known = context.settings, context.known
    model, train, smoke = settings["model"], settings["train"], settings["smoke"]
    folder, attention = Path(model["path"] or "").expanduser(), model["attn_implementation"]
    if model["path"]:
        yield from vocabulary(folder, None if model["new_tokens"] else known.rows)
        yield from token_ids_as_loaded(folder)
        if known.config and folder.is_dir():
            yield from _audited(folder, folder_identity(folder))
    yield from lengths(train["max_len"], smoke["max_model_len"], known.context)
    if (how := stored(known.config)) is not None:
        value = f"the base is already quantised ({how})"
        override = "model.path=<the model in bfloat16>"
        yield Finding("model.path", value, "training starts from plain weights", override)
    yield from vllm_serves(smoke["engine"], context.vllm_on_cpu, known)
    yield from packed(attention, known)
    yield from shared_rows(train, attention, known)
    yield from head_exists(context.objective, known)
    yield from router_loss(train, known)
    yield from embedded(model, settings["data"])


def look(kind: str, path: str | None, revision: str | None = None) -> tuple[Known, list[Finding]]:
    """Return facts about the base model, and problems with it.

    Of a Hugging Face id only config.json is read, from the local cache or the Hub.

    Args:
        kind: `model.kind`.
        path: `model.path`, a folder or a Hugging Face id.
        revision: `model.revision`.
    """
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
        return _on_hub(path, revision), []
    allowed = "give an existing folder, or a Hugging Face id like owner/name"
    return Known(), [_refused(f"no such folder: {path}", allowed)]


def look_at(model: Mapping[str, Any]) -> tuple[Known, list[Finding]]:
    """Return `look` of section `model`."""
    return look(model["kind"], model["path"], model["revision"])


def _on_hub(hub_id: str, revision: str | None) -> Known:
    config, _ = hub_config(hub_id, revision)  # the stage that downloads it reports what fails
    text = config.get("text_config") or config
    try:
        parameters = Sizes.of(config).weights()
    except KeyError:  # an architecture that names its dimensions differently
        parameters = None
    context = text.get("max_position_embeddings")
    return Known(config=config, parameters=parameters, context=context)


def why_unknown(model: Mapping[str, Any]) -> str:
    """Return the reason why the dimensions of the model of section `model` are not known."""
    path = model["path"]
    if path and _HUB_ID.fullmatch(path) and not Path(path).expanduser().is_dir():
        _, reason = hub_config(path, model["revision"])
        if reason:
            return f"no {CONFIG} of {path} in the Hugging Face cache: {reason}"
    return f"no {CONFIG} whose dimensions can be read"


@cache
def _audited(folder: Path, _: str) -> list[Finding]:
    report = base_errors(folder)
    return [
        Finding(
            "model.path", f"{report.source}: {error.code} {error.where}: {error.found}",
            f"the base itself is broken: {error.why}; {error.fix}", report.command,
        )
        for error in report.findings if error.code not in _REPORTED
    ]  # fmt: skip


def embedded(model: Mapping[str, Any], data: Mapping[str, Any]) -> list[Finding]:
    """Warn if only one of model and data is the user's."""
    if model["kind"] != "toy" and data["kind"] == "toy":
        value = f"embedded tasks for {model['path']}"
        allowed = "they are made for the embedded model"
        return [Finding("data.kind", value, allowed, "data.path=<file>", "warning")]
    if model["kind"] == "toy" and data["kind"] != "toy":
        value, allowed = "the embedded model, of 0.9M parameters", "it only knows its own tasks"
        return [Finding("model.kind", value, allowed, "model.path=<folder or hub id>", "warning")]
    return []


def _refused(value: str, allowed: str) -> Finding:
    return Finding("model.path", value, allowed, "model.path=<folder or hub id>")


def _read_folder(folder: Path) -> tuple[Known, list[Finding]]:
    try:
        checkpoint = inspect_checkpoint(folder)
        weights = [f for name, f in checkpoint.files.items() if name.endswith(".safetensors")]
        if problems := [*foreign_entries(folder), *checkpoint.problems]:
            allowed = "complete files in Hugging Face's layout"
            return Known(), [_refused(f"{folder}: {p}", allowed) for p in problems]
        config = read_json(folder / CONFIG)
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


def lengths(max_len: int, max_model_len: int | None, context: int | None) -> Iterator[Finding]:
    """Check that the served context holds what was trained, and the model's context both."""
    if max_model_len is not None and max_model_len < max_len:
        allowed = f"at least train.max_len={max_len}"
        override = f"smoke.max_model_len={max_len}"
        yield Finding("smoke.max_model_len", str(max_model_len), allowed, override)
    if context is not None and max_len > context:
        allowed, override = f"at most the model's context, {context}", f"train.max_len={context}"
        yield Finding("train.max_len", str(max_len), allowed, override)


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


def shared_rows(train: Mapping[str, Any], attn_implementation: str, known: Known) -> list[Finding]:
    """Refuse rows divided over ranks (Ulysses) where ranks, heads or attention do not allow it.

    Args:
        attn_implementation: `model.attn_implementation`.
        known: facts about the base model.
    """
    sharing, ranks = train["sequence_parallel"], train["nproc"] * train["nodes"]
    if sharing <= 1:
        return []
    key, whole = "train.sequence_parallel", "train.sequence_parallel=1"
    text = known.config.get("text_config") or known.config
    heads = text.get("num_attention_heads") or text.get("n_head")
    family = str(text.get("model_type", ""))
    divisors = [n for n in range(sharing, 0, -1) if ranks % n == 0 and (heads or n) % n == 0]
    fewer = f"{key}={next(iter(divisors), 1)}"
    problems = []
    if ranks % sharing:
        problems.append((f"{sharing} with {ranks} ranks", "a divisor of nproc x nodes", fewer))
    if heads and heads % sharing:
        allowed = f"a divisor of the model's {heads} attention heads"
        problems.append((f"{sharing} with {heads} heads", allowed, fewer))
    if train["objective"] in ONLINE:
        value = f"{sharing} with train.objective={train['objective']}"
        problems.append((value, "responses are sampled and scored in whole rows", whole))
    if attn_implementation != "sdpa":
        value = f"{sharing} with model.attn_implementation={attn_implementation}"
        override = f"model.attn_implementation=sdpa or {whole}"
        problems.append((value, "tokens are exchanged for heads around sdpa alone", override))
    if not takes_own_attention(family):
        allowed = "the family's attention in transformers cannot be replaced"
        problems.append((f"{sharing} with {family}", allowed, whole))
    return [Finding(key, *problem) for problem in problems]


def takes_own_attention(family: str) -> bool:
    """Return False if transformers' code of a model type supports only its own attention.

    The code is read as text, because importing transformers takes seconds. A family without a
    folder of its name is accepted.
    """
    name = family.removesuffix("_text")
    try:
        source = distribution("transformers").locate_file(
            f"transformers/models/{name}/modeling_{name}.py"
        )
        return "_supports_attention_backend = True" in Path(str(source)).read_text("utf-8")
    except OSError:
        return True


def vllm_serves(engine: str, on_cpu: bool, known: Known) -> list[Finding]:
    """Refuse what the installed vLLM fails on at its start: sizes of heads, vision on CPUs.

    Args:
        engine: `smoke.engine` or `rollout.engine`.
        on_cpu: True if the installed vLLM is the one for CPUs.
        known: facts about the base model.
    """
    if engine == "transformers" or not on_cpu:
        return []
    text = known.config.get("text_config") or known.config
    heads = text.get("num_attention_heads")
    size = text.get("head_dim") or (text["hidden_size"] // heads if heads else None)
    problems = []
    if size is not None and size not in CPU_HEAD_SIZES:
        sizes = f"vLLM on a CPU serves {', '.join(map(str, CPU_HEAD_SIZES))}"
        problems.append((f"attention heads of {size}", sizes))
    if "vision_config" in known.config and find_spec("torchvision") is None:
        needed = "vLLM needs torchvision for it, of PyTorch's own index for CPUs"
        problems.append((f"vllm with {known.config.get('model_type')}", needed))
    return [Finding("smoke.engine", *problem, "smoke.engine=transformers") for problem in problems]


def vocabulary(folder: Path, rows: int | None) -> list[Finding]:
    """Refuse a tokenizer with ids that the embedding has no row for.

    Such a model trains, since no row is padded here, and fails when a padded batch is served. The
    padding token is reported first, then other special tokens, then the highest id.

    Args:
        folder: of the base; one without `tokenizer.json` is accepted.
        rows: of its input embedding; None if unknown.
    """
    if rows is None or not (folder / "tokenizer.json").is_file():
        return []
    try:
        special, highest = token_ids(folder)
    except ArtifactError as error:
        return [_without_row(error.message, "pad_token")]
    findings = [
        _without_row(f"{role} {text!r} has id {token}, the embedding has {rows} rows", role)
        for role, (text, token) in special.items()
        if token >= rows
    ]
    if not findings and highest >= rows:
        value = f"the tokenizer has ids up to {highest}, the embedding {rows} rows"
        findings.append(_without_row(value))
    return findings


def token_ids_as_loaded(folder: Path) -> list[Finding]:
    """Refuse a base whose tokenizer.json transformers misreads: it would train on such ids.

    Args:
        folder: of the base; one without `tokenizer.json` is accepted.
    """
    if not (folder / "tokenizer.json").is_file():
        return []
    reason = misread(folder)
    if not reason:
        return []
    return [
        Finding(
            "model.path", f"the tokenizer is misread: {reason}",
            "the ids of tokenizer.json, which the base was trained on",
            f"python flows/audit.py {typed('source', folder)} tells what fixes it",
            "warning" if is_leading(reason) else "error",
        )
    ]  # fmt: skip


def _without_row(value: str, role: str = "") -> Finding:
    override = "model.path=<the base with its embedding resized>"
    if role:
        override += f', or another "{role}" in its tokenizer_config.json'
    return Finding("model.path", value, "a row for every id", override)


@cache
def families(auto_class: str) -> frozenset[str]:
    """Return the model types (`model_type` of config.json) that a class of transformers knows.

    The table is parsed as text, because importing transformers takes seconds.

    Args:
        auto_class: a key of `_TABLES`.

    Raises:
        LookupError: the installed transformers has no such table.
    """
    path = Path(str(distribution("transformers").locate_file(_SOURCE)))
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = [name.id for name in getattr(node, "targets", ()) if isinstance(name, ast.Name)]
        if isinstance(node, ast.Assign) and _TABLES[auto_class] in names:
            (table,) = node.value.args  # type: ignore[attr-defined]  # OrderedDict([...])
            return frozenset(name for name, _ in ast.literal_eval(table))
    raise LookupError(f"{path} has no {_TABLES[auto_class]}")


def head_exists(objective: str, known: Known) -> Iterator[Finding]:
    """Refuse an objective whose head the model, or its family in transformers, does not have.

    A model with its own code (`auto_map`) is accepted.
    """
    config, rewards = known.config, objective == "reward"
    auto_class = "AutoModelForSequenceClassification" if rewards else "AutoModelForCausalLM"
    family, override = config.get("model_type"), "model.path=<a causal language model>"
    if known.score is not None and (not rewards or known.score[0] != 1):
        value = f"{objective} on a base with a score head of {known.score[0]} labels"
        allowed = "one label is a reward, no score head a language model"
        yield Finding("train.objective", value, allowed, override)
    if family is None or auto_class in (config.get("auto_map") or {}):
        return
    able = families(auto_class)
    if not rewards and "text_config" in config:  # a vision-language model, trained on text
        able |= families("AutoModelForImageTextToText")
    classes = [str(name) for name in config.get("architectures") or ()]
    masked = bool(classes) and all(name.endswith("ForMaskedLM") for name in classes)
    if config.get("is_encoder_decoder") or masked:
        allowed = "only decoders, which predict the next token, are trained here"
    elif family not in able:
        head = "score head (...ForSequenceClassification)" if rewards else "causal language model"
        allowed = f"transformers {version('transformers')} has no {head} for {family}"
    else:
        return
    yield Finding("train.objective", f"{objective} on {family}", allowed, override)


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
        (not has_router_loss(family), f"transformers has no such loss for {family}"),
        (again, "reentrant checkpointing loses the gradient of the routers' outputs"),
    ):
        if wrong:
            yield Finding(key, f"{weight:g}", allowed, without)
