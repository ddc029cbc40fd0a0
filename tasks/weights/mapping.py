"""Map the keys of a checkpoint to tensors in memory, by transformers' own conversion.

    disk = default_layout(model)          keys and shapes that `save_pretrained` would write
    mapping = trace(model, disk)          a `Slot` for each key of a checkpoint

transformers 5 renames and fuses tensors while it loads, for example all experts of a layer. `trace`
repeats what `from_pretrained` does with a checkpoint's keys (`core_model_loading.py` of
transformers 5.19), on `Traced` tensors without data. So it accepts exactly the layouts that
transformers can load: old or new, with or without prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclass(frozen=True)
class Slot:
    """Position of a tensor on disk, or of a part of it: a contiguous part of a live tensor."""

    key: str  # key in the checkpoint
    shape: Shape  # shape of the tensor on disk
    live: str  # name in memory
    live_shape: Shape  # shape of the tensor in memory
    start: int = 0  # first element in the flattened live tensor
    transpose: bool = False  # True if the last two axes are swapped between disk and memory
    # True for the full tensor on disk, False if memory splits a tensor that disk fuses
    whole: bool = True

    @property
    def is_all(self) -> bool:
        """True if disk and memory hold the same elements."""
        return self.whole and prod(self.shape) == prod(self.live_shape)

    @property
    def is_renamed(self) -> bool:
        """True if disk and memory differ by nothing but the name."""
        return self.is_all and not self.transpose


@dataclass(frozen=True)
class Mapped:
    """A checkpoint mapped to a model."""

    slots: tuple[Slot, ...]  # position in memory of every tensor on disk, in the checkpoint's order
    # shapes of the keys that the model ignores on purpose, or whose elements loading mixes
    unread: Shapes
    missing: Shapes  # shapes of the keys that the checkpoint lacks
    findings: tuple[str, ...]  # missing keys, unexpected keys, shapes that differ; one line each


def default_layout(model: Any, shapes: Shapes | None = None) -> dict[str, Shape]:
    """Return the keys and shapes that `save_pretrained` writes for a newly made model."""
    from transformers.core_model_loading import revert_weight_conversion

    if shapes is None:
        tied = set(model.all_tied_weights_keys)
        state = model.state_dict()
        shapes = {name: tuple(state[name].shape) for name in state if name not in tied}
    traced = {name: Traced.of(name, shape) for name, shape in shapes.items()}
    return {key: tensor.shape for key, tensor in revert_weight_conversion(model, traced).items()}


def trace(model: Any, disk: Shapes) -> Mapped:
    """Map every key of a checkpoint to its slot in the model."""
    live = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    transforms, strangers = _transforms(model, disk)
    findings: list[str] = []
    slots: list[Slot] = []
    mixed: set[str] = set()  # live names
    unread: dict[str, Shape] = {}
    for name, transform in transforms.items():
        parts = transform.collected_tensors.values()  # `convert` empties it
        keys = [tensor.boxes[0].key for each in parts for tensor in each]
        try:
            converted = transform.convert(name, model=model, config=model.config)
            for target, value in converted.items():
                traced = value[0] if isinstance(value, list) else value
                slots += list(_slots(target, traced, live, disk))
        except UntraceableError:
            first, *others = transform.target_patterns
            mixed |= {name, *(name.replace(first, other) for other in others)}
            unread |= {key: disk[key] for key in keys}
        except (ValueError, RuntimeError, AssertionError) as error:
            findings.append(f"{name}: {error}")
    # A tied tensor may be stored under its other name alone.
    filled, tied = {slot.live for slot in slots}, model.all_tied_weights_keys
    known = {*filled, *mixed, *tied, *(holder for alias, holder in tied.items() if alias in filled)}
    absent = {name: shape for name, shape in live.items() if name not in known}
    missing, ignored = default_layout(model, absent), _ignored(model)
    unread |= {key: disk[key] for key in strangers if ignored and ignored.search(key)}
    findings += [f"{k}: missing, {list(shape)}" for k, shape in missing.items() if k not in disk]
    findings += [f"{k}: the model has no place for it" for k in strangers if k not in unread]
    order = {key: at for at, key in enumerate(disk)}
    slots.sort(key=lambda slot: (order[slot.key], slot.live, slot.start))
    return Mapped(tuple(slots), unread, missing, tuple(findings))


def _transforms(model: Any, disk: Shapes) -> tuple[dict[str, Any], list[str]]:
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


def _ignored(model: Any) -> re.Pattern[str] | None:
    """Return a pattern for the keys that transformers ignores without a warning."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    text = "|".join(f"({pattern})" for pattern in sorted(patterns))
    return re.compile(text) if patterns else None


def _slots(name: str, traced: Traced, live: Shapes, disk: Shapes) -> Iterator[Slot]:
    """Yield the slots of the tensors on disk that make a live tensor."""
    if name not in live:
        raise ValueError("made by the conversion, but the model has no such tensor")
    if traced.shape != live[name]:
        key, made = traced.boxes[0].key, list(traced.shape)
        raise ValueError(f"the model has {list(live[name])}, {key} and others make {made}")
    for box in traced.boxes:
        sizes = enumerate(zip(box.shape, traced.shape, strict=True))
        cut = [axis for axis, (part, size) in sizes if part < size]
        if cut and any(size != 1 for size in box.shape[: cut[-1]]):  # not one range of elements
            raise ValueError(f"{box.key} is scattered over {name}")
        order = [axis for axis in box.axes if axis is not None]
        straight = sorted(order)
        if order not in (straight, [*straight[:-2], *straight[-1:-3:-1]]):
            raise ValueError(f"{box.key} lies in {name} with its axes in the order {order}")
        start = 0
        for size, at in zip(traced.shape, box.origin, strict=True):
            start = start * size + at
        shape = disk[box.key]
        whole = prod(box.shape) == prod(shape)
        yield Slot(box.key, shape, name, traced.shape, start, order != straight, whole)


