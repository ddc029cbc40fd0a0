"""Artifacts: directories that one stage publishes and the next one reads.

    with staging(final) as work:      # a hidden folder beside `final`; see `locks.py`
        ...write files into work...
        publish(work, final, origin)

An artifact becomes visible by one rename, after its `manifest.json` is written and all files are
flushed to disk: *existence means complete*. The manifest lists every tensor (shape, dtype, hash)
and every other file (size, hash). Its digest is the artifact's identity.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blake3 import blake3

from tasks.core.errors import ArtifactError
from tasks.core.files import file_stats, flush, flush_tree, write_refused
from tasks.core.redaction import redacted
from tasks.core.terminal import command
from tasks.pipeline.locks import staging as staging
from tasks.pipeline.locks import sweep as sweep
from tasks.weights.files import documents
from tasks.weights.files.documents import MANIFEST
from tasks.weights.files.reader import read_header

CARD = "README.md"
"""Model card of a served folder, written after its evaluation. The manifest has its hash under
`card`; the digest names the model alone, so that evaluating it again does not change it."""
_CHUNK = 8 << 20


@dataclass(frozen=True)
class Origin:
    """Origin of an artifact, part of its manifest; `inputs` are digests of artifacts by role."""

    kind: str
    stage: str
    key: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Artifact:
    """Reference to a published artifact: small and picklable, without tensors."""

    kind: str
    path: Path
    digest: str

    def manifest(self) -> dict[str, Any]:
        """Read the manifest."""
        return read_manifest(self.path)

    @property
    def created(self) -> str:
        """Time at which it was published, in ISO 8601 with UTC offset."""
        return str(self.manifest()["created"])

    @property
    def notes(self) -> dict[str, Any]:
        """Notes of the stage, from the manifest."""
        return dict(self.manifest()["notes"])


def publish(
    work: Path, final: Path, origin: Origin, known: Mapping[tuple[str, str], str] | None = None
) -> Artifact:
    """Write the manifest into `work`, flush all files, and rename `work` to `final`.

    Tensors whose hash is `known`, by file and tensor, are not read again. An older artifact at
    `final` (altered, or forced to be rebuilt) is moved aside first and removed after the rename, so
    a half-written directory is never visible. Raises ArtifactError on a full disk.
    """
    tensors, files = inventory(work, known=known)
    document: dict[str, Any] = {
        "format": 1,
        "kind": origin.kind,
        "stage": origin.stage,
        "key": origin.key,
        "digest": content_digest(origin.kind, tensors, files),
        "tensors": tensors,
        "files": files,
        "inputs": dict(origin.inputs),
        "config": redacted(dict(origin.config)),
        "versions": dict(origin.versions),
        "notes": redacted(dict(origin.notes)),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        (work / MANIFEST).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
        flush_tree(work)
    except OSError as error:  # a full disk
        raise write_refused(work, error) from error
    replace_folder(work, final)
    return Artifact(origin.kind, final, document["digest"])


def replace_folder(work: Path, final: Path) -> None:
    """Rename a complete staging folder to `final`; an older folder there is removed."""
    old = final.parent / f"..{final.name}.tmp"  # no name of a staging folder
    shutil.rmtree(old, ignore_errors=True)  # of a killed process
    if final.exists():
        final.rename(old)
    work.rename(final)
    flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def inventory(
    root: Path, known: Mapping[tuple[str, str], str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """List the contents of a directory: tensors by file and name, and files with size and hash.

    The entry of a safetensors file hashes its header only; the entries of its tensors cover the
    rest. Tensors whose hash is `known`, by file and tensor, are not read.
    """
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for name, path in _files(root).items():
        if name == MANIFEST:
            continue
        hashed = size = path.stat().st_size
        if path.suffix == ".safetensors":
            header = read_header(path)
            hashed = header.data_start
            tensors[name] = {
                tensor: {
                    "shape": list(info.shape),
                    "dtype": info.dtype,
                    "blake3": (known or {}).get((name, tensor))
                    or _hash_range(path, info.extents[0].start, info.nbytes),
                }
                for tensor, info in header.tensors.items()
            }
        files[name] = {"size": size, "blake3": _hash_range(path, 0, hashed)}
    return tensors, files


def content_digest(kind: str, tensors: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    """Return the digest of an artifact: the SHA-256 of its kind, tensors and files."""
    text = json.dumps([kind, tensors, files], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def open_artifact(path: Path, kind: str | None = None) -> Artifact:
    """Open a published artifact and check its kind, file list and file sizes, not the bytes.

    Raises ArtifactError if there is none, or a file is missing, added or of another size.
    """
    document = read_manifest(path)
    if kind is not None and document["kind"] != kind:
        raise ArtifactError(f"{path} is an artifact of kind {document['kind']}, not {kind}")
    if problems := _surface_problems(path, document):
        raise ArtifactError(
            f"{path} is not what its manifest says",
            details=problems,
            hint="copy the folder again from where it was made, or make it again",
        )
    return Artifact(document["kind"], path, document["digest"])


def verify(artifact: Artifact) -> list[str]:
    """Read every byte and compare it with the manifest. Returns one text per difference."""
    document = artifact.manifest()
    if problems := _surface_problems(artifact.path, document):
        return problems
    tensors, files = inventory(artifact.path)
    listed = _listed(document)
    problems = [f"{name}: contents changed" for name in listed if files[name] != listed[name]]
    for file, entries in document["tensors"].items():
        for name, entry in entries.items():
            if tensors[file].get(name) != entry:
                problems.append(f"{file}: tensor {name} changed")
    model = {name: entry for name, entry in files.items() if name in document["files"]}
    if not problems and content_digest(document["kind"], tensors, model) != document["digest"]:
        problems.append(f"{MANIFEST}: digest does not match its own contents")
    return problems


def intact(artifact: Artifact, seen: Path) -> list[str]:
    """Verify an artifact, but read its bytes only if the stat of a file has changed since then.

    A record of each verified artifact has size, mtime, ctime and inode of its files. Restoring the
    mtime of an altered file does not hide it, since its ctime has changed.
    """
    record = seen / f"{artifact.digest}.json"
    with contextlib.suppress(OSError, ValueError):
        if json.loads(record.read_text()) == _stats(artifact.path):
            os.utime(record)  # the time of the last use
            return []
    problems = verify(artifact)
    if not problems:
        remember(artifact, seen)
    return problems


def remember(artifact: Artifact, seen: Path) -> None:
    """Record the stats of an artifact's files for `intact`, after its bytes have been hashed."""
    seen.mkdir(parents=True, exist_ok=True)
    (seen / f"{artifact.digest}.json").write_text(json.dumps(_stats(artifact.path)))


