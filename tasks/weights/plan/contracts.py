"""Contracts from configuration: what a checkpoint has to hold, asked of the model's own class.

The class is built on the meta device, which costs no memory, and its checkpoint's keys go through
transformers' own conversion (`families/conversion.py`); so names and shapes are those of the
library that will load the checkpoint, not our idea of them. That takes the import of transformers:
6 to 17 s on 2 busy cores, where reading the same from config.json takes 0.3 s, Python's start
included (Qwen2 1.5 B, measured). So families whose names are the same on disk and in memory are
answered by `families/plain.py`, which the tests hold against transformers, and which passes on
whatever does not fit exactly. For the rest call this through `tasks.weights.execute.worker` where a
warm process can answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.core.contract import Expected
from tasks.weights.adapters.live import LiveModel, live_model
from tasks.weights.families.conversion import Conversion, default_layout, trace
from tasks.weights.families.meta import meta_model, quantized_names
from tasks.weights.families.places import Place, stored_names
from tasks.weights.families.plain import plain_facts
from tasks.weights.files.documents import read_json
from tasks.weights.files.index import index_of
from tasks.weights.files.reader import DTYPE_NAMES, WEIGHTS, read_checkpoint
from tasks.weights.files.source import Source
from tasks.weights.pickled.state import is_pickled_model, read_model
from tasks.weights.quantized.config_fields import is_packed, without_quantization
from tasks.weights.quantized.source import read_base

_SINGLE = f"{WEIGHTS}.safetensors"


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
    said, disk = _described(config, disk)
    plain = plain_facts(said, dtype, disk)
    return facts_of(meta_model(config, dtype), disk) if plain is None else ModelFacts(**plain)


def known_facts(
    config: Path, dtype: str, disk: Mapping[str, tuple[int, ...]] | None = None
) -> ModelFacts | None:
    """The same without transformers; None for a model that it has to be asked about."""
    said, disk = _described(config, disk)
    plain = plain_facts(said, dtype, disk)
    return None if plain is None else ModelFacts(**plain)


def _described(
    folder: Path, disk: Mapping[str, tuple[int, ...]] | None
) -> tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]] | None]:
    """config.json of the decoded model, and the shapes of its tensors on disk."""
    document = read_json(folder / "config.json")
    packed = is_packed(document)
    disk = _layout_in(folder, packed) if disk is None else disk
    return (without_quantization(document) if packed else document), disk


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
        live=replace(live_model(model), stored=stored_names(layout.places)),
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
    source: Source
    if is_pickled_model(folder):
        source = read_model(folder)
    elif any((folder / name).is_file() for name in (_SINGLE, index_of(_SINGLE))):
        source = read_base(folder) if packed else read_checkpoint(folder)
    else:
        return None
    return {name: tuple(info.shape) for name, info in source.tensors.items()}
