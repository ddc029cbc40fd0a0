"""Servers that do not answer and keys that do not fit are refused before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tasks.config.checks import release
from tests.answering import Reply, answering

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


def test_silent_servers_are_refused_without_their_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is asked once, however many steps a chain has."""
    assert list(release.prefect_reachable()) == []
    monkeypatch.setattr(release, "LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://me:secret@127.0.0.1:{server.getsockname()[1]}"
        (mlflow,) = release.reachable(url)
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
        (prefect,) = release.prefect_reachable()
        asked = release._why_silent.cache_info().misses
        assert [*release.reachable(url), *release.prefect_reachable()] == [mlflow, prefect]
        assert asked == release._why_silent.cache_info().misses
    assert (mlflow.what, prefect.what) == ("tracking.uri", "PREFECT_API_URL")
    assert "secret" not in f"{mlflow} {prefect}"


LOGINS = {
    "PREFECT_API_AUTH_STRING": ("me:secret", BASIC),
    "PREFECT_API_KEY": ("pnu_1", "Bearer pnu_1"),
    "MLFLOW_TRACKING_TOKEN": ("t", "Bearer t"),
}


@pytest.mark.parametrize("name", LOGINS)
def test_a_login_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    word, header = LOGINS[name]

    def found() -> int:
        return len([*release.prefect_reachable(), *release.reachable(uri)])

    with serving(lambda sent: 200 if sent == header else 401) as place:
        uri = f"http://{place}" if name.startswith("MLFLOW") else None
        if uri is None:
            monkeypatch.setenv("PREFECT_API_URL", f"http://{place}/api")
        assert found() == 1
        monkeypatch.setenv(name, word)
        assert found() == 0


def test_the_status_of_mlflow() -> None:
    for uri in (None, "sqlite:////a/b.db", "databricks"):
        assert list(release.reachable(uri)) == [], "no server to ask"
    for status, refused in ((200, 0), (404, 0), (503, 1)):
        with serving(lambda _, status=status: status) as place:
            assert len(list(release.reachable(f"http://{place}"))) == refused
