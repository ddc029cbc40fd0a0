"""Read the settings in the header of a GGUF file: no tensor, and within limits.

read_header(Path("model-q4_k_m.gguf"))["tokenizer.ggml.eos_token_id"]

Layout: `docs/gguf.md` of ggml, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError

MAX_BYTES = 64 << 20
"""The settings of a model with 256k tokens have about 10 MB."""
_FIXED = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""`struct` formats by type of a value."""
_TEXT, _ARRAY = 8, 9


def read_header(path: Path) -> dict[str, Any]:
    """Return the settings by name; of an array, the number of its elements.

    Raises:
        ArtifactError: no GGUF file, damaged, or of another version.
    """
    try:
        with path.open("rb") as file:
            return _settings(file.read(MAX_BYTES))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (struct.error, ValueError, KeyError) as error:
        raise ArtifactError(f"{path}: not a readable GGUF file: {error}") from error


def _settings(raw: bytes) -> dict[str, Any]:
    magic, version, _, count = struct.unpack_from("<4sIQQ", raw)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"{magic!r}, version {version}")
    settings: dict[str, Any] = {}
    at = 24
    for _ in range(count):
        name, at = _text(raw, at)
        (kind,) = struct.unpack_from("<I", raw, at)
        settings[name], at = _value(raw, at + 4, kind)
    return settings


def _value(raw: bytes, at: int, kind: int) -> tuple[Any, int]:
    """Return a value and the offset behind it."""
    if kind == _TEXT:
        return _text(raw, at)
    if kind != _ARRAY:
        form = f"<{_FIXED[kind]}"
        return struct.unpack_from(form, raw, at)[0], at + struct.calcsize(form)
    inner, count = struct.unpack_from("<IQ", raw, at)
    at += 12
    if inner in _FIXED:
        return count, at + count * struct.calcsize(f"<{_FIXED[inner]}")
    for _ in range(count):
        _, at = _value(raw, at, inner)
    return count, at


def _text(raw: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from("<Q", raw, at)
    start, end = at + 8, at + 8 + size
    if end > len(raw):
        raise ValueError("cut short")
    return raw[start:end].decode("utf-8", "replace"), end
