"""The interface of a running server, whatever dialect of HTTP it speaks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import PlumblineError

Message: TypeAlias = Mapping[str, Any]
"""A turn of a conversation: `role` and `content`, of tools also `tool_calls`."""
Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Schemas of the tools of a conversation, in OpenAI's form."""
Ids: TypeAlias = Sequence[int]
Prompt: TypeAlias = Ids | Sequence[Message]
"""Token ids, or a conversation that the server renders with its own template."""
SAMPLED = 12
"""Positions of a sequence that are scored where each costs a request."""


class ServerError(PlumblineError):
    """A server does not answer, refuses, or answers with something unreadable.

    Codes: "unreachable", "login", "missing" (no such path or model), "busy" (429 or 503 to the
    end), "length" (longer than the context), "request" (any other refusal), "response"
    (unreadable).
    """

    exit_code = 2


class UnsupportedError(ServerError):
    """The API of this server cannot answer this; a check that needs it is "unknown"."""


class Entry(NamedTuple):
    """Token ids and their log-probabilities (nats) at one position, both (K,), likeliest first."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


EMPTY = Entry(np.empty(0, np.int32), np.empty(0, np.float32))
"""A position that was not measured."""
Scores: TypeAlias = Sequence[Entry]
"""Log-probabilities of T token ids, T-1 entries: entry t predicts token t+1, and has the server's
most likely ids and that token."""


@dataclass(frozen=True)
class ServedModel:
    """A name that a server answers to; None stands for what the server does not say."""

    name: str
    parent: str | None = None  # name of the base of an adapter
    root: str | None = None  # path or repository that the server loaded
    max_length: int | None = None  # tokens of prompt and response together


@dataclass(frozen=True)
class Generated:
    """One response; None stands for what the server does not say."""

    ids: tuple[int, ...] | None  # a final EOS is included by some servers only
    text: str  # untrusted
    finish: str  # "stop" (the end of the turn), "length" or the server's own word
    prompt_ids: tuple[int, ...] | None = None
    prompt_length: int | None = None


class Server:
    """A running server; each dialect overrides what its API can do, by several threads at once.

    Every method raises ServerError if the server does not answer or refuses, and UnsupportedError
    for what the API cannot do.
    """

    url: str  # without password, final slash and `/v1`
    kind: str  # dialect: "vllm", "sglang", "llama.cpp" or "openai"
    version: str

    def models(self) -> Sequence[ServedModel]:
        """Return the names that the server answers to; the base before its adapters."""
        raise NotImplementedError

    def score(self, model: str, sequences: Sequence[Ids], workers: int = 0) -> list[Scores]:
        """Return the prompt log-probabilities of sequences, `workers` requests at a time."""
        self._cannot("return log-probabilities of prompts")

    def next(
        self, model: str, prefixes: Sequence[Ids], workers: int = 0, cache: bool = True
    ) -> list[Entry]:
        """Return the most likely next tokens after each prefix, as they are generated.

        `cache` lets the server use its prompt cache, as requests of users do.
        """
        self._cannot("return log-probabilities of next tokens")

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text; `special` adds those that begin a sequence (BOS)."""
        self._cannot("tokenise texts")

    def render(self, model: str, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """Return the ids of a conversation with the generation prompt, by the server's template."""
        self._cannot("tell the token ids of a conversation")

    def generate(
        self, model: str, prompt: Prompt, count: int, n: int = 1, stream: bool = False, **more: Any
    ) -> list[Generated]:
        """Return n responses of at most `count` tokens; one that is streamed is joined.

        `more` has names of vLLM (`temperature`, `top_p`, `seed`, `logit_bias`). What is left
        out is not sent, so that the server's own defaults hold.
        """
        self._cannot("generate responses to token ids")

    def _cannot(self, what: str) -> NoReturn:
        raise UnsupportedError(f"{self.url} does not {what}")


def entry(values: Mapping[int, float | None]) -> Entry:
    """Return the log-probabilities of one position by token id; None is left out.

    Raises ServerError for values that are not log-probabilities.
    """
    pairs = {token: value for token, value in values.items() if value is not None}
    ids = np.fromiter(pairs, np.int64, len(pairs))
    try:
        logprobs = np.fromiter(pairs.values(), np.float64, len(pairs))
    except (TypeError, ValueError):
        logprobs = np.array([np.nan])
    if not (logprobs <= 1e-3).all():  # NaN included
        raise ServerError(
            "the server returns values that are not log-probabilities",
            hint="vllm serve --logprobs-mode raw_logprobs",
            code="response",
        )
    order = np.argsort(-logprobs, kind="stable")
    return Entry(ids[order].astype(np.int32), logprobs[order].astype(np.float32))


def score(
    server: Server,
    model: str,
    sequences: Sequence[Ids],
    *,
    workers: int = 0,
    cache: bool = False,
    most: int = SAMPLED,
) -> list[Scores]:
    """Score sequences by prompt log-probabilities, else by next tokens at up to `most` positions.

    The other positions are empty. `cache` is that of `Server.next`.
    """
    try:
        return server.score(model, sequences, workers)
    except UnsupportedError:
        pass
    places = [
        (number, at)
        for number, ids in enumerate(sequences)
        for at in np.unique(np.linspace(len(ids) - 2, 0, min(most, len(ids) - 1)).round())
    ]
    prefixes = [sequences[number][: int(at) + 1] for number, at in places]
    known = dict(zip(places, server.next(model, prefixes, workers, cache), strict=True))
    return [
        [known.get((number, at), EMPTY) for at in range(len(ids) - 1)]
        for number, ids in enumerate(sequences)
    ]


def is_chat(prompt: Prompt) -> bool:
    """Return True if a prompt is a conversation."""
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def chat_fields(messages: Sequence[Message], tools: Tools) -> dict[str, Any]:
    """Return the fields of a chat request, in which the arguments of calls are JSON text."""
    turns = [dict(message) for message in messages]
    for turn in turns:
        if "tool_calls" in turn:
            turn["tool_calls"] = [_as_text(call) for call in turn["tool_calls"]]
    return {"messages": turns, **({"tools": list(tools)} if tools else {})}


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {"id": "call", **call, "function": {**call["function"], "arguments": arguments}}
