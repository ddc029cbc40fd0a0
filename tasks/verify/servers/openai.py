"""Speak the OpenAI dialect: vLLM, and other servers with `/v1/completions` and chats.

Servers differ in what they add to it, so that it is tried out and not assumed: prompt
log-probabilities with token ids (vLLM), `echo` with `logprobs`, or the most likely next tokens.
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
)

WANTED = 100
"""Ids per position, if the server allows as many."""
_TRIAL = [1, 2, 3]
"""Token ids to try a server with; every vocabulary has them."""
_LIMIT = re.compile(r"max(?:imum)? allowed:? (\d+)")
_TOKEN = re.compile(r"token_id:(\d+)")
_NAMED = "return_tokens_as_token_ids"


class OpenAiServer(Server):
    """Server of the OpenAI dialect; it is tried out with `model`, or its first one."""

    def __init__(
        self, client: Client, *, kind: str = "openai", version: str = "", model: str | None = None
    ) -> None:
        self.client, self.url = client, client.url
        self.kind, self.version = kind, version
        self._more: dict[str, Any] = {_NAMED: True}
        self._completes = self._echoes = False
        self._of_prompts = self._of_next = 0  # ids per position
        self._asked_for = 0
        names = [served.name for served in self.models()]
        if not names:
            raise ServerError(f"{self.url} serves no model", code="model")
        # Another name is a mistake, which is reported with all others.
        self.try_out(model if model in names else names[0])

    def models(self) -> tuple[ServedModel, ...]:
        listed = self.client.get("/v1/models")
        cards = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(cards, list):
            raise ServerError(f"{self.url}/v1/models: no list of models", code="response")
        models = [
            ServedModel(
                name=str(card["id"]),
                parent=card.get("parent"),
                root=card.get("root"),
                max_length=_whole(card.get("max_model_len")),
            )
            for card in cards
            if isinstance(card, dict) and "id" in card
        ]
        return tuple(sorted(models, key=lambda model: model.parent is not None))

    def score(self, model: str, sequences: Sequence[Ids], workers: int = 0) -> list[Scores]:
        if not self._of_prompts:
            raise UnsupportedError(f"{self.url} returns no log-probabilities of prompts")
        work = self._echoed if self._echoes else self._scored
        return parallel(
            lambda ids: work(model, list(ids)), sequences, workers or self.client.workers
        )

    def next(
        self, model: str, prefixes: Sequence[Ids], workers: int = 0, cache: bool = True
    ) -> list[Entry]:
        if not self._of_next:
            raise UnsupportedError(f"{self.url} returns no log-probabilities of next tokens")

        def ask(prefix: Sequence[int]) -> Entry:
            body = {"prompt": list(prefix), "max_tokens": 1, "temperature": 0}
            body |= {"logprobs": self._asked_for, **self._more}
            tops = _logprobs(self.post("/v1/completions", model, body)).get("top_logprobs")
            return entry(_by_id(tops[0] if tops else {}))

        return parallel(ask, prefixes, workers or self.client.workers)

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
        body: dict[str, Any] = {"max_tokens": count, **({"n": n} if n > 1 else {}), **more}
        is_chat = len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if not is_chat and not self._completes:
            raise UnsupportedError(f"{self.url} takes no token ids")
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        body |= {"messages" if is_chat else "prompt": list(prompt), **self.extras()}
        if stream:
            body = {"model": model, **body, "stream": True}
            return _joined(self.client.events(path, body), n)
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

    def try_out(self, model: str) -> None:
        """Find out which log-probabilities the server returns, and how many."""
        body: dict[str, Any] = {"prompt": _TRIAL, "max_tokens": 1, "temperature": 0}
        count, answer = self._most(model, body, "prompt_logprobs")
        self._completes = answer is not None
        if answer and isinstance(answer["choices"][0].get("prompt_logprobs"), list):
            self._asked_for = count
            self._of_prompts = self._of_next = max(1, count)
            return
        count, answer = self._most(model, {**body, "echo": True}, "logprobs")
        tokens = _logprobs(answer).get("tokens") or []
        if len(tokens) in (len(_TRIAL), len(_TRIAL) + 1):
            self._completes = self._echoes = True
            self._asked_for = count
            are_ids = [_id(token) for token in tokens[: len(_TRIAL)]] == _TRIAL
            self._of_prompts = max(1, count) if are_ids else 1
            self._of_next = self._of_prompts if are_ids else 0
            return
        count, answer = self._most(model, body, "logprobs")
        tokens = _logprobs(answer).get("tokens") or []
        self._completes |= answer is not None
        self._asked_for = count
        self._of_next = max(1, count) if tokens and _id(tokens[0]) is not None else 0

    def _most(
        self, model: str, body: Mapping[str, Any], field: str
    ) -> tuple[int, dict[str, Any] | None]:
        """Return the largest number of alternatives that a field takes, and that response.

        The response is None if the server refuses the request altogether.
        """
        wanted = WANTED
        for _ in range(4):
            try:
                more = {field: wanted, **self._more}
                return wanted, self.post("/v1/completions", model, {**body, **more})
            except ServerError as error:
                if error.code not in ("request", "missing"):
                    raise
                if self._more and _NAMED in error.message:
                    self._more = {}  # an unknown field of a server that takes known ones only
                    continue
                limit = _LIMIT.search(error.message)
                # OpenAI's own API takes five at most, and says so in other words.
                lower = int(limit[1]) if limit else 5
                if error.code == "missing" or lower >= wanted:
                    break
                wanted = lower
        return 0, None

    def _scored(self, model: str, ids: list[int]) -> Scores:
        """Score by vLLM's prompt log-probabilities: one mapping of id to value per position."""
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0}
        body["prompt_logprobs"] = self._asked_for
        listed = self.post("/v1/completions", model, body)["choices"][0].get("prompt_logprobs")
        require(self.url, listed, ids)
        return [
            entry({int(token): value["logprob"] for token, value in (place or {}).items()})
            for place in listed[1:]
        ]

    def _echoed(self, model: str, ids: list[int]) -> Scores:
        """Score by `echo`: the sequence's own tokens, and alternatives if they are told as ids."""
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True}
        body |= {"logprobs": self._asked_for, **self._more}
        told = _logprobs(self.post("/v1/completions", model, body))
        own, tops = (told.get("token_logprobs") or [])[: len(ids)], told.get("top_logprobs") or []
        require(self.url, own, ids)
        tops = [*tops, *[None] * len(ids)]
        return [
            entry({**_by_id(tops[at]), ids[at]: own[at]} if own[at] is not None else {})
            for at in range(1, len(ids))
        ]


