"""Score by `/v1/completions`: vLLM, and every other server of the OpenAI dialect.

Servers differ in what they add to it, so that the abilities are tried out and not assumed: prompt
log-probabilities with token ids (vLLM), `echo` with `logprobs`, or the most likely next tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tasks.verify.servers.http import Http
from tasks.verify.servers.openai import OpenAiServer
from tasks.verify.servers.scoring import entry, score_next, scores
from tasks.verify.servers.server import (
    Abilities,
    Entry,
    Message,
    Scores,
    ServerError,
    Tools,
    UnsupportedError,
    chat_fields,
)
from tasks.verify.servers.vocabulary import Vocabulary

WANTED = 100
"""Ids per position, if the server allows as many."""
_TRIAL = [1, 2, 3]
"""Token ids to try out abilities with; every vocabulary has them."""
_LIMIT = re.compile(r"max(?:imum)? allowed:? (\d+)")
_TOKEN = re.compile(r"token_id:(\d+)")


class CompletionsServer(OpenAiServer):
    """Server that takes token ids, and returns log-probabilities in one of three ways.

    Args:
        http: its client.
        kind: dialect.
        version: as the server says.
        model: name to try out abilities with; None for the first one.
        vocabulary: texts of token ids, for servers that tell tokens as texts.
    """

    def __init__(
        self,
        http: Http,
        *,
        kind: str = "openai",
        version: str = "",
        model: str | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._asked_for = 0  # alternatives per position to ask for
        self._echoes = False
        self._vocabulary = vocabulary
        self._more: dict[str, Any] = {"return_tokens_as_token_ids": True}
        super().__init__(http, kind=kind, version=version, model=model)

    def score(
        self, model: str, sequences: Sequence[Sequence[int]], *, workers: int | None = None
    ) -> list[Scores]:
        """Return the log-probabilities of token sequences, in their order."""
        if not self.abilities.token_ids:
            raise UnsupportedError(f"{self.url} takes no token ids")
        if self.abilities.prompt_logprobs:
            work = self._score_prompt if not self._echoes else self._score_echo
            items = [(model, list(map(int, sequence))) for sequence in sequences]
            return self.http.parallel(lambda item: work(*item), items, workers)
        return score_next(partial(self.next_tokens, model, workers=workers), sequences)

    def next_tokens(
        self, model: str, prefixes: Sequence[Sequence[int]], *, workers: int | None = None
    ) -> list[Entry]:
        """Return the most likely next tokens after each prefix, as they are generated."""
        if not (self.abilities.token_ids and self.abilities.next_logprobs):
            raise UnsupportedError(f"{self.url} returns no log-probabilities of next tokens")
        return self.http.parallel(
            lambda prefix: self._score_next(model, prefix), list(prefixes), workers
        )

    def tried(self, model: str) -> Abilities:
        """Return what the server does when it is asked for it."""
        body: dict[str, Any] = {"prompt": _TRIAL, "max_tokens": 1, "temperature": 0}
        alternatives, answer = self._limit(model, body, "prompt_logprobs")
        choice = answer["choices"][0] if answer else {}
        render = self.renders(model)
        if isinstance(choice.get("prompt_logprobs"), list):
            self._asked_for = alternatives
            count = max(1, alternatives)
            return Abilities(True, count, count, self.tokenizes(model), render)
        token_ids = answer is not None
        alternatives, answer = self._limit(model, {**body, "echo": True}, "logprobs")
        tokens = (_logprobs(answer) or {}).get("tokens") or []
        if len(tokens) in (len(_TRIAL), len(_TRIAL) + 1):
            self._echoes, self._asked_for = True, alternatives
            is_told = [self._token(token) for token in tokens[: len(_TRIAL)]] == _TRIAL
            prompt = max(1, alternatives) if is_told else 1
            after = prompt if is_told else 0
            return Abilities(True, prompt, after, self.tokenizes(model), render)
        alternatives, answer = self._limit(model, body, "logprobs")
        tokens = (_logprobs(answer) or {}).get("tokens") or []
        self._asked_for = alternatives
        after = max(1, alternatives) if tokens and self._token(tokens[0]) is not None else 0
        return Abilities(token_ids or answer is not None, 0, after, self.tokenizes(model), render)

    def _limit(
        self, model: str, body: Mapping[str, Any], field: str
    ) -> tuple[int, dict[str, Any] | None]:
        """Return the largest number of alternatives that a field takes, and that response.

        The response is None if the server refuses the request altogether.
        """
        wanted = WANTED
        for _ in range(4):
            more = {field: wanted, **self._more}
            try:
                return wanted, self.post("/v1/completions", model, {**body, **more})
            except ServerError as error:
                if error.code != "request":
                    if error.code == "missing":
                        return 0, None
                    raise
                if self._more and next(iter(self._more)) in error.message:
                    self._more = {}  # an unknown field of a server that takes known ones only
                    continue
                limit = _LIMIT.search(error.message)
                # OpenAI's own API takes five at most, and says so in other words.
                lower = int(limit[1]) if limit else 5
                if lower >= wanted:
                    return 0, None
                wanted = lower
        return 0, None

    def _score_prompt(self, model: str, sequence: list[int]) -> Scores:
        """Score by vLLM's prompt log-probabilities: one mapping of id to value per position."""
        body = {"prompt": sequence, "max_tokens": 1, "temperature": 0}
        body["prompt_logprobs"] = self._asked_for
        answer = self.post("/v1/completions", model, body)
        listed = answer["choices"][0].get("prompt_logprobs")
        if not isinstance(listed, list) or len(listed) != len(sequence):
            raise ServerError(
                f"{self.url}: log-probabilities for {len(listed or ())} of {len(sequence)} tokens",
                hint="a proxy or a limit of the server may cut the prompt",
                code="response",
            )
        entries = {
            at: entry({int(token): value["logprob"] for token, value in place.items()})
            for at, place in enumerate(listed[1:])
            if place
        }
        return scores(len(sequence), entries)

    def _score_echo(self, model: str, sequence: list[int]) -> Scores:
        """Score by `echo`: the sequence's own tokens, and alternatives if they are told as ids."""
        body = {"prompt": sequence, "max_tokens": 1, "temperature": 0, "echo": True}
        body |= {"logprobs": self._asked_for, **self._more}
        told = _logprobs(self.post("/v1/completions", model, body)) or {}
        own, tops = told.get("token_logprobs") or [], told.get("top_logprobs") or []
        if len(own) < len(sequence):
            raise ServerError(
                f"{self.url}: log-probabilities for {len(own)} of {len(sequence)} tokens",
                code="response",
            )
        entries = {}
        for at, token in enumerate(sequence[1:]):
            values = self._by_id(tops[at + 1]) if at + 1 < len(tops) else {}
            if own[at + 1] is not None:
                entries[at] = entry({**values, token: own[at + 1]})
        return scores(len(sequence), entries)

    def _score_next(self, model: str, prefix: Sequence[int]) -> Entry:
        """Return the most likely next tokens after a prefix."""
        body = {"prompt": list(map(int, prefix)), "max_tokens": 1, "temperature": 0}
        body |= {"logprobs": self._asked_for, **self._more}
        tops = (_logprobs(self.post("/v1/completions", model, body)) or {}).get("top_logprobs")
        return entry(self._by_id(tops[0]) if tops else {})

    def _token(self, text: str) -> int | None:
        """Return the id of a token that a server names by its id, or by its text."""
        if match := _TOKEN.fullmatch(str(text)):
            return int(match[1])
        return self._vocabulary.find(str(text).encode()) if self._vocabulary else None

    def _by_id(self, top: Mapping[str, float] | None) -> dict[int, float]:
        pairs = ((self._token(text), value) for text, value in (top or {}).items())
        return {token: value for token, value in pairs if token is not None}


