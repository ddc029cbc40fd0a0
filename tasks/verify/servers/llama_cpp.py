"""Speak to `llama-server` of llama.cpp: next tokens after token ids, its tokeniser and template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
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

_TOP = 100
_FORCED = 100.0
"""Bias that makes a token certain."""
_WITHOUT = "@base"
"""Ending of the name under which the base is asked without any adapter."""
_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}


class LlamaCppServer(Server):
    """A server of llama.cpp.

    Its model's name is what a client gets: with the adapters of the command line at their default
    scales. With adapters there are two kinds of names more, which `lora` of each request selects:
    the adapters' file names without ending, and the base as `<model>@base`.
    """

    def __init__(self, client: Client) -> None:
        self.client, self.url = client, client.url
        props = client.get("/props")
        self.kind, self.version = "llama.cpp", str(props.get("build_info", ""))
        length = (props.get("default_generation_settings") or {}).get("n_ctx")
        self._models, self._lora = self._names(str(props.get("model_path", "")) or None, length)
        # Log-probabilities are those before biases. A token that is a whole letter is forced: after
        # a part of a letter the server waits for the rest, and returns none.
        letter = self.tokenize(self._models[0].name, "a", special=False)[-1]
        self._bias = [[letter, _FORCED]]

    def models(self) -> tuple[ServedModel, ...]:
        return self._models

    def score(self, model: str, sequences: Sequence[Ids], workers: int = 0) -> list[Scores]:
        raise UnsupportedError(f"{self.url} returns no log-probabilities of prompts")

    def next(
        self, model: str, prefixes: Sequence[Ids], workers: int = 0, cache: bool = True
    ) -> list[Entry]:
        """Return the most likely next tokens after each prefix, as they are generated.

        Its prompt cache mixes adapters (llama.cpp issue 26207).
        """
        body = {"n_predict": 1, "n_probs": _TOP, "temperature": 0, "logit_bias": self._bias}
        body |= {} if cache else {"cache_prompt": False}

        def ask(prefix: Sequence[int]) -> Entry:
            answer = self._completion(model, prefix, body)
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
            raise UnsupportedError(f"{self.url} does not stream tokens that are parts of a letter")

        def respond(_: int) -> Generated:
            if is_chat(prompt):
                return self._chat(model, {"messages": list(prompt), "max_tokens": count, **more})
            body = {"n_predict": count, "return_tokens": True, **more}
            return _generated(self._completion(model, prompt, body))

        return parallel(respond, range(n), self.client.workers)

    def _chat(self, model: str, body: Mapping[str, Any]) -> Generated:
        # Log-probabilities are asked for because they name the ids.
        body = {**body, **self._selected(model), "logprobs": True}
        answer = self.client.post("/v1/chat/completions", body)
        choice = answer["choices"][0]
        tokens = (choice.get("logprobs") or {}).get("content")
        return Generated(
            ids=tuple(int(token["id"]) for token in tokens) if tokens else None,
            text=str((choice.get("message") or {}).get("content") or ""),
            finish=str(choice.get("finish_reason") or ""),
            prompt_length=(answer.get("usage") or {}).get("prompt_tokens"),
        )

    def _completion(self, model: str, ids: Prompt, body: Mapping[str, Any]) -> Any:
        request = {"prompt": list(ids), **body, **self._selected(model)}
        return self.client.post("/completion", request)

    def _selected(self, model: str) -> dict[str, Any]:
        """Return the field that selects the adapters of a request."""
        if model not in self._lora:
            raise ServerError(f"{self.url} serves no model {model!r}", code="missing")
        scales = self._lora[model]
        return {} if scales is None else {"lora": scales}

    def _names(
        self, path: str | None, length: int | None
    ) -> tuple[tuple[ServedModel, ...], dict[str, list[dict[str, Any]] | None]]:
        """Return the models, and the scales of all adapters for each name."""
        cards = self.client.get("/v1/models").get("data") or [{}]
        name = str(cards[0].get("id") or "default")
        models = [ServedModel(name, None, path, length)]
        lora: dict[str, list[dict[str, Any]] | None] = {name: None}
        adapters = self.client.optional("/lora-adapters") or []
        if adapters:
            base = name + _WITHOUT
            models.append(ServedModel(base, None, path, length))
            lora[base] = [{"id": adapter["id"], "scale": 0.0} for adapter in adapters]
        for chosen in adapters:
            file = PurePath(str(chosen["path"]))
            models.append(ServedModel(file.stem, name + _WITHOUT, str(file), length))
            lora[file.stem] = [
                {"id": adapter["id"], "scale": float(adapter["id"] == chosen["id"])}
                for adapter in adapters
            ]
        return tuple(models), lora


def _generated(answer: Mapping[str, Any]) -> Generated:
    stop, tokens = str(answer.get("stop_type", "")), answer.get("tokens")
    return Generated(
        ids=tuple(tokens) if tokens else None,
        text=str(answer.get("content", "")),
        finish=_FINISH.get(stop, stop),
        prompt_length=answer.get("tokens_evaluated"),
    )
