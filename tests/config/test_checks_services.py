"""Servers that do not answer and keys that do not fit are refused before anything starts."""

from __future__ import annotations

import http.server
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from flows.chain.steps import chain_steps
from flows.cli.config import compose_config
from flows.cli.plan import check
from tasks.config.checks import signing, tracking
from tasks.core.errors import ConfigError
from tasks.pipeline.signature import PASSWORD
from tests.keys import make_pair


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
    assert f"tracking.uri: http://me:***@127.0.0.1:{closed}" in text
    assert "peft and zero: " in text
    assert "secret" not in text


@contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve in a thread; yield host and port."""
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("scheme", ["http", "postgresql"])
def test_a_dead_port_of_any_kind(closed: int, scheme: str) -> None:
    (finding,) = tracking.reachable(f"{scheme}://me:secret@127.0.0.1:{closed}/x")
    assert finding.what == "tracking.uri"
    assert "secret" not in str(finding)


def test_silent_servers_are_refused_after_five_seconds(
    silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each server is asked once, however many steps a chain has."""
    assert list(tracking.prefect_reachable()) == []
    monkeypatch.setattr(tracking, "LIMIT_S", 0.5)
    started = time.monotonic()
    for _ in range(3):
        (mlflow,) = tracking.reachable(f"http://127.0.0.1:{silent}")
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{silent}/api")
    (prefect,) = tracking.prefect_reachable()
    assert time.monotonic() - started < 4
    assert (mlflow.what, prefect.what) == ("tracking.uri", "PREFECT_API_URL")


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
    with serving(login(header)) as place:
        monkeypatch.setenv("PREFECT_API_URL", f"http://{place}/api")
        (finding,) = tracking.prefect_reachable()
        assert "PREFECT_API_AUTH_STRING" in finding.override
        tracking._known.clear()
        monkeypatch.setenv(name, word)
        assert list(tracking.prefect_reachable()) == []


@pytest.mark.parametrize(("status", "refused"), [(200, 0), (401, 1), (404, 0), (503, 1)])
def test_a_server_that_answers(status: int, refused: int) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with serving(Answer) as place:
        assert len(list(tracking.reachable(f"http://{place}"))) == refused


def test_there_may_be_no_server_to_ask() -> None:
    for uri in (None, "sqlite:////a/b.db", "databricks"):
        assert list(tracking.reachable(uri)) == []


def test_a_password_is_accepted_from_the_url_and_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(login(BASIC)) as place:
        assert list(tracking.reachable(f"http://me:secret@{place}")) == []
        (finding,) = tracking.reachable(f"http://me:wrong@{place}")
        assert "MLFLOW_TRACKING_PASSWORD" in finding.override
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
        assert list(tracking.reachable(f"http://{place}")) == []


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with keys of all kinds, as the working directory."""
    monkeypatch.delenv(PASSWORD, raising=False)
    monkeypatch.chdir(tmp_path)
    make_pair(tmp_path)
    make_pair(tmp_path, "other")
    make_pair(tmp_path, "hidden", password="right")
    make_pair(tmp_path, "koblitz", private=ec.generate_private_key(ec.SECP256K1()))
    make_pair(tmp_path, "edwards", private=ed25519.Ed25519PrivateKey.generate())
    make_pair(tmp_path, "rsa", private=rsa.generate_private_key(65537, 2048))
    make_pair(tmp_path, "open")[0].chmod(0o644)
    make_pair(tmp_path, "group")[0].chmod(0o640)
    Path("text.pem").touch(mode=0o600)
    Path("large.pem").touch(mode=0o600)
    Path("large.pem").write_bytes(b"-" * 100_000)
    return tmp_path


def findings(private: str | None, public: str | None = None) -> list[Any]:
    return signing.signing({"sign": private, "verify": public})


def test_a_key_that_cannot_sign_is_refused(keys: Path) -> None:
    advice = {
        "absent.pem": "openssl ecparam",
        ".": "openssl ecparam",
        "open.pem": "chmod 600 open.pem",
        "group.pem": "chmod 600 group.pem",
        "key.pub": "chmod 600",
        "text.pem": "openssl ecparam",
        "large.pem": "openssl ecparam",
        "koblitz.pem": "openssl ecparam",
        "edwards.pem": "openssl ecparam",
        "rsa.pem": "openssl ecparam",
        "hidden.pem": f"export {PASSWORD}=",
    }
    for name, command in advice.items():
        (finding,) = findings(name)
        assert finding.what == "register.sign", name
        assert command in finding.override, name


def test_a_key_that_cannot_check_is_refused(keys: Path) -> None:
    advice = {
        "absent.pub": "openssl ec -in key.pem -pubout",
        "key.pem": "openssl ec -in key.pem -pubout -out key.pub",
        "text.pem": "-pubout",
        "koblitz.pub": "openssl ecparam",
        "rsa.pub": "openssl ecparam",
        "other.pub": "openssl ec -in key.pem -pubout",
    }
    for name, command in advice.items():
        (finding,) = findings("key.pem", name)
        assert finding.what == "register.verify", name
        assert command in finding.override, name


def test_keys_that_fit(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings(None) == []
    assert findings("key.pem") == findings(None, "key.pub") == findings("key.pem", "key.pub") == []
    monkeypatch.setenv(PASSWORD, "right")
    assert findings("hidden.pem", "hidden.pub") == []
    (finding,) = findings("key.pem")
    assert f"unset {PASSWORD}" in finding.override
    monkeypatch.setenv(PASSWORD, "wrong")
    (finding,) = findings("hidden.pem")
    assert "wrong" not in finding.override


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_commands_of_the_advice_make_keys_that_fit(keys: Path) -> None:
    folder = keys / "new"
    folder.mkdir()
    for command in (signing.MAKE, signing.EXPORT):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    assert findings(str(folder / "key.pem"), str(folder / "key.pub")) == []


def test_signing_needs_its_package(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing, "find_spec", lambda name: None)
    (finding,) = findings("key.pem")
    assert finding.override == "make setup-sign"
