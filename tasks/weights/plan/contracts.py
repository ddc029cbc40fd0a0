"""Facts of a model class: the tensors that its checkpoints hold, and their place in memory.

The class is built on the meta device, which costs no memory, and transformers' own conversion
(`families/conversion.py`) maps its names to keys on disk, so names and shapes are those of the
library that loads the checkpoint. The import of transformers takes 6 to 17 s on 2 busy cores. So
`families/plain.py` answers for families with the same names on disk and in memory, from config.json
alone, and leaves everything else to transformers. Call `model_facts` through
`tasks.weights.execute.worker`, where a warm process can answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.core.contract import Expected
from tasks.core.errors import ArtifactError
from tasks.weights.adapters.config import parse_config
from tasks.weights.adapters.live import LiveModel, live_model
from tasks.weights.adapters.pieces import Contract
from tasks.weights.families.conversion import Conversion, default_layout, trace
from tasks.weights.families.meta import meta_model, other_towers, quantized_names
from tasks.weights.families.places import Place, stored_names
from tasks.weights.families.plain import plain_facts
from tasks.weights.files.documents import read_json
from tasks.weights.files.index import index_of
from tasks.weights.files.reader import DTYPE_NAMES, WEIGHTS, read_checkpoint
from tasks.weights.files.source import Source
from tasks.weights.pickled.state import is_pickled_model, read_model
from tasks.weights.quantized.config_fields import is_decodable, without_quantization
from tasks.weights.quantized.source import read_base

_SINGLE = f"{WEIGHTS}.safetensors"


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model class and of one layout of its checkpoints.

    Names are keys on disk, except in `live` and `places`. Names on disk and in memory differ where
    transformers renames or fuses tensors while it loads.

    Attributes:
        tensors: every tensor that the checkpoint has to hold; a tied tensor appears once, under
            the key that stores it.
        tied: key that a checkpoint may leave out -> key that stores the same tensor.
        embedding: key of the input embedding, (vocabulary, hidden).
        quantized: keys of weights that transformers can load in 4 bits.
        live: the model in memory.
        places: place in memory of every tensor on disk.
        unread: keys on disk that the model ignores.
        aliases: live name of a tied tensor -> its key, if a checkpoint stores it separately.
        towers: live names of the tensors that no text passes, which training leaves as they are.
        findings: problems of the checkpoint whose keys were given; see `Conversion`.
    """

    tensors: tuple[Expected, ...]
    tied: Mapping[str, str]
    embedding: str
    quantized: tuple[str, ...]
    live: LiveModel = field(default_factory=lambda: LiveModel({}, {}, {}))
    places: tuple[Place, ...] = ()
    unread: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    towers: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()


def model_facts(
    config: Path,
    dtype: str = "bfloat16",
    disk: Mapping[str, tuple[int, ...]] | None = None,
) -> ModelFacts:
    """Return the facts of the model that a folder's config.json describes.

    Args:
        config: folder with config.json.
        dtype: torch name of the dtype of the parameters.
        disk: shape by key of the tensors of a checkpoint, after any decoding. None reads the
            headers of the checkpoint in the folder; without one, the layout of `save_pretrained`
            is used.

    Raises:
        ArtifactError: config.json cannot be read or describes no class that is installed, or the
            folder's checkpoint cannot be read.
    """
    document, disk = _config_and_shapes(config, disk)
    plain = plain_facts(document, dtype, disk)
    return facts_of(meta_model(config, dtype), disk) if plain is None else ModelFacts(**plain)


def known_facts(
    config: Path, dtype: str, disk: Mapping[str, tuple[int, ...]] | None = None
) -> ModelFacts | None:
    """Return the same facts without importing transformers; None if transformers is needed.

    Args: as of `model_facts`.
    """
    document, disk = _config_and_shapes(config, disk)
    plain = plain_facts(document, dtype, disk)
    return None if plain is None else ModelFacts(**plain)


