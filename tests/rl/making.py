"""Responses as the training loop makes them, with the tiny byte-level tokenizer; formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.rl.responses import Prompt, Response
from tasks.serving.vllm.colocation import Generated
from tests.training.conftest import make_tokenizer

TOKENIZER = make_tokenizer()
WORDS = ("ape", "beetle", "cat", "a word that is much longer")
KL: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}
"""Estimators of the KL from the difference of the log-probabilities of a token."""


def response(
    question: str, text: str, /, *, tokenizer: Any = TOKENIZER, ended: bool = True, **columns: Any
) -> Response:
    """Return a response with the token ids that a server would read and sample.

    `columns` are added to the row.
    """
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    response_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    response_ids = [*response_ids, tokenizer.eos_token_id] if ended else response_ids
    row = {"id": f"row of {question[:30]}", "messages": messages, **columns}
    return Response(
        Prompt(row, np.array(ids, np.int32)),
        Generated(np.array(response_ids, np.int32), np.zeros(len(response_ids), np.float32), ended),
        text,
    )


def responses(**columns: Any) -> list[Response]:
    """Return one response for each of `WORDS`, which it repeats."""
    return [response(f"copy {word}", word, answer=word, **columns) for word in WORDS]


@dataclass
class Judge:
    """A reward source with a rule."""

    rule: Callable[[Response], float]

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        return [self.rule(response) for response in responses]
