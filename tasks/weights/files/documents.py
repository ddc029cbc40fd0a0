"""JSON files beside weights: read whole, of bounded size, and refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError

MAX_BYTES = 100_000_000
"""The index of a model of 45,000 tensors has 4 MB, the largest tokenizer.json some 40."""
_SHOWN = 200


def read_json(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """A JSON object from a file.

    Args:
        path: the file.
        unique: refuse a key that comes twice in one object, where json would keep the last.

    Raises:
        ArtifactError: the file is not there, too large, no JSON, or no object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ArtifactError(f"{path}: {size} bytes of JSON, allowed: {MAX_BYTES}")
        raw = parse_json(path.read_bytes(), unique=unique)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArtifactError(f"{path}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ArtifactError(f"{path}: not a JSON object")
    return raw


def parse_json(text: bytes, *, unique: bool = False) -> Any:
    """What UTF-8 `text` says.

    Raises:
        ValueError: no JSON, nested too deep for anybody, or, where `unique`, a key comes twice.
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=_once if unique else None)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name[:_SHOWN]} comes twice")
            seen.add(name)
    return found
