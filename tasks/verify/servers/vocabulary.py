"""Texts of token ids, from `tokenizer.json`: for servers that take and return texts only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LARGEST = 256 * 2**20
"""Bytes of a `tokenizer.json`; the largest known has 35 MiB."""


class Vocabulary:
    """Bytes of all tokens.

    Attributes:
        bos: token that begins a sequence; None if there is none.

    Args:
        pieces: bytes by token id.
        bos: text of the token that begins a sequence; "" for none.
    """

    def __init__(self, pieces: Mapping[int, bytes], bos: str = "") -> None:
        self._pieces = dict(pieces)
        self._ids: dict[bytes, int | None] = {}
        for token, piece in self._pieces.items():
            self._ids[piece] = None if piece in self._ids else token
        self.bos = self.find(bos.encode())

    def text(self, ids: Sequence[int]) -> str | None:
        """Return the text of token ids; None if it is unknown or no text."""
        try:
            return b"".join(self._pieces[token] for token in ids).decode()
        except (KeyError, UnicodeDecodeError):
            return None

    def find(self, piece: bytes) -> int | None:
        """Return the token with these bytes; None if there is none, or several."""
        return self._ids.get(piece)


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Return the vocabulary in a folder; None if it has no `tokenizer.json` that is understood."""
    path = folder / "tokenizer.json"
    try:
        if path.stat().st_size > LARGEST:
            return None
        document = json.loads(path.read_text(encoding="utf-8"))
        pieces = dict(_pieces(document))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return Vocabulary(pieces, _bos(folder / "tokenizer_config.json"))


def _bos(path: Path) -> str:
    try:
        token = json.loads(path.read_text(encoding="utf-8")).get("bos_token")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def _pieces(document: Mapping[str, Any]) -> Iterator[tuple[int, bytes]]:
    vocabulary = document["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [piece, score], in the order of ids
        vocabulary = {entry[0]: token for token, entry in enumerate(vocabulary)}
    is_byte_level = "ByteLevel" in json.dumps(
        [document.get("decoder"), document.get("pre_tokenizer")]
    )
    alphabet = _byte_alphabet() if is_byte_level else {}
    for piece, token in vocabulary.items():
        if is_byte_level:
            if all(letter in alphabet for letter in piece):
                yield int(token), bytes(alphabet[letter] for letter in piece)
        elif match := _BYTE.fullmatch(piece):
            yield int(token), bytes([int(match[1], 16)])
        else:
            yield int(token), piece.replace("\u2581", " ").encode()
    for added in document.get("added_tokens") or ():
        yield int(added["id"]), str(added["content"]).encode()


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each letter of GPT-2's byte-level alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + at): byte for at, byte in enumerate(others)}
