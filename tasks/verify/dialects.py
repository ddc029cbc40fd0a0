"""Dialects: OpenAI's (vLLM and other servers with `/v1/completions`), SGLang's, llama.cpp's.

Servers of OpenAI's dialect differ in what they add to it, so that it is tried out and not assumed:
prompt log-probabilities with token ids (vLLM), or the most likely next tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tasks.verify.server import (
    Client,
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
    chat_fields,
    entry,
    is_chat,
    parallel,
)

WANTED = (100, 20, 5)
"""Ids per position, as many as the server allows: vLLM 20 by default, OpenAI's own API 5."""
_SGLANG_IDS = 50
"""Ids per position that are asked of SGLang."""
_TOKEN = re.compile(r"token_id:(\d+)")
_ONE = {"max_tokens": 1, "temperature": 0}
_LLAMA_IDS = 100
"""Ids per position that are asked of llama.cpp."""
_FORCED = 100.0
"""Bias that makes a token certain."""
_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}
"""Words of llama.cpp for the end of a response."""


class OpenAiServer(Server):
    """Server of the OpenAI dialect; it is tried out with `model`, or its first one."""

    def __init__(
        self, client: Client, kind: str = "openai", version: str = "", model: str | None = None
    ) -> None:
        self.client, self.url = client, client.url
        self.kind, self.version = kind, version
        self._completes = self._scores_prompts = self._scores_next = False
        self._top = 0  # ids per position
        names = [served.name for served in self.models()]
        if not names:
            raise ServerError(f"{self.url} serves no model", code="missing")
        # Another name is a mistake, which is reported with all others.
        self.try_out(model if model in names else names[0])

    def models(self) -> tuple[ServedModel, ...]:
        cards = self.client.get("/v1/models")["data"]
        keys = ("parent", "root", "max_model_len")
        models = [ServedModel(str(card["id"]), *map(card.get, keys)) for card in cards]
        return tuple(sorted(models, key=lambda model: model.parent is not None))

    def score(self, model: str, sequences: Sequence[Ids], workers: int = 0) -> list[Scores]:
        if not self._scores_prompts:
            return super().score(model, sequences)
        ask = self.score_one
        scored = parallel(lambda ids: ask(model, [*ids]), sequences, workers or self.client.workers)
        for ids, entries in zip(sequences, scored, strict=True):
            if len(entries) != len(ids) - 1:
                raise ServerError(
                    f"{self.url}: log-probabilities for {len(entries) + 1} of {len(ids)} tokens",
                    hint="a proxy or a limit of the server may cut the prompt, or add a token",
                    code="response",
                )
        return scored

    def score_one(self, model: str, ids: list[int]) -> Scores:
        """Return vLLM's prompt log-probabilities: one mapping of id to value per position."""
        body = {"prompt": ids, "prompt_logprobs": self._top, **_ONE}
        listed = self._choice(model, body).get("prompt_logprobs") or ()
        return [
            entry({int(token): value["logprob"] for token, value in (place or {}).items()})
            for place in listed[1:]
        ]

    def next(
        self, model: str, prefixes: Sequence[Ids], workers: int = 0, cache: bool = True
    ) -> list[Entry]:
        if not self._scores_next:
            return super().next(model, prefixes)
        ask = self.next_one
        return parallel(lambda ids: ask(model, [*ids]), prefixes, workers or self.client.workers)

    def next_one(self, model: str, ids: list[int]) -> Entry:
        """Return the most likely next tokens after a prefix."""
        body = {"prompt": ids, **_ONE, **_named(self._top)}
        tops = (self._choice(model, body).get("logprobs") or {}).get("top_logprobs") or [{}]
        pairs = ((_id(token), value) for token, value in tops[0].items())
        return entry({token: value for token, value in pairs if token is not None})

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        body = {"model": model, "prompt": text, "add_special_tokens": special}
        try:
            return tuple(self.client.post("/tokenize", body)["tokens"])
        except ServerError as error:
            if error.code == "missing":
                return super().tokenize(model, text)
            raise

    def render(self, model: str, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        fields = chat_fields(messages, tools)
        # "auto" needs a parser of calls; the prompt is the same.
        choice = {"tools": fields["tools"], "tool_choice": "none"} if tools else {}
        ids = self.generate(model, fields["messages"], 1, **choice)[0].prompt_ids
        return super().render(model, messages) if ids is None else ids

    def generate(
        self, model: str, prompt: Prompt, count: int, n: int = 1, stream: bool = False, **more: Any
    ) -> list[Generated]:
        chat = is_chat(prompt)
        if not chat and not self._completes:
            return super().generate(model, prompt, count)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = {"max_tokens": count, **({"n": n} if n > 1 else {}), **more, **self.extras(model)}
        body["messages" if chat else "prompt"] = list(prompt)
        if stream:
            body = {"model": model, **body, "stream": True}
            return [_joined(self.client.events(path, body))]
        answer = self._post(path, model, body)
        choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))
        length = (answer.get("usage") or {}).get("prompt_tokens")
        return [_generated(choice, answer.get("prompt_token_ids"), length) for choice in choices]

    def extras(self, model: str) -> dict[str, Any]:
        """Return the fields of every request for responses; these let it tell token ids."""
        return {"return_token_ids": True}

    def try_out(self, model: str) -> None:
        """Find out which log-probabilities the server returns, and how many."""
        choice = self._trial(model, lambda count: {"prompt_logprobs": count})
        self._completes = choice is not None
        if choice and isinstance(choice.get("prompt_logprobs"), list):
            self._scores_prompts = self._scores_next = True
            return
        choice = self._trial(model, _named)
        self._completes |= choice is not None
        tokens = ((choice or {}).get("logprobs") or {}).get("tokens") or [None]
        self._scores_next = _id(tokens[0]) is not None

    def _trial(
        self, model: str, fields: Callable[[int], Mapping[str, Any]]
    ) -> Mapping[str, Any] | None:
        """Return the response with as many ids as the server allows; None if it refuses."""
        for self._top in WANTED:
            try:  # every vocabulary has these tokens
                return self._choice(model, {"prompt": [1, 2, 3], **_ONE, **fields(self._top)})
            except ServerError as error:
                if error.code not in ("request", "missing"):
                    raise
        return None

    def _post(self, path: str, model: str, body: Mapping[str, Any]) -> Any:
        answer = self.client.post(path, {"model": model, **body})
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise ServerError(f"{self.url}{path}: a response without choices", code="response")
        return answer

    def _choice(self, model: str, body: Mapping[str, Any]) -> Any:
        return self._post("/v1/completions", model, body)["choices"][0]


