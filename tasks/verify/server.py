"""Running servers, asked over HTTP: the interface of all dialects, and their client.

Redirects are not followed, so that the API key goes to the host that was typed and to no other.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.redaction import hide, hide_in_url, redact_url
from tasks.serving.vllm.colocation import DIRECT, KEY_VARIABLE

Message: TypeAlias = Mapping[str, Any]
"""A turn of a conversation: `role` and `content`, of tools also `tool_calls`."""
Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Schemas of the tools of a conversation, in OpenAI's form."""
Ids: TypeAlias = Sequence[int]
Prompt: TypeAlias = Ids | Sequence[Message]
"""Token ids, or a conversation that the server renders with its own template."""
SAMPLED = 12
"""Positions of a sequence that are scored where each costs a request."""


class ServerError(PlumblineError):
    """A server does not answer, refuses, or answers with something unreadable.

    Codes: "unreachable", "login", "missing" (no such path or model), "busy" (429 or 503 to the
    end), "length" (longer than the context), "request" (any other refusal), "response"
    (unreadable).
    """

    exit_code = 2


class UnsupportedError(ServerError):
    """The API of this server cannot answer this; a check that needs it is "unknown"."""


class Entry(NamedTuple):
    """Token ids and their log-probabilities (nats) at one position, both (K,), likeliest first."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


EMPTY = Entry(np.empty(0, np.int32), np.empty(0, np.float32))
"""A position that was not measured."""
Scores: TypeAlias = Sequence[Entry]
"""Log-probabilities of T token ids, T-1 entries: entry t predicts token t+1, and has the server's
most likely ids and that token."""


@dataclass(frozen=True)
class ServedModel:
    """A name that a server answers to; None stands for what the server does not say."""

    name: str
    parent: str | None = None  # name of the base of an adapter
    root: str | None = None  # path or repository that the server loaded
    max_length: int | None = None  # tokens of prompt and response together


@dataclass(frozen=True)
class Generated:
    """One response; None stands for what the server does not say."""

    ids: tuple[int, ...] | None  # a final EOS is included by some servers only
    text: str  # untrusted
    finish: str  # "stop" (the end of the turn), "length" or the server's own word
    prompt_ids: tuple[int, ...] | None = None
    prompt_length: int | None = None


class Server:
    """A running server; each dialect overrides what its API can do, by several threads at once.

    Every method raises ServerError if the server does not answer or refuses, and UnsupportedError
    for what the API cannot do.
    """

    url: str  # without password, final slash and `/v1`
    kind: str  # dialect: "vllm", "sglang", "llama.cpp" or "openai"
    version: str

    def models(self) -> Sequence[ServedModel]:
        """Return the names that the server answers to; the base before its adapters."""
        raise NotImplementedError

    def score(self, model: str, sequences: Sequence[Ids], workers: int = 0) -> list[Scores]:
        """Return the prompt log-probabilities of sequences, `workers` requests at a time."""
        self._cannot("return log-probabilities of prompts")

    def next(
        self, model: str, prefixes: Sequence[Ids], workers: int = 0, cache: bool = True
    ) -> list[Entry]:
        """Return the most likely next tokens after each prefix, as they are generated.

        `cache` lets the server use its prompt cache, as requests of users do.
        """
        self._cannot("return log-probabilities of next tokens")

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text; `special` adds those that begin a sequence (BOS)."""
        self._cannot("tokenise texts")

    def render(self, model: str, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]:
        """Return the ids of a conversation with the generation prompt, by the server's template."""
        self._cannot("tell the token ids of a conversation")

    def generate(
        self, model: str, prompt: Prompt, count: int, n: int = 1, stream: bool = False, **more: Any
    ) -> list[Generated]:
        """Return n responses of at most `count` tokens; one that is streamed is joined.

        `more` has names of vLLM (`temperature`, `top_p`, `seed`, `logit_bias`). What is left
        out is not sent, so that the server's own defaults hold.
        """
        self._cannot("generate responses to token ids")

    def _cannot(self, what: str) -> NoReturn:
        raise UnsupportedError(f"{self.url} does not {what}")


