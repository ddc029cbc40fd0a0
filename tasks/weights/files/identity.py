"""Decide whether a base is the one that an adapter was trained on.

A wrong base of the same architecture (the instruct model for the plain one) has the same names and
shapes. So the base is identified by what training recorded: the digest in our manifests, the name
in adapter_config.json, the name of the folder in the local Hub cache.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from tasks.weights.files.documents import MANIFEST, optional_json, read_manifest
from tasks.weights.quantized.source import open_model

CONFIG = "config.json"
_SAMPLES, _SAMPLE = 16, 4096
_HUB = re.compile(r"models--(.+)")
_PACKED = re.compile(r"(-unsloth)?(-bnb)?-4bit$")
"""Name suffixes of 4-bit copies of the same model."""


def base_mismatch(
    base: Path, *, digest: str = "", name: str = "", store: Path | None = None
) -> str:
    """Return why `base` is not the model that training recorded; "" if it may be.

    The most reliable record decides: `digest` of the base artifact, which is looked up in `store`,
    the root folder of our artifacts, or else `name` of the base or its folder, as PEFT recorded it.
    """
    manifest = read_manifest(base)
    if digest and manifest:
        is_same, own = manifest["digest"] == digest, manifest["digest"][:12]
        return "" if is_same else f"trained on the base {digest[:12]}, {base} is {own}"
    original = published(digest, store, "base") if digest and store is not None else None
    local = Path(name)
    if original is None and "\0" not in name and local.is_absolute():
        original = local if (local / CONFIG).is_file() else None
    if original is not None:
        if original.resolve() == base.resolve() or sample(original) == sample(base):
            return ""
        return f"trained on {original}; the weights in {base} are others"
    called = next((own for own in names_of(base) if name and _contradicts(name, own)), "")
    return f"trained on {name}; {base} says it is {called}" if called else ""


def published(digest: str, store: Path, kind: str) -> Path | None:
    """Return the folder of the artifact with this kind and digest; None if it is not stored."""
    for path in sorted((store / kind).glob("*")):
        if optional_json(path / MANIFEST).get("digest") == digest:  # one may be half written
            return path
    return None


def names_of(base: Path) -> Iterator[str]:
    """Yield the names of a model: from config.json, from the Hub cache, from its folder."""
    name = optional_json(base / CONFIG).get("_name_or_path")
    if isinstance(name, str) and name and not name.startswith(("/", ".")):
        yield name
    for part in base.resolve().parts:
        if match := _HUB.fullmatch(part):
            yield match[1].replace("--", "/")
    yield base.name


def _contradicts(recorded: str, called: str) -> bool:
    """Return True if two Hub names differ, or if one name extends the other with a suffix."""
    first, second = (_PACKED.sub("", text.rstrip("/").lower()) for text in (recorded, called))
    if "/" in first and "/" in second:
        return first != second
    first, second = first.rpartition("/")[2], second.rpartition("/")[2]
    return first != second and (first.startswith(f"{second}-") or second.startswith(f"{first}-"))


def sample(folder: Path) -> str:
    """Return a hash of all header entries and of samples of 4 KiB from every tensor.

    Two checkpoints of one architecture differ nearly everywhere. A change between the samples is
    not noticed.
    """
    digest = hashlib.sha256()
    source = open_model(folder)
    for name, info in sorted(source.items()):
        digest.update(f"{name} {info.shape} {info.dtype}".encode())
        for extent in info.extents:
            with extent.path.open("rb") as file:
                step = max(1, extent.nbytes // _SAMPLES)
                for at in range(0, extent.nbytes, step):
                    file.seek(extent.start + at)
                    digest.update(file.read(min(_SAMPLE, extent.nbytes - at)))
    return digest.hexdigest()