class SglangServer(OpenAiServer):
    """A server of SGLang: its `/generate` takes token ids and names those of log-probabilities.

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
        own, tops = (facts.get(f"input_{name}_logprobs") or () for name in ("token", "top"))
        return [
            entry({int(token): value for value, token, *_ in [*(top or ()), mine]})
            for top, mine in zip(tops[1:], own[1:], strict=True)
        ]

    def next_one(self, model: str, ids: list[int]) -> Entry:
        """Return the most likely next tokens after a prefix."""
        tops = self._scored(model, ids).get("output_top_logprobs") or [()]
        return entry({int(token): value for value, token, *_ in tops[0] or ()})

    def generate(
        self, model: str, prompt: Prompt, count: int, n: int = 1, stream: bool = False, **more: Any
    ) -> list[Generated]:
        if stream or is_chat(prompt):
            return super().generate(model, prompt, count, n, stream=stream, **more)
        options = {"max_new_tokens": count, **({"n": n} if n > 1 else {}), **more}
        made = self._native(model, list(prompt), options)
        return [_of_sglang(part) for part in (made if isinstance(made, list) else [made])]

    def extras(self, model: str) -> dict[str, Any]:
        """Return the field that selects an adapter; chats of SGLang tell no token ids."""
        return {} if model in self._bases else {"lora_path": model}

    def _scored(self, model: str, ids: list[int], **options: Any) -> Any:
        body = {"return_logprob": True, "top_logprobs_num": _SGLANG_IDS, **options}
        sampling = {"max_new_tokens": 1, "temperature": 0}
        return self._native(model, ids, sampling, **body)["meta_info"]

    def _native(self, model: str, ids: list[Any], sampling: Mapping[str, Any], **body: Any) -> Any:
        body |= {**self.extras(model), "input_ids": ids, "sampling_params": sampling}
        return self.client.post("/generate", body)


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
        body = {"n_predict": 1, "n_probs": _LLAMA_IDS, "temperature": 0, "logit_bias": self._bias}
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


def _named(count: int) -> dict[str, Any]:
    return {"logprobs": count, "return_tokens_as_token_ids": True}


def _id(token: Any) -> int | None:
    """Return the id of a token that a server names by it."""
    match = _TOKEN.fullmatch(str(token))
    return int(match[1]) if match else None


def _generated(choice: Mapping[str, Any], prompt_ids: Any = None, length: Any = None) -> Generated:
    text = choice["text"] if "text" in choice else (choice.get("message") or {}).get("content")
    prompt_ids, ids = prompt_ids or choice.get("prompt_token_ids"), choice.get("token_ids")
    return Generated(
        ids=tuple(ids) if isinstance(ids, list) else None,
        text=str(text or ""),
        finish=str(choice.get("finish_reason") or ""),
        prompt_ids=tuple(prompt_ids) if isinstance(prompt_ids, list) else None,
        prompt_length=length,
    )


def _joined(parts: Iterator[Mapping[str, Any]]) -> Generated:
    """Return the response of a stream."""
    whole: dict[str, Any] = {"text": "", "token_ids": None}
    for part in parts:
        for choice in part.get("choices") or ():
            whole["text"] += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if isinstance(choice.get("token_ids"), list):
                whole["token_ids"] = (whole["token_ids"] or []) + choice["token_ids"]
            whole["finish_reason"] = choice.get("finish_reason") or whole.get("finish_reason")
    return _generated(whole)


def _of_sglang(answer: Mapping[str, Any]) -> Generated:
    facts, ids = answer.get("meta_info") or {}, answer.get("output_ids")
    return Generated(
        ids=tuple(ids) if ids else None,
        text=str(answer.get("text", "")),
        finish=str((facts.get("finish_reason") or {}).get("type", "")),
        prompt_length=facts.get("prompt_tokens"),
    )


def connect(
    url: str, timeout_s: float = 120.0, *, workers: int = 8, model: str | None = None
) -> Server:
    """Return the server at an address, with or without `/v1`; its endpoints tell the dialect.

    `workers` requests are sent at the same time, unless a call says otherwise; `model` is the name
    to try the server with, by default its first one. The API key is read from PLUMBLINE_API_KEY.
    Raises ConfigError for an address that is none, ServerError if nothing answers there, the key is
    refused, or it is no such server.
    """
    client = Client(url, timeout_s=timeout_s, workers=workers)

    def field(path: str, key: str) -> Any:
        document = client.optional(path)
        return document.get(key) if isinstance(document, dict) else None

    cards = field("/v1/models", "data")
    is_openai = isinstance(cards, list)
    if is_openai and cards and cards[0].get("owned_by") == "vllm":
        return OpenAiServer(client, "vllm", str(field("/version", "version") or ""), model)
    if field("/props", "default_generation_settings"):
        return LlamaCppServer(client)
    if field("/get_model_info", "model_path") or field("/model_info", "model_path"):
        version = field("/get_server_info", "version") or field("/server_info", "version")
        return SglangServer(client, "sglang", str(version or ""), model)
    is_ollama = field("/api/version", "version")
    if is_openai and not is_ollama:
        return OpenAiServer(client, model=model)
    raise ServerError(
        f"{client.url} is {'Ollama' if is_ollama else 'no server of models: no /v1/models'}",
        hint="url= of vLLM, SGLang, another OpenAI-compatible server, or llama-server, which "
        "serves Ollama's GGUF file",
        code="response",
    )
