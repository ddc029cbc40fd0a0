"""Speak to `vllm serve`: token ids as prompts, prompt log-probabilities, its own tokeniser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.verify.servers.openai import OpenAiServer
from tasks.verify.servers.server import Message, ServerError, UnsupportedError


class VllmServer(OpenAiServer):
    """A server of vLLM."""

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text, with special tokens (BOS) unless told not."""
        return self._tokens({"model": model, "prompt": text, "add_special_tokens": special})

    def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        body = {"model": model, "tokens": list(map(int, ids))}
        return str(self._native("/detokenize", body)["prompt"])

    def render(self, model: str, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids of a conversation with the generation prompt, by the server's template.

        A chat request tells what users get. Servers before 0.10.2 do not tell its ids; there,
        `/tokenize` renders, which knows nothing of `--default-chat-template-kwargs`.
        """
        if self.abilities.render:
            return super().render(model, messages)
        return self._tokens({"model": model, "messages": list(messages)})

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