class VllmServer(OpenAiServer):
    """A server of vLLM."""

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        return self._tokens({"model": model, "prompt": text, "add_special_tokens": special})

    def render(self, model: str, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """Return the ids of a conversation with the generation prompt, by the server's template.

        A chat request tells what users get. Servers before 0.10.2 do not tell its ids; there,
        `/tokenize` renders, which knows nothing of `--default-chat-template-kwargs`.
        """
        try:
            return super().render(model, messages, tools)
        except UnsupportedError:
            return self._tokens({"model": model, **chat_fields(messages, tools)})

    def _tokens(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        try:
            return tuple(self.client.post("/tokenize", body)["tokens"])
        except ServerError as error:
            if error.code != "missing":
                raise
            raise UnsupportedError(f"{self.url} hides /tokenize") from None


def require(url: str, listed: Any, ids: Sequence[int]) -> None:
    """Raise ServerError unless there is one entry for each token of a prompt."""
    count = len(listed) if isinstance(listed, list) else 0
    if count != len(ids):
        raise ServerError(
            f"{url}: log-probabilities for {count} of {len(ids)} tokens",
            hint="a proxy or a limit of the server may cut the prompt",
            code="response",
        )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _id(token: Any) -> int | None:
    """Return the id of a token that a server names by it."""
    match = _TOKEN.fullmatch(str(token))
    return int(match[1]) if match else None


def _by_id(top: Mapping[str, float] | None) -> dict[int, float]:
    pairs = ((_id(text), value) for text, value in (top or {}).items())
    return {token: value for token, value in pairs if token is not None}


def _logprobs(answer: Mapping[str, Any] | None) -> Mapping[str, Any]:
    told = answer["choices"][0].get("logprobs") if answer else None
    return told if isinstance(told, dict) else {}


def _generated(choice: Mapping[str, Any], prompt_ids: Any, length: Any = None) -> Generated:
    message = choice.get("message") or {}
    text = choice.get("text") if "text" in choice else message.get("content")
    prompt_ids = prompt_ids or choice.get("prompt_token_ids")
    ids = choice.get("token_ids")
    return Generated(
        ids=tuple(ids) if isinstance(ids, list) else None,
        text=str(text or ""),
        finish=str(choice.get("finish_reason") or ""),
        prompt_ids=tuple(prompt_ids) if isinstance(prompt_ids, list) else None,
        prompt_length=_whole(length),
    )


def _joined(parts: Iterator[Mapping[str, Any]], n: int) -> list[Generated]:
    """Return the responses of a stream, whose parts may be mixed."""
    whole: list[dict[str, Any]] = [{"text": "", "token_ids": None} for _ in range(n)]
    prompt_ids = None
    for part in parts:
        prompt_ids = prompt_ids or part.get("prompt_token_ids")
        for choice in part.get("choices") or ():
            index = choice.get("index", 0)
            if not 0 <= index < n:
                continue
            target, delta = whole[index], choice.get("delta") or {}
            target["text"] += choice.get("text") or delta.get("content") or ""
            if isinstance(choice.get("token_ids"), list):
                target["token_ids"] = (target["token_ids"] or []) + choice["token_ids"]
            target["finish_reason"] = choice.get("finish_reason") or target.get("finish_reason")
            prompt_ids = prompt_ids or choice.get("prompt_token_ids")
    return [_generated(choice, prompt_ids) for choice in whole]
