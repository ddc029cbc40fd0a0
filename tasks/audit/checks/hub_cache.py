"""Check a snapshot of a Hugging Face cache: downloads that ended early, blobs that were changed."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tasks.audit.catalogue.files import Files
from tasks.audit.finding import Finding, some
from tasks.audit.recognise import Kind
from tasks.audit.source import Source

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Names of blobs: git's SHA-1 of small files, the SHA-256 of those in LFS."""
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.\w+")
_LOCAL = ".cache/huggingface/download"
"""Folder of unfinished files below a folder of `hf download --local-dir`."""
_THREADS = 4


def check(source: Source) -> Iterator[Finding]:
    """Report an interrupted download; with `values`, blobs whose hash is not their name."""
    yield from _interrupted(source)
    if not source.values:
        return
    blobs = _blobs(source)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = dict(zip(blobs, pool.map(_hash, blobs.values()), strict=True))
    for name, digest in digests.items():
        if digest != blobs[name].name:
            yield Files.BLOB_DIFFERS.at(
                name, found=f"hash {digest}", expected=f"{blobs[name].name}, as the blob's name",
                fix=_download(source, name, "--force-download"),
            )  # fmt: skip


def _interrupted(source: Source) -> Iterator[Finding]:
    root = source.folder.root
    places = [root / _LOCAL, *([root.parent.parent / "blobs"] if _is_snapshot(root) else [])]
    partial = [path for place in places for path in sorted(place.rglob("*.incomplete"))]
    lacking = source.folder.listing.odd or source.weights.absent or _shards_lack(source)
    if partial and (lacking or source.kind is Kind.NOTHING):
        yield Files.DOWNLOAD_INTERRUPTED.at(
            "", found=f"unfinished: {some(path.name for path in partial)}",
            expected="all files of the repository", fix=_download(source),
        )  # fmt: skip


def _shards_lack(source: Source) -> bool:
    """Return True if the names of shards give a total that is not there."""
    shards = [_SHARD.fullmatch(name) for name in source.weights.files]
    return any(shard and len(shards) < int(shard[2]) for shard in shards)


def _is_snapshot(root: Path) -> bool:
    return root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir()


def _blobs(source: Source) -> Mapping[str, Path]:
    """Return the blobs whose names are hashes, by the name of the link."""
    root = source.folder.root
    links = {name: (root / name).resolve() for name in source.folder.files}
    return {
        name: path for name, path in links.items()
        if path.parent.name == "blobs" and _HASH.fullmatch(path.name)
    }  # fmt: skip


def _hash(path: Path) -> str:
    """Return the hash of a blob, of the kind that its name is."""
    if len(path.name) == 40:
        data = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(source: Source, *more: str) -> str:
    """Return the command that completes the folder."""
    root = source.folder.root
    if not _is_snapshot(root):
        return f"hf download <owner/name> {shlex.join([*more, '--local-dir', str(root)])}"
    repository = root.parent.parent
    name = repository.name.removeprefix("models--").replace("--", "/")
    cache = ["--revision", root.name, "--cache-dir", str(repository.parent)]
    return shlex.join(["hf", "download", name, *more, *cache])
