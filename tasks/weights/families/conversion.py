"""Map the keys of a checkpoint to tensors in memory, by transformers' own conversion.

    disk = default_layout(model)          keys and shapes that `save_pretrained` would write
    conversion = trace(model, disk)       place in memory of each key of a checkpoint

`trace` repeats what `from_pretrained` does with a checkpoint's keys (`core_model_loading.py` of
transformers 5.19), on `Traced` tensors without data. So it accepts exactly the layouts that
transformers can load: old or new, with or without prefix.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.weights.families.places import Place, places_of
from tasks.weights.families.traced import Traced, UntraceableError

Shapes = Mapping[str, tuple[int, ...]]
_NEAR = 5


@dataclass(frozen=True)
class Conversion:
    """Result of mapping a checkpoint to a model.

    Attributes:
        places: place in memory of every tensor on disk, in the checkpoint's order.
        unread: shapes of the keys that the model ignores on purpose, by key.
        missing: shapes of the keys that the checkpoint lacks, by key.
        findings: missing keys, unexpected keys, shapes that differ; one line each.
    """

    places: tuple[Place, ...]
    unread: Shapes
    missing: Shapes
    findings: tuple[str, ...]


def default_layout(model: Any, shapes: Shapes | None = None) -> dict[str, tuple[int, ...]]:
    """Return the keys and shapes that `save_pretrained` writes for a newly made model.

    Args:
        model: transformers model; it may be on the meta device.
        shapes: shapes of the live tensors to convert, by name; None for all that are not tied to
            another tensor.

    Raises:
        UntraceableError: the conversion mixes elements of tensors.
    """
    from transformers.core_model_loading import revert_weight_conversion

    if shapes is None:
        tied = set(model.all_tied_weights_keys)
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in model.state_dict().items()
            if name not in tied
        }
    state = {name: Traced.of(name, shape) for name, shape in shapes.items()}
    return {key: tensor.shape for key, tensor in revert_weight_conversion(model, state).items()}


def trace(model: Any, disk: Shapes) -> Conversion:
    """Map every key of a checkpoint to its place in the model.

    Args:
        model: transformers model; it may be on the meta device.
        disk: shape of every tensor of the checkpoint by key, after any decoding.
    """
    live = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    transforms, strangers = _collect(model, disk)
    findings: list[str] = []
    places: list[Place] = []
    for name, transform in transforms.items():
        try:
            made = transform.convert(name, model=model, config=model.config)
            for key, value in made.items():
                traced = value[0] if isinstance(value, list) else value
                places += _checked(key, traced, live, disk)
        except (UntraceableError, ValueError, RuntimeError, AssertionError) as error:
            findings.append(f"{name}: {error}")
    ignored = _ignored(model)
    unread = {key: disk[key] for key in strangers if ignored and ignored.search(key)}
    missing = _absent(model, live, places)
    findings += [f"{k}: missing, {list(shape)}" for k, shape in missing.items() if k not in disk]
    findings += _placeless([key for key in strangers if key not in unread], [*missing, *live])
    order = {key: at for at, key in enumerate(disk)}
    places.sort(key=lambda place: (order[place.disk], place.live, place.start))
    return Conversion(tuple(places), unread, missing, tuple(findings))


def _collect(model: Any, disk: Shapes) -> tuple[dict[str, Any], list[str]]:
    """Return the transform of each group of keys, by its first live name, and unexpected keys."""
    from copy import deepcopy

    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    state, prefix = model.state_dict(), model.base_model_prefix
    transforms: dict[str, Any] = {}
    strangers: list[str] = []
    for key in sorted(disk, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            strangers.append(key)
            continue
        fresh = deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(key, name)
        transform = transforms.setdefault(name, fresh)
        if pattern is None and transform is not fresh:
            strangers.append(key)  # a second key for the same live tensor
            continue
        transform.add_tensor(name, key, pattern or key, Traced.of(key, disk[key]))
    return transforms, strangers


def _checked(name: str, traced: Traced, live: Shapes, disk: Shapes) -> list[Place]:
    if name not in live:
        raise ValueError("made by the conversion, but the model has no such tensor")
    if traced.shape != live[name]:
        keys = sorted({piece.key for piece in traced.pieces})
        raise ValueError(
            f"the model has {list(live[name])}, {', '.join(keys[:3])}"
            f"{' ...' if len(keys) > 3 else ''} make {list(traced.shape)}"
        )
    return places_of(name, traced, disk)


def _ignored(model: Any) -> re.Pattern[str] | None:
    """Return a pattern for the keys that transformers ignores without a warning."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return (
        re.compile("|".join(f"({pattern})" for pattern in sorted(patterns))) if patterns else None
    )


def _absent(model: Any, live: Shapes, places: Sequence[Place]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of live tensors that the checkpoint lacks, by the key it would have."""
    made = {place.live for place in places}
    tied = model.all_tied_weights_keys
    # A tied tensor may be stored under its other name alone.
    twins = {holder for alias, holder in tied.items() if alias in made}
    known = {*made, *tied, *twins}
    return default_layout(model, {name: live[name] for name in live if name not in known})


def _placeless(keys: Sequence[str], known: Sequence[str]) -> list[str]:
    findings = []
    for at, key in enumerate(keys):
        # A search through all names is slow, and the first few hints are enough.
        near = difflib.get_close_matches(key, known, n=1) if at < _NEAR else []
        hint = f"; near: {near[0]}" if near else ""
        findings.append(f"{key}: the model has no place for it{hint}")
    return findings
