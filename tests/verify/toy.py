"""A language model of eight tokens, and its servers: in this process with faults, and over HTTP."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.report import Row
from tasks.drift.fingerprint import Fingerprint
from tasks.verify.reference import Probe, Reference
from tasks.verify.server import (
    Entry,
    Generated,
    Scores,
    ServedModel,
    Server,
    ServerError,
    entry,
    is_chat,
    parallel,
)
from tasks.witness.plumbline_witness.probes import CHATS, TEXTS
from tests.answering import Answer, refusal

SIZE = 8
EOS = 7
TEMPLATE = {"system": 5, "user": 4, "assistant": 6, "tool": 4}
"""Token before the content of a message, by role; the generation prompt is the assistant's."""


def logprobs(prefix: Sequence[int], model: int = 0) -> NDArray[np.float64]:
    """Return the log-probabilities of the token after a prefix, shape (SIZE,)."""
    return _logprobs(sum((at + 1) * (token + 1) for at, token in enumerate(prefix)), model)


@cache
def _logprobs(prefix: int, model: int) -> NDArray[np.float64]:
    seed = prefix + 10_000 * model
    logits = np.random.default_rng(seed).normal(size=SIZE) * 2
    values: NDArray[np.float64] = logits - np.log(np.exp(logits).sum())
    return values


def greedy(prompt: Sequence[int], count: int, model: int = 0) -> list[int]:
    """Return the most likely tokens after a prompt, up to EOS."""
    tokens: list[int] = []
    while len(tokens) < count and EOS not in tokens:
        tokens.append(int(logprobs([*prompt, *tokens], model).argmax()))
    return tokens


def tokens(text: str) -> list[int]:
    """Return one token per letter: a, b, c or d; others are one of them, too."""
    return [(ord(letter) - ord("a")) % 4 for letter in text]


def text(ids: Sequence[int]) -> str:
    """Return the letters of tokens; others have none."""
    return "".join("abcd"[token] for token in ids if token < 4)