class VllmServer(CompletionsServer):
    """A server of vLLM."""

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text, with special tokens (BOS) unless told not."""
        return self._tokens({"model": model, "prompt": text, "add_special_tokens": special})

    def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        body = {"model": model, "tokens": list(map(int, ids))}
        return str(self._native("/detokenize", body)["prompt"])

    def render(self, model: str, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """Return the ids of a conversation with the generation prompt, by the server's template.

        A chat request tells what users get. Servers before 0.10.2 do not tell its ids; there,
        `/tokenize` renders, which knows nothing of `--default-chat-template-kwargs`.
        """
        if self.abilities.render:
            return super().render(model, messages, tools)
        return self._tokens({"model": model, **chat_fields(messages, tools)})

    def tokenizes(self, model: str) -> bool:
        """Return True if `/tokenize` is there; proxies often hide it."""
        try:
            return bool(self._tokens({"model": model, "prompt": "a"}))
        except UnsupportedError:
            return False

    def _tokens(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(self._native("/tokenize", body)["tokens"])

    def _native(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            return self.http.post(path, body)
        except ServerError as error:
            error = self.explained(error, body["model"])
            if error.code == "missing":
                raise UnsupportedError(f"{self.url} hides {path}") from None
            raise error from None


def _logprobs(answer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    told = answer["choices"][0].get("logprobs") if answer else None
    return told if isinstance(told, dict) else None
