"""Servers of the toy model: in this process with faults, and over HTTP as dialects document it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tasks.verify.servers.client import parallel
from tasks.verify.servers.server import (
    Entry,
    Generated,
    Scores,
    ServedModel,
    Server,
    ServerError,
    entry,
    is_chat,
)
from tests.answering import Answer, refusal
from tests.verify import toy_model as toy

NAMES = ["a", "b", "c", "d", "<user>", "<system>", "<assistant>", "<eos>"]
MODELS = {"base": 0, "tuned": 1, "other": 2}
VLLM = ("prompt_logprobs", "logprobs", "ids", "return_token_ids")
"""Fields of a request that vLLM answers, and "ids" for texts of tokens that are their ids."""


@dataclass
class ToyServer(Server):
    """A server that answers as vLLM does, and its faults."""

    length: int = 600  # context, in tokens
    render_chat: Callable[[Any], list[int]] = toy.rendered
    split: Callable[[str], list[int]] = toy.tokens
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
            return [entry(tops) for tops in toy.prompt_tops(tuple(ids), toy.SIZE, chosen)]

        return parallel(ask, sequences, workers or 8)

    def next(self, model: str, prefixes: Any, workers: int = 0, cache: bool = True) -> list[Entry]:
        def ask(ids: Any) -> Entry:
            return entry(toy.tops(ids, toy.SIZE, None, self._chosen(model, ids, 1, True)))

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
            made = toy.greedy(ids, count, chosen)
        else:
            made = [int(toy.logprobs(ids, chosen).argmax())] * count
        finish = "stop" if self.ends and toy.EOS in made else "length"
        told = tuple(ids) if self.tells_ids else None
        return [Generated(tuple(made), toy.text(made), finish, told, len(ids))]

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


def openai(fields: tuple[str, ...] = VLLM) -> dict[str, Answer]:
    """Return the answers of OpenAI's dialect with these fields, by default those of vLLM."""
    limit, length = 5, 64  # log-probabilities of a position, tokens of the context
    is_vllm = fields == VLLM
    owner = {"owned_by": "vllm" if is_vllm else "somebody"}
    cards: list[Any] = [{"id": name, "parent": "base", **owner} for name in ("tuned", "other")]
    cards.append({"id": "base", "max_model_len": length, **owner})

    def complete(body: Any) -> Any:
        if body["model"] not in MODELS:
            return refusal(404, f"The model `{body['model']}` does not exist.")
        if max(body.get("prompt_logprobs", 0), body.get("logprobs", 0)) > limit:
            return refusal(400, f"Requested logprobs are greater than max allowed: {limit}")
        prompt = body.get("prompt") or toy.rendered(
            _parsed(body["messages"]), body.get("tools", ())
        )
        if len(prompt) + body["max_tokens"] > length:
            return refusal(400, f"This model's maximum context length is {length} tokens.")
        model = MODELS[body["model"]]
        ids = toy.greedy(prompt, body["max_tokens"], model)
        choice: dict[str, Any] = {"finish_reason": "stop" if toy.EOS in ids else "length"}
        text = toy.text(ids)
        choice |= {"text": text} if "prompt" in body else {"message": {"content": text}}
        answer = {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}
        if "prompt_logprobs" in body and "prompt_logprobs" in fields:
            places = toy.prompt_tops(tuple(prompt), body["prompt_logprobs"], model)
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": value} for token, value in tops.items()} for tops in places
            ]
        if body.get("logprobs") is not None and "logprobs" in fields:
            name = "token_id:{}" if "ids" in fields else "<{}>"
            tops = toy.tops(prompt, body["logprobs"], ids[0], model)
            choice["logprobs"] = {
                "tokens": [name.format(own) for own in ids],
                "top_logprobs": [{name.format(i): v for i, v in tops.items()}],
            }
        if body.get("return_token_ids") and "return_token_ids" in fields:
            choice["token_ids"] = ids
            (choice if "prompt" in body else answer)["prompt_token_ids"] = prompt
        if body.get("stream"):
            parts = [{"text": toy.text([token]), "token_ids": [token]} for token in ids]
            return iter(
                [{"choices": [part]} for part in [*parts, {**choice, "text": "", "token_ids": []}]]
            )
        return answer

    own = {
        "/version": lambda _: {"version": "0.32.0"},
        "/tokenize": lambda body: {"tokens": toy.tokens(body["prompt"])},
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
    return [toy.EOS, *ids] if bos else ids


def text_of(ids: list[int]) -> str:
    return "".join(NAMES[token] for token in ids)


def llama_cpp() -> dict[str, Answer]:
    def completion(body: Any) -> Any:
        ids = body["prompt"]
        made = toy.greedy(ids, body["n_predict"])
        stop = "eos" if toy.EOS in made else "limit"
        answer = {"content": toy.text(made), "stop_type": stop, "tokens_evaluated": len(ids)}
        answer["tokens"] = made if body.get("return_tokens") else []
        if body.get("n_probs"):
            tops = toy.tops(ids, body["n_probs"])
            listed = [{"id": i, "token": "?", "bytes": [], "logprob": v} for i, v in tops.items()]
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
        "/apply-template": lambda body: {"prompt": text_of(toy.rendered(body["messages"]))},
    }


def sglang() -> dict[str, Answer]:
    def generate(body: Any) -> Any:
        ids, options = body["input_ids"], body["sampling_params"]
        model = 1 if body.get("lora_path") == "tuned" else 0
        made = toy.greedy(ids, options["max_new_tokens"], model)
        kind = "stop" if toy.EOS in made else "length"
        told: dict[str, Any] = {"finish_reason": {"type": kind}, "prompt_tokens": len(ids)}
        if body.get("return_logprob"):
            k = body["top_logprobs_num"]
            tops = [toy.tops(ids[:at], k, None, model) for at in range(1, len(ids) + 1)]
            listed = [[[value, token, None] for token, value in top.items()] for top in tops]
            own = [[float(toy.logprobs(ids[:at], model)[ids[at]]), ids[at], None]
                   for at in range(1, len(ids))]  # fmt: skip
            if body.get("logprob_start_len", -1) == 0:
                told["input_token_logprobs"] = [[None, ids[0], None], *own]
                told["input_top_logprobs"] = [None, *listed[:-1]]
            told["output_top_logprobs"] = listed[-1:]
        answer = {"text": toy.text(made), "output_ids": made, "meta_info": told}
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
            "usage": {"prompt_tokens": len(toy.rendered(body["messages"]))},
        },
    }
