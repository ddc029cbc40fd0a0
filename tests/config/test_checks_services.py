"""Servers that do not answer and keys that do not fit are refused before anything starts."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from tasks.config.checks import model, servers, signing, tracking
from tasks.core.finding import Finding
from tasks.pipeline.signature import PASSWORD
from tests.answering import Reply, answering
from tests.config.test_checks_online import settings
from tests.keys import make_pair
from tests.machines import with_gpus

BASIC = "Basic bWU6c2VjcmV0"
PAGES = (
    "/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default", "/api/admin/version",
)  # fmt: skip


@contextmanager
def serving(status: Callable[[str], int]) -> Iterator[str]:
    """Answer with a status that depends on the login. Yields host and port."""

    def answer(_: None) -> Reply:
        return Reply(status(asked.seen[-1][2].get("Authorization", "")), b"{}")

    with answering(dict.fromkeys(PAGES, answer)) as asked:
        yield asked.url.removeprefix("http://")


def login(header: str) -> Callable[[str], int]:
    return lambda sent: 200 if sent == header else 401


def test_a_dead_port_is_refused_without_its_password() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for scheme in ("http", "postgresql"):
        (finding,) = tracking.reachable(f"{scheme}://me:secret@127.0.0.1:{port}/x")
        assert finding.what == "tracking.uri"
        assert "secret" not in str(finding)


def test_silent_servers_are_refused_after_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server is asked once, however many steps a chain has."""
    assert list(tracking.prefect_reachable()) == []
    monkeypatch.setattr(tracking, "LIMIT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        started = time.monotonic()
        for _ in range(3):
            (mlflow,) = tracking.reachable(url)
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
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


def test_the_status_and_the_login_of_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    for uri in (None, "sqlite:////a/b.db", "databricks"):
        assert list(tracking.reachable(uri)) == [], "no server to ask"
    for status, refused in ((200, 0), (404, 0), (503, 1)):
        with serving(lambda _, status=status: status) as place:
            assert len(list(tracking.reachable(f"http://{place}"))) == refused
    with serving(login(BASIC)) as place:
        assert list(tracking.reachable(f"http://me:secret@{place}")) == []
        (finding,) = tracking.reachable(f"http://me:wrong@{place}")
        assert "MLFLOW_TRACKING_PASSWORD" in finding.override
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
        assert list(tracking.reachable(f"http://{place}")) == []


URL = "http://10.0.0.7:8000"


def of(rl: Any = None, **rollout: Any) -> dict[str, Any]:
    whole = settings(rollout={"engine": "server", **rollout}, rl=rl)
    usual = {"save_steps": 0, "eval_steps": 0, "keep": "last"}
    return {**whole, "train": {**usual, **whole["train"]}}


def checked(*, on_cpu: bool = True, rl: Any = None, **rollout: Any) -> list[Finding]:
    return servers.servers(of(rl, **rollout), model.TOY, on_cpu=on_cpu)


def test_servers_are_started_or_named(tmp_path: Path) -> None:
    assert checked(servers=2) == []
    assert checked(urls=["http://127.0.0.1:8000", "http://localhost:8001/"]) == []
    assert checked(urls=[URL], sync_dir=str(tmp_path / "made" / "later")) == []
    for wrong in ({"servers": 0}, {"servers": 2, "urls": [URL]}):
        (finding,) = checked(**wrong)
        assert finding.what == "rollout.servers"
    (remote,) = checked(urls=[URL, "http://127.0.0.1:8000"])
    (relative,) = checked(urls=[URL], sync_dir="policies")
    (file,) = checked(urls=[URL], sync_dir="/proc/version/policies")
    assert {remote.what, relative.what, file.what} == {"rollout.sync_dir"}
    assert "/proc/version" in file.allowed
    (parallel,) = checked(servers=1, tensor_parallel=2)  # on a CPU
    assert parallel.override == "rollout.tensor_parallel=1"
    for url in ("10.0.0.7:8000", "http://[::1:8000", "http://127.0.0.1:8000/v1",
                "http://me:secret@127.0.0.1:8000"):  # fmt: skip
        (finding,) = servers.addresses([url])
        assert "secret" not in str(finding)
    (twice,) = servers.addresses([URL, URL])
    assert URL in twice.found


def test_started_servers_get_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 4)
    assert checked(servers=2, on_cpu=False) == []
    (finding,) = checked(servers=2, tensor_parallel=2, on_cpu=False)
    assert finding.what == "rollout.servers"
    assert "4" in finding.allowed


def test_staleness_needs_servers_importance_weights_and_room_between_checkpoints() -> None:
    assert checked(servers=2, rl={"staleness": 1}) == []
    (finding,) = servers.staleness({**of({"staleness": 1}), "rollout": {"engine": "vllm"}})
    assert "rollout.engine=vllm" in finding.found
    (finding,) = checked(servers=2, rl={"staleness": 1, "correction": "none"})
    assert "rl.correction=none" in finding.found
    whole = of({"staleness": 1}, servers=2)
    whole["train"] |= {"save_steps": 1, "eval_steps": 1}
    values = [finding.found for finding in servers.staleness(whole)]
    assert values == ["1 with train.save_steps=1", "1 with train.eval_steps=1"]
    whole["train"] |= {"save_steps": 0}
    assert list(servers.staleness(whole)) == [], "nothing is saved"


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
    make_pair(tmp_path, "group")[0].chmod(0o640)
    Path("large.pem").touch(mode=0o600)
    Path("large.pem").write_bytes(b"-" * 100_000)
    return tmp_path


def findings(private: str | None, public: str | None = None) -> list[Finding]:
    return signing.signing({"sign": private, "verify": public})


def test_a_key_that_cannot_sign_or_check_is_refused(keys: Path) -> None:
    for name, command in {
        "absent.pem": "openssl ecparam",
        "group.pem": "chmod 600 group.pem",
        "large.pem": "openssl ecparam",
        "koblitz.pem": "openssl ecparam",
        "edwards.pem": "openssl ecparam",
        "hidden.pem": f"export {PASSWORD}=",
    }.items():
        (finding,) = findings(name)
        assert finding.what == "register.sign", name
        assert command in finding.override, name
    for name, command in {
        "absent.pub": "openssl ec -in key.pem -pubout",
        "key.pem": "openssl ec -in key.pem -pubout -out key.pub",
        "koblitz.pub": "openssl ecparam",
        "other.pub": "openssl ec -in key.pem -pubout",
    }.items():
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
