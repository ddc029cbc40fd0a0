"""Raw texts to token ids, as in pre-training: every token bears loss, and an end stands behind.

A text begins as the tokenizer has texts begin (with a BOS token, where it has one) and ends with
its EOS token. Nothing foretells the first token, which therefore bears no loss. Pieces of a text
overlap by one token: each begins with the last token of the one before it, which is read and not
learnt, so that every other token of the text is learnt exactly once.
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
        """Token ids and marks of each text, whole, or what is wrong with it."""
        if not documents:
            return []
        texts = [document.text for document in documents]
        several = self.tokenizer(texts, verbose=False)["input_ids"]  # of any length
        return [self._marked(ids) for ids in several]

    def _marked(self, ids: list[int]) -> Tokens | Unfit:
        end = int(self.tokenizer.eos_token_id)
        whole = ids if ids and ids[-1] == end else [*ids, end]
        if len(whole) < 2:
            return Unfit("no trainable token: the tokenizer makes nothing of the text")
        bears: NDArray[np.uint8] = np.ones(len(whole), np.uint8)
        bears[0] = 0
        return Tokens(np.asarray(whole, np.int32), bears)


def pieces(tokens: Tokens, max_len: int) -> Iterator[Tokens]:
    """A text of two tokens or more as pieces of at most `max_len` >= 2 tokens, in order."""
    for start in range(0, len(tokens.ids) - 1, max_len - 1):
        ids = tokens.ids[start : start + max_len]
        bears: NDArray[np.uint8] = np.ones(len(ids), np.uint8)
        bears[0] = 0
        yield Tokens(ids, bears)