class UntraceableError(Exception):
    """A conversion does something other than moving boxes of elements."""


@dataclass(frozen=True)
class Box:
    """A box of a tensor on disk inside a traced tensor; tuples are by axis of the traced tensor."""

    key: str  # key of the tensor on disk
    shape: Shape  # shape of the box
    origin: Shape  # first index of the box in the traced tensor
    axes: tuple[int | None, ...]  # axis of the tensor on disk; None for an axis that stacking added


class Traced:
    """A tensor without data: a shape, and the boxes of tensors on disk that fill it.

    transformers converts with `torch.stack`, `cat`, `transpose` and `chunk`. torch passes each of
    these calls to `__torch_function__`. A conversion that mixes elements (rotary permutation,
    interleaving) cannot be described by boxes and raises `UntraceableError`.
    """

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        self.shape = tuple(shape)
        self.boxes = tuple(boxes)

    @classmethod
    def of(cls, key: str, shape: Sequence[int]) -> Traced:
        """Return a full tensor on disk."""
        axes = tuple(range(len(shape)))
        return cls(shape, [Box(key, tuple(shape), (0,) * len(shape), axes)])

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, dim: int) -> int:
        """Return the length of an axis."""
        return self.shape[dim]

    def contiguous(self) -> Traced:
        """Return the tensor itself: memory layout does not matter here."""
        return self

    def transpose(self, dim0: int, dim1: int) -> Traced:
        """Swap two axes."""
        return _transpose(self, dim0, dim1)

    def squeeze(self) -> Traced:
        """Drop all axes of length 1."""
        return _select(self, [axis for axis, size in enumerate(self.shape) if size != 1])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UntraceableError(f"uses Tensor.{name}")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        handler = _HANDLERS.get(name)
        if handler is None:
            raise UntraceableError(f"uses torch.{name}")
        return handler(*args, **(kwargs or {}))


def _select(tensor: Traced, order: Sequence[int]) -> Traced:
    """Return the tensor with the axes in `order`; other axes must have length 1 and are dropped."""

    def pick(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[axis] for axis in order)

    boxes = [Box(b.key, pick(b.shape), pick(b.origin), pick(b.axes)) for b in tensor.boxes]
    return Traced(pick(tensor.shape), boxes)


def _transpose(tensor: Traced, dim0: int, dim1: int) -> Traced:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _select(tensor, order)


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    axis = dim % tensors[0].ndim
    _require_equal(tensors, [_put(tensor.shape, axis) for tensor in tensors])
    at, boxes = 0, []
    for tensor in tensors:
        for box in tensor.boxes:
            boxes.append(replace(box, origin=_put(box.origin, axis, box.origin[axis] + at)))
        at += tensor.shape[axis]
    return Traced(_put(tensors[0].shape, axis, at), boxes)


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    axis = dim % (tensors[0].ndim + 1)
    _require_equal(tensors, [tensor.shape for tensor in tensors])

    def widen(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
        return (*values[:axis], value, *values[axis:])

    def wide(box: Box) -> Box:
        axes = widen(box.axes, None)
        return Box(box.key, widen(box.shape, 1), widen(box.origin, 0), axes)

    return _cat([Traced(widen(t.shape, 1), [wide(b) for b in t.boxes]) for t in tensors], axis)


def _require_equal(tensors: Sequence[Traced], shapes: Sequence[Shape]) -> None:
    for tensor, shape in zip(tensors, shapes, strict=True):
        if shape != shapes[0]:
            first, other = tensors[0].boxes[0].key, tensor.boxes[0].key
            raise ValueError(
                f"cannot join {first} {list(tensors[0].shape)} and {other} {list(tensor.shape)}"
            )


def _chunk(tensor: Traced, chunks: int, dim: int = 0) -> tuple[Traced, ...]:
    axis = dim % tensor.ndim
    whole = tensor.shape[axis]
    size, parts = -(-whole // chunks), []
    for start in range(0, whole, size):
        end, boxes = min(start + size, whole), []
        for box in tensor.boxes:
            low = max(box.origin[axis], start)
            high = min(box.origin[axis] + box.shape[axis], end)
            if low < high:
                shape = _put(box.shape, axis, high - low)
                origin = _put(box.origin, axis, low - start)
                boxes.append(replace(box, shape=shape, origin=origin))
        parts.append(Traced(_put(tensor.shape, axis, end - start), boxes))
    return tuple(parts)


def _put(values: Shape, axis: int, *value: int) -> Shape:
    """Return a tuple with another value at an axis, or without that axis."""
    return (*values[:axis], *value, *values[axis + 1 :])


_HANDLERS: Mapping[str, Callable[..., Any]] = {
    "cat": _cat, "stack": _stack, "transpose": _transpose, "chunk": _chunk,
}  # fmt: skip
