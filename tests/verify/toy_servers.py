"""Servers of the toy model: vLLM and others, as their documentation says that they answer."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.answering import Answer, refusal
from tests.verify import toy_model as toy

NAMES = ["a", "b", "c", "d", "<user>", "<system>", "<assistant>", "<eos>"]
MODELS = {"base": 0, "tuned": 1, "other": 2}
VLLM = ("prompt_logprobs", "logprobs", "ids", "return_token_ids")
"""Fields of a request that vLLM answers, and "ids" for texts of tokens that are their ids."""


@dataclass
class OpenAI:
    """A server of OpenAI's dialect, vLLM 0.32 unless told otherwise, and its faults."""

    fields: tuple[str, ...] = VLLM
    limit: int = 5  # most log-probabilities of a position
    length: int = 64  # context, in tokens
    render: Callable[[Any], list[int]] = toy.rendered
    split: Callable[[str], list[int]] = toy.tokens
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

    def answers(self) -> dict[str, Answer]:
        """Return the answers by path."""
        vllm = self.fields == VLLM
        owner = "vllm" if vllm else "somebody"
        cards = [
            {"id": name, "parent": "base", "root": f"/adapters/{name}", "owned_by": owner}
            for name in ("tuned", "other")
        ]
        root = {"root": "/models/base", "max_model_len": self.length}
        listed = {"data": [*cards, {"id": "base", "owned_by": owner, **root}]}
        own = {
            "/version": lambda _: {"version": "0.32.0"},
            "/tokenize": self.tokenize,
        }
        return {
            "/v1/models": lambda _: listed,
            "/v1/completions": self.complete,
            "/v1/chat/completions": self.complete,
            **(own if vllm else {}),
        }

    def tokenize(self, body: Any) -> Any:
        """Split a text, or render a conversation."""
        chat = "messages" in body
        return {"tokens": self.render(body["messages"]) if chat else self.split(body["prompt"])}

    def complete(self, body: Any) -> Any:
        """Return a response, or a refusal."""
        scores = "prompt_logprobs" in body
        with self._lock:
            self._under_way += 1
            if self._under_way > 1:
                self._met.add(scores)
        time.sleep(self.pause)
        try:
            return self._refusal(body) or self._response(body, scores in self._met)
        finally:
            with self._lock:
                self._under_way -= 1

    def _refusal(self, body: Any) -> Any:
        if body["model"] not in MODELS:
            return refusal(404, f"The model `{body['model']}` does not exist.")
        for name, kind in (("prompt_logprobs", "prompt"), ("logprobs", "sample")):
            if body.get(name, 0) > self.limit:
                message = f"Requested {kind} logprobs of {body[name]}, which is greater than max "
                return refusal(400, f"{message}allowed: {self.limit}")
        prompt = body.get("prompt") or self.render(body["messages"])
        if len(prompt) + body["max_tokens"] > self.length:
            return refusal(400, f"This model's maximum context length is {self.length} tokens.")
        return None

    def _response(self, body: Any, crowded: bool) -> Any:
        prompt = body.get("prompt") or self.render(body["messages"])
        prompt = prompt[-self.cut :] if self.cut else prompt
        scores = "prompt_logprobs" in body
        model = self.choose(body["model"], not scores, crowded, len(prompt))
        if not scores:
            self._seen[tuple(prompt)] += 1
            model = (self._seen[tuple(prompt)] > 1 and self.cached) or model
            model = (body.get("stream") and self.streamed) or model
        ids = self._generated(body, prompt, model)
        stops = self.ends and toy.EOS in ids
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if stops else "length"}
        text = toy.text(ids)
        choice |= {"text": text} if "prompt" in body else {"message": {"content": text}}
        answer = {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}
        if scores and "prompt_logprobs" in self.fields:
            places = toy.prompt_tops(tuple(prompt), body["prompt_logprobs"], model)
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": value} for token, value in tops.items()} for tops in places
            ]
        if body.get("logprobs") is not None and "logprobs" in self.fields:
            choice["logprobs"] = self._logprobs(body, prompt, ids, model)
        if body.get("return_token_ids") and "return_token_ids" in self.fields:
            choice["token_ids"] = ids
            (choice if "prompt" in body else answer)["prompt_token_ids"] = prompt
        return self._stream(ids, choice) if body.get("stream") else answer

    def _generated(self, body: Any, prompt: list[int], model: int) -> list[int]:
        count: int = body["max_tokens"]
        if bias := body.get("logit_bias"):
            return [int(next(iter(bias)))] * (1 if self.ends else count)
        if self.ends:
            return toy.greedy(prompt, count, model)
        return [int(toy.logprobs(prompt, model).argmax())] * count

    def _logprobs(self, body: Any, prompt: list[int], ids: list[int], model: int) -> Any:
        name = "token_id:{}" if "ids" in self.fields else "<{}>"
        whole, first = [*prompt, *ids], len(prompt)
        tops = [
            toy.tops(whole[:at], body["logprobs"], whole[at], model)
            for at in range(first, len(whole))
        ]
        return {
            "tokens": [name.format(own) for own in ids],
            "top_logprobs": [{name.format(i): v for i, v in top.items()} for top in tops],
        }

    @staticmethod
    def _stream(ids: list[int], choice: dict[str, Any]) -> Iterator[Any]:
        for token in ids:
            yield {"choices": [{"index": 0, "text": toy.text([token]), "token_ids": [token]}]}
        yield {"choices": [{"index": 0, "text": "", "finish_reason": choice["finish_reason"]}]}


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
