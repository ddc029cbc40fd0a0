"""Running servers, asked over HTTP: one interface, and one class per dialect.

server = connect("http://host:8000")
server.models(), server.score(name, ids), server.next(name, prefixes)
server.tokenize(name, text), server.render(name, chat), server.generate(name, prompt, 16)

What an API cannot do raises UnsupportedError.
"""

from __future__ import annotations

from typing import Any

from tasks.verify.servers.client import Client
from tasks.verify.servers.dialects import LlamaCppServer, OpenAiServer, SglangServer
from tasks.verify.servers.server import Server, ServerError


def connect(
    url: str, timeout_s: float = 120.0, *, workers: int = 8, model: str | None = None
) -> Server:
    """Return the server at an address, with or without `/v1`; its endpoints tell the dialect.

    `workers` requests are sent at the same time, unless a call says otherwise; `model` is the name
    to try the server with, by default its first one. The API key is read from PLUMBLINE_API_KEY.
    Raises ConfigError for an address that is none, ServerError if nothing answers there, the key is
    refused, or it is no such server.
    """
    client = Client(url, timeout_s=timeout_s, workers=workers)

    def field(path: str, key: str) -> Any:
        document = client.optional(path)
        return document.get(key) if isinstance(document, dict) else None

    cards = field("/v1/models", "data")
    is_openai = isinstance(cards, list)
    if is_openai and cards and cards[0].get("owned_by") == "vllm":
        return OpenAiServer(client, "vllm", str(field("/version", "version") or ""), model)
    if field("/props", "default_generation_settings"):
        return LlamaCppServer(client)
    if field("/get_model_info", "model_path") or field("/model_info", "model_path"):
        version = field("/get_server_info", "version") or field("/server_info", "version")
        return SglangServer(client, "sglang", str(version or ""), model)
    is_ollama = field("/api/version", "version")
    if is_openai and not is_ollama:
        return OpenAiServer(client, model=model)
    raise ServerError(
        f"{client.url} is {'Ollama' if is_ollama else 'no server of models: no /v1/models'}",
        hint="url= of vLLM, SGLang, another OpenAI-compatible server, or llama-server, which "
        "serves Ollama's GGUF file",
        code="response",
    )