def entry(values: Mapping[int, float | None]) -> Entry:
    """Return the log-probabilities of one position by token id; None is left out.

    Raises ServerError for values that are not log-probabilities.
    """
    pairs = {token: value for token, value in values.items() if value is not None}
    ids = np.fromiter(pairs, np.int64, len(pairs))
    try:
        logprobs = np.fromiter(pairs.values(), np.float64, len(pairs))
    except (TypeError, ValueError):
        logprobs = np.array([np.nan])
    if not (logprobs <= 1e-3).all():  # NaN included
        raise ServerError(
            "the server returns values that are not log-probabilities",
            hint="vllm serve --logprobs-mode raw_logprobs",
            code="response",
        )
    order = np.argsort(-logprobs, kind="stable")
    return Entry(ids[order].astype(np.int32), logprobs[order].astype(np.float32))


def score(
    server: Server,
    model: str,
    sequences: Sequence[Ids],
    *,
    workers: int = 0,
    cache: bool = False,
    most: int = SAMPLED,
) -> list[Scores]:
    """Score sequences by prompt log-probabilities, else by next tokens at up to `most` positions.

    The other positions are empty. `cache` is that of `Server.next`.
    """
    try:
        return server.score(model, sequences, workers)
    except UnsupportedError:
        pass
    places = [
        (number, at)
        for number, ids in enumerate(sequences)
        for at in np.unique(np.linspace(len(ids) - 2, 0, min(most, len(ids) - 1)).round())
    ]
    prefixes = [sequences[number][: int(at) + 1] for number, at in places]
    known = dict(zip(places, server.next(model, prefixes, workers, cache), strict=True))
    return [
        [known.get((number, at), EMPTY) for at in range(len(ids) - 1)]
        for number, ids in enumerate(sequences)
    ]


def is_chat(prompt: Prompt) -> bool:
    """Return True if a prompt is a conversation."""
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def chat_fields(messages: Sequence[Message], tools: Tools) -> dict[str, Any]:
    """Return the fields of a chat request, in which the arguments of calls are JSON text."""
    turns = [dict(message) for message in messages]
    for turn in turns:
        if "tool_calls" in turn:
            turn["tool_calls"] = [_as_text(call) for call in turn["tool_calls"]]
    return {"messages": turns, **({"tools": list(tools)} if tools else {})}


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {"id": "call", **call, "function": {**call["function"], "arguments": arguments}}


EXCERPT = 300
"""Characters of a response that an error shows."""
# vLLM grants a prompt as long as the context no token: "max_tokens must be at least 1, got 0".
_TOO_LONG = re.compile(
    r"context (length|size|window)|max_model_len|longer than|too long|max_tokens must be at least",
    re.I,
)
_LOGIN = ("login", f"export {KEY_VARIABLE}=... with a key of this server")
_BUSY = ("busy", "fewer workers=, a longer timeout_s=, or wait until the server is ready")
_REFUSALS: Mapping[int, tuple[str, str]] = {
    401: _LOGIN, 403: _LOGIN, 429: _BUSY, 503: _BUSY,
    404: ("missing", ""), 405: ("missing", ""), 501: ("missing", ""),
}  # fmt: skip
"""Code and hint of a `ServerError` by status; all others are "request"."""
_START = "start the server, wait until it is ready, or correct url="
_ITEM = TypeVar("_ITEM")
_RESULT = TypeVar("_RESULT")


