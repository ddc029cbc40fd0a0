"""Find out what kind of server answers at an address."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.errors import ConfigError
from tasks.verify.servers.completions import CompletionsServer, VllmServer
from tasks.verify.servers.http import Http
from tasks.verify.servers.llama_cpp import LlamaCppServer
from tasks.verify.servers.ollama import OllamaServer
from tasks.verify.servers.server import Server, ServerError
from tasks.verify.servers.sglang import SglangServer
from tasks.verify.servers.tgi import TgiServer
from tasks.verify.servers.transformers_serve import TransformersServer
from tasks.verify.servers.vocabulary import read_vocabulary

KINDS = ("vllm", "sglang", "tgi", "llama.cpp", "ollama", "transformers", "openai")
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
    tokenizer: Path | None = None,
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
        tokenizer: folder with the `tokenizer.json` of the training, for servers that take texts
            only; None for none.

    Raises:
        ConfigError: the address or the kind is none.
        ServerError: nothing answers there, the key is refused, or it is no such server.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"kind={kind} is no kind of server", hint=f"one of {', '.join(KINDS)}")
    http = Http(url, key=key, timeout_s=timeout_s, workers=workers, ca=ca)
    try:
        return _connected(http, kind, model, tokenizer)
    except BaseException:
        http.close()
        raise


def _connected(http: Http, kind: str | None, model: str | None, tokenizer: Path | None) -> Server:
    owner = _owner(http)
    if kind is None and owner == "vllm":
        kind = "vllm"
    vocabulary = read_vocabulary(tokenizer) if tokenizer is not None else None
    if kind == "vllm":
        version = _text(http.optional("/version"), "version")
        return VllmServer(http, kind=kind, version=version, model=model)
    if kind == "openai":
        return CompletionsServer(http, model=model, vocabulary=vocabulary)
    if kind in (None, "llama.cpp"):
        props = http.optional("/props")
        if _has(props, "default_generation_settings"):
            return LlamaCppServer(http, props)
    if kind in (None, "sglang"):
        facts = http.optional("/get_model_info") or http.optional("/model_info")
        if _has(facts, "model_path"):
            served = http.optional("/get_server_info") or http.optional("/server_info")
            return SglangServer(http, _text(served, "version"), model)
    if kind in (None, "tgi"):
        info = http.optional("/info")
        if _has(info, "model_id"):
            return TgiServer(http, info, vocabulary, model)
    if kind in (None, "ollama"):
        version = _text(http.optional("/api/version"), "version")
        if version:
            return OllamaServer(http, version, vocabulary, model)
    if kind == "transformers" or (kind is None and _is_transformers(http)):
        return TransformersServer(http, "", vocabulary, model)
    if kind is not None:
        raise ServerError(
            f"{http.url} is no server of kind {kind}", hint="kind= is not needed", code="response"
        )
    if owner is None:
        raise ServerError(
            f"{http.url} answers, but no /v1/models is there",
            hint=f"url= of a model server, or kind= one of {', '.join(KINDS)}",
            code="response",
        )
    return CompletionsServer(http, model=model, vocabulary=vocabulary)


def _owner(http: Http) -> str | None:
    """Return `owned_by` of the first model of `/v1/models`; None if there is no such list."""
    listed = http.optional("/v1/models")
    cards = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(cards, list):
        return None
    first = cards[0] if cards and isinstance(cards[0], dict) else {}
    return str(first.get("owned_by", ""))


def _is_transformers(http: Http) -> bool:
    """Return True if the API's description lists the endpoint that only transformers has."""
    described = http.optional("/openapi.json")
    return _has(described, "paths") and "/load_model" in described["paths"]


def _has(answer: Any, key: str) -> bool:
    return isinstance(answer, Mapping) and key in answer


def _text(answer: Any, key: str) -> str:
    value = answer.get(key, "") if isinstance(answer, Mapping) else ""
    return value if isinstance(value, str) else ""
