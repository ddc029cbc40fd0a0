"""Contracts from configuration: what a checkpoint has to hold, asked of the model's own class.

The class is built on the meta device, which costs no memory, and its checkpoint's keys go through
transformers' own conversion (`families/conversion.py`); so names and shapes are those of the
library that will load the checkpoint, not our idea of them. That takes the import of transformers:
6 to 17 s on 2 busy cores, where reading the same from config.json takes 0.3 s, Python's start
included (Qwen2 1.5 B, measured). So families whose names are the same on disk and in memory are
answered by `families/plain.py`, which the tests hold against transformers, and which passes on
whatever does not fit exactly. For the rest call this through `tasks.weights.worker` where a warm
process can answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.contract import Expected
from tasks.errors import ArtifactError
from tasks.weights.adapters.config import parse_config
from tasks.weights.adapters.live import LiveModel, live_model
from tasks.weights.adapters.pieces import Contract
from tasks.weights.families.conversion import Conversion, default_layout, trace
from tasks.weights.families.meta import meta_model, quantized_names
from tasks.weights.families.places import Place
from tasks.weights.families.plain import plain_facts
from tasks.weights.reader import DTYPE_NAMES, WEIGHTS, open_checkpoint, read_json
from tasks.weights.stored4bit.said import is_packed, without_quantization
from tasks.weights.stored4bit.source import open_base


@dataclass(frozen=True)
class ModelFacts:
    """What a model class says of its checkpoints.

    Names are keys on disk, except in `live` and in `places`, which tells how the two belong
    together. They differ where transformers renames or fuses while it loads.

    Attributes:
        tensors: every tensor that the checkpoint has to hold; a tied one appears once, under the
            key it is stored under.
        tied: key that a checkpoint need not hold -> key that holds the same tensor.
        embedding: key of the input embedding, (vocabulary, hidden).
        quantized: keys that transformers turns into 4-bit weights when asked to.
        live: the model in memory.
        places: where every tensor on disk lies in memory.
        unread: keys on disk that the model does not read, and is not surprised by.
        aliases: live name of a tied tensor -> key that it is stored under when it is stored.
        findings: what is wrong with the checkpoint whose keys were given; see `Conversion`.
    """

    tensors: tuple[Expected, ...]
    tied: Mapping[str, str]
    embedding: str
    quantized: tuple[str, ...]
    live: LiveModel = field(default_factory=lambda: LiveModel({}, {}, {}))
    places: tuple[Place, ...] = ()
    unread: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "live": self.live.as_json()}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ModelFacts:
        """What `as_json` made, or what JSON made of that."""
        return cls(
            tensors=tuple(expected_from_json(entry) for entry in raw["tensors"]),
            tied=dict(raw["tied"]),
            embedding=str(raw["embedding"]),
            quantized=tuple(raw["quantized"]),
            live=LiveModel.from_json(raw["live"]),
            places=tuple(Place.from_json(entry) for entry in raw["places"]),
            unread=tuple(raw["unread"]),
            aliases=dict(raw["aliases"]),
            findings=tuple(raw["findings"]),
        )


def expected_from_json(raw: Mapping[str, Any]) -> Expected:
    """One `Expected` from its plain JSON form."""
    return Expected(raw["name"], tuple(raw["shape"]), raw["dtype"])


def model_facts(
    config: Path,
    dtype: str = "bfloat16",
    disk: Mapping[str, tuple[int, ...]] | None = None,
) -> ModelFacts:
    """Facts of the model that a folder's config.json describes.

    Args:
        config: the folder.
        dtype: torch name of the dtype of its parameters.
        disk: shape of every tensor of a checkpoint of it, as it is after any decoding. None reads
            the headers of the checkpoint in the same folder; where there is none, the layout is
            the one `save_pretrained` writes.

    Raises:
        ArtifactError: the configuration is unreadable, or names no class this stack has; or the
            folder's checkpoint cannot be read.
    """
    said = read_json(config / "config.json")
    packed = is_packed(said)
    said = without_quantization(said) if packed else said
    disk = _layout_in(config, packed) if disk is None else disk
    plain = plain_facts(said, dtype, disk)
    if plain is not None:
        return ModelFacts(**plain)
    return facts_of(meta_model(config, dtype), disk)


def facts_of(model: Any, disk: Mapping[str, tuple[int, ...]] | None = None) -> ModelFacts:
    """Facts of a transformers model; on the meta device is enough. Arguments as `model_facts`."""
    layout = trace(model, default_layout(model) if disk is None else disk)
    keys = _disk_names(model, layout)
    tied = {keys[alias]: keys[to] for alias, to in model.all_tied_weights_keys.items()}
    names = {f"torch.{text}": short for text, short in DTYPE_NAMES.items()}
    dtypes = {name: names.get(str(one.dtype)) for name, one in model.state_dict().items()}
    tensors = {one.disk: Expected(one.disk, one.shape, dtypes[one.live]) for one in layout.places}
    others = {**layout.unread, **layout.missing}
    tensors |= {key: Expected(key, shape) for key, shape in others.items()}
    quantized = set(quantized_names(model))
    return ModelFacts(
        tensors=tuple(one for one in tensors.values() if one.name not in tied),
        tied=tied,
        embedding=keys[_embedding(model)],
        quantized=tuple(one.disk for one in layout.places if one.live in quantized),
        live=live_model(model),
        places=layout.places,
        unread=tuple(layout.unread),
        aliases={alias: keys[alias] for alias in model.all_tied_weights_keys},
        findings=layout.findings,
    )


def _embedding(model: Any) -> str:
    """Live name of the input embedding's weight."""
    wanted = model.get_input_embeddings()
    return next(name for name, one in model.named_modules() if one is wanted) + ".weight"


