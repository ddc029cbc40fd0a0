"""Recognise the kind of a folder from its file names, configuration and tensor names.

recognised = recognise(folder)
recognised.kind        Kind.ADAPTER
recognised.what        "a PEFT adapter of rank 8 (adapter_model.safetensors)"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tasks.audit.folder import Folder
from tasks.audit.weights import Weights, open_weights
from tasks.weights.files.documents import MANIFEST, own_manifest
from tasks.weights.files.index import index_of
from tasks.weights.heads import OPENRLHF, SIDE_FILES, architectures, wrapped_class
from tasks.weights.plan.partitions import PARTITIONS

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
MODELS = ("model.safetensors", "pytorch_model.bin")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


class Kind(StrEnum):
    """Kinds of folders. `FOREIGN` is a known format that only the tool that wrote it reads."""

    ADAPTER = "adapter"
    MODEL = "model"
    REWARD = "reward-model"
    VALUE = "value-head-model"
    DEEPSPEED = "deepspeed"
    SHARDS = "shards"
    FOREIGN = "foreign"
    MIXTURE = "mixture"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Recognised:
    """The kind of a folder and its description.

    Attributes:
        kind: for programs.
        what: for people, without the folder's name.
        weights: its tensors; empty for kinds that are not read by headers.
        manifest: the manifest of a Plumbline artifact; empty for other folders.
        beside: descriptions of trainer checkpoints in the same folder.
    """

    kind: Kind
    what: str
    weights: Weights = field(default_factory=lambda: Weights(""))
    manifest: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()


def recognise(folder: Folder) -> Recognised:
    """Recognise a folder by file names, then configuration and headers. Raises ArtifactError."""
    manifest = own_manifest(folder.json(MANIFEST))
    states = tuple(_states(folder))
    adapter, model = _open_first(folder, ADAPTERS), _open_first(folder, MODELS)
    # Shards have an adapter_config.json beside them, which gathering uses.
    parts, weights = PARTITIONS in folder.files, Weights("")
    if adapter is not None and model is not None and not _is_head(model):
        kind, weights = Kind.MIXTURE, model
        what = f"a mixture: a PEFT adapter ({_stored(adapter)}) and a full model ({_stored(model)})"
    elif adapter is not None or (ADAPTER_CONFIG in folder.files and not (states or parts)):
        weights = adapter or Weights(ADAPTERS[0])
        kind, what = Kind.ADAPTER, _adapter(folder, weights)
    elif model is not None:
        weights = model
        kind, what = _model(folder, model)
    elif parts:
        kind, what = Kind.SHARDS, _shards(folder)
    elif states:
        kind = Kind.DEEPSPEED if "DeepSpeed" in states[0] else Kind.FOREIGN
        what, *rest = states
        states = tuple(rest)
    else:
        bare = "a configuration without weights" if CONFIG in folder.files else "nothing known"
        kind, what = Kind.NOTHING, bare
        if manifest:
            what = f"a Plumbline artifact of kind {manifest.get('kind')}"
    if manifest and weights.files:
        what = f"Plumbline artifact of kind {manifest.get('kind')}: {what}"
    return Recognised(kind, what, weights, manifest, states)


def _open_first(folder: Folder, names: tuple[str, ...]) -> Weights | None:
    """Open the first of several names that has files: safetensors come before pickles."""
    for name in names:
        weights = open_weights(folder, name)
        if weights.files or weights.index is not None or index_of(name) in folder.files:
            return weights
    return None


def _stored(weights: Weights) -> str:
    """Return a short description of the weight files."""
    if len(weights.files) == 1:
        return weights.files[0]
    return f"{len(weights.files)} files of {weights.single.replace('.', '-*.', 1)}"


def _is_head(weights: Weights) -> bool:
    """Return True if it holds only a head: TRL saves the head of a PEFT model like a full model."""
    return bool(weights.tensors) and all("v_head." in key for key in weights.tensors)


def _adapter(folder: Folder, weights: Weights) -> str:
    config = folder.json(ADAPTER_CONFIG)
    rank = f" of rank {config['r']}" if type(config.get("r")) is int else ""
    dora = "DoRA " if config.get("use_dora") else ""
    stored = _stored(weights) if weights.files else "no weights"
    return f"a PEFT {dora}adapter{rank} ({stored}){_head_of_adapter(folder, weights)}"


def _head_of_adapter(folder: Folder, weights: Weights) -> str:
    if any("v_head." in key for key in weights.tensors) or any(
        name in folder.files for name in SIDE_FILES
    ):
        return " with a value head"
    config = folder.json(ADAPTER_CONFIG)
    wrapped = wrapped_class(config)
    if wrapped == "CriticModel":
        return " of an OpenRLHF critic"
    if wrapped in OPENRLHF:
        return " of an OpenRLHF reward model"
    return " of a reward model" if config.get("task_type") == "SEQ_CLS" else ""


def _model(folder: Folder, weights: Weights) -> tuple[Kind, str]:
    config, stored = folder.json(CONFIG), _stored(weights)
    names = architectures(config)
    side = next((name for name in SIDE_FILES if name in folder.files), "")
    if side:
        return Kind.VALUE, f"a model with LLaMA-Factory's value head ({stored}, {side})"
    if any("v_head." in key for key in weights.tensors):
        return Kind.VALUE, f"a model with TRL's value head ({stored})"
    if {*OPENRLHF} & set(names) or "value_head_prefix" in config:
        role = "critic" if "CriticModel" in names else "reward model"
        return Kind.REWARD, f"an OpenRLHF {role} ({stored})"
    if any(name.endswith("ForSequenceClassification") for name in names):
        return Kind.REWARD, f"a {names[0]} ({stored})"
    return Kind.MODEL, f"a full {names[0] if names else 'model'} ({stored})"


def _shards(folder: Folder) -> str:
    """Describe Plumbline's shards: of an adapter or of a full model."""
    partitions = folder.json(PARTITIONS)
    rank = folder.json(ADAPTER_CONFIG).get("r")
    of_rank = f" of rank {rank}" if type(rank) is int else ""
    of = {"adapter": f" of a LoRA adapter{of_rank}", "full": " of a full model"}
    mode, ranks = partitions.get("mode"), partitions.get("world_size")
    count = f" of {ranks} ranks" if type(ranks) is int else ""
    return f"Plumbline's shards{of.get(mode, '') if isinstance(mode, str) else ''}{count}"