def _config_and_shapes(
    folder: Path, disk: Mapping[str, tuple[int, ...]] | None
) -> tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]] | None]:
    """Return config.json of the decoded model, and the shapes of its tensors on disk."""
    document = read_json(folder / "config.json")
    packed = is_decodable(document)
    disk = _layout_in(folder, packed) if disk is None else disk
    return (without_quantization(document) if packed else document), disk


def facts_of(model: Any, disk: Mapping[str, tuple[int, ...]] | None = None) -> ModelFacts:
    """Return the facts of a transformers model.

    Args:
        model: the model; it may be on the meta device.
        disk: shape by key of the tensors of a checkpoint; None for the layout of `save_pretrained`.
    """
    layout = trace(model, default_layout(model) if disk is None else disk)
    keys = _disk_names(model, layout)
    tied = {keys[alias]: keys[to] for alias, to in model.all_tied_weights_keys.items()}
    names = {f"torch.{text}": short for text, short in DTYPE_NAMES.items()}
    dtypes = {name: names.get(str(tensor.dtype)) for name, tensor in model.state_dict().items()}
    tensors = {
        place.disk: Expected(place.disk, place.shape, dtypes[place.live]) for place in layout.places
    }
    without_place = {**layout.unread, **layout.missing}
    tensors |= {key: Expected(key, shape) for key, shape in without_place.items()}
    quantized = set(quantized_names(model))
    return ModelFacts(
        tensors=tuple(expected for expected in tensors.values() if expected.name not in tied),
        tied=tied,
        embedding=keys[_embedding(model)],
        quantized=tuple(place.disk for place in layout.places if place.live in quantized),
        live=replace(live_model(model), stored=stored_names(layout.places)),
        places=layout.places,
        unread=tuple(layout.unread),
        aliases={alias: keys[alias] for alias in model.all_tied_weights_keys},
        towers=_within(other_towers(model), model.state_dict()),
        findings=layout.findings,
    )


def _within(modules: Iterable[str], tensors: Iterable[str]) -> tuple[str, ...]:
    """Return the tensors of some modules."""
    prefixes = tuple(f"{module}." for module in modules)
    return tuple(name for name in tensors if prefixes and name.startswith(prefixes))


def _embedding(model: Any) -> str:
    """Return the live name of the input embedding's weight."""
    wanted = model.get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is wanted) + ".weight"


def _disk_names(model: Any, layout: Conversion) -> dict[str, str]:
    """Return the key on disk by live name, for tensors stored unsplit and for all tied ones."""
    placed = {place.live: place.disk for place in layout.places if place.is_all}
    ties = model.all_tied_weights_keys
    # A checkpoint may lack these tensors (a finding), but their keys are needed all the same.
    absent = {*ties, *ties.values(), _embedding(model)} - set(placed)
    state = model.state_dict()
    saved = {name: default_layout(model, {name: tuple(state[name].shape)}) for name in absent}
    return placed | {name: next(iter(keys)) for name, keys in saved.items()}


def _layout_in(folder: Path, packed: bool) -> dict[str, tuple[int, ...]] | None:
    """Return shape by key of a folder's checkpoint, decoded; None if it has no checkpoint."""
    source: Source
    if is_pickled_model(folder):
        source = read_model(folder)
    elif any((folder / name).is_file() for name in (_SINGLE, index_of(_SINGLE))):
        source = read_base(folder) if packed else read_checkpoint(folder)
    else:
        return None
    return {name: tuple(info.shape) for name, info in source.tensors.items()}


def adapter_contract(base: Path, adapter_config: Path, dtype: str = "BF16") -> list[Expected]:
    """Return the tensors that `adapter_model.safetensors` has to hold.

    Uses our own reading of the configuration, which the tests compare with peft. Settings that we
    do not read are left to peft: an adapter that cannot be merged can still be gathered.

    Args:
        base: folder with the base model's config.json.
        adapter_config: path of the adapter_config.json that peft wrote.
        dtype: safetensors name that every tensor must have.

    Raises:
        ArtifactError: the configuration cannot be read, or does not fit the base.
    """
    # Initialisers such as PiSSA compute with base weights, which the meta device does not have.
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
    """Return the same contract by wrapping a model on the meta device with peft."""
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