def _disk_names(model: Any, layout: Conversion) -> dict[str, str]:
    """Key of every live tensor that is one tensor on disk; tied ones have one, stored or not."""
    placed = {one.live: one.disk for one in layout.places if one.is_all}
    ties = model.all_tied_weights_keys
    # A checkpoint may lack any of them: that is a finding, and their keys are known all the same.
    absent = {*ties, *ties.values(), _embedding(model)} - set(placed)
    state = model.state_dict()
    saved = {name: default_layout(model, {name: tuple(state[name].shape)}) for name in absent}
    return placed | {name: next(iter(keys)) for name, keys in saved.items()}


def _layout_in(folder: Path, packed: bool) -> dict[str, tuple[int, ...]] | None:
    """Keys and shapes of a folder's checkpoint, decoded; None when it holds none."""
    names = (f"{WEIGHTS}.safetensors", f"{WEIGHTS}.safetensors.index.json")
    if not any((folder / name).is_file() for name in names):
        return None
    with open_base(folder) if packed else open_checkpoint(folder) as checkpoint:
        return {name: tuple(info.shape) for name, info in checkpoint.tensors.items()}


def weights_contract(config: Path, dtype: str = "bfloat16") -> list[Expected]:
    """What a full checkpoint of a folder's config.json holds. Raises ArtifactError."""
    return list(model_facts(config, dtype).tensors)


def adapter_contract(base: Path, adapter_config: Path, dtype: str = "BF16") -> list[Expected]:
    """What `adapter_model.safetensors` has to hold.

    By our own reading of the configuration, which is tested against peft; peft is asked where that
    reading ends: a setting that cannot be merged can still be gathered.

    Args:
        base: folder with the base model's config.json.
        adapter_config: PEFT's own adapter_config.json.
        dtype: safetensors name that every tensor must have.

    Raises:
        ArtifactError: an unreadable configuration, or targets that the base does not have.
    """
    # Initialisers such as PiSSA compute with the base weights, which are not there.
    settings = {**read_json(adapter_config), "init_lora_weights": False, "inference_mode": False}
    config, findings = parse_config(settings)
    if not findings:
        contract = Contract(config, model_facts(base).live, {})
        wants = {key: shape for piece in contract.pieces for key, shape in piece.wants.items()}
        if wants and not contract.findings:
            return [Expected(key, shape, dtype) for key, shape in wants.items()]
    return _peft_contract(base, adapter_config, settings, dtype)


def _peft_contract(
    base: Path, adapter_config: Path, settings: Mapping[str, Any], dtype: str
) -> list[Expected]:
    """The same from peft itself, on the meta device."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    try:
        config = LoraConfig(**{k: v for k, v in settings.items() if k != "peft_type"})
        with torch.device("meta"):
            wrapped = get_peft_model(meta_model(base, "bfloat16"), config)
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{adapter_config}: does not fit {base}: {error}") from error
    state = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    return [Expected(name, tuple(tensor.shape), dtype) for name, tensor in state.items()]
