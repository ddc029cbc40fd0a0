"""Check section `tracking` and `push`: servers answer in five seconds."""

from __future__ import annotations

import os
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from tasks.core.finding import Finding
from tasks.core.redaction import HIDDEN, redact
from tasks.release.push import LOGIN, owner_problem

LIMIT_S = 5.0
FRESH_S = 30.0
"""An answer counts for all steps of a run and for its plan, not for the next run of a sweep."""
_LOGIN = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
_REFUSES = "it refuses the user or the password"
PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}

_known: dict[str, tuple[float, str]] = {}


def reachable(uri: str | None) -> Iterator[Finding]:
    """Yield a finding if the server of `tracking.uri` does not answer.

    Args:
        uri: `tracking.uri`; None and SQLite need no server.
    """
    if uri is None or urlsplit(uri).hostname is None:
        return
    is_http = urlsplit(uri).scheme in ("http", "https")
    if reason := _why_unreachable(uri, _ask_mlflow if is_http else _ask_database):
        yield Finding(
            "tracking.uri",
            redact(uri),
            f"{reason}; metrics of this run would have no place to go",
            "tracking.uri=sqlite:////<path>/mlflow.db, or "
            + (_LOGIN if reason.startswith(_REFUSES) else "start that server: make up"),
        )


def prefect_reachable() -> Iterator[Finding]:
    """Yield a finding if the Prefect server of `PREFECT_API_URL` does not answer."""
    if (url := os.environ.get("PREFECT_API_URL")) and (
        reason := _why_unreachable(url, _ask_prefect)
    ):
        login = "PREFECT_API_AUTH_STRING, or PREFECT_API_KEY"
        yield Finding(
            "PREFECT_API_URL",
            redact(url),
            f"{reason}; this run would not be recorded there",
            "unset PREFECT_API_URL (a server of its own), or "
            + (login if reason.startswith(_REFUSES) else "start that server"),
        )


def hub(repo: str | None, engine: str = "") -> Iterator[Finding]:
    """Yield a finding if nothing can be pushed to the repository of `push`.

    Args:
        repo: `push`; None pushes nothing.
        engine: `smoke.engine`.
    """
    if repo is None:
        return
    from huggingface_hub import get_token
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
        named = repo.count("/") == 1
    except HFValidationError:
        named = False
    if not named:
        yield Finding("push", redact(repo), "<owner>/<name> on the Hub", "push=me/my-model")
    elif engine == "none":
        proven = "only what an engine has loaded and measured is pushed"
        yield Finding("push", f"{repo} with smoke.engine=none", proven, "smoke.engine=vllm")
    elif is_offline_mode():
        yield Finding("push", repo, "HF_HUB_OFFLINE forbids it", "unset HF_HUB_OFFLINE")
    elif get_token() is None:
        yield Finding("push", repo, "there is no token of the Hub", LOGIN)
    elif reason := _why_unreachable(repo, owner_problem):
        yield Finding("push", repo, reason, LOGIN)


def public(tracking: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each name that MLflow's pages show and that contains a secret.

    Args:
        tracking: the section.
    """
    for key in {"experiment", "model_name"} & tracking.keys():
        shown = redact(tracking[key])
        if HIDDEN in shown:
            allowed = "a name without a token or a password, because every page shows it"
            yield Finding(f"tracking.{key}", shown, allowed, f"tracking.{key}=plumbline")


def _why_unreachable(uri: str, ask: Callable[[str], str]) -> str:
    """Return why no server answers at a URI; empty if one does."""
    asked, reason = _known.get(uri, (0.0, ""))
    if not asked or time.monotonic() - asked > FRESH_S:
        reason = _answer_in_time(uri, ask)
        _known[uri] = time.monotonic(), reason
    return reason


def _answer_in_time(uri: str, ask: Callable[[str], str]) -> str:
    reasons: list[str] = []

    def answer() -> None:
        try:
            reasons.append(ask(uri))
        except Exception as error:  # a missing library, for example, is no silent server
            reasons.append(f"asking it failed ({type(error).__name__}: {error})")

    # In a thread, since neither a slow name server nor slow headers end at a socket's timeout.
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return reasons[0] if reasons else f"there was no answer within {LIMIT_S:g} s"


def _ask_mlflow(uri: str) -> str:
    name, word = (os.environ.get(f"MLFLOW_TRACKING_{key}") for key in ("USERNAME", "PASSWORD"))
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    insecure = os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1")
    status, reason = _get(
        f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/get-by-name",
        params={"experiment_name": "Default"},
        auth=(name, word) if name and word else None,
        headers={"Authorization": f"Bearer {token}"} if token else None,
        verify=not insecure,
    )
    signed = {"MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4"} & set(os.environ)
    if status in (401, 403) and signed:  # which only MLflow's client can do
        return ""
    return reason


def _ask_prefect(url: str) -> str:
    login, key = (os.environ.get(f"PREFECT_API_{name}") for name in ("AUTH_STRING", "KEY"))
    scheme, word = ("Basic", b64encode(login.encode()).decode()) if login else ("Bearer", key)
    insecure = os.environ.get("PREFECT_API_TLS_INSECURE_SKIP_VERIFY", "").lower() in ("true", "1")
    return _get(
        f"{url.rstrip('/')}/admin/version",
        headers={"Authorization": f"{scheme} {word}"} if word else None,
        verify=not insecure,
    )[1]


def _get(url: str, **arguments: Any) -> tuple[int, str]:
    """Send a GET request. Returns the status, and why the server cannot be used."""
    import requests

    try:
        status = requests.get(url, **arguments, timeout=LIMIT_S).status_code
    except requests.exceptions.Timeout:
        return 0, f"there was no answer within {LIMIT_S:g} s"
    except requests.exceptions.SSLError:
        return 0, "its TLS certificate is not trusted"
    except (requests.exceptions.RequestException, ValueError) as error:
        return 0, _in_words(error)
    if status in (401, 403):
        return status, f"{_REFUSES} (status {status})"
    return status, f"it answers with status {status}" if status >= 500 else ""


def _in_words(error: Exception) -> str:
    for known, words in (
        ("refused", "nothing listens there"),
        ("resolve", "there is no host of that name"),
    ):
        if known in str(error):
            return words
    return f"no connection ({type(error).__name__})"


def _ask_database(uri: str) -> str:
    parts = urlsplit(uri)
    port = parts.port or PORTS.get(parts.scheme.partition("+")[0])
    if port is None:
        return ""
    try:
        socket.create_connection((parts.hostname, port), timeout=LIMIT_S).close()
    except OSError as error:
        return _in_words(error) if "refused" in str(error) else "no connection"
    return ""
