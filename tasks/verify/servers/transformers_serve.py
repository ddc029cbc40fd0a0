"""Speak to `transformers serve`: texts in and texts out, without log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.verify.servers.http import Http
from tasks.verify.servers.server import (
    Entry,
    Generated,
    Message,
    ServedModel,
    ServerError,
    UnsupportedError,
)
from tasks.verify.servers.texts import TextServer
from tasks.verify.servers.vocabulary import Vocabulary


class TransformersServer(TextServer):
    """A server of transformers. It refuses fields that it does not know, so that few are sent."""

    def __init__(
        self, http: Http, version: str, vocabulary: Vocabulary | None, model: str | None
    ) -> None:
        super().__init__(http, "transformers", version, vocabulary)
        self._model = model

    def models(self) -> tuple[ServedModel, ...]:
        """Return the model that `connect` was given, else those of the hub's cache.

        The server loads any folder or repository by its name, and lists the cache alone.
        """
        if self._model is not None:
            return (ServedModel(self._model, root=self._model),)
        listed = self.http.get("/v1/models").get("data") or ()
        return tuple(ServedModel(str(card["id"])) for card in listed)

    def next_token(self, model: str, text: str, ids: Sequence[int]) -> Entry | None:
        """Raise UnsupportedError: there are no log-probabilities."""
        raise UnsupportedError(f"{self.url} returns no log-probabilities")

    def respond(
        self, model: str, prompt: str | Sequence[Message], count: int, sampling: Mapping[str, Any]
    ) -> Generated:
        """Return one response to a text or a conversation."""
        is_text = isinstance(prompt, str)
        path = "/v1/completions" if is_text else "/v1/chat/completions"
        body = {"model": model, "max_tokens": count, "stream": False, **sampling}
        body |= {"prompt": prompt} if is_text else {"messages": list(prompt)}
        try:
            answer: Any = self.http.post(path, body)
        except ServerError as error:
            raise self.named(error, model) from None
        choice = answer["choices"][0]
        text = choice.get("text") if is_text else choice["message"].get("content")
        length = (answer.get("usage") or {}).get("prompt_tokens")
        reason = str(choice.get("finish_reason") or "")
        return Generated(None, str(text or ""), reason, prompt_length=length)
