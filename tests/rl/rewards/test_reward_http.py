"""A reward endpoint: a real HTTP server, and its possible faults."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tasks.core.errors import RewardError
from tasks.rl.rewards import http
from tasks.rl.rewards.http import Endpoint
from tests.rl.making import TOKENIZER, responses

LOG = logging.getLogger("tests.rl")
Generated = tuple[int, dict[str, str], bytes]


@dataclass
class Server:
    """Requests that a server got, and its answers: `plan` first, then lengths of completions."""

    plan: list[Callable[[BaseHTTPRequestHandler], Generated | None]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    url: str = ""

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.requests.append(body)
        self.headers.append(dict(handler.headers))
        self.times.append(time.monotonic())
        usual = json.dumps(
            {"rewards": [len(completion) for completion in body["completions"]]}
        ).encode()
        answer = self.plan.pop(0)(handler) if self.plan else (200, {}, usual)
        if answer is None:  # it has seen to it
            return
        status, headers, content = answer
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server on this machine, without delays."""
    server_ = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            server_.take(self)

        def log_message(self, *_: object) -> None:
            """Silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        server_.url = f"http://127.0.0.1:{listening.server_port}/get_reward"
        yield server_
        listening.shutdown()
        thread.join()


def ask(url: str, *, retries: int = 0, batch: int = 64, timeout_s: float = 20.0) -> list[float]:
    how = {"retries": retries, "batch": batch, "timeout_s": timeout_s}
    endpoint = Endpoint(url, tokenizer=TOKENIZER, log=LOG, **how)
    try:
        return endpoint(responses())
    finally:
        endpoint.close()


def says(content: bytes, status: int = 200, **headers: str) -> Callable[[Any], Generated]:
    return lambda _: (status, headers, content)


def test_the_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLUMBLINE_REWARD_TOKEN", "of-the-environment")
    assert ask(server.url) == [3.0, 6.0, 3.0, 26.0]
    (body,) = server.requests
    assert sorted(body) == ["completions", "labels", "prompts", "query", "rows"]
    assert body["query"][0] == (
        "<|im_start|>user\ncopy ape<|im_end|>\n<|im_start|>assistant\nape<|im_end|>"
    )
    assert body["prompts"][0] == "<|im_start|>user\ncopy ape<|im_end|>\n<|im_start|>assistant\n"
    assert body["labels"] == body["completions"]
    assert body["rows"][1]["id"] == "row of copy beetle"
    assert server.headers[0]["Content-Type"] == "application/json"
    assert server.headers[0]["Authorization"] == "Bearer of-the-environment"
    assert ask(server.url, batch=3) == [3.0, 6.0, 3.0, 26.0]
    assert [len(body["prompts"]) for body in server.requests[1:]] == [3, 1]


def test_temporary_errors_are_retried(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.1)

    def hangs_up(handler: BaseHTTPRequestHandler) -> None:
        handler.connection.close()

    busy = {"Retry-After": "0.02"}
    server.plan = [says(b"no memory", 503), hangs_up, says(b"slowly", 429, **busy)]
    with caplog.at_level(logging.WARNING):
        assert ask(server.url, retries=3) == [3.0, 6.0, 3.0, 26.0]
    assert len(server.requests) == 4
    assert server.requests[3] == server.requests[0]
    first, second, third = (b - a for a, b in zip(server.times, server.times[1:], strict=False))
    assert first >= 0.1
    assert second >= 0.2, "twice as long"
    assert third >= 0.02
    assert "503" in caplog.text
    assert "429" in caplog.text


def test_a_server_that_is_down(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.01)
    server.plan = [says(b"out of memory", 500)] * 3
    with pytest.raises(RewardError, match="3 attempts: status 500.*out of memory"):
        ask(server.url, retries=2)
    assert len(server.requests) == 3
    with pytest.raises(RewardError, match="1 attempt") as caught:
        ask("http://user:word@127.0.0.1:9/rewards?token=secret")
    assert "http://user:***@127.0.0.1:9/rewards?token=***" in caught.value.message
    assert "word" not in caught.value.report()
    assert "secret" not in caught.value.report()


@pytest.mark.parametrize("slow", ["headers", "body"])
def test_a_slow_server_does_not_exceed_the_timeout(server: Server, slow: str) -> None:
    """It sends one byte after the other; without a limit it would go on for 8 s."""
    done = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if slow == "body":
            handler.send_response(200)
            handler.send_header("Content-Length", "1000000")
            handler.end_headers()
        else:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Padding: ")
        while not done.wait(0.1):
            handler.wfile.write(b" ")

    server.plan = [answer]
    over = threading.Timer(8, done.set)
    over.start()
    try:
        began = time.monotonic()
        with pytest.raises(RewardError, match="0.5 s"):
            ask(server.url, timeout_s=0.5)
        assert time.monotonic() - began < 4
    finally:
        over.cancel()
        done.set()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"<html>", "<html>"),
        (b'{"scores": [1]}', "scores"),
        (b'{"rewards": [1, 2]}', "2 rewards for 4"),
        (b'{"rewards": [1, 2, NaN, 4]}', "nan for row of copy cat"),
    ],
)
def test_invalid_answers(server: Server, content: bytes, named: str) -> None:
    server.plan = [says(content)]
    with pytest.raises(RewardError, match=named):
        ask(server.url, retries=5)
    assert len(server.requests) == 1, "an answer that is wrong will be wrong again"


def test_a_rejected_request_is_not_retried(server: Server) -> None:
    server.plan = [says(b"no field `question`", 422)]
    with pytest.raises(RewardError, match="status 422 .*`question`"):
        ask(server.url, retries=5)
    server.plan = [says(b"", 307, Location="http://elsewhere/rewards")]
    with pytest.raises(RewardError, match="status 307") as caught:
        ask(server.url, retries=5)
    assert caught.value.hint == "reward.url=http://elsewhere/rewards"
    assert len(server.requests) == 2
