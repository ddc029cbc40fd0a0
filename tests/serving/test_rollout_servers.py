"""Prompts are dealt to real HTTP servers that fail in every way; each is answered exactly once."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import ArtifactError, PlumblineError, TrainingError
from tasks.serving import rollout_servers
from tasks.serving.rollout_servers import Fleet, RefusedError, RemoteServer, request_body
from tasks.serving.vllm.colocation import Colocation, why_not_started
from tests.answering import Reply, answering
from tests.settings import Rollout

HOW = Colocation(Path(), Rollout(temperature=0.7, max_num_seqs=4), (9,), timeout_s=20.0)
React = Callable[[int, dict[str, Any]], tuple[int, Any] | None]


@dataclass
class FakeVllm:
    """A server that answers as vLLM does, unless `react` answers or breaks off in its place.

    `react` gets the number of the request and its body. `served` has the first prompt ids of the
    requests that were answered as usual.
    """

    react: React = lambda _, __: None
    served: list[int] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)
    asked: Any = None

    def die(self) -> None:
        """Stop listening, as a killed process does."""
        threading.Thread(target=self.asked.server.shutdown).start()
        self.asked.server.socket.close()
        raise ConnectionAbortedError

    def __call__(self, body: dict[str, Any]) -> Any:
        special = self.react(next(self.numbers), body)
        if special is not None:
            return Reply(special[0], json.dumps(special[1]).encode())
        self.served.append(body["prompt"][0])
        return usual(body)


def usual(body: dict[str, Any]) -> dict[str, Any]:
    ids = [body["prompt"][0], body["seed"], 9]
    logprobs = {"token_logprobs": [-0.5] * 3}
    choice = {"token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"}
    return {"model": body["model"], "choices": [choice]}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeVllm]]:
    monkeypatch.setattr(rollout_servers, "PAUSES_S", (0.01,) * 8)
    with ExitStack() as stack:

        def started(react: React = lambda _, __: None) -> FakeVllm:
            fake = FakeVllm(react)
            fake.asked = stack.enter_context(answering({"/v1/completions": fake}))
            return fake

        yield started


def fleet_of(*fakes: FakeVllm, timeout_s: float = 20.0) -> Fleet:
    servers = [RemoteServer(fake.asked.url, base="model", model="policy-v3") for fake in fakes]
    return Fleet(replace(HOW, timeout_s=timeout_s), servers)


def sample(fleet: Fleet, responses: int) -> None:
    """Sample, and assert that each response is that of its request."""
    bodies = [request_body([n, 7], HOW, 1000 + n, limit=4) for n in range(responses)]
    made = fleet.generate(bodies, 3)
    assert len(made) == responses
    for number, response in enumerate(made):
        assert response.ids.tolist() == [number, 1000 + number, 9]
        assert response.ended
        assert response.version == 3


def require_once(*fakes: FakeVllm) -> None:
    assert set(Counter(n for fake in fakes for n in fake.served).values()) == {1}


def test_a_server_that_dies_leaves_its_prompts_to_the_others(start: Any) -> None:
    dying, died = start(), threading.Event()

    def die(number: int, _: Any) -> None:
        if number >= 5:
            died.set()
            dying.die()

    dying.react = die
    good = start(lambda *_: None if died.wait(30) else (500, {}))
    fleet = fleet_of(dying, good)
    sample(fleet, 40)
    require_once(dying, good)
    assert len(dying.served) <= 5
    assert [bool(server.lost) for server in fleet.servers] == [True, False]
    assert fleet.present == fleet.servers[1:]


def test_a_broken_connection_and_a_busy_server_are_tried_again(start: Any) -> None:
    def react(number: int, _: Any) -> tuple[int, Any] | None:
        if number % 3 == 0:
            raise ConnectionAbortedError
        return (503, {"error": {"message": "full"}}) if number == 1 else None

    fake = start(react)
    fleet = fleet_of(fake)
    sample(fleet, 20)
    require_once(fake)
    assert fleet.servers[0].lost == ""


SHORT = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
NONE = {"token_ids": None, "logprobs": None}


@pytest.mark.parametrize(
    ("answer", "error", "named"),
    [
        (lambda body: (500, {"error": "broken"}), TrainingError, "no rollout server.*500.*broken"),
        (lambda body: (404, {"error": {"message": "no policy-v3"}}), RefusedError, "404"),
        (lambda body: (200, {**usual(body), "model": "base"}), ArtifactError, "base"),
        (lambda body: (200, {**usual(body), "choices": [NONE]}), ArtifactError, "0 token ids"),
        (lambda body: (200, {**usual(body), "choices": [SHORT]}), ArtifactError, "1 of 4"),
    ],
)
def test_answers_that_cannot_be_used_end_the_run(
    start: Any, answer: Callable[[Any], Any], error: type[PlumblineError], named: str
) -> None:
    fake = start(lambda number, body: answer(body))
    with pytest.raises(error, match=named):
        sample(fleet_of(fake), 6)


def test_a_server_that_hangs_is_named_by_the_time_limit(start: Any) -> None:
    fake = start(lambda number, _: time.sleep(2.0) if number == 3 else None)
    with pytest.raises(TrainingError, match="[1-8] of 8"):
        sample(fleet_of(fake, timeout_s=0.5), 8)


def test_the_engines_own_error_comes_first() -> None:
    """More memory is advised only where the engine lacks it."""
    last = "RuntimeError: Engine core initialization failed. See root cause above."
    wrong = ["INFO: starts", "ERROR [core.py:1] ValueError: Unknown quantization: x", last]
    assert why_not_started(wrong) == ("ValueError: Unknown quantization: x", "")
    reason, hint = why_not_started(["ValueError: 9 GiB KV cache is needed", last])
    assert reason.startswith("ValueError: 9 GiB")
    assert "kv_cache_gib" in hint