def require_published(folder: Path, digest: str | None) -> Artifact:
    """Compare every byte of a served folder with what was published. Raises ArtifactError.

    `digest` is the one that was registered; None for that of its own manifest.
    """
    if not folder.is_dir():
        raise ArtifactError(f"no such folder on this machine: {folder}")
    if not (folder / MANIFEST).is_file():
        raise ArtifactError(
            f"{folder} is no model that Plumbline served: it has no {MANIFEST}",
            hint=f"{command('deliver', source=folder, out='<a new folder>')}, which is proven and "
            "can be served; for an adapter also base=<its base>",
        )
    artifact = open_artifact(folder, "served")
    problems = verify(artifact)
    if digest not in (None, artifact.digest):
        problems = [f"its digest is {artifact.digest}, and {digest} was registered", *problems]
    if problems:
        raise ArtifactError(
            f"{folder} is not the model that was {'registered' if digest else 'published'}: "
            f"{problems[0]}",
            details=problems,
            hint="copy the folder again from where it was made, or choose another version",
        )
    return artifact


def _files(root: Path) -> dict[str, Path]:
    """Return all files of a folder by their relative path, sorted."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path for path in files}


def _stats(root: Path) -> dict[str, list[int]]:
    return {name: file_stats(path) for name, path in _files(root).items()}


def _listed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of all files that a manifest lists, the model card's included."""
    return document["files"] | ({CARD: document["card"]} if "card" in document else {})


def _surface_problems(root: Path, document: Mapping[str, Any]) -> list[str]:
    problems = []
    listed, present = _listed(document), _files(root)
    for name, entry in listed.items():
        if name not in present:
            problems.append(f"{name}: missing")
        elif (size := present[name].stat().st_size) != entry["size"]:
            problems.append(f"{name}: {size} bytes, manifest says {entry['size']}")
    partial = {f".{name}.tmp" for name in (MANIFEST, CARD)}  # of a card that is being written
    added = sorted(present.keys() - {MANIFEST, CARD, *partial, *listed})
    return problems + [f"{name}: not in the manifest" for name in added]


def read_manifest(root: Path) -> dict[str, Any]:
    """Return the manifest of a published artifact. Raises ArtifactError."""
    document = documents.read_manifest(root)
    if not document:
        raise ArtifactError(f"{root}: no published artifact: no {MANIFEST} of ours")
    return document


def _hash_range(path: Path, start: int, nbytes: int) -> str:
    digest = blake3()
    with path.open("rb") as file:
        file.seek(start)
        while nbytes > 0:
            block = file.read(min(nbytes, _CHUNK))
            if not block:
                raise ArtifactError(f"{path}: shorter than it was a moment ago")
            digest.update(block)
            nbytes -= len(block)
    return str(digest.hexdigest())
