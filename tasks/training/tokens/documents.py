"""Raw texts to token ids, as in pre-training: every token bears loss, EOS included.

A text begins as the tokenizer begins texts (with a BOS token if it has one) and ends with its EOS
token. The first token bears no loss, since no token before it predicts it. Pieces of a text overlap
by one token: the last token of one piece is the first of the next, where it bears no loss. So every
token of a text but its first bears loss exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.training.tokens.chat import Unfit
from tasks.training.tokens.examples import Tokens


class Document(NamedTuple):
    """A raw text."""

    text: str


@dataclass(frozen=True)
class TextEncoder:
    """Tokenises raw texts.

    Attributes:
        tokenizer: a Hugging Face tokenizer with an EOS token.
    """

    tokenizer: Any

    def encode(self, documents: Sequence[Document]) -> list[Tokens | Unfit]:
        """Return token ids and loss marks of each text, or the reason it is unfit."""
        if not documents:
            return []
        texts = [document.text for document in documents]
        tokenised = self.tokenizer(texts, verbose=False)["input_ids"]  # no warnings about length
        return [self._marked(ids) for ids in tokenised]

    def _marked(self, ids: list[int]) -> Tokens | Unfit:
        end = int(self.tokenizer.eos_token_id)
        whole = ids if ids and ids[-1] == end else [*ids, end]
        if len(whole) < 2:
            return Unfit("no trainable token: the tokenizer makes nothing of the text")
        bears: NDArray[np.uint8] = np.ones(len(whole), np.uint8)
        bears[0] = 0
        return Tokens(np.asarray(whole, np.int32), bears)


def pieces(tokens: Tokens, max_len: int) -> Iterator[Tokens]:
    """Cut a text into pieces of at most `max_len` tokens, in order.

    Args:
        tokens: a text of at least two tokens.
        max_len: at least 2.
    """
    for start in range(0, len(tokens.ids) - 1, max_len - 1):
        ids = tokens.ids[start : start + max_len]
        bears: NDArray[np.uint8] = np.ones(len(ids), np.uint8)
        bears[0] = 0
        yield Tokens(ids, bears)
