"""Cache of tokenised splits, shared by runs.

The name of an entry is the digest of everything that determines its bytes: the split's file, the
tokenizer and its template, the settings, and the code. An entry appears by one rename, so that runs
can make the same entry at the same time, and is checked (size and CRC-32 of every file) before use.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.core.errors import DataError
from tasks.pipeline.artifact import hash_of
from tasks.training.tokens.examples import damage, describe, join_parts

LOG = logging.getLogger(__name__)
ABANDONED_S = 86_400


class TokenCache:
    """One entry of the cache: a tokenised split.

    Args:
        root: folder of the cache.
        parts: everything that determines the entry's bytes, as JSON values.
    """

    def __init__(self, root: Path, parts: Mapping[str, Any]) -> None:
        text = json.dumps(dict(parts), sort_keys=True)
        self.folder = root / hashlib.sha256(text.encode()).hexdigest()[:24]

    def intact(self) -> bool:
        """Return True if the entry exists and is undamaged; remove a damaged one."""
        if not self.folder.is_dir():
            return False
        problem = damage(self.folder)
        if problem:
            LOG.warning("tokenised data in %s are damaged and made again: %s", self.folder, problem)
            self._move_away()
        return not problem

    def stage(self) -> Path:
        """Make an empty folder beside the entry, on the same file system.

        Folders left by killed runs are removed after a day.
        """
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        for left in self.folder.parent.glob(".*"):
            if left.stat().st_mtime < time.time() - ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f".{self.folder.name}.", dir=self.folder.parent))

    def publish(
        self, staged: Path, parts: Sequence[Path], *, roles: Sequence[str],
        values: Sequence[str], notes: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Join the ranks' parts and rename the result to the entry; remove `staged`.

        If another run has published the entry meanwhile, that one stays: the bytes are the same.

        Args:
            staged: folder made by `stage`.
            parts: folders of the ranks' parts, in order.
            roles: names of an example's sequences.
            values: names of the examples' numbers.
            notes: counts for the event "data".
        """
        whole = staged / "whole"
        whole.mkdir()
        join_parts(whole, parts)
        describe(whole, roles=roles, values=values, notes=notes)
        try:
            whole.rename(self.folder)
        except OSError:
            if damage(self.folder):
                raise
        shutil.rmtree(staged, ignore_errors=True)

    def _move_away(self) -> None:
        """Rename and delete the entry; processes that have mapped its files keep them."""
        grave = self.stage()
        self.folder.rename(grave / "damaged")
        shutil.rmtree(grave, ignore_errors=True)


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of everything that determines a tokenizer's output."""
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer.to_str()
    else:
        core = json.dumps([tokenizer.get_vocab(), tokenizer.init_kwargs], sort_keys=True,
                          default=str)  # fmt: skip
    parts = [type(tokenizer).__name__, core, str(tokenizer.chat_template),
             json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def split_digest(path: Path) -> str:
    """Return the SHA-256 of a split's file, from the artifact's manifest if there is one.

    Raises:
        DataError: the file or its manifest cannot be read.
    """
    manifest = path.parent / "manifest.json"
    try:
        if manifest.is_file():
            entry = json.loads(manifest.read_text())["files"][path.name]
            return str(entry[hash_of(entry)])
        return _sha256(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
