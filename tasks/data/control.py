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
from tasks.data.messages import Message, Unusable

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
        row = dict(payload)
        if not self.tokens or self.mode == KEEP:
            return row, ""
        warning = ""
        for part in (name for name in _PARTS if name in row):
            messages = list(row[part])
            for number in self._rendered(row, part, messages):
                text = messages[number]["content"]
                match = _pattern(self.tokens).search(text)
                if match is None:
                    continue
                answer = self._bears_loss(row, part, messages, number)
                who = "an answer" if answer else f"by the {messages[number]['role']}"
                holds = f"message {number + 1} of {part!r}, {who}, holds {match[0]!r}"
                if self.mode == ESCAPE:
                    messages[number] = {**messages[number], "content": self._escaped(text, holds)}
                elif answer or self.mode == REFUSE:
                    raise Unusable(f"{holds}, a control token: {WAYS}")
                warning = warning or ("" if self.mode == ESCAPE else holds)
            row[part] = messages
        return row, warning

    def _rendered(self, row: Mapping[str, Any], part: str, messages: Sequence[Message]) -> range:
        """Return the messages that become ids: not the reference answer of a prompt."""
        reference = "columns" in row and messages[-1]["role"] == "assistant"
        return range(len(messages) - reference)

    def _bears_loss(
        self, row: Mapping[str, Any], part: str, messages: Sequence[Message], number: int
    ) -> bool:
        if messages[number]["role"] != "assistant" or part == "prompt" or "columns" in row:
            return False
        only_last = part == "messages" and (self.last_answer or "desirable" in row)
        return number == len(messages) - 1 if only_last else True

    def _escaped(self, text: str, holds: str) -> str:
        broken = _pattern(self.tokens).sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
        if _pattern(self.tokens).search(broken):
            raise Unusable(f"{holds}, and so does the text with a blank in it")
        return broken


@lru_cache(maxsize=8)
def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(re.escape(token) for token in longest_first))
