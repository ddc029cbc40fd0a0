"""Lineage: walk from a served folder back through manifests to the rows that it was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.pipeline.artifact import read_manifest
from tasks.pipeline.retention import stored_in

_ROWS = ".jsonl"


@dataclass(frozen=True)
class Ancestor:
    """One artifact in the history of a model.

    Attributes:
        role: role in which the artifact below it was made from it; empty for the model itself.
        depth: number of artifacts between it and the model.
        path: its folder; None if it is not in the store any more, and kind, stage and time of
            publication are empty.
        rows: hashes of its files of rows, by name; of a dataset only.
        repeated: True if its own ancestors are listed further up.
    """

    role: str
    depth: int
    digest: str
    path: Path | None = None
    kind: str = ""
    stage: str = ""
    created: str = ""
    rows: Mapping[str, str] | None = None
    repeated: bool = False


def lineage(folder: Path, store: Path) -> list[Ancestor]:
    """Return a model and everything in the store that it was made from, depth first.

    Raises:
        ArtifactError: the folder has no manifest.
    """
    folders = {each.digest: each.path for each in stored_in(store)[0]}
    return list(_walk(folders, read_manifest(folder), folder, "", 0, set()))


def _walk(
    folders: Mapping[str, Path],
    document: Mapping[str, Any],
    path: Path,
    role: str,
    depth: int,
    seen: set[str],
) -> Iterator[Ancestor]:
    digest = document["digest"]
    facts = {key: str(document[key]) for key in ("kind", "stage", "created")}
    rows = None
    if document["kind"] == "dataset":
        files = document["files"].items()
        rows = {name: str(e["blake3"]) for name, e in files if name.endswith(_ROWS)}
    yield Ancestor(role, depth, digest, path, **facts, rows=rows, repeated=digest in seen)
    if digest in seen:
        return
    seen.add(digest)
    for role, digest in document["inputs"].items():
        if digest in folders:
            above = folders[digest]
            yield from _walk(folders, read_manifest(above), above, role, depth + 1, seen)
        else:
            yield Ancestor(role, depth + 1, digest)
