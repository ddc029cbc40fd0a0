"""Speak the OpenAI dialect: vLLM, and other servers with `/v1/completions` and chats.

Servers differ in what they add to it, so that it is tried out and not assumed: prompt
log-probabilities with token ids (vLLM), or the most likely next tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks.verify.servers.client import Client, parallel
from tasks.verify.servers.server import (
    Entry,
    Generated,
    Ids,
    Message,
    Prompt,
    Scores,
    ServedModel,
    Server,
    ServerError,
    Tools,
    UnsupportedError,
    chat_fields,
    entry,
    is_chat,
)

WANTED = 100
"""Ids per position, if the server allows as many."""
FEW = 5
"""Ids per position that every API allows."""
_TRIAL = [1, 2, 3]
"""Token ids to try a server with; every vocabulary has them."""
_LIMIT = re.compile(r"max(?:imum)? allowed:? (\d+)")
_TOKEN = re.compile(r"token_id:(\d+)")


class OpenAiServer(Server):
    """Server of the OpenAI dialect; it is tried out with `model`, or its first one."""

    def __init__(
        self, client: Client, *, kind: str = "openai", version: str = "", model: str | None = None
    ) -> None:
        self.client, self.url = client, client.url
        self.kind, self.version = kind, version
        self._completes = self._scores_prompts = self._scores_next = False
        self._top = 0  # ids per position
        names = [served.name for served in self.models()]
        if not names:
            raise ServerError(f"{self.url} serves no model", code="missing")
        # Another name is a mistake, which is reported with all others.
        self.try_out(model if model in names else names[0])

    def models(self) -> tuple[ServedModel, ...]:
        listed = self.client.get("/v1/models")
        cards = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(cards, list):
            raise ServerError(f"{self.url}/v1/models: no list of models", code="response")
        models = [
            ServedModel(
                str(card["id"]), card.get("parent"), card.get("root"), card.get("max_model_len")
            )
            for card in cards
        ]
        return tuple(sorted(models, key=lambda model: model.parent is not None))

    def score(self, model: str, sequences: Sequence[Ids], workers: int = 0) -> list[Scores]:
        if not self._scores_prompts:
            raise UnsupportedError(f"{self.url} returns no log-probabilities of prompts")
        return parallel(
            lambda ids: self.score_one(model, list(ids)), sequences, workers or self.client.workers
        )

    def score_one(self, model: str, ids: list[int]) -> Scores:
        """Return vLLM's prompt log-probabilities: one mapping of id to value per position."""
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": self._top}
        listed: Any = self._choice(model, body).get("prompt_logprobs")
        require(self.url, listed, ids)
        return [
            entry({int(token): value["logprob"] for token, value in (place or {}).items()})
            for place in listed[1:]
        ]

    def next(
        self, model: str, prefixes: Sequence[Ids], workers: int = 0, cache: bool = True
    ) -> list[Entry]:
        if not self._scores_next:
            raise UnsupportedError(f"{self.url} returns no log-probabilities of next tokens")
        return parallel(
            lambda ids: self.next_one(model, list(ids)), prefixes, workers or self.client.workers
        )

    def next_one(self, model: str, ids: list[int]) -> Entry:
        """Return the most likely next tokens after a prefix."""
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, **_named(self._top)}
        tops = (self._choice(model, body).get("logprobs") or {}).get("top_logprobs") or [{}]
        pairs = ((_id(token), value) for token, value in tops[0].items())
        return entry({token: value for token, value in pairs if token is not None})

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        raise UnsupportedError(f"{self.url} does not tokenise texts")

    def render(self, model: str, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        fields = chat_fields(messages, tools)
        # "auto" needs a parser of calls; the prompt is the same.
        choice = {"tools": fields["tools"], "tool_choice": "none"} if tools else {}
        ids = self.generate(model, fields["messages"], 1, **choice)[0].prompt_ids
        if ids is None:
            raise UnsupportedError(f"{self.url} does not tell the token ids of a conversation")
        return ids

    def generate(
        self, model: str, prompt: Prompt, count: int, n: int = 1, stream: bool = False, **more: Any
    ) -> list[Generated]:
        chat = is_chat(prompt)
        if not chat and not self._completes:
            raise UnsupportedError(f"{self.url} takes no token ids")
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = {"max_tokens": count, **({"n": n} if n > 1 else {}), **more, **self.extras()}
        body["messages" if chat else "prompt"] = list(prompt)
        if stream:
            body = {"model": model, **body, "stream": True}
            return [_joined(self.client.events(path, body))]
        answer = self.post(path, model, body)
        choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))
        length = (answer.get("usage") or {}).get("prompt_tokens")
        return [_generated(choice, answer.get("prompt_token_ids"), length) for choice in choices]

    def extras(self) -> dict[str, Any]:
        """Return the fields that let this server tell token ids."""
        return {"return_token_ids": True}

    def post(self, path: str, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request for a model; return the response, which has choices."""
        answer = self.client.post(path, {"model": model, **body})
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise ServerError(f"{self.url}{path}: a response without choices", code="response")
        return answer

    def _choice(self, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = self.post("/v1/completions", model, body)["choices"][0]
        return choice

    def try_out(self, model: str) -> None:
        """Find out which log-probabilities the server returns, and how many."""
        choice = self._trial(model, lambda count: {"prompt_logprobs": count})
        self._completes = choice is not None
        if choice and isinstance(choice.get("prompt_logprobs"), list):
            self._scores_prompts = self._scores_next = True
            return
        choice = self._trial(model, _named)
        tokens = ((choice or {}).get("logprobs") or {}).get("tokens") or [None]
        self._completes |= choice is not None
        self._scores_next = _id(tokens[0]) is not None

    def _trial(self, model: str, fields: Any) -> dict[str, Any] | None:
        """Return the response with as many alternatives as the server allows; None if it refuses.

        OpenAI's own API takes five at most, and says so in other words.
        """
        body = {"prompt": _TRIAL, "max_tokens": 1, "temperature": 0}
        count = WANTED
        while count:
            try:
                choice = self._choice(model, {**body, **fields(count)})
            except ServerError as error:
                if error.code not in ("request", "missing"):
                    raise
                limit = _LIMIT.search(error.message)
                lower = int(limit[1]) if limit else FEW
                count = lower if lower < count else 0
            else:
                self._top = count
                return choice
        return None


class VllmServer(OpenAiServer):
    """A server of vLLM."""

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        body = {"model": model, "prompt": text, "add_special_tokens": special}
        return tokens_of(self.client, body)


def tokens_of(client: Client, body: Mapping[str, Any]) -> tuple[int, ...]:
    """Return what `/tokenize` of vLLM and SGLang answers."""
    try:
        return tuple(client.post("/tokenize", body)["tokens"])
    except ServerError as error:
        if error.code != "missing":
            raise
        raise UnsupportedError(f"{client.url} has no /tokenize") from None


def require(url: str, listed: Any, ids: Sequence[int]) -> None:
    """Raise ServerError unless there is one entry for each token of a prompt."""
    count = len(listed) if isinstance(listed, list) else 0
    if count != len(ids):
        raise ServerError(
            f"{url}: log-probabilities for {count} of {len(ids)} tokens",
            hint="a proxy or a limit of the server may cut the prompt",
            code="response",
        )


def _named(count: int) -> dict[str, Any]:
    return {"logprobs": count, "return_tokens_as_token_ids": True}


def _id(token: Any) -> int | None:
    """Return the id of a token that a server names by it."""
    match = _TOKEN.fullmatch(str(token))
    return int(match[1]) if match else None


def _generated(choice: Mapping[str, Any], prompt_ids: Any, length: Any = None) -> Generated:
    text = choice["text"] if "text" in choice else (choice.get("message") or {}).get("content")
    prompt_ids, ids = prompt_ids or choice.get("prompt_token_ids"), choice.get("token_ids")
    return Generated(
        ids=tuple(ids) if isinstance(ids, list) else None,
        text=str(text or ""),
        finish=str(choice.get("finish_reason") or ""),
        prompt_ids=tuple(prompt_ids) if isinstance(prompt_ids, list) else None,
        prompt_length=length,
    )


def _joined(parts: Iterator[Mapping[str, Any]]) -> Generated:
    """Return the response of a stream."""
    whole: dict[str, Any] = {"text": "", "token_ids": None}
    for part in parts:
        for choice in part.get("choices") or ():
            whole["text"] += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if isinstance(choice.get("token_ids"), list):
                whole["token_ids"] = (whole["token_ids"] or []) + choice["token_ids"]
            whole["finish_reason"] = choice.get("finish_reason") or whole.get("finish_reason")
    return _generated(whole, None)
