"""What is delivered from an artifact of ours has to be what was published.

A manifest is believed twice: its digest stands for the folder in the keys of stages, and its hashes
for tensors that need not be read. So the bytes are compared with it first.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tasks.core.errors import ArtifactError, first_and_more
from tasks.pipeline.artifact import Artifact, intact
from tasks.weights.files.identity import read_manifest
from tasks.weights.files.reader import MANIFEST

_SHOWN = 100


def require_intact(folders: Iterable[Path], store: Path) -> None:
    """Compare the folders that have a manifest of ours with it, byte for byte.

    What was compared is remembered with size, times and inode of every file, and is not read again
    while these are the same. Restoring a file's mtime does not hide a change: its ctime tells.

    Args:
        folders: what is read; those without a manifest of ours are passed over.
        store: our artifacts, whose records the stage mechanism shares.

    Raises:
        ArtifactError: with every file that is missing, added or altered.
    """
    findings: list[str] = []
    for folder in dict.fromkeys(folders):
        findings += [f"{folder}/{problem}" for problem in _problems(folder, store)]
    if findings:
        raise ArtifactError(
            f"altered since it was published: {first_and_more(findings)}",
            details=findings[:_SHOWN],
            hint="give an intact copy, or make it again; without its manifest.json the folder is "
            "taken as it is now",
        )


def _problems(folder: Path, store: Path) -> list[str]:
    manifest = read_manifest(folder)
    if not manifest:
        return []
    artifact = Artifact(str(manifest["kind"]), folder, str(manifest["digest"]))
    # By digest alone a copy and its original would take turns in forgetting each other.
    seen = store / ".seen"
    try:
        return intact(artifact, seen if store in folder.parents else seen / "given")
    except ArtifactError as error:
        return [f"{MANIFEST}: {error.message}", *error.details]
