"""Speak to SGLang: its `/generate` scores token ids; models and chats are of the OpenAI dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.verify.servers.http import Http
from tasks.verify.servers.openai import OpenAiServer
from tasks.verify.servers.scoring import entry, scores
from tasks.verify.servers.server import (
    Abilities,
    Entry,
    Generated,
    Prompt,
    Scores,
    ServerError,
    UnsupportedError,
)

_TOP = 50


class SglangServer(OpenAiServer):
    """A server of SGLang, whose log-probabilities name token ids.

    `lora_path` selects an adapter by the name that `/v1/models` lists; for the base it is left out.
    """

    def __init__(self, http: Http, version: str, model: str | None = None) -> None:
        self._bases: set[str] = set()
        super().__init__(http, kind="sglang", version=version, model=model)

    def score(
        self, model: str, sequences: Sequence[Sequence[int]], *, workers: int | None = None
    ) -> list[Scores]:
        """Return the log-probabilities of token sequences, in their order."""
        items = [list(map(int, sequence)) for sequence in sequences]
        return self.http.parallel(lambda ids: self._scored(model, ids), items, workers)

    def next_tokens(
        self, model: str, prefixes: Sequence[Sequence[int]], *, workers: int | None = None
    ) -> list[Entry]:
        """Return the most likely next tokens after each prefix, as they are generated."""

        def ask(prefix: Sequence[int]) -> Entry:
            told = self._native(model, list(map(int, prefix)), 1, return_logprob=True)["meta_info"]
            tops = told.get("output_top_logprobs") or [()]
            return entry({int(token): value for value, token, *_ in tops[0] or ()})

        return self.http.parallel(ask, list(prefixes), workers)

    def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        body = {"model": model, "tokens": list(map(int, ids)), "skip_special_tokens": False}
        try:
            return str(self.http.post("/detokenize", body)["text"])
        except ServerError as error:
            raise self._unsupported(error) from None

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text, with special tokens (BOS) unless told not."""
        body = {"model": model, "prompt": text, "add_special_tokens": special}
        try:
            return tuple(self.http.post("/tokenize", body)["tokens"])
        except ServerError as error:
            raise self._unsupported(error) from None

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
        """Return n responses of at most `count` tokens; streamed ones have no ids."""
        if stream or (len(prompt) > 0 and isinstance(prompt[0], Mapping)):
            chosen = {**self._adapter(model), **sampling}
            return super().generate(model, prompt, count, n, stream=stream, **chosen)
        ids = [int(token) for token in prompt if not isinstance(token, Mapping)]
        made = self._native(model, ids, count, **({"n": n} if n > 1 else {}), **sampling)
        return [_generated(part) for part in (made if isinstance(made, list) else [made])]

    def extras(self) -> dict[str, Any]:
        """Return nothing: chats of SGLang tell no token ids."""
        return {}

    def tried(self, model: str) -> Abilities:
        """Return what SGLang can answer."""
        self._bases = {served.name for served in self.models() if served.parent is None}
        try:
            tokenizes = bool(self.tokenize(model, "a"))
        except UnsupportedError:
            tokenizes = False
        return Abilities(True, _TOP, _TOP, tokenizes, False)

    def _scored(self, model: str, ids: list[int]) -> Scores:
        told = self._native(model, ids, 1, return_logprob=True, logprob_start_len=0)["meta_info"]
        own, tops = told.get("input_token_logprobs"), told.get("input_top_logprobs")
        if not own or not tops or len(own) != len(ids) or len(tops) != len(ids):
            raise ServerError(
                f"{self.url}/generate: log-probabilities for {len(own or ())} of {len(ids)} tokens",
                code="response",
            )
        entries = {}
        for at in range(1, len(ids)):
            values = {int(token): value for value, token, *_ in tops[at] or ()}
            value, token, *_ = own[at]
            entries[at - 1] = entry({**values, int(token): value})
        return scores(len(ids), entries)

    def _adapter(self, model: str) -> dict[str, str]:
        """Return the field that selects an adapter: `model` alone selects the base everywhere."""
        return {} if model in self._bases else {"lora_path": model}

    def _native(self, model: str, ids: list[int], count: int, **options: Any) -> Any:
        fields = {"return_logprob", "logprob_start_len"}
        body: dict[str, Any] = {key: options.pop(key) for key in fields & set(options)}
        if "return_logprob" in body:
            body["top_logprobs_num"] = _TOP
            options["temperature"] = 0
        body |= self._adapter(model)
        body |= {"input_ids": ids, "sampling_params": {"max_new_tokens": count, **options}}
        try:
            return self.http.post("/generate", body)
        except ServerError as error:
            raise self.explained(error, model) from None

    def _unsupported(self, error: ServerError) -> ServerError:
        if error.code != "missing":
            return error
        return UnsupportedError(f"{self.url} has no tokeniser to ask; SGLang 0.5.4 and later has")


def _generated(answer: Mapping[str, Any]) -> Generated:
    told = answer.get("meta_info") or {}
    reason, ids = told.get("finish_reason") or {}, answer.get("output_ids")
    return Generated(
        ids=tuple(ids) if ids else None,
        text=str(answer.get("text", "")),
        finish=str(reason.get("type", "")),
        prompt_length=told.get("prompt_tokens"),
    )
