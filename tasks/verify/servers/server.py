"""Define what every running server can be asked, whatever dialect of HTTP it speaks.

`tasks.verify.servers.connect.connect` returns a `Server`. What an API cannot do is in `Abilities`;
asking for it raises `UnsupportedError`, so that a check can say "unknown" instead of "ok".
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import PlumblineError

Message: TypeAlias = Mapping[str, Any]
"""A turn of a conversation: `role` and `content`, of tools also `tool_calls`."""
Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Schemas of the tools of a conversation, in OpenAI's form."""
Entry: TypeAlias = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Ids and natural-log probabilities of one position, both of shape (K,), most likely first."""
Prompt: TypeAlias = Sequence[int] | Sequence[Message]
"""Token ids, or a conversation that the server renders with its own template."""


class ServerError(PlumblineError):
    """A server does not answer, refuses, or answers with something unreadable.

    Codes: "unreachable", "login", "model" (no such model), "busy" (429 or 503 to the end),
    "length" (longer than the context), "request" (any other refusal), "response" (unreadable).
    """

    exit_code = 2


class UnsupportedError(ServerError):
    """The API of this server cannot answer this; a check that needs it is "unknown"."""


def chat_fields(messages: Sequence[Message], tools: Tools) -> dict[str, Any]:
    """Return the fields of a chat request, in which the arguments of calls are JSON text."""
    turns = [dict(message) for message in messages]
    for turn in turns:
        if "tool_calls" in turn:
            turn["tool_calls"] = [_as_text(call) for call in turn["tool_calls"]]
    return {"messages": turns, **({"tools": list(tools)} if tools else {})}


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    function = {**call["function"], "arguments": arguments}
    return {"id": "call", **call, "function": function}


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of one sequence of T token ids, as a server returned them.

    Both tuples have T-1 entries: position t predicts token t+1. An entry has the ids that the
    server returned: its most likely ones and the sequence's own next token, most likely first. An
    empty entry was not measured.

    Attributes:
        ids: token ids, each of shape (K,), int32; K differs between positions.
        logprobs: their natural-log probabilities, each of shape (K,), float32.
    """

    ids: tuple[NDArray[np.int32], ...]
    logprobs: tuple[NDArray[np.float32], ...]


@dataclass(frozen=True)
class ServedModel:
    """A name that a server answers to.

    Attributes:
        name: to be sent as `model`.
        parent: name of the base, if this is an adapter and the server says so.
        root: path or repository that the server loaded; None if it does not say.
        max_length: tokens of prompt and response together; None if the server does not say.
    """

    name: str
    parent: str | None = None
    root: str | None = None
    max_length: int | None = None


@dataclass(frozen=True)
class Generated:
    """One response.

    Attributes:
        ids: tokens of the response; None if the server returns text only. A final EOS is included
            by some servers and left out by others.
        text: the response as text, untrusted.
        finish: reason, "stop" (the end of the turn), "length" or the server's own word.
        prompt_ids: tokens of the prompt as the server saw them; None if it does not say.
        prompt_length: their number; None if the server does not say.
    """

    ids: tuple[int, ...] | None
    text: str
    finish: str
    prompt_ids: tuple[int, ...] | None = None
    prompt_length: int | None = None


@dataclass(frozen=True)
class Abilities:
    """List what the API of a server can answer.

    Attributes:
        token_ids: prompts may be token ids.
        prompt_logprobs: largest number of ids per position of a prompt; 0 for none.
        next_logprobs: largest number of ids per generated token; 0 for none.
        tokenize: the server tokenises a text.
        render: the server tells the token ids of a rendered conversation.
    """

    token_ids: bool
    prompt_logprobs: int
    next_logprobs: int
    tokenize: bool
    render: bool


class Server(ABC):
    """A running server. All methods may be called by several threads at once.

    Attributes:
        url: address without a final slash and without `/v1`, for people; it has no password.
        kind: dialect: "vllm", "sglang", "tgi", "llama.cpp", "ollama", "transformers", "openai".
        version: as the server says; "" if it does not.
        abilities: what it can answer.
        exact: False if token ids are sent as a text, which the server may split otherwise.

    Every method raises ServerError if the server does not answer or refuses, and UnsupportedError
    for something outside of `abilities`.
    """

    url: str
    kind: str
    version: str
    abilities: Abilities
    exact: bool = True

    @abstractmethod
    def models(self) -> tuple[ServedModel, ...]:
        """Return the names that the server answers to; the base before its adapters."""

    @abstractmethod
    def score(
        self, model: str, sequences: Sequence[Sequence[int]], *, workers: int | None = None
    ) -> list[Scores]:
        """Return the log-probabilities of token sequences, in their order.

        Prompt log-probabilities where the API has them; else the most likely next tokens after
        some prefixes of each sequence, and the other positions are empty.

        Args:
            model: name of the model.
            sequences: token ids, at least two each.
            workers: requests at the same time; None for the setting of `connect`.
        """

    @abstractmethod
    def next_tokens(
        self, model: str, prefixes: Sequence[Sequence[int]], *, workers: int | None = None
    ) -> list[Entry]:
        """Return the most likely next tokens after each prefix, as they are generated.

        Unlike prompt log-probabilities, these may be computed with a prefix cache.

        Args:
            model: name of the model.
            prefixes: token ids, at least one each.
            workers: requests at the same time; None for the setting of `connect`.
        """

    @abstractmethod
    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text, with special tokens (BOS) unless told not."""

    def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        raise UnsupportedError(f"{self.url} does not tell the text of token ids")

    @abstractmethod
    def render(self, model: str, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """Return the ids of a conversation with the generation prompt, by the server's template."""

    @abstractmethod
    def generate(
        self,
        model: str,
        prompt: Prompt,
        count: int,
        n: int = 1,
        *,
        stream: bool = False,
        **sampling: Any,
    ) -> list[Generated]:
        """Return n responses of at most `count` tokens.

        Args:
            model: name of the model.
            prompt: token ids, or messages.
            count: maximum number of tokens.
            n: number of responses.
            stream: receive the response in parts; they are joined here.
            sampling: `temperature`, `top_p`, `top_k`, `seed`, `logit_bias`, by the names of vLLM.
                What is not given is not sent, so that the server's own defaults hold.
        """
