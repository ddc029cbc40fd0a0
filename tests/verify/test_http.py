"""Errors of a server say what is wrong and what to type; keys and passwords are never shown."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from tasks.core.errors import ConfigError
from tasks.serving.vllm.colocation import KEY_VARIABLE
from tasks.verify.dialects import connect
from tasks.verify.server import Client, ServerError
from tests.answering import Reply, Requests, answering, refusal
from tests.verify.serving import free_port

KEY = "sk-verysecretkey-0123456789"


def failing(answer: Any, **options: Any) -> tuple[ServerError, Requests]:
    """Return the error of a GET of /x, and what the server saw."""
    with answering({"/x": lambda _: answer}) as server, pytest.raises(ServerError) as caught:
        Client(server.url, **options).get("/x")
    return caught.value, server


def test_where_nothing_listens_or_the_address_is_none() -> None:
    with pytest.raises(ServerError) as caught:
        connect(f"http://127.0.0.1:{free_port()}")
    assert (caught.value.code, caught.value.exit_code) == ("unreachable", 2)
    for url in ("ftp://host:1", "http://", "http://host:port"):
        with pytest.raises(ConfigError, match="url="):
            Client(url)


def test_a_server_of_this_machine_is_asked_past_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    with answering({"/x": lambda _: {"answer": 1}}) as server:
        assert Client(server.url).get("/x") == {"answer": 1}


def test_keys_and_passwords_are_sent_to_this_host_alone_and_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-another-services-key-987654321")
    error, server = failing(refusal(400, f"bad key {KEY}"))
    assert server.seen[0][2]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in error.report()
    assert "987654321" not in str(server.seen)
    with answering({"/x": lambda _: {"stolen": 1}}) as other:
        error, _ = failing(Reply(302, headers={"location": f"{other.url}/x"}))
    assert other.url in error.message
    assert not other.seen

    monkeypatch.delenv(KEY_VARIABLE)
    missing, _ = failing(refusal(401, "Unauthorized"))
    assert missing.code == "login"
    assert KEY_VARIABLE in missing.hint
    broken = {"/x": lambda _: refusal(500, "broken")}
    with answering(broken) as server, pytest.raises(ServerError) as caught:
        Client(server.url.replace("http://", "http://user:hunter2hunter2@")).get("/x")
    assert "hunter2" not in caught.value.report()
    assert server.seen[0][2]["Authorization"].startswith("Basic ")


def test_a_rate_limit_is_waited_for_unless_it_exceeds_the_time_limit() -> None:
    replies = [refusal(429, "slow down", Retry_After="1"), {"ok": True}]
    with answering({"/x": lambda _: replies.pop(0)}) as server:
        begin = time.monotonic()
        assert Client(server.url).get("/x") == {"ok": True}
    assert time.monotonic() - begin >= 1
    error, server = failing(refusal(429, "slow down", Retry_After="3600"), timeout_s=30)
    assert (error.code, len(server.seen)) == ("busy", 1)


def test_a_connection_that_the_server_closed_meanwhile_is_opened_again() -> None:
    """Servers close idle connections after some seconds, at the same time as we ask again."""
    seen: list[Any] = []

    def hang_up_once(body: Any) -> Any:
        seen.append(body)
        if len(seen) == 1:
            raise ConnectionAbortedError
        return {}

    with answering({"/x": hang_up_once}) as server:
        assert Client(server.url).post("/x", {"n": 1}) == {}
    assert seen == [{"n": 1}] * 2


def test_a_response_that_is_no_json_is_refused() -> None:
    page, _ = failing(Reply(200, b"<html>\x1b[2Jwelcome</html>"))
    deep, _ = failing(Reply(200, b"[" * 900))
    assert {page.code, deep.code} == {"response"}
    assert "\x1b" not in page.report()
    assert "welcome" in page.report()


def test_what_is_no_server_is_refused() -> None:
    listed = {"data": [{"id": "toy", "owned_by": "library"}]}
    ollama = {"/v1/models": lambda _: listed, "/api/version": lambda _: {"version": "0.13.0"}}
    answers: Mapping[str, Any]
    for answers in ({"/": lambda _: {}}, ollama):
        with answering(answers) as requests, pytest.raises(ServerError) as caught:
            connect(requests.url)
        assert "llama-server" in caught.value.hint
