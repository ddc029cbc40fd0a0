"""Read and write the JSON files of a checkpoint, and the manifest of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.core.files import link_problem, link_refused, open_regular

MAX_BYTES = 100_000_000
"""Size limit of a JSON file; the largest published tokenizer.json has about 40 MB."""
MAX_VALUES = 4_000_000
"""Limit of the values in a document; the largest tokenizer.json has about 2 million.

`[[],[],...]` takes twenty times its size in memory.
"""
_SHOWN = 200
MANIFEST = "manifest.json"
_KEYS = {"kind", "digest", "tensors", "files", "inputs", "notes"}
"""Keys of every manifest of ours; see `tasks/pipeline/artifact.py`."""
_DAMAGED = "give an intact copy of the folder; without its manifest.json it is taken as it is now"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ArtifactError, also for a link out of its folder."""
    try:
        raw = parse_json(_content(path, MAX_BYTES))
    except ValueError as error:
        raise ArtifactError(f"{path}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ArtifactError(f"{path}: not a JSON object")
    return raw


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON as Hugging Face does: indented, sorted keys, newline at the end."""
    path.write_text(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def read_text(path: Path, limit: int) -> str:
    """Read a UTF-8 file of at most `limit` bytes. Raises ArtifactError as `read_json` does."""
    try:
        return _content(path, limit).decode()
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path}: not UTF-8: {error.reason}") from error


def _content(path: Path, limit: int) -> bytes:
    if path.is_symlink() and (problem := link_problem(path, path.parent)):
        raise link_refused(path, problem)
    try:
        with open_regular(path) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > limit:
        raise ArtifactError(f"{path}: more than {limit} bytes are not read")
    return content


def optional_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if the file is missing or cannot be read."""
    try:
        return read_json(path) if path.is_file() else {}
    except (ArtifactError, OSError):
        return {}


def read_manifest(root: Path) -> dict[str, Any]:
    """Return our manifest of a folder; empty if there is none, or another tool wrote the file.

    Raises ArtifactError if it is damaged, since the folder's bytes cannot be checked then.
    """
    path = root / MANIFEST
    try:
        manifest = own_manifest(read_json(path)) if path.is_file() else {}
    except ArtifactError as error:
        raise ArtifactError(error.message, hint=_DAMAGED) from error
    if manifest and (problem := manifest_problem(manifest)):
        raise ArtifactError(f"{path}: not a manifest: {problem}", hint=_DAMAGED)
    return manifest


def artifact_name(root: Path) -> tuple[str, str]:
    """Return kind and key of the artifact in a folder; ("", "") if it is not one of ours."""
    path = root / MANIFEST
    return _artifact_name(path, path.stat().st_mtime_ns) if path.is_file() else ("", "")


@lru_cache(maxsize=16)  # a manifest lists every tensor: not parsed again for every file
def _artifact_name(path: Path, changed: int) -> tuple[str, str]:
    manifest = own_manifest(optional_json(path))
    return str(manifest.get("kind", "")), str(manifest.get("key", ""))


def own_manifest(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest that has most of our keys; an empty one for another tool's."""
    return dict(document) if 2 * len(_KEYS & set(document)) > len(_KEYS) else {}


def manifest_problem(document: Mapping[str, Any]) -> str:
    """Return what is wrong with the form of a manifest; empty if nothing is."""
    missing = _KEYS - set(document)
    if missing:
        return f"no {', '.join(sorted(missing))}"
    if not all(isinstance(document[key], str) for key in ("kind", "digest")):
        return "kind or digest is not text"
    if not all(isinstance(document[key], dict) for key in _KEYS - {"kind", "digest"}):
        return "tensors, files, inputs or notes is not an object"
    files = [*document["files"].items(), ("card", document.get("card"))]
    for name, entry in files if "card" in document else files[:-1]:
        if not (_has_hash(entry) and isinstance(entry.get("size"), int)):
            return f"the entry of file {name!a} has no size or no hash"
    for name, entries in document["tensors"].items():
        if not (isinstance(entries, dict) and all(map(_has_hash, entries.values()))):
            return f"an entry of a tensor in {name!a} has no hash"
    return ""


def _has_hash(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("blake3"), str)


def parse_json(text: bytes) -> Any:
    """Parse UTF-8 JSON. Raises ValueError: not JSON, too many values, or nested too deep."""
    count = sum(map(text.count, (b",", b"[", b"{")))
    if count > MAX_VALUES:
        raise ValueError(f"about {count} values, at most {MAX_VALUES} are read")
    try:
        return json.loads(text.decode())
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the members of a JSON object. Raises ValueError if a key is there twice."""
    values: dict[str, object] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"duplicate key {name[:_SHOWN]}")
        values[name] = value
    return values
