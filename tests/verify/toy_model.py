"""A language model of eight tokens: what servers of fixed answers compute in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.report import Row
from tasks.drift.fingerprint import Fingerprint
from tasks.verify.reference import Probe, Reference
from tasks.witness.plumbline_witness.probes import CHATS, TEXTS

SIZE = 8
EOS = 7
TEMPLATE = {"system": 5, "user": 4, "assistant": 6, "tool": 4}
"""Token before the content of a message, by role; the generation prompt is the assistant's."""


def logprobs(prefix: Sequence[int], model: int = 0) -> NDArray[np.float64]:
    """Return the log-probabilities of the token after a prefix, shape (SIZE,)."""
    return _logprobs(sum((at + 1) * (token + 1) for at, token in enumerate(prefix)), model)


@cache
def _logprobs(prefix: int, model: int) -> NDArray[np.float64]:
    seed = prefix + 10_000 * model
    logits = np.random.default_rng(seed).normal(size=SIZE) * 2
    values: NDArray[np.float64] = logits - np.log(np.exp(logits).sum())
    return values


def greedy(prompt: Sequence[int], count: int, model: int = 0) -> list[int]:
    """Return the most likely tokens after a prompt, up to EOS."""
    tokens: list[int] = []
    while len(tokens) < count and EOS not in tokens:
        tokens.append(int(logprobs([*prompt, *tokens], model).argmax()))
    return tokens


def tokens(text: str) -> list[int]:
    """Return one token per letter: a, b, c or d; others are one of them, too."""
    return [(ord(letter) - ord("a")) % 4 for letter in text]


def text(ids: Sequence[int]) -> str:
    """Return the letters of tokens; others have none."""
    return "".join("abcd"[token] for token in ids if token < 4)


def rendered(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Return a conversation with the generation prompt; arguments of calls are objects."""
    ids = [token for tool in tools for token in tokens(tool["function"]["description"])]
    for message in messages:
        ids += [TEMPLATE[message["role"]], *tokens(message["content"])]
        for call in message.get("tool_calls", ()):
            ids += tokens("".join(call["function"]["arguments"].values()))
    return [*ids, TEMPLATE["assistant"]]


def tops(
    prefix: Sequence[int], count: int, own: int | None = None, model: int = 0
) -> dict[int, float]:
    """Return the most likely tokens after a prefix, and one token more."""
    values = logprobs(prefix, model)
    chosen = [int(token) for token in np.argsort(-values)[:count]]
    chosen += [own] if own is not None and own not in chosen else []
    return {token: float(values[token]) for token in chosen}


@cache
def prompt_tops(prompt: tuple[int, ...], count: int, model: int) -> list[dict[int, float]]:
    """Return the most likely tokens and the prompt's own at each position but the first."""
    return [tops(prompt[:at], count, prompt[at], model) for at in range(1, len(prompt))]


def fingerprint(probes: Sequence[Probe]) -> Fingerprint:
    """Return the toy model's log-probabilities of all tokens."""
    rows = [logprobs(p.ids[:end]) for p in probes for end in range(1, len(p.ids))]
    values = np.array(rows, np.float32)
    ids = np.tile(np.arange(SIZE, dtype=np.int32), (len(rows), 1))
    sequences = tuple(p.ids for p in probes)
    return Fingerprint(sequences, ids, values, values.argmax(1).astype(np.int32), "toy")


def reference(**facts: Any) -> Reference:
    """Return what the toy model recorded: texts, conversations, and a turn that ends."""
    probes = [Probe(tuple(tokens(t))[:64], "text", n, t) for n, t in enumerate(TEXTS)]
    for number, chat in enumerate(CHATS):
        messages = [{"role": role, "content": text} for role, text in chat]
        probes.append(Probe(tuple(rendered(messages))[:64], "chat", number, "?"))
    special = {"eos_token_id": EOS, "bos_token_id": None}
    facts = {"tokens": {"tokenizer": special}, **facts}
    return Reference(tuple(probes), fingerprint(probes), None, facts)


def causes(check: Row) -> list[str]:
    """Return the codes of the likely causes."""
    return [cause.code for cause in check.causes]