def rendered(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Return a conversation with the generation prompt; arguments of calls are objects."""
    ids = [token for tool in tools for token in tokens(tool["function"]["description"])]
    for message in messages:
        ids += [TEMPLATE[message["role"]], *tokens(message["content"])]
        for call in message.get("tool_calls", ()):
            ids += tokens("".join(call["function"]["arguments"].values()))
    return [*ids, TEMPLATE["assistant"]]


def tops(
    prefix: Sequence[int], count: int, own: int | None = None, model: int = 0
) -> dict[int, float]:
    """Return the most likely tokens after a prefix, and one token more."""
    values = logprobs(prefix, model)
    chosen = [int(token) for token in np.argsort(-values)[:count]]
    chosen += [own] if own is not None and own not in chosen else []
    return {token: float(values[token]) for token in chosen}


@cache
def prompt_tops(prompt: tuple[int, ...], count: int, model: int) -> list[dict[int, float]]:
    """Return the most likely tokens and the prompt's own at each position but the first."""
    return [tops(prompt[:at], count, prompt[at], model) for at in range(1, len(prompt))]


def fingerprint(probes: Sequence[Probe]) -> Fingerprint:
    """Return the toy model's log-probabilities of all tokens."""
    rows = [logprobs(p.ids[:end]) for p in probes for end in range(1, len(p.ids))]
    values = np.array(rows, np.float32)
    ids = np.tile(np.arange(SIZE, dtype=np.int32), (len(rows), 1))
    sequences = tuple(p.ids for p in probes)
    return Fingerprint(sequences, ids, values, values.argmax(1).astype(np.int32), "toy")


def reference(**facts: Any) -> Reference:
    """Return what the toy model recorded: texts, conversations, and a turn that ends."""
    probes = [Probe(tuple(tokens(t))[:64], "text", n, t) for n, t in enumerate(TEXTS)]
    for number, chat in enumerate(CHATS):
        messages = [{"role": role, "content": text} for role, text in chat]
        probes.append(Probe(tuple(rendered(messages))[:64], "chat", number, "?"))
    special = {"eos_token_id": EOS, "bos_token_id": None}
    facts = {"tokens": {"tokenizer": special}, **facts}
    return Reference(tuple(probes), fingerprint(probes), None, facts)


def causes(check: Row) -> list[str]:
    """Return the codes of the likely causes."""
    return [cause.code for cause in check.causes]


NAMES = ["a", "b", "c", "d", "<user>", "<system>", "<assistant>", "<eos>"]
MODELS = {"base": 0, "tuned": 1, "other": 2}
VLLM = ("prompt_logprobs", "logprobs", "ids", "return_token_ids")
"""Fields of a request that vLLM answers, and "ids" for texts of tokens that are their ids."""


@dataclass
class ToyServer(Server):
    """A server that answers as vLLM does, and its faults."""

    length: int = 600  # context, in tokens
    render_chat: Callable[[Any], list[int]] = rendered
    split: Callable[[str], list[int]] = tokens
    tells_ids: bool = True  # False if it tells lengths of prompts only
    ends: bool = True  # False if it generates on after EOS
    cut: int | None = None  # tokens at the end of a prompt that it reads
    # from name, "is generation", "such requests have met" and the prompt's length to the model
    choose: Callable[[str, bool, bool, int], int] = lambda name, *_: MODELS[name]
    cached: int = 0  # model that answers to a prompt that was generated from before
    streamed: int = 0  # model that answers to streamed requests
    pause: float = 0.0  # seconds in which the requests of a crowd meet
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _under_way: int = 0
    _met: set[bool] = field(default_factory=set)  # of a crowd with slow threads, only some meet
    _seen: Counter[tuple[int, ...]] = field(default_factory=Counter)

    url, kind, version = "http://localhost", "toy", ""

    def models(self) -> list[ServedModel]:
        adapters = [ServedModel(name, "base") for name in ("tuned", "other")]
        return [ServedModel("base", max_length=self.length), *adapters]

    def score(self, model: str, sequences: Any, workers: int = 0) -> list[Scores]:
        def ask(ids: Any) -> Scores:
            chosen = self._chosen(model, ids, 1, False)
            return [entry(tops) for tops in prompt_tops(tuple(ids), SIZE, chosen)]

        return parallel(ask, sequences, workers or 8)

    def next(self, model: str, prefixes: Any, workers: int = 0, cache: bool = True) -> list[Entry]:
        def ask(ids: Any) -> Entry:
            return entry(tops(ids, SIZE, None, self._chosen(model, ids, 1, True)))

        return parallel(ask, prefixes, workers or 8)

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        return tuple(self.split(text))

    def render(self, model: str, messages: Any, tools: Any = ()) -> tuple[int, ...]:
        return tuple(self.render_chat(messages)) if self.tells_ids else super().render(model, ())

    def generate(
        self, model: str, prompt: Any, count: int, n: int = 1, stream: bool = False, **more: Any
    ) -> list[Generated]:
        ids = self.render_chat(prompt) if is_chat(prompt) else list(prompt)
        chosen = self._chosen(model, ids, count, True, stream)
        ids = ids[-self.cut :] if self.cut else ids
        if bias := more.get("logit_bias"):
            made = [int(next(iter(bias)))] * (1 if self.ends else count)
        elif self.ends:
            made = greedy(ids, count, chosen)
        else:
            made = [int(logprobs(ids, chosen).argmax())] * count
        finish = "stop" if self.ends and EOS in made else "length"
        told = tuple(ids) if self.tells_ids else None
        return [Generated(tuple(made), text(made), finish, told, len(ids))]

    def _chosen(
        self, name: str, prompt: Any, count: int, generates: bool, stream: bool = False
    ) -> int:
        """Return the model that answers; refuse a prompt that is too long."""
        if len(prompt) + count > self.length:
            raise ServerError(f"the context is {self.length} tokens", code="length")
        with self._lock:
            self._under_way += 1
            if self._under_way > 1:
                self._met.add(generates)
        time.sleep(self.pause)
        with self._lock:
            self._under_way -= 1
            chosen = self.choose(name, generates, generates in self._met, len(prompt))
            if generates:
                self._seen[tuple(prompt)] += 1
                chosen = (self._seen[tuple(prompt)] > 1 and self.cached) or chosen
                chosen = (stream and self.streamed) or chosen
        return chosen


def openai(fields: tuple[str, ...] = VLLM, length: int = 64) -> dict[str, Answer]:
    """Return the answers of OpenAI's dialect with these fields, by default those of vLLM.

    `length` is the context in tokens.
    """
    limit = 5  # log-probabilities of a position
    is_vllm = fields == VLLM
    owner = {"owned_by": "vllm" if is_vllm else "somebody"}
    cards: list[Any] = [{"id": name, "parent": "base", **owner} for name in ("tuned", "other")]
    cards.append({"id": "base", "max_model_len": length, **owner})

    def complete(body: Any) -> Any:
        if body["model"] not in MODELS:
            return refusal(404, f"The model `{body['model']}` does not exist.")
        if max(body.get("prompt_logprobs", 0), body.get("logprobs", 0)) > limit:
            return refusal(400, f"Requested logprobs are greater than max allowed: {limit}")
        prompt = body.get("prompt") or rendered(_parsed(body["messages"]), body.get("tools", ()))
        if len(prompt) + body["max_tokens"] > length:
            return refusal(400, f"This model's maximum context length is {length} tokens.")
        model = MODELS[body["model"]]
        ids = greedy(prompt, body["max_tokens"], model)
        choice: dict[str, Any] = {"finish_reason": "stop" if EOS in ids else "length"}
        made = text(ids)
        choice |= {"text": made} if "prompt" in body else {"message": {"content": made}}
        answer = {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}
        if "prompt_logprobs" in body and "prompt_logprobs" in fields:
            places = prompt_tops(tuple(prompt), body["prompt_logprobs"], model)
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": value} for token, value in tops.items()} for tops in places
            ]
        if body.get("logprobs") is not None and "logprobs" in fields:
            name = "token_id:{}" if "ids" in fields else "<{}>"
            likely = tops(prompt, body["logprobs"], ids[0], model)
            choice["logprobs"] = {
                "tokens": [name.format(own) for own in ids],
                "top_logprobs": [{name.format(i): v for i, v in likely.items()}],
            }
        if body.get("return_token_ids") and "return_token_ids" in fields:
            choice["token_ids"] = ids
            (choice if "prompt" in body else answer)["prompt_token_ids"] = prompt
        if body.get("stream"):
            parts = [{"text": text([token]), "token_ids": [token]} for token in ids]
            return iter(
                [{"choices": [part]} for part in [*parts, {**choice, "text": "", "token_ids": []}]]
            )
        return answer

    own = {
        "/version": lambda _: {"version": "0.32.0"},
        "/tokenize": lambda body: {"tokens": tokens(body["prompt"])},
    }
    return {
        "/v1/models": lambda _: {"data": cards},
        "/v1/completions": complete,
        "/v1/chat/completions": complete,
        **(own if is_vllm else {}),
    }


