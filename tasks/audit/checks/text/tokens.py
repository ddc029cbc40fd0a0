"""Ids of a tokenizer, read from tokenizer.json without taking its vocabulary apart.

Vocabularies have hundreds of thousands of entries and merges; as Python objects they take some
twenty times the bytes that they have on disk. What is asked here is the highest id and the added
tokens, so the text is searched, not parsed.
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
"""Possessive, and of so many escapes: a string without an end is tried once, and costs little."""
_ID = re.compile(_STRING + rb":\s*(\d{1,9})\s*([,}])")
_PIECE = re.compile(rb"\s*\[" + _STRING + rb",\s*-?[\d.eE+-]+\s*\]\s*([,\]])")
_MAX_ADDED_BYTES = 4 << 20
_MAX_ENTRIES = 1 << 21
"""The largest vocabularies have an eighth of it."""


@dataclass(frozen=True)
class Tokens:
    """What a tokenizer says of ids.

    Attributes:
        rows: highest id + 1; 0 where there is no tokenizer.json, or none that can be read.
        added: ids of added tokens, by their text.
        special: those of them that are special.
        highest_plain: highest id of the vocabulary without the added ones; -1 for none.
    """

    rows: int = 0
    added: Mapping[str, int] = field(default_factory=dict)
    special: frozenset[str] = frozenset()
    highest_plain: int = -1
    _raw: bytes = field(default=b"", repr=False, compare=False)

    def id_of(self, token: str) -> int | None:
        """Id of a token; None where the tokenizer has no such one."""
        if token in self.added:
            return self.added[token]
        for text in _written(token):
            match = re.search(re.escape(text) + rb"\s*:\s*(\d{1,9})", self._raw)
            if match:
                return int(match[1])
        return None

    def has(self, token: str) -> bool:
        """Whether the tokenizer has it; vocabularies that are lists tell no ids."""
        return token in self.added or any(text in self._raw for text in _written(token))


def _written(token: str) -> set[bytes]:
    """A text as JSON holds it."""
    spellings = (json.dumps(token), json.dumps(token, ensure_ascii=False))
    return {one.encode(errors="replace") for one in spellings}


def read_tokens(folder: Folder) -> Tokens:
    """Look through a folder's tokenizer.json."""
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
    """The same of a file; once for all families that ask. Raises OSError."""
    with path.open("rb") as file:
        raw = file.read(MAX_JSON_BYTES)
    added = _added(raw)
    ids = {str(one["content"]): one["id"] for one in added}
    special = frozenset(str(one["content"]) for one in added if one.get("special") is True)
    plain = _highest(raw)
    if _VOCABULARY.search(raw) and plain < 0:
        return Tokens(0, ids, special, -1, raw)  # of a kind that is not known here
    return Tokens(max((plain, *ids.values()), default=-1) + 1, ids, special, plain, raw)


def _added(raw: bytes) -> list[dict[str, Any]]:
    match = _ADDED.search(raw)
    if match is None:
        return []
    text = raw[match.end() - 1 : match.end() + _MAX_ADDED_BYTES].decode(errors="replace")
    try:
        found, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return []
    return [
        one
        for one in found
        if isinstance(one, dict) and "content" in one and type(one.get("id")) is int
    ]


def _highest(raw: bytes) -> int:
    """Highest id of the vocabulary: of a mapping its largest number, of a list its length."""
    match = _VOCABULARY.search(raw)
    if match is None:
        return -1
    highest, count, at = -1, 0, match.end()
    entry = _PIECE if match[1] == b"[" else _ID
    while (found := entry.match(raw, at)) is not None:
        count, at = count + 1, found.end()
        highest = max(highest, int(found[1])) if entry is _ID else count - 1
        if found[entry.groups] in (b"}", b"]") or count > _MAX_ENTRIES:
            break
    return highest if count <= _MAX_ENTRIES else -1
