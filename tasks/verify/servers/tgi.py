"""Speak to Text Generation Inference: texts in, token ids with log-probabilities out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tasks.verify.servers.http import Http
from tasks.verify.servers.scoring import entry
from tasks.verify.servers.server import (
    Entry,
    Generated,
    Message,
    ServedModel,
    ServerError,
    Tools,
    chat_fields,
)
from tasks.verify.servers.texts import TextServer
from tasks.verify.servers.vocabulary import Vocabulary

_TOP = 5
"""The most that a server takes by default (`--max-top-n-tokens`)."""
_FINISH = {"eos_token": "stop", "stop_sequence": "stop"}


class TgiServer(TextServer):
    """A server of TGI; other models than the first one are its LoRA adapters."""

    def __init__(
        self, http: Http, info: Mapping[str, Any], vocabulary: Vocabulary | None, model: str | None
    ) -> None:
        super().__init__(http, "tgi", str(info.get("version", "")), vocabulary)
        self.abilities = replace(
            self.abilities,
            next_logprobs=_TOP if vocabulary is not None else 0,
            tokenize=True,
            render=True,
        )
        length, name = info.get("max_total_tokens"), str(info["model_id"])
        length = length if isinstance(length, int) else None
        served = [ServedModel(name, None, name, length)]
        if model is not None and model != name:
            served.append(ServedModel(model, name, None, length))
        self._served = tuple(served)

    def models(self) -> tuple[ServedModel, ...]:
        """Return the model, and the adapter that `connect` was given."""
        return self._served

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text; TGI always adds special tokens."""
        return tuple(int(t["id"]) for t in self._post("/tokenize", model, {"inputs": text}))

    def render(self, model: str, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """Return the ids of a conversation with the generation prompt, by the server's template."""
        body = {"model": model, **chat_fields(messages, tools)}
        answer = self._post("/chat_tokenize", model, body)
        return tuple(int(token["id"]) for token in answer["tokenize_response"])

    def next_token(self, model: str, text: str, ids: Sequence[int]) -> Entry | None:
        """Return the most likely next tokens after a text; None if it became other ids there."""
        options = {"max_new_tokens": 1, "top_n_tokens": _TOP, "decoder_input_details": True}
        details = self._details(model, text, options)["details"]
        if [int(token["id"]) for token in details.get("prefill") or ()] != list(ids):
            return None
        tops = [*(details.get("top_tokens") or [()])[0], *(details.get("tokens") or ())[:1]]
        return entry({int(token["id"]): token["logprob"] for token in tops})

    def respond(
        self, model: str, prompt: str | Sequence[Message], count: int, sampling: Mapping[str, Any]
    ) -> Generated:
        """Return one response to a text or a conversation."""
        if not isinstance(prompt, str):
            body = {"model": model, "messages": list(prompt), "max_tokens": count, **sampling}
            answer = self._post("/v1/chat/completions", model, body)
            choice = answer["choices"][0]
            return Generated(
                None,
                str(choice["message"].get("content") or ""),
                _FINISH.get(choice["finish_reason"], choice["finish_reason"]),
                prompt_length=(answer.get("usage") or {}).get("prompt_tokens"),
            )
        options = {"max_new_tokens": count, "decoder_input_details": True, **sampling}
        if options.get("temperature", 1) == 0:  # 0 is refused; greedy is the default
            del options["temperature"]
        elif sampling:
            options["do_sample"] = True
        answer = self._details(model, prompt, options)
        details = answer["details"]
        prefill = tuple(int(token["id"]) for token in details.get("prefill") or ())
        reason = str(details.get("finish_reason", ""))
        return Generated(
            tuple(int(token["id"]) for token in details["tokens"]),
            str(answer.get("generated_text", "")),
            _FINISH.get(reason, reason),
            prefill or None,
            len(prefill) or None,
        )

    def _details(self, model: str, text: str, options: Mapping[str, Any]) -> Any:
        adapter = {} if model == self._served[0].name else {"adapter_id": model}
        parameters = {"details": True, **adapter, **options}
        return self._post("/generate", model, {"inputs": text, "parameters": parameters})

    def _post(self, path: str, model: str, body: Mapping[str, Any]) -> Any:
        try:
            return self.http.post(path, body)
        except ServerError as error:
            raise self.named(error, model) from None
