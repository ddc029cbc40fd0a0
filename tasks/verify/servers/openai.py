"""Speak the OpenAI dialect: lists of models, completions and chats, streamed or not."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks.verify.servers.http import Http
from tasks.verify.servers.server import (
    Abilities,
    Generated,
    Message,
    Prompt,
    ServedModel,
    Server,
    ServerError,
    Tools,
    UnsupportedError,
    chat_fields,
)


class OpenAiServer(Server):
    """Server with `/v1/models`, `/v1/completions` and `/v1/chat/completions`.

    Log-probabilities are those of its two kinds: `completions.py` and `sglang.py`.

    Args:
        http: its client.
        kind: dialect.
        version: as the server says.
        model: name to try out abilities with; None for the first one.
    """

    def __init__(
        self,
        http: Http,
        *,
        kind: str = "openai",
        version: str = "",
        model: str | None = None,
    ) -> None:
        self.http = http
        self.url = http.url
        self.kind = kind
        self.version = version
        names = [served.name for served in self.models()]
        if not names:
            raise ServerError(f"{self.url} serves no model", code="model")
        # Another name is a mistake, which is reported with all others.
        self.abilities = self.tried(model if model in names else names[0])

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

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text, with special tokens (BOS) unless told not."""
        raise UnsupportedError(f"{self.url} does not tokenise texts")

    def render(self, model: str, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """Return the ids of a conversation with the generation prompt, by the server's template."""
        if self.abilities.render:
            fields = chat_fields(messages, tools)
            # "auto" needs a parser of calls; the prompt is the same.
            choice = {"tools": fields["tools"], "tool_choice": "none"} if tools else {}
            ids = self.generate(model, fields["messages"], 1, **choice)[0].prompt_ids
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

    @abstractmethod
    def tried(self, model: str) -> Abilities:
        """Return what the server does when it is asked for it."""

    def tokenizes(self, model: str) -> bool:
        """Return True if the server tokenises texts."""
        return False

    def renders(self, model: str) -> bool:
        """Return True if the server tells the token ids of a conversation."""
        body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1, **self.extras()}
        try:
            return bool(self.post("/v1/chat/completions", model, body).get("prompt_token_ids"))
        except ServerError as error:
            if error.code in ("missing", "request", "response"):
                return False
            raise


def _length(card: Mapping[str, Any]) -> int | None:
    length = card.get("max_model_len")
    return length if isinstance(length, int) else None


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
