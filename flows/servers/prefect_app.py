"""Prefect's server behind a check of the headers Host and Origin.

    uvicorn --factory flows.servers.prefect_app:create_app

Prefect itself answers requests for any host name. A web page whose name is made to point at this
machine (DNS rebinding) would then be of the same origin as the server, for the browser. Browsers do
not apply CORS to websockets either. So both headers are compared with two lists:

    PLUMBLINE_PREFECT_HOSTS                 host:port, comma-separated
    PREFECT_SERVER_CORS_ALLOWED_ORIGINS     Prefect's own setting; "*" is refused

This file imports nothing of Plumbline: the server image of infra/Dockerfile has this file alone.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

HOSTS = "PLUMBLINE_PREFECT_HOSTS"
WAITS = "PLUMBLINE_PREFECT_WAITS"
"""Set if the server opens its database and port when it gets a line on standard input."""
ORIGINS = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Guard:
    """An ASGI application that refuses requests for other hosts and from other origins.

    Args:
        app: the application behind it.
        hosts: accepted values of the header Host.
        origins: accepted values of the header Origin. Programs send none, which is accepted.
    """

    def __init__(self, app: App, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with status 403."""
        problem = "" if scope["type"] == "lifespan" else self._problem(scope["headers"])
        if not problem:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # answered with status 403
        else:
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": problem.encode()})

    def _problem(self, headers: Collection[tuple[bytes, bytes]]) -> str:
        """Return the reason to refuse a request; empty if there is none."""
        sent = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
        if len(sent) != 1 or sent[0] not in self._hosts:
            return f"host not allowed; allowed: {', '.join(sorted(self._hosts))} ({HOSTS})"
        origins = {value.decode("latin-1").lower() for name, value in headers if name == b"origin"}
        if not origins <= self._origins:
            return f"origin not allowed; allowed: {', '.join(sorted(self._origins))} ({ORIGINS})"
        return ""


def create_app() -> Guard:
    """Return Prefect's server, guarded. Reads its settings from the environment.

    Raises:
        RuntimeError: a list is missing, or allows everything.
        SystemExit: standard input was closed before the line that this server waits for.
    """
    hosts, origins = _listed(HOSTS), _listed(ORIGINS)
    gc.set_threshold(50_000)  # as in flows/cli/start.py
    from prefect.server.api.server import create_app as create_prefect_app

    lock_before_reading()
    guard = Guard(create_prefect_app(), hosts, origins)
    if os.environ.get(WAITS) and not sys.stdin.readline():
        raise SystemExit(0)
    return guard


def lock_before_reading() -> None:
    """Let the two tasks of every worker poll take SQLite's write lock before they read.

    In Prefect 3.7 their transactions read, then write. If another connection writes in between,
    SQLite refuses at once ("database is locked"), whatever its timeout. Prefect's pull request
    22967 does the same; this function does nothing in later versions.
    """
    import prefect
    from docket import Depends
    from prefect.server.database import provide_database_interface
    from prefect.server.models.deployments import mark_deployments_ready
    from prefect.server.models.work_queues import mark_work_queues_ready

    if prefect.__version__.startswith("3.7."):
        for task in (mark_deployments_ready, mark_work_queues_ready):
            task.__kwdefaults__["db"] = Depends(lambda: _WriteLock(provide_database_interface()))


class _WriteLock:
    """Prefect's database interface, whose transactions begin with the write lock."""

    def __init__(self, interface: Any) -> None:
        self._interface = interface

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interface, name)

    def session_context(self, begin_transaction: bool = False) -> Any:
        return self._interface.session_context(begin_transaction, with_for_update=True)


def guard_settings(*hosts: str) -> dict[str, str]:
    """Return the environment that allows these hosts (`host:port`), and pages served by them."""
    return {HOSTS: ",".join(hosts), ORIGINS: ",".join(f"http://{host}" for host in hosts)}


def _listed(variable: str) -> list[str]:
    entries = [entry.strip().lower() for entry in os.environ.get(variable, "").split(",")]
    if not all(entries) or "*" in entries:
        raise RuntimeError(f"{variable}={os.environ.get(variable, '')}: list what is allowed")
    return entries
