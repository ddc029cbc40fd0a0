"""Artifacts: directories that one stage publishes and the next one reads.

    with staging(final) as work:      # a hidden sibling of `final`; see `staging.py`
        ...write files into work...
        publish(work, final, manifest_fields)

An artifact becomes visible by one rename, after its `manifest.json` was written and everything was
flushed to disk: *existence means complete*. The manifest names every tensor (shape, dtype, sha256)
and every other file (size, sha256); its digest is the artifact's identity.
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

from tasks.core.errors import ArtifactError
from tasks.pipeline.staging import staging as staging
from tasks.pipeline.staging import sweep as sweep
from tasks.weights.execute.journal import JOURNAL, read_outcomes
from tasks.weights.files.file_ranges import write_refused
from tasks.weights.files.header import Header, read_header

MANIFEST = "manifest.json"
_CHUNK = 8 << 20


@dataclass(frozen=True)
class Origin:
    """How an artifact came to be: goes into the manifest, beside what it contains."""

    kind: str
    stage: str
    key: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Artifact:
    """A published artifact: where it is and what it is. Small, picklable, never holds tensors."""

    kind: str
    path: Path
    digest: str

    def manifest(self) -> dict[str, Any]:
        """The manifest, as a dictionary."""
        return _load_manifest(self.path)

    @property
    def notes(self) -> dict[str, Any]:
        """What the stage wrote down beside the contents."""
        return dict(self.manifest()["notes"])


def publish(work: Path, final: Path, origin: Origin) -> Artifact:
    """Write the manifest into `work`, flush, and rename it to `final`.

    Tensors that were hashed while they were written, as the journal says, are not read again.
    An older artifact at `final` (altered, or forced to be rebuilt) is moved aside first and removed
    after the rename, so that no moment exists at which a half-written directory is visible.

    Raises:
        ArtifactError: the manifest cannot be written, or something cannot be flushed (full disk).
    """
    tensors, files = inventory(work, known=_journal_hashes(work))
    document: dict[str, Any] = {
        "format": 1,
        "kind": origin.kind,
        "stage": origin.stage,
        "key": origin.key,
        "digest": content_digest(origin.kind, tensors, files),
        "tensors": tensors,
        "files": files,
        "inputs": dict(origin.inputs),
        "config": dict(origin.config),
        "versions": dict(origin.versions),
        "notes": dict(origin.notes),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    try:
        (work / MANIFEST).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
        _flush(work)
    except OSError as error:  # a full disk; the journal stays, for the run that comes after
        raise write_refused(work, error) from error
    (work / JOURNAL).unlink(missing_ok=True)
    old = final.parent / f".{final.name}.{os.getpid()}.old.tmp"
    if final.exists():
        final.rename(old)
    work.rename(final)
    _flush_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return Artifact(origin.kind, final, document["digest"])


def _journal_hashes(work: Path) -> dict[tuple[str, str], str]:
    """sha256 by (file, tensor), as far as who wrote them has taken them."""
    return {(one.file, one.name): one.sha256 for one in read_outcomes(work / JOURNAL)}


def inventory(
    root: Path, known: Mapping[tuple[str, str], str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a directory holds: tensors by file and name, and every file with size and sha256.

    A safetensors file's own entry hashes its header only: the tensor entries cover the rest.

    Args:
        root: the directory.
        known: sha256 by (file, tensor) of tensors that need not be read.
    """
    tensors: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        name = path.relative_to(root).as_posix()
        if name in (MANIFEST, JOURNAL):
            continue
        size = path.stat().st_size
        if path.suffix == ".safetensors":
            header = read_header(path)
            hashes = {n: (known or {}).get((name, n)) for n in header.tensors}
            tensors[name] = _hash_tensors(path, header, hashes)
            files[name] = {"size": size, "sha256": _hash_range(path, 0, header.data_start)}
        else:
            files[name] = {"size": size, "sha256": _hash_range(path, 0, size)}
    return tensors, files


