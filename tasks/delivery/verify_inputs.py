"""Compare input artifacts with their manifests before anything is made from them.

An artifact's manifest digest is part of the cache key of every stage that reads it, and its tensor
hashes save reading tensors again. So the bytes have to match the manifest first.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tasks.core.errors import ArtifactError, first_and_more
from tasks.pipeline.artifact import Artifact, intact
from tasks.weights.files.documents import MANIFEST, read_manifest

_SHOWN = 100


def require_intact(folders: Iterable[Path], store: Path) -> None:
    """Compare folders with their manifests, byte for byte.

    The result is stored with size, times and inode of every file. A file is read again only if one
    of these changed. Restoring a file's mtime does not hide a change, because its ctime differs.

    Args:
        folders: input folders; those without a manifest of ours are skipped.
        store: folder of our artifacts; the stage mechanism uses the same stored results.

    Raises:
        ArtifactError: files are missing, added or altered; all of them are listed.
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
    # Results are stored by digest: a copy and its original would overwrite each other's.
    seen = store / ".seen"
    try:
        return intact(artifact, seen if store in folder.parents else seen / "given")
    except ArtifactError as error:
        return [f"{MANIFEST}: {error.message}", *error.details]
