"""Put the served artifact into OUT, the folder of the user's choice, in one rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tasks.core.disk import flush, write_refused
from tasks.core.errors import ArtifactError
from tasks.core.files import copy_file
from tasks.core.private import open_up
from tasks.pipeline.artifact import SIGNATURE, Artifact, open_artifact
from tasks.pipeline.signature import sign
from tasks.pipeline.staging import staging
from tasks.release.model_card import write_card
from tasks.weights.files.documents import MANIFEST, read_manifest


def out_findings(
    out: Path, *, inputs: list[Path], expected: str | None, overwrite: bool
) -> Iterator[str]:
    """Yield the reasons why nothing may be delivered to `out`.

    Args:
        out: the folder; may be absent or empty.
        inputs: input folders.
        expected: digest of the artifact to deliver; None if it is not known yet.
        overwrite: True if an earlier delivery may be replaced.
    """
    real = out.resolve()
    for folder in inputs:
        source = folder.resolve()
        if real == source or real in source.parents or source in real.parents:
            yield f"out={out} lies in the input {folder}, or contains it: name another folder"
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
        yield f"out={out} is not a folder: name another one"


def put(served: Artifact, out: Path, private_key: Path | None = None, card: str = "") -> None:
    """Publish a copy of the served artifact as `out`.

    Its files share their blocks with the artifact's until one side is written, if the file system
    can do that; they are never hard links, with which a write to one side would change the other.
    The manifest is written last, and signed; then one rename makes everything visible. An earlier
    delivery is moved aside before the rename and removed after it. Call `out_findings` first. The
    copy has the permissions of the user's umask, because another user may serve it.

    Args:
        served: the served artifact.
        out: the folder to write.
        card: model card of the copy; empty for none.
        private_key: key that signs the copy (`register.sign`); None leaves it unsigned.

    Raises:
        ArtifactError: `out` cannot be written, or differs from what was signed before.
        BusyError: another process delivers to the same folder.
    """
    if _is_delivered(out, served):
        if private_key is not None:
            sign(out, private_key)
        return
    with staging(out) as work:
        for path in sorted(served.path.rglob("*")):
            if path.is_file() and path.name not in (MANIFEST, SIGNATURE):
                target = work / path.relative_to(served.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                _copy(path, target)
                flush(target)
        _copy(served.path / MANIFEST, work / MANIFEST)
        flush(work / MANIFEST)
        if card:
            write_card(work, card)
        if private_key is not None:
            sign(work, private_key)
            flush(work / SIGNATURE)
        open_up(work)
        flush(work)
        old = out.parent / f".{out.name}.{os.getpid()}.old.tmp"
        if out.is_dir() and any(out.iterdir()):
            out.rename(old)
        work.rename(out)
        flush(out.parent)
        shutil.rmtree(old, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    try:
        copy_file(source, target)
    except OSError as error:
        raise write_refused(target, error) from error


def _is_delivered(out: Path, served: Artifact) -> bool:
    """Return True if `out` already is this artifact, complete."""
    if read_manifest(out).get("digest") != served.digest:
        return False
    try:
        open_artifact(out, "served")
    except ArtifactError:
        return False
    return True