def content_digest(kind: str, tensors: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    """sha256 over kind, tensors and files: the artifact's identity, wherever it lies."""
    text = json.dumps([kind, tensors, files], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def open_artifact(path: Path, kind: str | None = None) -> Artifact:
    """Open a published artifact and check kind, file list and sizes (not the bytes).

    Raises:
        ArtifactError: missing, of another kind, or with a file missing, added or of another size.
    """
    document = _load_manifest(path)
    if kind is not None and document["kind"] != kind:
        raise ArtifactError(f"{path} is an artifact of kind {document['kind']}, not {kind}")
    problems = _surface_problems(path, document)
    if problems:
        raise ArtifactError(f"{path} is not what its manifest says", details=problems)
    return Artifact(document["kind"], path, document["digest"])


def verify(artifact: Artifact) -> list[str]:
    """Read every byte and compare with the manifest. Returns what differs; empty means intact."""
    document = artifact.manifest()
    problems = _surface_problems(artifact.path, document)
    if problems:
        return problems
    tensors, files = inventory(artifact.path)
    for name, entry in document["files"].items():
        if files[name] != entry:
            problems.append(f"{name}: contents changed")
    for file, entries in document["tensors"].items():
        for name, entry in entries.items():
            if tensors[file].get(name) != entry:
                problems.append(f"{file}: tensor {name} changed")
    if not problems and content_digest(document["kind"], tensors, files) != document["digest"]:
        problems.append(f"{MANIFEST}: digest does not match its own contents")
    return problems


def intact(artifact: Artifact, seen: Path) -> list[str]:
    """Like `verify`, but reads the bytes only when a file's stat has changed since the last look.

    `seen` is a folder of small records (size, mtime, ctime, inode of every file), outside of the
    artifact. Restoring the mtime does not hide a change of ctime, so an altered file is noticed.
    """
    record = seen / f"{artifact.digest}.json"
    stats = _stats(artifact.path)
    with contextlib.suppress(OSError, ValueError):
        if json.loads(record.read_text()) == stats:
            return []
    problems = verify(artifact)
    if not problems:
        remember(artifact, seen)
    return problems


def remember(artifact: Artifact, seen: Path) -> None:
    """Note the files' present stats for `intact`: of an artifact that was hashed just now."""
    seen.mkdir(parents=True, exist_ok=True)
    (seen / f"{artifact.digest}.json").write_text(json.dumps(_stats(artifact.path)))


def _stats(root: Path) -> dict[str, list[int]]:
    found = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        stat = path.stat()
        found[path.relative_to(root).as_posix()] = [
            stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino,
        ]  # fmt: skip
    return found


def _surface_problems(root: Path, document: Mapping[str, Any]) -> list[str]:
    problems = []
    listed = document["files"]
    for name, entry in listed.items():
        path = root / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif path.stat().st_size != entry["size"]:
            problems.append(f"{name}: {path.stat().st_size} bytes, manifest says {entry['size']}")
    present = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
    problems += [f"{name}: not in the manifest" for name in sorted(present - {MANIFEST, *listed})]
    return problems


def _load_manifest(root: Path) -> dict[str, Any]:
    path = root / MANIFEST
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise ArtifactError(f"{root}: no published artifact: {error.strerror}") from error
    except ValueError as error:
        raise ArtifactError(f"{path}: not JSON: {error}") from error
    missing = {"kind", "digest", "tensors", "files", "inputs", "notes"} - set(document)
    if missing:
        raise ArtifactError(f"{path}: not a manifest: no {', '.join(sorted(missing))}")
    return document


def _hash_range(path: Path, start: int, end: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        left = end - start
        while left > 0:
            block = file.read(min(left, _CHUNK))
            if not block:
                raise ArtifactError(f"{path}: shorter than it was a moment ago")
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _hash_tensors(path: Path, header: Header, known: Mapping[str, str | None]) -> dict[str, Any]:
    return {
        name: {
            "shape": list(info.shape),
            "dtype": info.dtype,
            "sha256": known[name] or _hash_range(path, info.start, info.end),
        }
        for name, info in header.tensors.items()
    }


def _flush(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        if path.is_dir():
            _flush_directory(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
