"""Replies as the loop makes them, with the tiny byte-level tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from tasks.rl.experience.responses import Generated, Prompt, Reply
from tests.training.conftest import make_tokenizer

TOKENIZER = make_tokenizer()
WORDS = ("ape", "beetle", "cat", "a word that is much longer")


def reply(
    question: str, given: str, /, *, tokenizer: Any = TOKENIZER, ended: bool = True, **columns: Any
) -> Reply:
    """A reply of the tokens that a server would feed and sample; a row has its `columns` too."""
    messages = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
    answered = tokenizer(given, add_special_tokens=False)["input_ids"]
    answered = [*answered, tokenizer.eos_token_id] if ended else answered
    row = {"id": f"row of {question[:30]}", "messages": messages, **columns}
    return Reply(
        Prompt(row, np.array(ids, np.int32)),
        Generated(np.array(answered, np.int32), np.zeros(len(answered), np.float32), ended),
        given,
    )


def replies(**columns: Any) -> list[Reply]:
    """One to each of `WORDS`, which it repeats."""
    return [reply(f"copy {word}", word, answer=word, **columns) for word in WORDS]
