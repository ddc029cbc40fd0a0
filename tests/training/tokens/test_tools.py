"""Conversations with tools and reasoning: what bears loss, and what a template leaves out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tasks.training.tokens.chat import Encoder, Turns, Unfit

TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
)
REASONING = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
RESULTS = "{{ m.content }}"


def template(
    *, tools: str = TOOLS, calls: str = CALLS, reasoning: str = REASONING, results: str = RESULTS
):
    """Return a ChatML template of these parts."""
    answer = f"{reasoning}{{{{ m.content }}}}{calls}"
    return (
        f"{tools}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n"
        f"{{% if m.role == 'tool' %}}{results}{{% else %}}{answer}{{% endif %}}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


SCHEMAS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
MESSAGES = [
    {"role": "user", "content": "rain?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"at": 1}}}
        ],
    },
    {"role": "tool", "content": "no"},
    {"role": "assistant", "content": "No.", "reasoning_content": "dry"},
]


def encoded(tokenizer, first: int = 0, **parts: str) -> Any:
    tokenizer.chat_template = template(**parts)
    turns = Turns(MESSAGES, first, tools=SCHEMAS)
    (result,) = Encoder(tokenizer, frozenset({tokenizer.eos_token_id})).encode([turns])
    return result


@pytest.fixture
def tokenizer(tokenizer):
    before = tokenizer.chat_template
    yield tokenizer
    tokenizer.chat_template = before


def test_calls_reasoning_and_answers_bear_loss_and_results_do_not(tokenizer) -> None:
    tokens = encoded(tokenizer)
    ids, bears = np.asarray(tokens.ids), np.asarray(tokens.bears)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], bears, [0]]).astype(int)))
    assert [tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2)] == [
        '<tool_call>weather {"at": 1}</tool_call><|im_end|>',
        "<think>dry</think>No.<|im_end|>",
    ]
    assert '"name": "weather"' in tokenizer.decode(ids[: edges[0]])


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("tools", "tools"),
        ("calls", "'tool_calls' of message 2"),
        ("results", "message 3"),
        ("reasoning", "'reasoning_content' of message 4"),
    ],
)
def test_a_template_that_leaves_something_out_is_refused(tokenizer, part: str, named: str) -> None:
    result = encoded(tokenizer, **{part: ""})
    assert isinstance(result, Unfit)
    assert named in str(result)


def test_reasoning_of_an_answer_that_is_not_trained_may_be_dropped(tokenizer) -> None:
    """Templates strip the reasoning of earlier turns, as servers do."""
    tokenizer.chat_template = template(reasoning="")
    earlier = [MESSAGES[0], MESSAGES[3], MESSAGES[0], {"role": "assistant", "content": "Still no."}]
    encoder = Encoder(tokenizer, frozenset({tokenizer.eos_token_id}))
    last, every = encoder.encode([Turns(earlier, 3), Turns(earlier, 0)])
    assert not isinstance(last, Unfit)
    assert isinstance(every, Unfit)