def _parsed(messages: Any) -> Any:
    """Return messages as vLLM gives them to a template: arguments of calls are objects."""
    for function in (call["function"] for turn in messages for call in turn.get("tool_calls", ())):
        function["arguments"] = json.loads(function["arguments"])
    return messages


def split(text: str, *, bos: bool = False) -> list[int]:
    """Return the tokens of a text, as the servers split it."""
    ids = [NAMES.index(name) for name in re.findall(r"<\w+>|[abcd]", text)]
    return [EOS, *ids] if bos else ids


def text_of(ids: list[int]) -> str:
    return "".join(NAMES[token] for token in ids)


def llama_cpp() -> dict[str, Answer]:
    def completion(body: Any) -> Any:
        ids = body["prompt"]
        made = greedy(ids, body["n_predict"])
        stop = "eos" if EOS in made else "limit"
        answer = {"content": text(made), "stop_type": stop, "tokens_evaluated": len(ids)}
        answer["tokens"] = made if body.get("return_tokens") else []
        if body.get("n_probs"):
            likely = tops(ids, body["n_probs"])
            listed = [{"id": i, "token": "?", "bytes": [], "logprob": v} for i, v in likely.items()]
            answer["completion_probabilities"] = [{"id": made[0], "top_logprobs": listed}]
        return answer

    return {
        "/v1/models": lambda _: {"data": [{"id": "toy.gguf", "owned_by": "llamacpp"}]},
        "/props": lambda _: {
            "default_generation_settings": {"n_ctx": 64},
            "model_path": "/m/toy.gguf",
            "build_info": "b11434-abc",
        },
        "/completion": completion,
        "/tokenize": lambda body: {"tokens": split(body["content"], bos=body["add_special"])},
        "/apply-template": lambda body: {"prompt": text_of(rendered(body["messages"]))},
    }


def sglang() -> dict[str, Answer]:
    def generate(body: Any) -> Any:
        ids, options = body["input_ids"], body["sampling_params"]
        model = 1 if body.get("lora_path") == "tuned" else 0
        made = greedy(ids, options["max_new_tokens"], model)
        kind = "stop" if EOS in made else "length"
        told: dict[str, Any] = {"finish_reason": {"type": kind}, "prompt_tokens": len(ids)}
        if body.get("return_logprob"):
            k = body["top_logprobs_num"]
            likely = [tops(ids[:at], k, None, model) for at in range(1, len(ids) + 1)]
            listed = [[[value, token, None] for token, value in top.items()] for top in likely]
            own = [[float(logprobs(ids[:at], model)[ids[at]]), ids[at], None]
                   for at in range(1, len(ids))]  # fmt: skip
            if body.get("logprob_start_len", -1) == 0:
                told["input_token_logprobs"] = [[None, ids[0], None], *own]
                told["input_top_logprobs"] = [None, *listed[:-1]]
            told["output_top_logprobs"] = listed[-1:]
        answer = {"text": text(made), "output_ids": made, "meta_info": told}
        return [answer] * options["n"] if options.get("n", 1) > 1 else answer

    cards = [{"id": "toy", "root": "toy", "max_model_len": 64, "owned_by": "sglang"}]
    cards.append({"id": "tuned", "root": "/adapters/tuned", "parent": "toy", "owned_by": "sglang"})
    return {
        "/v1/models": lambda _: {"data": cards},
        "/get_model_info": lambda _: {"model_path": "toy", "is_generation": True},
        "/get_server_info": lambda _: {"version": "0.5.9"},
        "/generate": generate,
        "/tokenize": lambda body: {"tokens": split(body["prompt"], bos=body["add_special_tokens"])},
        "/v1/chat/completions": lambda body: {
            "choices": [{"index": 0, "message": {"content": ""}, "finish_reason": "length"}],
            "usage": {"prompt_tokens": len(rendered(body["messages"]))},
        },
    }
