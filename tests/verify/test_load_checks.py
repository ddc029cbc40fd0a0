"""Faults under load are found and named: crowds, caches, long prompts, streams, mixed adapters."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tasks.verify.answers import Answers
from tasks.verify.check import Check
from tasks.verify.checks.changes import change
from tasks.verify.checks.leak import leak
from tasks.verify.checks.load import batching, long_prompts, prefix_cache, streaming
from tasks.verify.servers.connect import connect
from tests.verify import toy_model as toy
from tests.verify.answering import Answer, answering
from tests.verify.test_openai_dialect import vllm
from tests.verify.test_prompt_checks import codes, reference

MODELS = {"base": 0, "tuned": 1, "other": 2}
Choose = Callable[[str, bool, bool, int], int]
"""From the name, "is generation", "such requests have met" and the prompt's length to a model."""


def honest(name: str, generates: bool, crowded: bool, length: int) -> int:
    return MODELS[name]


def serving(choose: Choose = honest, *, cached: int = 0, streamed: int = 0) -> dict[str, Answer]:
    """Return the answers of a server.

    Args:
        choose: the model that answers.
        cached: model that answers to a prompt that was generated from before.
        streamed: model that answers streamed requests for model 0.
    """
    lock, under_way, seen = threading.Lock(), [0], Counter[tuple[int, ...]]()
    met: set[bool] = set()  # kinds of requests; of a crowd whose threads are slow, only some meet

    def answer(body: Any) -> Any:
        with lock:
            under_way[0] += 1
            if under_way[0] > 1:
                met.add("prompt_logprobs" in body)
        time.sleep(0.005)  # requests of a crowd meet here
        try:
            return made(body, ("prompt_logprobs" in body) in met)
        finally:
            with lock:
                under_way[0] -= 1

    def made(body: Any, crowded: bool) -> Any:
        prompt, scores = body["prompt"], "prompt_logprobs" in body
        model = choose(body["model"], not scores, crowded, len(prompt))
        if scores:
            places = [
                {str(i): {"logprob": v} for i, v in toy.tops(prompt[:at], 8, own, model).items()}
                for at, own in enumerate(prompt)
                if at
            ]
            return {"choices": [{"prompt_logprobs": [None, *places]}]}
        seen[tuple(prompt)] += 1
        if seen[tuple(prompt)] > 1 and cached:
            model = cached
        if body.get("stream") and streamed:
            model = streamed
        ids = toy.greedy(prompt, body["max_tokens"], model)
        choice = {"text": toy.text(ids), "token_ids": ids, "finish_reason": "stop"}
        if "logprobs" in body:
            top = toy.tops(prompt, 8, None, model)
            choice["logprobs"] = {"top_logprobs": [{f"token_id:{i}": v for i, v in top.items()}]}
        if body.get("stream"):
            return parts(choice)
        return {"choices": [choice]}

    def parts(choice: dict[str, Any]) -> Iterator[Any]:
        yield {"choices": [{"index": 0, **choice}]}

    cards = [{"id": "base", "max_model_len": 600, "owned_by": "vllm"}]
    cards += [{"id": name, "parent": "base"} for name in MODELS if name != "base"]
    return {
        **vllm(),
        "/v1/models": lambda _: {"data": cards},
        "/v1/completions": answer,
    }


def asked(check: Any, answers: dict[str, Answer], model: str = "base") -> Check:
    with answering(answers) as requests:
        made: Check = check(Answers(connect(requests.url), reference()), model, "base")
    return made


@pytest.mark.parametrize("check", [batching, prefix_cache, long_prompts])
def test_a_server_that_always_answers_the_same_is_ok(check: Any) -> None:
    assert asked(check, serving(), "base").verdict == "ok"


def test_an_answer_that_depends_on_other_requests_is_a_fault() -> None:
    def crowded(name: str, generates: bool, crowded: bool, length: int) -> int:
        return 1 if crowded else 0

    check = asked(batching, serving(crowded), "base")
    assert (check.verdict, codes(check)) == ("fault", ["batch-variance"])
    assert float(check.measured["mean_kl"]) > check.limit["mean_kl"]


def test_a_cache_that_answers_otherwise_is_a_fault() -> None:
    check = asked(prefix_cache, serving(cached=1), "base")
    assert (check.verdict, codes(check)) == ("fault", ["prefix-cache"])


def test_scores_and_generation_that_disagree_on_long_prompts_are_a_fault() -> None:
    def long(name: str, generates: bool, crowded: bool, length: int) -> int:
        return 1 if length >= 256 and generates else 0

    check = asked(long_prompts, serving(long), "base")
    assert (check.verdict, codes(check)) == ("fault", ["long-prompts"])
    assert float(check.measured["other_top"]) > 0


def test_a_stream_that_differs_is_a_fault() -> None:
    assert asked(streaming, serving()).verdict == "ok"
    check = asked(streaming, serving(streamed=1))
    assert (check.verdict, codes(check)) == ("fault", ["streaming"])


def test_models_that_keep_apart_are_ok() -> None:
    check = asked(leak, serving(), "tuned")
    assert check.verdict == "ok"
    assert check.measured["models"] == 3
    assert set(check.limit) == {"kl_1", "kl_8", "kl_32"}


def test_an_adapter_that_leaks_into_the_base_is_named() -> None:
    def leaking(name: str, generates: bool, crowded: bool, length: int) -> int:
        return 1 if name == "base" and crowded else MODELS[name]

    check = asked(leak, serving(leaking), "tuned")
    assert (check.verdict, codes(check)) == ("fault", ["lora-leak"])
    assert "base answers" in check.text


def test_a_leak_in_generation_alone_is_found() -> None:
    def leaking(name: str, generates: bool, crowded: bool, length: int) -> int:
        return 1 if name == "base" and crowded and generates else MODELS[name]

    check = asked(leak, serving(leaking), "tuned")
    assert (check.verdict, codes(check)) == ("fault", ["lora-leak"])


def test_adapters_that_are_mixed_up_are_named() -> None:
    def mixed(name: str, generates: bool, crowded: bool, length: int) -> int:
        return 2 if name == "tuned" and crowded else MODELS[name]

    check = asked(leak, serving(mixed), "tuned")
    assert (check.verdict, codes(check)) == ("fault", ["adapters-mixed"])
    assert "nearest to other" in check.text


def test_models_that_answer_alike_prove_nothing() -> None:
    check = asked(leak, serving(lambda *_: 0), "tuned")
    assert check.verdict == "unknown"


def test_the_change_of_a_position_is_the_kl_where_all_ids_are_known() -> None:
    p, q = toy.logprobs([1, 2]), toy.logprobs([2, 1])
    ids = np.arange(toy.SIZE, dtype=np.int32)
    expected = float((np.exp(p) * (p - q)).sum())
    order = np.argsort(-q)
    before, after = (ids, p.astype(np.float32)), (ids[order], q[order].astype(np.float32))
    assert change(before, after) == pytest.approx(expected, rel=1e-4)
    assert change(before, before) == pytest.approx(0, abs=1e-6)
    top = (ids[order][:3], q[order][:3].astype(np.float32))
    assert 0 < change(before, top) <= expected * 1.01
