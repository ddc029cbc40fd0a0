"""Speak to SGLang: its `/generate` scores token ids; models and chats are of the OpenAI dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.verify.servers.openai import OpenAiServer, require, tokens_of
from tasks.verify.servers.server import Entry, Generated, Prompt, Scores, entry, is_chat

_TOP = 50


class SglangServer(OpenAiServer):
    """A server of SGLang, whose log-probabilities name token ids.

    `lora_path` selects an adapter by the name that `/v1/models` lists; for the base it is left out,
    since `model` alone selects the base everywhere.
    """

    def try_out(self, model: str) -> None:
        """Find out which names are adapters; what SGLang returns is known."""
        self._completes = self._scores_prompts = self._scores_next = True
        self._bases = {served.name for served in self.models() if served.parent is None}

    def score_one(self, model: str, ids: list[int]) -> Scores:
        """Return the log-probabilities of a prompt: the most likely ids, and its own."""
        facts = self._scored(model, ids, logprob_start_len=0)
        own, tops = facts.get("input_token_logprobs"), facts.get("input_top_logprobs")
        require(self.url, own, ids)
        require(self.url, tops, ids)
        assert own is not None
        assert tops is not None
        return [
            entry({int(token): value for value, token, *_ in [*(top or ()), mine]})
            for top, mine in zip(tops[1:], own[1:], strict=True)
        ]

    def next_one(self, model: str, ids: list[int]) -> Entry:
        """Return the most likely next tokens after a prefix."""
        tops = self._scored(model, ids).get("output_top_logprobs") or [()]
        return entry({int(token): value for value, token, *_ in tops[0] or ()})

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        body = {"model": model, "prompt": text, "add_special_tokens": special}
        return tokens_of(self.client, body)  # SGLang 0.5.4 and later

    def generate(
        self, model: str, prompt: Prompt, count: int, n: int = 1, stream: bool = False, **more: Any
    ) -> list[Generated]:
        if stream or is_chat(prompt):
            chosen = {**self._adapter(model), **more}
            return super().generate(model, prompt, count, n, stream=stream, **chosen)
        options = {"max_new_tokens": count, **({"n": n} if n > 1 else {}), **more}
        made = self._native(model, list(prompt), options)
        return [_generated(part) for part in (made if isinstance(made, list) else [made])]

    def extras(self) -> dict[str, Any]:
        """Return nothing: chats of SGLang tell no token ids."""
        return {}

    def _scored(self, model: str, ids: list[int], **options: Any) -> Mapping[str, Any]:
        body = {"return_logprob": True, "top_logprobs_num": _TOP, **options}
        sampling = {"max_new_tokens": 1, "temperature": 0}
        facts: Mapping[str, Any] = self._native(model, ids, sampling, **body)["meta_info"]
        return facts

    def _adapter(self, model: str) -> dict[str, str]:
        return {} if model in self._bases else {"lora_path": model}

    def _native(self, model: str, ids: list[Any], sampling: Mapping[str, Any], **body: Any) -> Any:
        body |= {**self._adapter(model), "input_ids": ids, "sampling_params": sampling}
        return self.client.post("/generate", body)


def _generated(answer: Mapping[str, Any]) -> Generated:
    facts = answer.get("meta_info") or {}
    ids = answer.get("output_ids")
    return Generated(
        ids=tuple(ids) if ids else None,
        text=str(answer.get("text", "")),
        finish=str((facts.get("finish_reason") or {}).get("type", "")),
        prompt_length=facts.get("prompt_tokens"),
    )
