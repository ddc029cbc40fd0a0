"""Speak to SGLang: its `/generate` scores token ids; models and chats are of the OpenAI dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.verify.servers.client import parallel
from tasks.verify.servers.openai import OpenAiServer, require
from tasks.verify.servers.server import (
    Entry,
    Generated,
    Ids,
    Prompt,
    Scores,
    ServerError,
    UnsupportedError,
    entry,
)

_TOP = 50


class SglangServer(OpenAiServer):
    """A server of SGLang, whose log-probabilities name token ids.

    `lora_path` selects an adapter by the name that `/v1/models` lists; for the base it is left out,
    since `model` alone selects the base everywhere.
    """

    def score(self, model: str, sequences: Sequence[Ids], workers: int = 0) -> list[Scores]:
        return parallel(
            lambda ids: self._scored(model, list(ids)),
            sequences,
            workers or self.client.workers,
        )

    def next(
        self, model: str, prefixes: Sequence[Ids], workers: int = 0, cache: bool = True
    ) -> list[Entry]:

        def ask(prefix: Sequence[int]) -> Entry:
            tops = self._told(model, list(prefix)).get("output_top_logprobs") or [()]
            return entry({int(token): value for value, token, *_ in tops[0] or ()})

        return parallel(ask, prefixes, workers or self.client.workers)

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        body = {"model": model, "prompt": text, "add_special_tokens": special}
        try:
            return tuple(self.client.post("/tokenize", body)["tokens"])
        except ServerError as error:
            if error.code != "missing":
                raise
            reason = "has no tokeniser to ask; SGLang 0.5.4 and later has"
            raise UnsupportedError(f"{self.url} {reason}") from None

    def generate(
        self, model: str, prompt: Prompt, count: int, n: int = 1, stream: bool = False, **more: Any
    ) -> list[Generated]:
        if stream or (len(prompt) > 0 and isinstance(prompt[0], Mapping)):
            chosen = {**self._adapter(model), **more}
            return super().generate(model, prompt, count, n, stream=stream, **chosen)
        options = {"max_new_tokens": count, **({"n": n} if n > 1 else {}), **more}
        made = self._native(model, list(prompt), options)
        return [_generated(part) for part in (made if isinstance(made, list) else [made])]

    def extras(self) -> dict[str, Any]:
        """Return nothing: chats of SGLang tell no token ids."""
        return {}

    def try_out(self, model: str) -> None:
        """Find out which names are adapters; what SGLang returns is known."""
        self._completes = True
        self._bases = {served.name for served in self.models() if served.parent is None}

    def _scored(self, model: str, ids: list[int]) -> Scores:
        told = self._told(model, ids, logprob_start_len=0)
        own, tops = told.get("input_token_logprobs"), told.get("input_top_logprobs")
        require(self.url, own, ids)
        require(self.url, tops, ids)
        assert own is not None
        assert tops is not None
        return [
            entry({int(token): value for value, token, *_ in [*(top or ()), mine]})
            for top, mine in zip(tops[1:], own[1:], strict=True)
        ]

    def _told(self, model: str, ids: list[int], **options: Any) -> Mapping[str, Any]:
        body = {"return_logprob": True, "top_logprobs_num": _TOP, **options}
        sampling = {"max_new_tokens": 1, "temperature": 0}
        told: Mapping[str, Any] = self._native(model, ids, sampling, **body)["meta_info"]
        return told

    def _adapter(self, model: str) -> dict[str, str]:
        return {} if model in self._bases else {"lora_path": model}

    def _native(
        self, model: str, ids: Sequence[Any], sampling: Mapping[str, Any], **body: Any
    ) -> Any:
        body |= {**self._adapter(model), "input_ids": ids, "sampling_params": sampling}
        return self.client.post("/generate", body)


def _generated(answer: Mapping[str, Any]) -> Generated:
    told = answer.get("meta_info") or {}
    reason, ids = told.get("finish_reason") or {}, answer.get("output_ids")
    return Generated(
        ids=tuple(ids) if ids else None,
        text=str(answer.get("text", "")),
        finish=str(reason.get("type", "")),
        prompt_length=told.get("prompt_tokens"),
    )
