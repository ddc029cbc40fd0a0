"""Send requests to a server: API key, time limits, errors that say what to type.

Redirects are not followed, so that the key goes to the host that was typed and to no other.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from tasks.core.errors import ConfigError
from tasks.core.redaction import hide, hide_in_url, redact_url
from tasks.serving.vllm.colocation import DIRECT, KEY_VARIABLE
from tasks.verify.servers.server import ServerError

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
