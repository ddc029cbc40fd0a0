"""The servers of MLflow and Prefect are asked before anything starts."""

from __future__ import annotations

import http.server
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.chain.steps import chain_steps
from flows.cli.config import compose_config
from flows.cli.plan import check
from tasks.config.checks import tracking
from tasks.core.errors import ConfigError
from tests.commands import command, environment, run_in_empty


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


BASIC = "Basic bWU6c2VjcmV0"


def login(header: str) -> type[http.server.BaseHTTPRequestHandler]:
    """A server that wants this header."""

    class Login(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers["Authorization"] == header else 401)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    return Login


def test_a_missing_library_is_no_silent_server(
    closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "requests", None)
    (finding,) = tracking.reachable(f"http://127.0.0.1:{closed}/missing-library")
    assert "requests" in str(finding)


def test_a_dead_port_is_one_of_the_problems(closed: int) -> None:
    overrides = [
        "+exp=sft_qlora", f"tracking.uri=http://me:secret@127.0.0.1:{closed}", "zero=zero3"
    ]  # fmt: skip
    composed = compose_config(overrides)
    started = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        check(chain_steps(composed, overrides))
    assert time.monotonic() - started < 5
    text = refused.value.report()
    assert f"tracking.uri: http://me:***@127.0.0.1:{closed}; nothing listens there" in text
    assert "tracking.uri=sqlite:////" in text
    assert "QLoRA with ZeRO-3" in text
    assert "secret" not in text


@pytest.mark.parametrize("scheme", ["http", "postgresql"])
def test_a_dead_port_of_any_kind(closed: int, scheme: str) -> None:
    (finding,) = tracking.reachable(f"{scheme}://me:secret@127.0.0.1:{closed}/x")
    assert finding.allowed.startswith("nothing listens there")
    assert "secret" not in str(finding)


def test_a_silent_server_is_refused_after_five_seconds_and_asked_once(silent: int) -> None:
    started = time.monotonic()
    for _ in range(3):  # as the steps of a chain do
        (finding,) = tracking.reachable(f"http://127.0.0.1:{silent}")
    assert 4 < time.monotonic() - started < 7
    assert "no answer within 5 s" in finding.allowed


def test_a_silent_prefect_server(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(tracking.prefect_reachable()) == []
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{silent}/api")
    started = time.monotonic()
    (finding,) = tracking.prefect_reachable()
    assert time.monotonic() - started < 7
    assert finding.what == "PREFECT_API_URL"
    assert "no answer within 5 s" in finding.allowed


@pytest.mark.parametrize(
    ("name", "word", "header"),
    [
        ("PREFECT_API_AUTH_STRING", "me:secret", BASIC),
        ("PREFECT_API_KEY", "pnu_1", "Bearer pnu_1"),
    ],
)
def test_the_login_of_prefect(
    monkeypatch: pytest.MonkeyPatch, name: str, word: str, header: str
) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), login(header)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api")
        (finding,) = tracking.prefect_reachable()
        assert "PREFECT_API_AUTH_STRING" in finding.override
        tracking._known.clear()
        monkeypatch.setenv(name, word)
        assert list(tracking.prefect_reachable()) == []
        server.shutdown()


@pytest.mark.parametrize(("status", "refused"), [(200, 0), (401, 1), (404, 0), (503, 1)])
def test_a_server_that_answers(status: int, refused: int) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        problems = list(tracking.reachable(f"http://127.0.0.1:{server.server_port}"))
    assert len(problems) == refused


@pytest.mark.parametrize("uri", [None, "sqlite:////a/b.db", "databricks"])
def test_no_server_to_ask(uri: str | None) -> None:
    assert list(tracking.reachable(uri)) == []


def test_a_password_is_accepted_from_the_url_and_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), login(BASIC)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_port}"
        assert list(tracking.reachable(f"http://me:secret@{place}")) == []
        (finding,) = tracking.reachable(f"http://me:wrong@{place}")
        assert "refuses the user or the password" in finding.allowed
        assert "MLFLOW_TRACKING_PASSWORD" in finding.override
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
        assert list(tracking.reachable(f"http://{place}")) == []
        server.shutdown()


def test_the_command_ends_before_anything_is_written(closed: int, tmp_path: Path) -> None:
    uri, runs = f"tracking.uri=http://me:secret@127.0.0.1:{closed}", tmp_path / "runs"
    done = run_in_empty(
        tmp_path,
        command("rlhf", "+exp=sft_qlora", uri, f"paths.runs={runs}"),
        env=environment(PREFECT_API_URL=f"http://127.0.0.1:{closed}/api"),
        timeout=120,
    )
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("nothing listens there") == 2
    assert f"PREFECT_API_URL: http://127.0.0.1:{closed}/api; nothing listens there" in done.stdout
    assert "unset PREFECT_API_URL" in done.stdout
    assert "secret" not in done.stdout
