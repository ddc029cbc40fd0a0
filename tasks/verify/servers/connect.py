"""Find out what kind of server answers at an address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.core.errors import ConfigError
from tasks.verify.servers.client import Client
from tasks.verify.servers.llama_cpp import LlamaCppServer
from tasks.verify.servers.openai import OpenAiServer, VllmServer
from tasks.verify.servers.server import Server, ServerError
from tasks.verify.servers.sglang import SglangServer

KINDS = ("vllm", "sglang", "llama.cpp", "openai")
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
        workers: requests at the same time, unless a call says otherwise.
        ca: file with the certificates to trust; None for those of the system.
        model: name to try the server with; None for the first one.

    Raises:
        ConfigError: the address or the kind is none.
        ServerError: nothing answers there, the key is refused, or it is no such server.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"kind={kind} is no kind of server", hint=f"one of {', '.join(KINDS)}")
    client = Client(url, key=key, timeout_s=timeout_s, workers=workers, ca=ca)
    listed = client.optional("/v1/models")
    cards = listed.get("data") if isinstance(listed, Mapping) else None
    first = cards[0] if isinstance(cards, list) and cards else {}
    if kind == "vllm" or (kind is None and _field(first, "owned_by") == "vllm"):
        version = _field(client.optional("/version"), "version")
        return VllmServer(client, kind="vllm", version=str(version), model=model)
    if kind in (None, "llama.cpp"):
        props = client.optional("/props")
        if _field(props, "default_generation_settings"):
            return LlamaCppServer(client, props)
    if kind in (None, "sglang"):
        facts = client.optional("/get_model_info") or client.optional("/model_info")
        if _field(facts, "model_path"):
            served = client.optional("/get_server_info") or client.optional("/server_info")
            version = _field(served, "version")
            return SglangServer(client, kind="sglang", version=str(version), model=model)
    if kind in ("llama.cpp", "sglang"):
        raise ServerError(
            f"{client.url} is no server of kind {kind}", hint="kind= is not needed", code="response"
        )
    if kind is None and _field(client.optional("/api/version"), "version"):
        reason = f"{client.url} is Ollama, which verify does not ask"
        hint = "serve the GGUF by llama-server to verify it"
        raise ServerError(reason, hint=hint, code="response")
    if not isinstance(cards, list):
        raise ServerError(
            f"{client.url} answers, but no /v1/models is there",
            hint=f"url= of a model server, or kind= one of {', '.join(KINDS)}",
            code="response",
        )
    return OpenAiServer(client, model=model)


def _field(answer: Any, key: str) -> Any:
    return answer.get(key, "") if isinstance(answer, Mapping) else ""
