"""Find and check the tensors of packed matrices; reads their JSON and tables, not their weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tasks.core.contract import describe
from tasks.weights.files.file_ranges import Reader
from tasks.weights.files.reader import DTYPE_NAMES, Checkpoint
from tasks.weights.quantized.packed import (
    BLOCKSIZES,
    LEVELS,
    NESTED_SCALES,
    NESTED_TABLE,
    SCALES,
    STATE,
    STATES,
    TABLE,
    Nested,
    Packed,
)

_SIDES = (SCALES, TABLE, NESTED_SCALES, NESTED_TABLE)
_MAX_STATE = 1 << 16
"""Largest size of the JSON in bytes; bitsandbytes writes less than 200."""
_CLOSE = 1e-6
"""Tolerance with which bitsandbytes compares two tables."""


def read_states(checkpoint: Checkpoint) -> tuple[dict[str, Packed], list[str]]:
    """Find every packed matrix of a checkpoint.

    Reads headers, and for every packed matrix the JSON and the 16 values.

    Returns:
        Packing of every matrix by key, and one line for everything that is wrong with any of them.

    Raises:
        ArtifactError: a file cannot be read.
    """
    matrices: dict[str, Packed] = {}
    findings: list[str] = []
    owners = _owners(checkpoint)
    for key, sides in owners.items():
        reading = _Reading(checkpoint, key, sides)
        packed = reading.packed()
        if packed is not None:
            matrices[key] = packed
        findings += [f"{key}: {text}" for text in reading.findings]
    for key, info in checkpoint.tensors.items():
        if key not in owners and info.dtype in ("U8", "I8") and key.split(".")[-1] == "weight":
            findings.append(
                f"{key}: {describe(info.shape, info.dtype)} without {SCALES} and {STATE}*"
            )
    return matrices, findings


def _owners(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """Return the keys of packed matrices, each with the keys that belong to it, by suffix."""
    owners: dict[str, dict[str, str]] = {}
    for key in checkpoint.tensors:
        owner, dot, rest = key.partition(STATE)
        suffix = dot + rest
        if not dot:
            suffix = next((side for side in _SIDES if key.endswith(side)), "")
            owner = key.removesuffix(suffix) if suffix else ""
        if owner:
            owners.setdefault(owner, {})[suffix] = key
    return owners


class _Reading:
    """Read and check one matrix and the tensors that belong to it."""

    def __init__(self, checkpoint: Checkpoint, key: str, sides: Mapping[str, str]) -> None:
        self._checkpoint, self._key, self._sides = checkpoint, key, sides
        self.findings: list[str] = []

    def packed(self) -> Packed | None:
        """Return the packing of the matrix; None if there are findings."""
        state = self._state()
        if self._key not in self._checkpoint.tensors:
            self.findings.append(f"absent, though {', '.join(sorted(self._sides))} are there")
        if state is None or self.findings:
            return None
        self.findings += _state_findings(state)
        if self.findings:
            return None
        return self._checked(state)

    def _state(self) -> dict[str, Any] | None:
        """Return the parsed JSON; None if it cannot be read."""
        names = [suffix for suffix in self._sides if suffix.startswith(STATE)]
        if len(names) != 1 or names[0] not in STATES:
            what = ", ".join(name.removeprefix(STATE) for name in names) or "none"
            known = ", ".join(name.removeprefix(STATE) for name in STATES)
            self.findings.append(f"{STATE[1:]}* is {what}; one of {known} is known")
            return None
        kind, key = STATES[names[0]], self._sides[names[0]]
        info = self._checkpoint.tensors[key]
        try:
            if info.dtype != "U8" or info.nbytes > _MAX_STATE:
                raise ValueError(describe(info.shape, info.dtype))
            state = json.loads(self._bytes(key).decode())
            if state.get("quant_type") != kind:
                self.findings.append(f"{names[0][1:]} says quant_type {state.get('quant_type')!r}")
            return dict(state)
        except (ValueError, AttributeError, RecursionError) as error:
            self.findings.append(f"{names[0][1:]} is not readable: {error}")
            return None

    def _checked(self, state: Mapping[str, Any]) -> Packed | None:
        nested = _nested(state)
        count = math.prod(state["shape"])
        blocks = -(-count // state["blocksize"])
        self._expect("", None, -(-count // 2))
        self._expect(SCALES, "U8" if nested else "F32", blocks)
        self._expect(TABLE, "F32", 16)
        if nested:
            self._expect(NESTED_SCALES, "F32", -(-blocks // nested.blocksize))
            self._expect(NESTED_TABLE, "F32", 256)
        else:
            stray = [side for side in (NESTED_SCALES, NESTED_TABLE) if side in self._sides]
            self.findings += [f"{side[1:]} without nested_blocksize" for side in stray]
        if not self.findings:
            self._check_levels(state["quant_type"])
        if self.findings:
            return None
        parts = ("", SCALES, *((NESTED_SCALES, NESTED_TABLE) if nested else ()))
        sizes = tuple((p, self._checkpoint.tensors[self._key + p].nbytes) for p in parts)
        return Packed(
            key=self._key,
            type=state["quant_type"],
            blocksize=state["blocksize"],
            dtype=state["dtype"],
            shape=tuple(state["shape"]),
            nested=nested,
            parts=sizes,
            sides=tuple(self._sides.values()),
        )

    def _expect(self, suffix: str, dtype: str | None, count: int) -> None:
        """Require a tensor of this dtype and element count; without a dtype, of this many bytes."""
        info = self._checkpoint.tensors.get(self._key + suffix)
        what = suffix[1:] or "packed numbers"
        if info is None:
            self.findings.append(f"{what} absent")
        elif dtype is None and info.nbytes != count:
            self.findings.append(f"{what} of {info.nbytes} bytes, the shape needs {count}")
        elif dtype is not None and (info.dtype, math.prod(info.shape)) != (dtype, count):
            stored = describe(info.shape, info.dtype)
            self.findings.append(f"{what} is {stored}, {dtype} [{count}] is needed")

    def _check_levels(self, kind: str) -> None:
        levels = np.frombuffer(self._bytes(self._key + TABLE), "<f4")
        if not np.allclose(levels, LEVELS[kind], rtol=0, atol=_CLOSE):
            self.findings.append(f"quant_map does not hold the values of {kind}")

    def _bytes(self, key: str) -> bytes:
        with Reader(self._checkpoint.extents(key)) as reader:
            return reader.read().tobytes()


def _state_findings(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of the JSON that cannot be decoded."""
    shape = state.get("shape")
    if not isinstance(shape, list) or not shape or not all(_is_count(n) for n in shape):
        yield f"shape {shape!r} is not a list of positive sizes"
    size, dtype = state.get("blocksize"), state.get("dtype")
    if not _is_count(size) or size not in BLOCKSIZES:
        yield f"blocksize {size!r} is not one of {', '.join(map(str, BLOCKSIZES))}"
    if not isinstance(dtype, str) or dtype not in DTYPE_NAMES:
        yield f"dtype {dtype!r} is not one of {', '.join(DTYPE_NAMES)}"
    if "nested_blocksize" not in state:
        return
    size = state["nested_blocksize"]
    if not _is_count(size) or size not in BLOCKSIZES:
        yield f"nested_blocksize {size!r} is not one of {', '.join(map(str, BLOCKSIZES))}"
    if state.get("nested_dtype") != "float32":
        yield f"nested_dtype {state.get('nested_dtype')!r}, only float32 is supported"
    offset = state.get("nested_offset")
    if not isinstance(offset, float) or not math.isfinite(offset):
        yield f"nested_offset {offset!r} is not a finite number"


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _nested(state: Mapping[str, Any]) -> Nested | None:
    if "nested_blocksize" not in state:
        return None
    return Nested(state["nested_blocksize"], state["nested_offset"])
