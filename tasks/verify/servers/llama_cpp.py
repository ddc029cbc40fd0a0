"""Speak to `llama-server` of llama.cpp: next tokens after token ids, its tokeniser and template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.verify.servers.client import Client, parallel
from tasks.verify.servers.server import (
    Entry,
    Generated,
    Ids,
    Message,
    Prompt,
    ServedModel,
    Server,
    Tools,
    chat_fields,
    entry,
    is_chat,
)

_TOP = 100
_FORCED = 100.0
"""Bias that makes a token certain."""
_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}


class LlamaCppServer(Server):
    """A server of llama.cpp, with the adapters of its command line at their default scales."""

    def __init__(self, client: Client) -> None:
        self.client, self.url = client, client.url
        props = client.get("/props")
        self.kind, self.version = "llama.cpp", str(props.get("build_info", ""))
        length = (props.get("default_generation_settings") or {}).get("n_ctx")
        cards = client.get("/v1/models").get("data") or [{}]
        name, root = str(cards[0].get("id") or "default"), str(props.get("model_path", ""))
        self._model = ServedModel(name, None, root or None, length)
        # Log-probabilities are those before biases. A token that is a whole letter is forced: after
        # a part of a letter the server waits for the rest, and returns none.
        letter = self.tokenize(name, "a", special=False)[-1]
        self._bias = [[letter, _FORCED]]

    def models(self) -> tuple[ServedModel, ...]:
        return (self._model,)

    def next(
        self, model: str, prefixes: Sequence[Ids], workers: int = 0, cache: bool = True
    ) -> list[Entry]:
        body = {"n_predict": 1, "n_probs": _TOP, "temperature": 0, "logit_bias": self._bias}
        body |= {} if cache else {"cache_prompt": False}

        def ask(prefix: Ids) -> Entry:
            answer = self.client.post("/completion", {"prompt": list(prefix), **body})
            listed = answer.get("completion_probabilities") or [{}]
            tops = listed[0].get("top_logprobs") or ()
            return entry({int(top["id"]): top["logprob"] for top in tops})

        return parallel(ask, prefixes, workers or self.client.workers)

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        body = {"content": text, "add_special": special, "parse_special": True}
        return tuple(self.client.post("/tokenize", body)["tokens"])

    def render(self, model: str, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        # A chat request tokenises its prompt with special tokens, as here.
        prompt = self.client.post("/apply-template", chat_fields(messages, tools))["prompt"]
        return self.tokenize(model, str(prompt))

    def generate(
        self, model: str, prompt: Prompt, count: int, n: int = 1, stream: bool = False, **more: Any
    ) -> list[Generated]:
        if stream:
            self._cannot("stream tokens that are parts of a letter")
        respond = self._chat if is_chat(prompt) else self._complete
        return parallel(lambda _: respond(prompt, count, more), range(n), self.client.workers)

    def _chat(self, prompt: Prompt, count: int, more: Mapping[str, Any]) -> Generated:
        # Log-probabilities are asked for because they name the ids.
        body = {"messages": list(prompt), "max_tokens": count, **more, "logprobs": True}
        answer = self.client.post("/v1/chat/completions", body)
        choice = answer["choices"][0]
        tokens = (choice.get("logprobs") or {}).get("content")
        return Generated(
            ids=tuple(int(token["id"]) for token in tokens) if tokens else None,
            text=str((choice.get("message") or {}).get("content") or ""),
            finish=str(choice.get("finish_reason") or ""),
            prompt_length=(answer.get("usage") or {}).get("prompt_tokens"),
        )

    def _complete(self, prompt: Prompt, count: int, more: Mapping[str, Any]) -> Generated:
        body = {"prompt": list(prompt), "n_predict": count, "return_tokens": True, **more}
        answer = self.client.post("/completion", body)
        stop, tokens = str(answer.get("stop_type", "")), answer.get("tokens")
        return Generated(
            ids=tuple(tokens) if tokens else None,
            text=str(answer.get("content", "")),
            finish=_FINISH.get(stop, stop),
            prompt_length=answer.get("tokens_evaluated"),
        )
