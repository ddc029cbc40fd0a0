"""Servers that do not answer are refused before anything starts."""

from __future__ import annotations

import socket

import pytest

from tasks.config.checks import servers
from tests.answering import Reply, answering

BASIC, BEARER = "Basic bWU6c2VjcmV0", "Bearer t"
MLFLOW = "/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default"
PREFECT = "/api/admin/version"


def test_silent_servers_are_refused_without_their_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is asked once, however many steps a chain has."""
    assert list(servers.prefect_reachable()) == []
    monkeypatch.setattr(servers, "LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://me:secret@127.0.0.1:{server.getsockname()[1]}"
        (mlflow,) = servers.reachable(url)
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
        (prefect,) = servers.prefect_reachable()
        asked = servers._why_silent.cache_info().misses
        assert [*servers.reachable(url), *servers.prefect_reachable()] == [mlflow, prefect]
        assert asked == servers._why_silent.cache_info().misses
    assert (mlflow.what, prefect.what) == ("tracking.uri", "PREFECT_API_URL")
    assert "secret" not in f"{mlflow} {prefect}"


@pytest.mark.parametrize(
    ("name", "word", "sent", "status", "refused"),
    [
        ("PREFECT_API_AUTH_STRING", "", "", 200, 1),
        ("PREFECT_API_AUTH_STRING", "me:secret", BASIC, 200, 0),
        ("PREFECT_API_KEY", "t", BEARER, 200, 0),
        ("MLFLOW_TRACKING_TOKEN", "t", BEARER, 200, 0),
        ("MLFLOW_TRACKING_TOKEN", "t", BEARER, 404, 0),
        ("MLFLOW_TRACKING_TOKEN", "t", BEARER, 503, 1),
    ],
)
def test_the_login_of_the_environment_is_sent(
    name: str, word: str, sent: str, status: int, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, word)

    def answer(_: None) -> Reply:
        login = asked.seen[-1][2].get("Authorization", "")
        return Reply(status if login and login == sent else 401, b"{}")

    with answering({MLFLOW: answer, PREFECT: answer}) as asked:
        if name.startswith("PREFECT"):
            monkeypatch.setenv("PREFECT_API_URL", f"{asked.url}/api")
        uri = None if name.startswith("PREFECT") else asked.url
        assert len([*servers.prefect_reachable(), *servers.reachable(uri)]) == refused


def test_no_server_to_ask() -> None:
    for uri in (None, "sqlite:////a/b.db", "databricks"):
        assert list(servers.reachable(uri)) == []
