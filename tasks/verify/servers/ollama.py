"""Speak to Ollama: raw texts in, texts of the most likely tokens out (0.12.11 and later)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tasks.verify.servers.http import Http
from tasks.verify.servers.scoring import entry
from tasks.verify.servers.server import Entry, Generated, Message, ServedModel, ServerError
from tasks.verify.servers.texts import TextServer
from tasks.verify.servers.vocabulary import Vocabulary

_TOP = 20


class OllamaServer(TextServer):
    """A server of Ollama."""

    def __init__(
        self, http: Http, version: str, vocabulary: Vocabulary | None, model: str | None
    ) -> None:
        super().__init__(http, "ollama", version, vocabulary)
        models = self.models()
        name = model or (models[0].name if models else "")
        if vocabulary is not None and name and self._tells(name):
            self.abilities = replace(self.abilities, next_logprobs=_TOP)

    def models(self) -> tuple[ServedModel, ...]:
        """Return the models that were pulled or created."""
        listed = self.http.get("/api/tags").get("models") or ()
        return tuple(ServedModel(str(model.get("name"))) for model in listed)

    def next_token(self, model: str, text: str, ids: Sequence[int]) -> Entry | None:
        """Return the most likely next tokens after a text; None if it became other ids there.

        Only their number is known. Tokens with a text that several tokens have are left out.
        """
        answer = self._answer(model, text, 1, {"temperature": 0}, logprobs=True, top_logprobs=_TOP)
        if answer.get("prompt_eval_count") != len(ids):
            return None
        listed = (answer.get("logprobs") or [{}])[0]
        values: dict[int, float] = {}
        for token in (listed, *(listed.get("top_logprobs") or ())):
            piece = bytes(token.get("bytes") or ()) or str(token.get("token", "")).encode()
            number = self.vocabulary.find(piece) if self.vocabulary and piece else None
            if number is not None:
                values[number] = token["logprob"]
        return entry(values)

    def respond(
        self, model: str, prompt: str | Sequence[Message], count: int, sampling: Mapping[str, Any]
    ) -> Generated:
        """Return one response to a text or a conversation."""
        answer = self._answer(model, prompt, count, sampling)
        text = answer.get("response") or (answer.get("message") or {}).get("content")
        length = answer.get("prompt_eval_count")
        return Generated(
            None,
            str(text or ""),
            str(answer.get("done_reason") or ""),
            prompt_length=length if isinstance(length, int) else None,
        )

    def _tells(self, model: str) -> bool:
        """Return True if this version returns log-probabilities."""
        answer = self._answer(model, "a", 1, {}, logprobs=True, top_logprobs=1)
        return bool(answer.get("logprobs"))

    def _answer(
        self,
        model: str,
        prompt: str | Sequence[Message],
        count: int,
        sampling: Mapping[str, Any],
        **more: Any,
    ) -> dict[str, Any]:
        body = {"model": model, "stream": False, "options": {"num_predict": count, **sampling}}
        is_text = isinstance(prompt, str)
        body |= {"prompt": prompt, "raw": True} if is_text else {"messages": list(prompt)}
        try:
            answer = self.http.post("/api/generate" if is_text else "/api/chat", {**body, **more})
        except ServerError as error:
            raise self.named(error, model) from None
        if not isinstance(answer, dict):
            raise ServerError(f"{self.url}: no response", code="response")
        return answer
