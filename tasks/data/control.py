"""Find control tokens in the texts of a row: refuse or report them.

A text such as `<|im_end|>` in a message becomes the token that ends a turn. In a question it forges
turns, and an answer with it is learned to end there. Raw texts are taken as they are, since control
tokens separate their documents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tasks.config.sections import ControlTokens
from tasks.data.messages import REASONING, Unusable

REFUSE, KEEP = "refuse", "keep"
_PARTS = ("prompt", "messages", "chosen", "rejected")
WAYS = f"data.control_tokens={KEEP} takes it as it is"


@dataclass(frozen=True)
class Control:
    """Control tokens of a tokenizer, and what becomes of a text that contains one."""

    tokens: tuple[str, ...] = ()  # their texts; none if the tokenizer is not known
    # `data.control_tokens`; None refuses them in answers and warns elsewhere
    mode: ControlTokens | None = None
    last_answer: bool = False  # True if only the last answer of a conversation bears loss

    def check(self, row: Mapping[str, Any]) -> str:
        """Return a warning about the first control token outside answers, or "".

        Raises Unusable for a control token in an answer, or anywhere with `refuse`.
        """
        warning = ""
        if not self.tokens or self.mode == KEEP:
            return warning
        for part in (name for name in _PARTS if name in row):
            messages = row[part]
            if "columns" in row and messages[-1]["role"] == "assistant":
                messages = messages[:-1]  # the reference answer of a prompt is not rendered
            for number, message in enumerate(messages):
                texts = (message.get(key, "") for key in ("content", *REASONING))
                match = next(filter(None, map(self._pattern.search, texts)), None)
                if match is None:
                    continue
                answer = self._is_answer(row, part, number)
                who = "an answer" if answer else f"by the {message['role']}"
                problem = f"message {number + 1} of {part!r}, {who}, holds {match[0]!r}"
                if answer or self.mode == REFUSE:
                    raise Unusable(f"{problem}, a control token: {WAYS}")
                warning = warning or problem
        return warning

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.tokens, key=len, reverse=True)
        return re.compile("|".join(re.escape(token) for token in longest_first))

    def _is_answer(self, row: Mapping[str, Any], part: str, number: int) -> bool:
        """Return True if a message bears loss."""
        if row[part][number]["role"] != "assistant" or part == "prompt" or "columns" in row:
            return False
        only_last = part == "messages" and (self.last_answer or "desirable" in row)
        return not only_last or number == len(row[part]) - 1
