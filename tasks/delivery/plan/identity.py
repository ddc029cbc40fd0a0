"""Find the base of SOURCE, and refuse a wrong one (see `tasks/weights/files/identity.py`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from tasks.audit.checks.values import value_faults
from tasks.audit.scan import first_difference
from tasks.audit.source import open_source
from tasks.core.disk import file_stats
from tasks.core.errors import ConfigError
from tasks.core.files import meant
from tasks.core.terminal import typed
from tasks.delivery.recognise import ADAPTER_CONFIG, CONFIG, Given
from tasks.weights.files.documents import optional_json, read_manifest
from tasks.weights.files.identity import base_mismatch, published


def find_base(given: Given, base: str | None, store: Path) -> Path | None:
    """Return the folder of the base: the setting, or the base that SOURCE names; None if unknown.

    Args:
        given: SOURCE.
        base: setting `base`; None to find it.
        store: folder of our artifacts, searched for the recorded digest.

    Raises:
        ConfigError: the setting is not the folder of a model.
    """
    if base is not None:
        folder = Path(base).expanduser().absolute()
        if not (folder / CONFIG).is_file():
            what = f"no {CONFIG} in it" if folder.is_dir() else "no such folder"
            near = "" if folder.is_dir() else meant(folder)
            hint = typed("base", near or "<folder of the base model>")
            raise ConfigError(f"base={base}: {what}", hint=hint)
        return folder
    digest = recorded_digest(given)
    original = published(digest, store, "base") if digest else None
    if original is not None:
        return original
    named = recorded_name(given)
    if named and Path(named).is_absolute() and (Path(named) / CONFIG).is_file():
        return Path(named)
    return None


def base_missing(given: Given) -> ConfigError:
    """Return the error for an adapter whose base is unknown."""
    named = recorded_name(given) or "no model"
    return ConfigError(
        f"source={given.root} is {given.what}: its base is needed",
        details=[f"{ADAPTER_CONFIG} names {named}, which is not a local folder"],
        hint="base=<folder of the base model>",
    )


def base_findings(given: Given, base: Path, store: Path) -> Iterator[str]:
    """Yield the reason why `base` is not the base of SOURCE; the most reliable record decides."""
    wrong = base_mismatch(
        base, digest=recorded_digest(given), name=recorded_name(given), store=store
    )
    if wrong:
        yield wrong


def equals_base(given: Given, base: Path) -> bool:
    """Return True if all tensors of a full model are bit-identical to the base's.

    The comparison ends at the first difference, so a trained model costs little reading.
    """
    source, original = open_source(given.root), open_source(base)
    ours, theirs = source.tensors, original.tensors
    if {key: (info.shape, info.dtype) for key, info in ours.items()} != {
        key: (theirs[key].shape, theirs[key].dtype) for key in ours if key in theirs
    }:
        return False
    return bool(ours) and first_difference(source, original, ours) is None


def value_findings(given: Given, base: Path) -> Iterator[str]:
    """Yield why the values of a full model cannot have been made from those of the base."""
    for code, fault in value_faults(open_source(given.root, base)):
        yield f"{code} {', '.join(fault.tensors[:3])}: {fault.actual}; expected {fault.expected}"


def recorded_digest(given: Given) -> str:
    """Return the digest of the base that training recorded; "" if there is no record."""
    if given.kind == "shards":
        return str(optional_json(given.root / "train.json").get("base_digest", ""))
    return str(given.manifest.get("inputs", {}).get("base", ""))


def recorded_name(given: Given) -> str:
    """Return the name or path of the base that PEFT recorded; "" if there is no record."""
    return str(optional_json(given.root / ADAPTER_CONFIG).get("base_model_name_or_path") or "")


def folder_identity(folder: Path) -> str:
    """Return a digest of a folder for cache keys.

    For our artifacts it is the digest of the manifest, otherwise a sha256 of the names, sizes,
    times and inodes of all files.
    """
    manifest = read_manifest(folder)
    if manifest:
        return str(manifest["digest"])
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [[str(path.relative_to(folder)), *file_stats(path)] for path in paths]
    text = json.dumps([str(folder.resolve()), files])
    return hashlib.sha256(text.encode()).hexdigest()
