"""Find out what kind of server answers at an address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.core.errors import ConfigError
from tasks.verify.servers.http import Http
from tasks.verify.servers.openai import OpenAiServer
from tasks.verify.servers.server import Server, ServerError
from tasks.verify.servers.vllm import VllmServer

KINDS = ("vllm", "openai")
"""Dialects that `kind` names; None finds out."""


def connect(
    url: str,
    kind: str | None = None,
    key: str | None = None,
    timeout_s: float = 120.0,
    *,
    workers: int = 8,
    ca: str | None = None,
    model: str | None = None,
) -> Server:
    """Return the server at an address.

    Args:
        url: `http://host:8000`, with or without `/v1`.
        kind: one of `KINDS`; None recognises it by its endpoints.
        key: API key; None for the variable PLUMBLINE_API_KEY.
        timeout_s: longest time of one request, in seconds.
        workers: requests at the same time.
        ca: file with the certificates to trust; None for those of the system.
        model: name to try out abilities with; None for the first one.

    Raises:
        ConfigError: the address or the kind is none.
        ServerError: nothing answers there, the key is refused, or it is no such server.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"kind={kind} is no kind of server", hint=f"one of {', '.join(KINDS)}")
    http = Http(url, key=key, timeout_s=timeout_s, workers=workers, ca=ca)
    try:
        return _connected(http, kind, model)
    except BaseException:
        http.close()
        raise


def _connected(http: Http, kind: str | None, model: str | None) -> Server:
    owner, version = _owner(http), _version(http.optional("/version"))
    kind = kind or ("vllm" if owner == "vllm" else "openai")
    if kind == "vllm":
        return VllmServer(http, kind=kind, version=version, model=model)
    if owner is None:
        raise ServerError(
            f"{http.url} answers, but no /v1/models is there",
            hint=f"url= of a model server, or kind= one of {', '.join(KINDS)}",
            code="response",
        )
    return OpenAiServer(http, kind="openai", version=version, model=model)


def _owner(http: Http) -> str | None:
    """Return `owned_by` of the first model of `/v1/models`; None if there is no such list."""
    listed = http.optional("/v1/models")
    cards = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(cards, list):
        return None
    first = cards[0] if cards and isinstance(cards[0], dict) else {}
    return str(first.get("owned_by", ""))


def _version(answer: Any) -> str:
    version = answer.get("version", "") if isinstance(answer, Mapping) else ""
    return version if isinstance(version, str) else ""
