"""Prompts are dealt to real HTTP servers that fail in every way; each is answered exactly once."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from tasks.core.errors import ArtifactError, TrainingError
from tasks.serving.rollout_servers import dealing
from tasks.serving.rollout_servers.dealing import Dealing
from tasks.serving.rollout_servers.remote import (
    RefusedError,
    RemoteServer,
    UnavailableError,
    request_body,
)
from tasks.serving.vllm.colocation import Sampling
from tests.answering import Reply, answering

SAMPLING = Sampling(temperature=0.7, max_new_tokens=4, ends=(9,))
Answer = tuple[int, Any]


@dataclass
class FakeVllm:
    """A server that answers as vLLM does; `react` may answer, or break off, in its place.

    `react` gets the number of the request and its body, and returns None for the usual answer.
    `served` has the first prompt ids of the requests that were answered as usual.
    """

    react: Callable[[int, dict[str, Any]], Answer | None] = lambda _, __: None
    requests: int = 0
    served: list[int] = field(default_factory=list)
    most: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    asked: Any = None

    @property
    def url(self) -> str:
        return str(self.asked.url)

    def die(self) -> None:
        """Stop listening, as a killed process does."""
        threading.Thread(target=self.asked.server.shutdown).start()
        self.asked.server.socket.close()

    def answer(self, body: dict[str, Any]) -> Any:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            number = self.requests
            self.requests += 1
        try:
            special = self.react(number, body)
        finally:
            with self._lock:
                self._now -= 1
        if special is not None:
            return Reply(special[0], json.dumps(special[1]).encode())
        self.served.append(body["prompt"][0])
        return usual(body)


def usual(body: dict[str, Any]) -> dict[str, Any]:
    ids = [body["prompt"][0], body["seed"], 9]
    logprobs = {"token_logprobs": [-0.5] * 3}
    choice = {"token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"}
    return {"model": body["model"], "choices": [choice]}


def after(event: threading.Event) -> Callable[[int, Any], None]:
    """Hold requests back until something has happened at another server."""

    def react(_: int, __: Any) -> None:
        assert event.wait(30)

    return react


@pytest.fixture
def start() -> Iterator[Callable[..., FakeVllm]]:
    with ExitStack() as stack:

        def started(react: Any = lambda _, __: None) -> FakeVllm:
            fake = FakeVllm(react)
            fake.gate.set()

            def healthy(_: None) -> dict[str, Any]:
                fake.gate.wait()
                return {}

            answers = {"/health": healthy, "/v1/completions": fake.answer}
            fake.asked = stack.enter_context(answering(answers))
            stack.callback(fake.gate.set)
            return fake

        yield started


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealing, "PAUSES_S", (0.0, 0.02, 0.05))


def dealt(count: int, at_once: int = 4, timeout_s: float = 20.0) -> Dealing:
    bodies = [request_body([number, 7], SAMPLING, 1000 + number) for number in range(count)]
    return Dealing(bodies, version=3, at_once=at_once, timeout_s=timeout_s)


def remote(fake: FakeVllm) -> RemoteServer:
    return RemoteServer(fake.url, base="model", model="policy-v3")


def once(fakes: list[FakeVllm]) -> bool:
    return all(n == 1 for n in Counter(n for fake in fakes for n in fake.served).values())


def test_each_prompt_is_answered_once_in_order_with_its_seed(start: Any) -> None:
    free = threading.Event()
    slow = start(after(free))
    fast = start(lambda number, _: free.set() if number == 40 else None)
    fakes = [fast, slow]
    dealing_ = dealt(60)
    responses = dealing_.run([remote(fake) for fake in fakes])
    assert [r.ids.tolist() for r in responses] == [[n, 1000 + n, 9] for n in range(60)]
    assert all(r.ended and r.version == 3 for r in responses)
    assert once(fakes)
    assert max(fake.most for fake in fakes) == 4, "requests under way at one server"
    assert len(fast.served) >= 40, "a server that is free takes the next prompt"
    assert dealing_.answered == {fake.url: len(fake.served) for fake in fakes}


def test_a_server_that_dies_leaves_its_prompts_to_the_others(start: Any) -> None:
    dying = start()
    died = threading.Event()

    def die(number: int, _: Any) -> None:
        if number >= 5:
            dying.die()
            died.set()
            raise ConnectionAbortedError

    dying.react = die
    good = start(after(died))
    servers = [remote(dying), remote(good)]
    responses = dealt(40).run(servers)
    assert [int(r.ids[0]) for r in responses] == list(range(40))
    assert once([dying, good])
    assert len(dying.served) <= 5
    assert servers[0].lost
    assert servers[1].lost == ""


def test_a_broken_connection_and_a_busy_server_are_tried_again(start: Any) -> None:
    def react(number: int, _: Any) -> Answer | None:
        if number % 3 == 0:
            raise ConnectionAbortedError
        return (503, {"error": {"message": "full"}}) if number == 1 else None

    fake = start(react)
    server = remote(fake)
    assert len(dealt(20, at_once=1).run([server])) == 20
    assert once([fake])
    assert server.lost == ""


def test_a_server_that_hangs_leaves_its_prompts_to_the_others(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing closes its connections, as when its machine has no power."""
    monkeypatch.setattr(dealing, "WATCH_S", 0.1)
    monkeypatch.setattr(dealing, "_HEALTH_S", 0.2)
    hanging = start()
    hangs = threading.Event()

    def hang(number: int, _: Any) -> None:
        if number >= 5:
            hanging.gate.clear()
            hangs.set()
            hanging.gate.wait()

    hanging.react = hang
    good = start(after(hangs))
    servers = [remote(hanging), remote(good)]
    responses = dealt(40).run(servers)
    assert [int(r.ids[0]) for r in responses] == list(range(40))
    assert hanging.url in servers[0].lost
    hanging.gate.set()
    assert set(good.served) >= set(range(40)) - set(hanging.served[:5])


def test_all_servers_dead_is_an_error(start: Any) -> None:
    fake = start()

    def die(number: int, _: Any) -> None:
        if number >= 6:
            fake.die()
            raise ConnectionAbortedError

    fake.react = die
    with pytest.raises(UnavailableError, match="127.0.0.1"):
        dealt(20).run([remote(fake)])


def test_answers_that_cannot_be_used_end_the_run(start: Any) -> None:
    short = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
    none = {"token_ids": None, "logprobs": None}
    for react, error, named in (
        (lambda n, body: (500, {}) if body["prompt"][0] == 2 else None, TrainingError,
         "request 2 .*500"),
        (lambda n, body: (404, {"error": {"message": "no policy-v3"}}), RefusedError, "404"),
        (lambda n, body: (200, {**usual(body), "model": "base"}), ArtifactError, "base"),
        (lambda n, body: (200, {**usual(body), "choices": [none]}), ArtifactError, "0 token ids"),
        (lambda n, body: (200, {**usual(body), "choices": [short]}), ArtifactError, "1 of 4"),
    ):  # fmt: skip
        fake = start(react)
        with pytest.raises(error, match=named):
            dealt(6).run([remote(fake)])
        if error is RefusedError:
            assert fake.requests <= 4, "it ends at once"


def test_a_server_that_hangs_is_named_by_the_time_limit(start: Any) -> None:
    fake = start(lambda number, _: time.sleep(2.0) if number == 3 else None)
    with pytest.raises(TrainingError, match="1 of 8"):
        dealt(8, timeout_s=0.5).run([remote(fake)])
