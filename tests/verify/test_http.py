"""Errors of a server say what is wrong and what to type; responses are bounded and untrusted."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tasks.core.errors import ConfigError
from tasks.serving.vllm.colocation import KEY_VARIABLE
from tasks.verify.servers import connect
from tasks.verify.servers.client import Client
from tasks.verify.servers.server import ServerError
from tests.answering import Reply, Requests, answering, refusal
from tests.verify.serving import free_port

KEY = "sk-verysecretkey-0123456789"


def failing(answers: Mapping[str, Any], **options: Any) -> tuple[ServerError, Requests]:
    """Return the error of a GET of /x, and what the server saw."""
    with answering(answers) as server, pytest.raises(ServerError) as caught:
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


def test_a_password_in_the_address_is_sent_and_not_shown() -> None:
    with answering({"/x": lambda _: refusal(500, "broken")}) as server:
        url = server.url.replace("http://", "http://user:hunter2hunter2@")
        with pytest.raises(ServerError) as caught:
            Client(url).get("/x")
    assert "hunter2" not in caught.value.report()
    assert server.seen[0][2]["Authorization"].startswith("Basic ")


def test_a_key_is_read_from_the_variable_sent_and_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-another-services-key-987654321")
    error, server = failing({"/x": lambda _: refusal(400, f"bad key {KEY}")})
    assert server.seen[0][2]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in error.report()
    assert "987654321" not in str(server.seen)

    monkeypatch.delenv(KEY_VARIABLE)
    missing, _ = failing({"/x": lambda _: refusal(401, "Unauthorized")})
    refused, _ = failing({"/x": lambda _: refusal(401, "Unauthorized")}, key=KEY)
    assert {missing.code, refused.code} == {"login"}
    assert KEY_VARIABLE in missing.hint


def test_a_rate_limit_is_waited_for_unless_it_exceeds_the_time_limit() -> None:
    replies = [refusal(429, "slow down", Retry_After="1"), {"ok": True}]
    with answering({"/x": lambda _: replies.pop(0)}) as server:
        begin = time.monotonic()
        assert Client(server.url).get("/x") == {"ok": True}
    assert time.monotonic() - begin >= 1
    longer = {"/x": lambda _: refusal(429, "slow down", Retry_After="3600")}
    error, server = failing(longer, timeout_s=30)
    assert (error.code, len(server.seen)) == ("busy", 1)


def test_a_redirect_is_not_followed_so_that_the_key_stays() -> None:
    with answering({"/x": lambda _: {"stolen": 1}}) as other:
        moved = Reply(302, headers={"location": f"{other.url}/x"})
        error, _ = failing({"/x": lambda _: moved}, key=KEY)
    assert other.url in error.message
    assert not other.seen


def test_a_response_that_is_no_json_is_refused() -> None:
    page, _ = failing({"/x": lambda _: Reply(200, b"<html>\x1b[2Jwelcome</html>")})
    deep, _ = failing({"/x": lambda _: Reply(200, b"[" * 900)})
    assert {page.code, deep.code} == {"response"}
    assert "\x1b" not in page.report()
    assert "welcome" in page.report()


def test_a_connection_that_the_server_closed_meanwhile_is_opened_again() -> None:
    """Servers close idle connections after some seconds, at the same time as we ask again."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        served: list[bytes] = []

        def serve() -> None:
            for reply in (b"", answer):
                connection, _ = listener.accept()
                served.append(connection.recv(10_000))
                connection.sendall(reply)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        assert Client(f"http://127.0.0.1:{listener.getsockname()[1]}").post("/x", {}) == {}
        thread.join()
    assert [request[:6] for request in served] == [b"POST /", b"POST /"]
