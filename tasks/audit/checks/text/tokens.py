"""Read token ids from tokenizer.json without parsing its vocabulary.

Vocabularies have hundreds of thousands of entries and merges; as Python objects they take about
twenty times their size on disk. The checks need only the highest id and the added tokens, so this
module searches the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks.audit.folder import MAX_JSON_BYTES, Folder

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
TOKENIZERS = (
    TOKENIZER,
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "vocab.txt",
    "tekken.json",
)
_ADDED = re.compile(rb'"added_tokens"\s*:\s*\[')
_VOCABULARY = re.compile(rb'"vocab"\s*:\s*([{\[])')
_STRING = rb'\s*"[^"\\]*+(?:\\.[^"\\]*+){0,9999}+"\s*'
"""Possessive, with limited escapes: a string without an end is tried once, at little cost."""
_ID = re.compile(_STRING + rb":\s*(\d{1,9})\s*([,}])")
_PIECE = re.compile(rb"\s*\[" + _STRING + rb",\s*-?[\d.eE+-]+\s*\]\s*([,\]])")
_MAX_ADDED_BYTES = 4 << 20
_MAX_ENTRIES = 1 << 21
"""The largest vocabularies have an eighth of this."""


@dataclass(frozen=True)
class Tokens:
    """Token ids of a tokenizer.

    Attributes:
        rows: highest id + 1; 0 without a readable tokenizer.json.
        added: ids of added tokens, by text.
        special: texts of added tokens that are special.
        highest_plain: highest id of the vocabulary without added tokens; -1 if there is none.
    """

    rows: int = 0
    added: Mapping[str, int] = field(default_factory=dict)
    special: frozenset[str] = frozenset()
    highest_plain: int = -1
    _raw: bytes = field(default=b"", repr=False, compare=False)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None if the tokenizer does not have it."""
        if token in self.added:
            return self.added[token]
        for text in _written(token):
            match = re.search(re.escape(text) + rb"\s*:\s*(\d{1,9})", self._raw)
            if match:
                return int(match[1])
        return None

    def has(self, token: str) -> bool:
        """Return True if the tokenizer has the token, also in vocabularies without ids (lists)."""
        return token in self.added or any(text in self._raw for text in _written(token))


def _written(token: str) -> set[bytes]:
    """Return the spellings of a text in JSON."""
    spellings = (json.dumps(token), json.dumps(token, ensure_ascii=False))
    return {spelling.encode(errors="replace") for spelling in spellings}


def read_tokens(folder: Folder) -> Tokens:
    """Read the tokenizer.json of a folder."""
    size = folder.files.get(TOKENIZER, 0)
    if not 0 < size <= MAX_JSON_BYTES:
        return Tokens()
    path = folder.root / TOKENIZER
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError:
        return Tokens()


@lru_cache(maxsize=2)
def _read(path: Path, changed: int) -> Tokens:
    """Read one tokenizer.json; cached for the checks that need it. Raises OSError."""
    with path.open("rb") as file:
        raw = file.read(MAX_JSON_BYTES)
    added = _added(raw)
    ids = {str(token["content"]): token["id"] for token in added}
    special = frozenset(str(token["content"]) for token in added if token.get("special") is True)
    plain = _highest(raw)
    if _VOCABULARY.search(raw) and plain < 0:  # an unknown kind of vocabulary
        return Tokens(0, ids, special, -1, raw)
    return Tokens(max((plain, *ids.values()), default=-1) + 1, ids, special, plain, raw)


def _added(raw: bytes) -> list[dict[str, Any]]:
    match = _ADDED.search(raw)
    if match is None:
        return []
    text = raw[match.end() - 1 : match.end() + _MAX_ADDED_BYTES].decode(errors="replace")
    try:
        entries, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return []
    return [
        entry
        for entry in entries
        if isinstance(entry, dict) and "content" in entry and type(entry.get("id")) is int
    ]


def _highest(raw: bytes) -> int:
    """Return the highest id of the vocabulary, which is a mapping to ids or a list."""
    match = _VOCABULARY.search(raw)
    if match is None:
        return -1
    highest, count, at = -1, 0, match.end()
    entry = _PIECE if match[1] == b"[" else _ID
    while (piece := entry.match(raw, at)) is not None:
        count, at = count + 1, piece.end()
        highest = max(highest, int(piece[1])) if entry is _ID else count - 1
        if piece[entry.groups] in (b"}", b"]") or count > _MAX_ENTRIES:
            break
    return highest if count <= _MAX_ENTRIES else -1