class Client:
    """HTTP client of one server; see `connect` for the arguments. Threads may share it."""

    def __init__(self, url: str, *, timeout_s: float = 120.0, workers: int = 8) -> None:
        address = _address(url)
        hide_in_url(address)
        self.url, self.workers, self._timeout_s = redact_url(address), workers, timeout_s
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if key:
            hide(key)
        self._client = httpx.Client(
            base_url=address,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            limits=httpx.Limits(max_connections=None),
            mounts=DIRECT,
        )

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def get(self, path: str) -> Any:
        """Return the JSON document at a path."""
        return self._parsed(path, self._response(path, None).content)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a JSON document; return the response's."""
        return self._parsed(path, self._response(path, body).content)

    def optional(self, path: str) -> Any:
        """Return the JSON document at a path; None if the server has none there.

        Raises ServerError if nothing answers or the key is refused.
        """
        try:
            return self.get(path)
        except ServerError as error:
            if error.code in ("unreachable", "login", "busy"):
                raise
            return None

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        """Send a JSON document; yield the server-sent events of the response, once all are here."""
        for line in self._response(path, body).text.splitlines():
            content = line.removeprefix("data:").strip()
            if content.startswith("{"):
                part = self._parsed(path, content.encode())
                if part.get("error"):
                    raise ServerError(f"{self.url}{path}: {_reason(content)}", code="request")
                yield part

    def _parsed(self, path: str, content: bytes) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise ServerError(
                f"{self.url}{path}: the response is no JSON",
                details=[content[:EXCERPT].decode("utf-8", "replace")],
                hint="url= is the address of the server itself, without a path of a page",
                code="response",
            ) from None

    def _response(self, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        """Return a successful response; wait where a busy server asks for it."""
        until, pause = time.monotonic() + self._timeout_s, 0.5
        request = self._client.build_request("GET" if body is None else "POST", path, json=body)
        while True:
            try:
                response = self._sent(request)
            except httpx.HTTPError as error:
                slow = isinstance(error, httpx.TimeoutException)
                slow = slow and not isinstance(error, httpx.ConnectTimeout)
                code, hint = _BUSY if slow else ("unreachable", _START)
                problem = f"{type(error).__name__}: {error}"
                if slow:
                    problem = f"no response within {self._timeout_s:g} s"
                if "CERTIFICATE" in problem:
                    hint = "export SSL_CERT_FILE=<the certificates to trust>"
                raise ServerError(f"{self.url}{path}: {problem}", hint=hint, code=code) from None
            if response.is_success:
                return response
            after = response.headers.get("retry-after", "").strip()
            pause = float(after) if after.isdecimal() else min(2 * pause, 8.0)
            if response.status_code not in (429, 503) or time.monotonic() + pause > until:
                raise self._refusal(path, response)
            time.sleep(pause)

    def _sent(self, request: httpx.Request) -> httpx.Response:
        try:
            return self._client.send(request)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            # The server closed an idle connection at the same time.
            return self._client.send(request)

    def _refusal(self, path: str, response: httpx.Response) -> ServerError:
        text = _reason(response.text)
        code, hint = _REFUSALS.get(response.status_code, ("request", ""))
        if response.is_redirect:
            location = redact_url(response.headers.get("location", "another address"))
            text, hint = f"redirects to {location}", "url= with the address that it redirects to"
        elif code == "request" and _TOO_LONG.search(text):
            code = "length"
        message = f"{self.url}{path}: {response.status_code}: {text}"
        return ServerError(message, hint=hint, code=code)


def parallel(
    work: Callable[[_ITEM], _RESULT], items: Sequence[_ITEM], workers: int
) -> list[_RESULT]:
    """Return the results of a function for all items, in their order, `workers` at a time."""
    with ThreadPoolExecutor(max(1, workers)) as pool:
        return list(pool.map(work, items))


def _address(url: str) -> str:
    """Return an address as the client needs it; `host:8000` means http."""
    address = url.strip() if "://" in url else f"http://{url.strip()}"
    address = re.sub(r"/(v1/?)?$", "", address.split("?")[0].split("#")[0].rstrip("/"))
    try:
        parsed = httpx.URL(address)
        if parsed.scheme in ("http", "https") and parsed.host:
            return address
    except httpx.InvalidURL:
        pass
    problem = f"url={redact_url(url)} is no address of a server"
    raise ConfigError(problem, hint="url=http://host:8000")


def _reason(text: str) -> str:
    """Return the message of an error response: of OpenAI's form, FastAPI's, or as it is."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text[:EXCERPT].strip()
    for _ in range(3):
        if isinstance(body, dict):
            keys = ("error", "message", "detail", "error_message")
            body = next((body[key] for key in keys if body.get(key)), str(body))
    return str(body)[:EXCERPT]
