"""Speak the OpenAI dialect: completions and chat, with what vLLM and others add to it.

Servers differ in what they add, so that the abilities are tried out and not assumed: prompt
log-probabilities with token ids (vLLM), `echo` with `logprobs`, or the most likely next tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks.verify.servers.http import Http
from tasks.verify.servers.scoring import entry, score_next, scores
from tasks.verify.servers.server import (
    Abilities,
    Entry,
    Generated,
    Message,
    Prompt,
    Scores,
    ServedModel,
    Server,
    ServerError,
    UnsupportedError,
)

WANTED = 100
"""Ids per position, if the server allows as many."""
_TRIAL = [1, 2, 3]
"""Token ids to try out abilities with; every vocabulary has them."""
_LIMIT = re.compile(r"max(?:imum)? allowed:? (\d+)")
_TOKEN = re.compile(r"token_id:(\d+)")


class OpenAiServer(Server):
    """Server with `/v1/models`, `/v1/completions` and `/v1/chat/completions`.

    Args:
        http: its client.
        kind: dialect.
        version: as the server says.
        model: name to try out abilities with; None for the first one.
    """

    def __init__(
        self, http: Http, *, kind: str = "openai", version: str = "", model: str | None = None
    ) -> None:
        self.http = http
        self.url = http.url
        self.kind = kind
        self.version = version
        self._asked_for = 0  # alternatives per position to ask for
        self._echoes = False
        self.abilities = self._tried(model or self._first())

    def models(self) -> tuple[ServedModel, ...]:
        """Return the names that the server answers to; the base before its adapters."""
        listed = self.http.get("/v1/models")
        cards = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(cards, list):
            raise ServerError(f"{self.url}/v1/models: no list of models", code="response")
        models = [
            ServedModel(
                name=str(card["id"]),
                parent=card.get("parent"),
                root=card.get("root"),
                max_length=_length(card),
            )
            for card in cards
            if isinstance(card, dict) and "id" in card
        ]
        return tuple(sorted(models, key=lambda model: model.parent is not None))

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
        return score_next(self, model, sequences, workers)

    def next_tokens(
        self, model: str, prefixes: Sequence[Sequence[int]], *, workers: int | None = None
    ) -> list[Entry]:
        """Return the most likely next tokens after each prefix, as they are generated."""
        if not (self.abilities.token_ids and self.abilities.next_logprobs):
            raise UnsupportedError(f"{self.url} returns no log-probabilities of next tokens")
        return self.http.parallel(
            lambda prefix: self._score_next(model, prefix), list(prefixes), workers
        )

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text, with special tokens (BOS) unless told not."""
        raise UnsupportedError(f"{self.url} does not tokenise texts")

    def render(self, model: str, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids of a conversation with the generation prompt, by the server's template."""
        if self.abilities.render:
            ids = self.generate(model, messages, 1)[0].prompt_ids
            if ids is not None:
                return ids
        raise UnsupportedError(f"{self.url} does not tell the token ids of a conversation")

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
        """Return n responses of at most `count` tokens."""
        body: dict[str, Any] = {"max_tokens": count, **({"n": n} if n > 1 else {}), **sampling}
        is_chat = len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if not is_chat and not self.abilities.token_ids:
            raise UnsupportedError(f"{self.url} takes no token ids")
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        body["messages" if is_chat else "prompt"] = list(prompt)
        body |= self.extras()
        if stream:
            parts = self.stream(path, model, body)
            return _joined(parts, n)
        answer = self.post(path, model, body)
        choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))
        length = (answer.get("usage") or {}).get("prompt_tokens")
        return [_generated(choice, answer.get("prompt_token_ids"), length) for choice in choices]

    def extras(self) -> dict[str, Any]:
        """Return the fields that let this server tell token ids."""
        return {"return_token_ids": True}

    def post(self, path: str, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request for a model; return the response, which has choices."""
        try:
            answer = self.http.post(path, {"model": model, **body})
        except ServerError as error:
            raise self.explained(error, model) from None
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise ServerError(f"{self.url}{path}: a response without choices", code="response")
        return answer

    def stream(self, path: str, model: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the parts of a streamed response."""
        try:
            yield from self.http.events(path, {"model": model, **body, "stream": True})
        except ServerError as error:
            raise self.explained(error, model) from None

    def explained(self, error: ServerError, model: str) -> ServerError:
        """Return the error of an unknown model's name with the names that exist."""
        if error.code not in ("missing", "request"):
            return error
        names = [served.name for served in self.models()]
        if not names or model in names:
            return error
        return ServerError(
            f"{self.url} serves no model {model!r}",
            details=[f"it serves {', '.join(names)}"],
            hint=f"name={names[0]}",
            code="model",
        )

    def _first(self) -> str:
        models = self.models()
        if not models:
            raise ServerError(f"{self.url} serves no model", code="model")
        return models[0].name

    def _tried(self, model: str) -> Abilities:
        """Return what the server does when it is asked for it."""
        body: dict[str, Any] = {"prompt": _TRIAL, "max_tokens": 1, "temperature": 0}
        alternatives, answer = self._limit(model, body, "prompt_logprobs")
        choice = answer["choices"][0] if answer else {}
        render = self._renders(model)
        if isinstance(choice.get("prompt_logprobs"), list):
            self._asked_for = alternatives
            count = max(1, alternatives)
            return Abilities(True, count, count, self.tokenizes(model), render)
        token_ids = answer is not None
        alternatives, answer = self._limit(model, {**body, "echo": True}, "logprobs")
        tokens = (_logprobs(answer) or {}).get("tokens") or []
        if len(tokens) in (len(_TRIAL), len(_TRIAL) + 1):
            self._echoes, self._asked_for = True, alternatives
            prompt = max(1, alternatives) if _ids(tokens) else 1
            after = prompt if _ids(tokens) else 0
            return Abilities(True, prompt, after, self.tokenizes(model), render)
        alternatives, answer = self._limit(model, body, "logprobs")
        tokens = (_logprobs(answer) or {}).get("tokens") or []
        self._asked_for = alternatives
        after = max(1, alternatives) if tokens and _ids(tokens) else 0
        return Abilities(token_ids or answer is not None, 0, after, self.tokenizes(model), render)

    def _limit(
        self, model: str, body: Mapping[str, Any], field: str
    ) -> tuple[int, dict[str, Any] | None]:
        """Return the largest number of alternatives that a field takes, and that response.

        The response is None if the server refuses the request altogether.
        """
        wanted = WANTED
        for _ in range(3):
            more = {field: wanted, "return_tokens_as_token_ids": True}
            try:
                return wanted, self.post("/v1/completions", model, {**body, **more})
            except ServerError as error:
                if error.code != "request":
                    if error.code == "missing":
                        return 0, None
                    raise
                limit = _LIMIT.search(error.message)
                # OpenAI's own API takes five at most, and says so in other words.
                lower = int(limit[1]) if limit else 5
                if lower >= wanted:
                    return 0, None
                wanted = lower
        return 0, None

    def tokenizes(self, model: str) -> bool:
        """Return True if the server tokenises texts."""
        return False

    def _renders(self, model: str) -> bool:
        """Return True if the server tells the token ids of a conversation."""
        body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1, **self.extras()}
        try:
            return bool(self.post("/v1/chat/completions", model, body).get("prompt_token_ids"))
        except ServerError as error:
            if error.code in ("missing", "request", "response"):
                return False
            raise

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
        body |= {"logprobs": self._asked_for, "return_tokens_as_token_ids": True}
        told = _logprobs(self.post("/v1/completions", model, body)) or {}
        own, tops = told.get("token_logprobs") or [], told.get("top_logprobs") or []
        if len(own) < len(sequence):
            raise ServerError(
                f"{self.url}: log-probabilities for {len(own)} of {len(sequence)} tokens",
                code="response",
            )
        entries = {}
        for at, token in enumerate(sequence[1:]):
            values = _by_id(tops[at + 1]) if at + 1 < len(tops) else {}
            if own[at + 1] is not None:
                entries[at] = entry({**values, token: own[at + 1]})
        return scores(len(sequence), entries)

    def _score_next(self, model: str, prefix: Sequence[int]) -> Entry:
        """Return the most likely next tokens after a prefix."""
        body = {"prompt": list(map(int, prefix)), "max_tokens": 1, "temperature": 0}
        body |= {"logprobs": self._asked_for, "return_tokens_as_token_ids": True}
        tops = (_logprobs(self.post("/v1/completions", model, body)) or {}).get("top_logprobs")
        return entry(_by_id(tops[0]) if tops else {})


def _length(card: Mapping[str, Any]) -> int | None:
    length = card.get("max_model_len")
    return length if isinstance(length, int) else None


def _logprobs(answer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    told = answer["choices"][0].get("logprobs") if answer else None
    return told if isinstance(told, dict) else None


def _ids(tokens: Sequence[Any]) -> bool:
    return all(_TOKEN.fullmatch(str(token)) for token in tokens)


def _by_id(top: Mapping[str, float] | None) -> dict[int, float]:
    matches = ((_TOKEN.fullmatch(token), value) for token, value in (top or {}).items())
    return {int(match[1]): value for match, value in matches if match}


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
        prompt_length=length if isinstance(length, int) else None,
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
            target = whole[index]
            delta = choice.get("delta") or {}
            target["text"] += choice.get("text") or delta.get("content") or ""
            if isinstance(choice.get("token_ids"), list):
                target["token_ids"] = (target["token_ids"] or []) + choice["token_ids"]
            target["finish_reason"] = choice.get("finish_reason") or target.get("finish_reason")
            prompt_ids = prompt_ids or choice.get("prompt_token_ids")
    return [_generated(choice, prompt_ids) for choice in whole]
