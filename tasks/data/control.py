"""Find control tokens in the texts of a row: refuse, escape or report them.

A text such as `<|im_end|>` in a message becomes the token that ends a turn. In a question it forges
turns, and an answer with it is learned to end there. Servers read texts alike, so escaping changes
the text (`< |im_end|>`); ids that no server makes would teach nothing. Raw texts are taken as they
are, since control tokens separate their documents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tasks.config.choices import ControlTokens
from tasks.data.messages import REASONING, Message, Unusable

ESCAPE, REFUSE, KEEP = "escape", "refuse", "keep"
_PARTS = ("prompt", "messages", "chosen", "rejected")
WAYS = f"data.control_tokens={ESCAPE} breaks it up, {KEEP} takes it as it is"


@dataclass(frozen=True)
class Control:
    """Control tokens of a tokenizer, and what becomes of a text that holds one.

    Attributes:
        tokens: their texts; none if the tokenizer is not known.
        mode: `data.control_tokens`; None refuses them in answers and warns elsewhere.
        last_answer: True if only the last answer of a conversation bears loss.
    """

    tokens: tuple[str, ...] = ()
    mode: ControlTokens | None = None
    last_answer: bool = False

    def apply(self, payload: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Return a row as it is trained, and its first control token outside answers, or "".

        Raises:
            Unusable: a control token in an answer, or anywhere with `refuse`.
        """
        row, warning = dict(payload), ""
        if not self.tokens or self.mode == KEEP:
            return row, warning
        pattern = _pattern(self.tokens)
        for part in (name for name in _PARTS if name in row):
            row[part] = list(row[part])
            reference = "columns" in row and row[part][-1]["role"] == "assistant"  # not rendered
            for number, key in _texts(row[part][: len(row[part]) - reference]):
                message = row[part][number]
                match = pattern.search(message[key])
                if match is None:
                    continue
                answer = self._is_answer(row, part, number)
                who = "an answer" if answer else f"by the {message['role']}"
                holds = f"message {number + 1} of {part!r}, {who}, holds {match[0]!r}"
                if self.mode == ESCAPE:
                    text = pattern.sub(lambda m: f"{m[0][0]} {m[0][1:]}", message[key])
                    if pattern.search(text):
                        raise Unusable(f"{holds}, and so does the text with a blank in it")
                    row[part][number] = {**message, key: text}
                elif answer or self.mode == REFUSE:
                    raise Unusable(f"{holds}, a control token: {WAYS}")
                else:
                    warning = warning or holds
        return row, warning

    def _is_answer(self, row: Mapping[str, Any], part: str, number: int) -> bool:
        """Return True if a message bears loss."""
        if row[part][number]["role"] != "assistant" or part == "prompt" or "columns" in row:
            return False
        only_last = part == "messages" and (self.last_answer or "desirable" in row)
        return not only_last or number == len(row[part]) - 1


def _texts(messages: Sequence[Message]) -> list[tuple[int, str]]:
    """Return the places of all texts: the number of the message, and the key."""
    keys = ("content", *REASONING)
    return [(number, key) for number, m in enumerate(messages) for key in keys if key in m]


@lru_cache(maxsize=8)
def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(re.escape(token) for token in longest_first))