_STATES: tuple[tuple[str, str], ...] = (
    # pattern of one of its files, description
    (r"(.*/)?zero/[^/]+/fp32\.pt", "a universal DeepSpeed checkpoint"),
    (r"(.*/)?zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt", "a DeepSpeed checkpoint of ZeRO-3"),
    (r"(.*/)?(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt",
     "a DeepSpeed checkpoint of ZeRO-1 or 2"),
    (r"(.*/)?mp_rank_\d+_model_states\.pt", "a DeepSpeed checkpoint without ZeRO"),
    (r"(.*/)?(actor/|critic/)?model_world_size_\d+_rank_\d+\.pt", "verl's FSDP shards"),
    (r"(.*/)?__\d+_\d+\.distcp", "a torch distributed (FSDP) checkpoint"),
    (r"(.*/)?mp_rank_\d+(_\d+)?/model_optim_rng\.pt", "a Megatron checkpoint"),
    (r"[^/]+\.gguf", "a GGUF model"),
    (r"(.*/)?(consolidated|model|pytorch_model)[^/]*\.(pt|pth)", "a raw torch state dict"),
)  # fmt: skip


def _states(folder: Folder) -> Iterator[str]:
    """Yield descriptions of trainer checkpoints in the folder."""
    deepspeed = False
    for pattern, what in _STATES:
        if deepspeed and "DeepSpeed" in what:
            continue  # a checkpoint has several kinds of files: the first match is the best
        if any(re.fullmatch(pattern, name) for name in folder.files):
            deepspeed |= "DeepSpeed" in what
            yield what
