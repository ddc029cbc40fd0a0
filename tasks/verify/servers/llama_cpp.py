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
    `props` is the answer of `/props`.
    """

    def __init__(self, client: Client, props: Mapping[str, Any]) -> None:
        self.client, self.url = client, client.url
        self.kind, self.version = "llama.cpp", str(props.get("build_info", ""))
        length = (props.get("default_generation_settings") or {}).get("n_ctx")
        self._length = length if isinstance(length, int) else None
        self._path = str(props.get("model_path", "")) or None
        self._models, self._lora = self._names()
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
            answer = self._completion(model, list(prefix), body)
            listed = answer.get("completion_probabilities") or [{}]
            tops = listed[0].get("top_logprobs") or ()
            return entry({int(top["id"]): top["logprob"] for top in tops})

        return parallel(ask, prefixes, workers or self.client.workers)

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        body = {"content": text, "add_special": special, "parse_special": True}
        return tuple(self.client.post("/tokenize", body)["tokens"])

    def render(self, model: str, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """Return the ids of a conversation with the generation prompt, by the server's template.

        A chat request tokenises its prompt with special tokens, as here.
        """
        prompt = self.client.post("/apply-template", chat_fields(messages, tools))["prompt"]
        return self.tokenize(model, str(prompt))

    def generate(
        self, model: str, prompt: Prompt, count: int, n: int = 1, stream: bool = False, **more: Any
    ) -> list[Generated]:

        def respond(_: int) -> Generated:
            if len(prompt) > 0 and isinstance(prompt[0], Mapping):
                fields = {"messages": list(prompt), "max_tokens": count}
                return self._chat({**fields, **self._selected(model), **more})
            body = {"n_predict": count, "return_tokens": True, **more}
            return (self._streamed if stream else self._whole)(model, prompt, body)

        return parallel(respond, range(n), self.client.workers)

    def _chat(self, body: Mapping[str, Any]) -> Generated:
        # Log-probabilities are asked for because they name the ids.
        answer = self.client.post("/v1/chat/completions", {**body, "logprobs": True})
        choice = answer["choices"][0]
        told = (choice.get("logprobs") or {}).get("content")
        return Generated(
            ids=tuple(int(token["id"]) for token in told) if told else None,
            text=str((choice.get("message") or {}).get("content") or ""),
            finish=str(choice.get("finish_reason") or ""),
            prompt_length=(answer.get("usage") or {}).get("prompt_tokens"),
        )

    def _whole(self, model: str, ids: Prompt, body: Mapping[str, Any]) -> Generated:
        return _generated(self._completion(model, ids, body))

    def _streamed(self, model: str, ids: Prompt, body: Mapping[str, Any]) -> Generated:
        text, tokens = "", list[int]()
        last: Mapping[str, Any] = {}
        request = {"prompt": list(ids), **body, **self._selected(model), "stream": True}
        for part in self.client.events("/completion", request):
            text += part.get("content", "")
            tokens += part.get("tokens") or []
            last = part
        if len(tokens) < last.get("tokens_predicted", 0):
            raise UnsupportedError(f"{self.url} does not stream tokens that are parts of a letter")
        return _generated({**last, "content": text, "tokens": tokens})

    def _completion(self, model: str, ids: Prompt, body: Mapping[str, Any]) -> Any:
        request = {"prompt": list(ids), **body, **self._selected(model)}
        answer = self.client.post("/completion", request)
        if not isinstance(answer, dict):
            raise ServerError(f"{self.url}/completion: no response", code="response")
        return answer

    def _selected(self, model: str) -> dict[str, Any]:
        """Return the field that selects the adapters of a request."""
        if model not in self._lora:
            names = f"it serves {', '.join(self._lora)}"
            raise ServerError(f"{self.url} serves no model {model!r}; {names}", code="model")
        scales = self._lora[model]
        return {} if scales is None else {"lora": scales}

    def _names(self) -> tuple[tuple[ServedModel, ...], dict[str, list[dict[str, Any]] | None]]:
        """Return the models, and the scales of all adapters for each name."""
        cards = self.client.get("/v1/models").get("data") or [{}]
        name = str(cards[0].get("id") or "default")
        models = [ServedModel(name, None, self._path, self._length)]
        lora: dict[str, list[dict[str, Any]] | None] = {name: None}
        adapters = self.client.optional("/lora-adapters")
        adapters = adapters if isinstance(adapters, list) else []
        if adapters:
            base = name + _WITHOUT
            models.append(ServedModel(base, None, self._path, self._length))
            lora[base] = [{"id": adapter["id"], "scale": 0.0} for adapter in adapters]
        for chosen in adapters:
            path = PurePath(str(chosen["path"]))
            models.append(ServedModel(path.stem, name + _WITHOUT, str(path), self._length))
            lora[path.stem] = [
                {"id": adapter["id"], "scale": float(adapter["id"] == chosen["id"])}
                for adapter in adapters
            ]
        return tuple(models), lora


def _generated(answer: Mapping[str, Any]) -> Generated:
    stop = str(answer.get("stop_type", ""))
    tokens, length = answer.get("tokens"), answer.get("tokens_evaluated")
    return Generated(
        ids=tuple(tokens) if tokens else None,
        text=str(answer.get("content", "")),
        finish=_FINISH.get(stop, stop),
        prompt_length=length if isinstance(length, int) else None,
    )
