"""Servers that have to answer, and names that their pages show."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from tasks.core.errors import Finding
from tasks.core.redaction import HIDDEN, redact

_INSECURE = ("MLFLOW_TRACKING_INSECURE_TLS", "PREFECT_API_TLS_INSECURE_SKIP_VERIFY")
LIMIT_S = 5.0


def reachable(uri: str | None) -> Iterator[Finding]:
    """Yield a finding if the server of `tracking.uri` does not answer; SQLite needs none."""
    if uri is None or urlsplit(uri).scheme not in ("http", "https"):
        return
    login = (os.environ.get(f"MLFLOW_TRACKING_{name}") or "" for name in ("USERNAME", "PASSWORD"))
    page = "api/2.0/mlflow/experiments/get-by-name?experiment_name=Default"
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if reason := _why_silent(f"{uri.rstrip('/')}/{page}", ":".join(login), token):
        allowed = f"{reason}; metrics of this run would have no place to go"
        override = "tracking.uri=sqlite:////<path>/mlflow.db, or make up"
        yield Finding("tracking.uri", redact(uri), allowed, override)


def prefect_reachable() -> Iterator[Finding]:
    """Yield a finding if the Prefect server of `PREFECT_API_URL` does not answer."""
    if not (url := os.environ.get("PREFECT_API_URL")):
        return
    login, token = (os.environ.get(f"PREFECT_API_{name}") for name in ("AUTH_STRING", "KEY"))
    if reason := _why_silent(f"{url.rstrip('/')}/admin/version", login or "", token):
        allowed = f"{reason}; this run would not be recorded there"
        override = "unset PREFECT_API_URL (a server of its own), or PREFECT_API_AUTH_STRING"
        yield Finding("PREFECT_API_URL", redact(url), allowed, override)


@cache  # the steps of a run and its plan ask once
def _why_silent(url: str, login: str, token: str | None) -> str:
    """Return why no server answers at a URL; empty if one does. `login`: `<user>:<password>`."""
    import httpx

    user, _, word = login.partition(":")
    headers = {"Authorization": f"Bearer {token}"} if token and not (user and word) else {}
    auth = (user, word) if user and word else None
    insecure = any((os.environ.get(name) or "").lower() in ("true", "1") for name in _INSECURE)
    try:
        answer = httpx.get(url, timeout=LIMIT_S, auth=auth, headers=headers, verify=not insecure)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return f"no answer within {LIMIT_S:g} s ({error or type(error).__name__})"
    if answer.status_code in (401, 403):
        return "it refuses the login"
    return f"it answers with status {answer.status_code}" if answer.status_code >= 500 else ""


def public(tracking: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each name that MLflow's pages show and that contains a secret."""
    for key in sorted({"experiment", "model_name"} & tracking.keys()):
        if HIDDEN in (shown := redact(tracking[key])):
            allowed = "a name without a token or a password, because every page shows it"
            yield Finding(f"tracking.{key}", shown, allowed, f"tracking.{key}=plumbline")
