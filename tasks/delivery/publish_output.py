"""OUT: the served artifact where the user wants it, visible all at once or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Artifact, open_artifact
from tasks.pipeline.staging import staging
from tasks.weights.execute.copying import link_or_copy
from tasks.weights.files.identity import read_manifest
from tasks.weights.files.reader import MANIFEST


def out_findings(
    out: Path, *, inputs: list[Path], expected: str | None, overwrite: bool
) -> Iterator[str]:
    """Why nothing may be delivered to `out`.

    Args:
        out: the folder; may be absent or empty.
        inputs: folders that are read.
        expected: digest of what is to be delivered, where that is known already.
        overwrite: whether an earlier delivery may be replaced.
    """
    real = out.resolve()
    for one in inputs:
        other = one.resolve()
        if real == other or real in other.parents or other in real.parents:
            yield f"out={out} and {one} lie in each other: an input is never written to"
    if out.is_dir() and not out.is_symlink():
        if not any(out.iterdir()):
            return
        manifest = read_manifest(out)
        if not manifest or manifest["kind"] != "served":
            yield f"out={out} is not empty, and no delivery made it: name another folder"
        elif manifest["digest"] != expected and not overwrite:
            yield (
                f"out={out} holds another delivery ({manifest['digest'][:12]}): "
                "overwrite=true replaces it"
            )
    elif out.exists() or out.is_symlink():
        yield f"out={out} is no folder"


def put(served: Artifact, out: Path) -> None:
    """Make `out` the served artifact: links where the file system allows it, else copies.

    The manifest comes last, then one rename. An earlier delivery is moved aside and removed after
    it; whether that may be done `out_findings` has said.

    Raises:
        ArtifactError: it cannot be written.
        BusyError: another process delivers to the same place.
    """
    if _holds(out, served):
        return
    with staging(out) as work:
        for path in sorted(served.path.rglob("*")):
            if path.is_file() and path.name != MANIFEST:
                target = work / path.relative_to(served.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path, target)
                _flush(target)
        shutil.copyfile(served.path / MANIFEST, work / MANIFEST)
        _flush(work / MANIFEST)
        _flush(work)
        old = out.parent / f".{out.name}.{os.getpid()}.old.tmp"
        if out.is_dir() and any(out.iterdir()):
            out.rename(old)
        work.rename(out)
        _flush(out.parent)
        shutil.rmtree(old, ignore_errors=True)


def _holds(out: Path, served: Artifact) -> bool:
    """Whether `out` is this delivery already, complete."""
    if read_manifest(out).get("digest") != served.digest:
        return False
    try:
        open_artifact(out, "served")
    except ArtifactError:
        return False
    return True


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
