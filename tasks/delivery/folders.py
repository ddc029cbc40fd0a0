"""Compare input artifacts with their manifests, and put the served artifact into OUT.

An artifact's manifest digest is part of the cache key of every stage that reads it, and its tensor
hashes save reading tensors again. So the bytes have to match the manifest first.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
from collections.abc import Iterable
from pathlib import Path

from tasks.core.errors import ArtifactError, ConfigError, first_and_more
from tasks.core.files import copy_file, flush, open_up, write_refused
from tasks.pipeline.artifact import Artifact, intact, open_artifact, replace_folder
from tasks.pipeline.locks import staging
from tasks.release.model_card import write_card
from tasks.weights.files.documents import MANIFEST, read_manifest

_SHOWN = 100
_WEIGHTS = (".safetensors", ".gguf")


def require_intact(folders: Iterable[Path], store: Path) -> None:
    """Compare folders with their manifests, byte for byte.

    The result is stored with size, times and inode of every file. A file is read again only if one
    of these changed. Restoring a file's mtime does not hide a change, because its ctime differs.
    """
    findings: list[str] = []
    for folder in dict.fromkeys(folders):
        if not (manifest := read_manifest(folder)):
            continue
        artifact = Artifact(str(manifest["kind"]), folder, str(manifest["digest"]))
        # Results are stored by digest: a copy and its original would overwrite each other's.
        seen = store / ".seen" / ("" if store in folder.parents else "given")
        try:
            problems: Iterable[str] = intact(artifact, seen)
        except ArtifactError as error:
            problems = [f"{MANIFEST}: {error.message}", *error.details]
        findings += [f"{folder}/{problem}" for problem in problems]
    if findings:
        raise ArtifactError(
            f"altered since it was published: {first_and_more(findings)}",
            details=findings[:_SHOWN],
            hint="give an intact copy, or make it again; without its manifest.json the folder is "
            "taken as it is now",
        )


def require_free(out: Path, inputs: Iterable[Path]) -> None:
    """Raise ConfigError if nothing can be delivered to `out`, which may be absent or empty."""
    real, reason = out.resolve(), ""
    for folder in inputs:
        source = folder.resolve()
        if real == source or real in source.parents or source in real.parents:
            reason = reason or f"lies in the input {folder}, or contains it"
    if not reason and (out.exists() or out.is_symlink()):
        if out.is_symlink() or not out.is_dir():
            reason = "is not a folder"
        elif any(out.iterdir()) and read_manifest(out).get("kind") != "served":
            reason = "is not empty, and no delivery made it"
    if reason:
        raise ConfigError(f"out={out} {reason}", hint="out=<another folder>")


def require_same(out: Path, digest: str) -> None:
    """Raise ConfigError if `out` holds another delivery than the artifact of this digest."""
    delivered = read_manifest(out).get("digest", digest)
    if delivered != digest:
        raise ConfigError(
            f"out={out} holds another delivery ({delivered[:12]})",
            hint="out=<another folder>, or overwrite=true",
        )


def put(served: Artifact, out: Path, card: str = "") -> None:
    """Publish the served artifact as `out`, with a model card.

    Weights are hard links of the artifact's files, and read-only; where OUT is on another file
    system, copies. Whoever writes to such a file all the same changes the artifact, too: the next
    run notices it and makes the artifact again. The manifest is written last; then one rename
    makes everything visible. An earlier delivery is moved aside before the rename and
    removed after it. Call `require_free` first. Files have the permissions of the user's umask,
    because another user may serve them.
    """
    if _is_delivered(out, served):
        return
    with staging(out) as work:
        for path in sorted(served.path.rglob("*")):
            if path.is_file() and path.name != MANIFEST:
                target = work / path.relative_to(served.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(path, target)
        _link_or_copy(served.path / MANIFEST, work / MANIFEST)
        if card:
            write_card(work, card)
        open_up(work)
        for path in work.rglob("*"):
            if path.suffix in _WEIGHTS:
                path.chmod(path.stat().st_mode & ~0o222)
        flush(work)
        replace_folder(work, out)


def _link_or_copy(source: Path, target: Path) -> None:
    if source.suffix in _WEIGHTS:
        with contextlib.suppress(OSError):  # another file system
            os.link(source, target)
            return
    try:
        copy_file(source, target)
        flush(target)
    except OSError as error:
        raise write_refused(target, error) from error


def _is_delivered(out: Path, served: Artifact) -> bool:
    """Return True if `out` already is this artifact, byte for byte."""
    if read_manifest(out).get("digest") != served.digest:
        return False
    try:
        open_artifact(out, "served")
    except ArtifactError:
        return False
    # Whoever altered OUT in place altered the artifact, too, which was made again under this name.
    files = [path for path in served.path.rglob("*") if path.is_file() and path.name != MANIFEST]
    copies = ((path, out / path.relative_to(served.path)) for path in files)
    return all(mine.samefile(theirs) or filecmp.cmp(mine, theirs, False) for mine, theirs in copies)
