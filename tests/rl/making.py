"""Make responses as the training loop does, with the tiny byte-level tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from tasks.rl.experience.responses import Prompt, Response
from tasks.serving.vllm.colocation import Generated
from tests.training.conftest import make_tokenizer

TOKENIZER = make_tokenizer()
WORDS = ("ape", "beetle", "cat", "a word that is much longer")


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
