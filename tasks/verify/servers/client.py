"""Send requests to a server: API key, time limits, bounded responses, errors that say what to type.

A response is untrusted: its size and time are bounded, and its texts are printed through
`tasks.core.terminal.plain`, which every `PlumblineError` does. Redirects are not followed, so that
the key goes to the host that was typed and to no other.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import httpx

from tasks.core.errors import ConfigError
from tasks.core.redaction import hide, hide_in_url, redact_url
from tasks.serving.rollout_servers.remote import KEY_VARIABLE
from tasks.verify.servers.server import ServerError

LARGEST = 256 * 2**20
"""Bytes of a response; 100 ids for each of 32,768 positions need fewer."""
EXCERPT = 300
"""Characters of a response that an error shows."""
# vLLM grants a prompt as long as the context no token: "max_tokens must be at least 1, got 0".
_TOO_LONG = re.compile(
    r"context (length|size|window)|max_model_len|longer than|too long|max_tokens must be at least",
    re.I,
)
_LOGIN = ("login", f"export {KEY_VARIABLE}=... with a key of this server")
_BUSY = ("busy", "fewer workers=, or wait until the server is ready")
_REFUSALS: Mapping[int, tuple[str, str]] = {
    401: _LOGIN, 403: _LOGIN, 429: _BUSY, 503: _BUSY,
    404: ("missing", ""), 405: ("missing", ""), 501: ("missing", ""),
}  # fmt: skip
"""Code and hint of a `ServerError` by status; all others are "request"."""
_ITEM = TypeVar("_ITEM")
_RESULT = TypeVar("_RESULT")


class Client:
    """HTTP client of one server; see `connect` for the arguments. Threads may share it."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float = 120.0,
        workers: int = 8,
        ca: str | None = None,
    ) -> None:
        address = _address(url)
        hide_in_url(address)
        self.url = redact_url(address)
        self.workers = workers
        self._timeout_s = timeout_s
        key = (key or os.environ.get(KEY_VARIABLE) or "").strip()
        if key:
            hide(key)
        # A transport of our own, for its retries, would turn off the variables HTTPS_PROXY.
        verify = _trusted(ca) if ca is not None else address.lower().startswith("https")
        try:
            self._client = httpx.Client(
                base_url=address,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
                limits=httpx.Limits(max_connections=None),
                verify=verify,
            )
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise ConfigError(f"url={self.url}: {error}") from None

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def get(self, path: str) -> Any:
        """Return the JSON document at a path."""
        return self._parsed(path, self._content(path, None))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a JSON document; return the response's."""
        return self._parsed(path, self._content(path, body))

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
        """Send a JSON document; yield the server-sent events of the response."""
        buffer = b""
        with self._response(path, body) as chunks:
            for chunk in chain(chunks, [b"\n"]):
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    content = line.strip().removeprefix(b"data:").strip()
                    if not content.startswith(b"{"):
                        continue
                    part = self._parsed(path, content)
                    if part.get("error"):
                        raise ServerError(f"{self.url}{path}: {_reason(content)}", code="request")
                    yield part

    def _content(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        with self._response(path, body) as chunks:
            return b"".join(chunks)

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

    @contextmanager
    def _response(self, path: str, body: Mapping[str, Any] | None) -> Iterator[Iterator[bytes]]:
        """Yield the parts of a successful response; wait where the server asks for it."""
        until = time.monotonic() + self._timeout_s
        with self._readable(path):
            for attempt in range(1_000):
                response = self._sent(path, body)
                try:
                    chunks = self._bounded(response, path)
                    if response.is_success:
                        yield chunks
                        return
                    content = b"".join(chunks)
                finally:
                    response.close()
                asked = response.headers.get("retry-after", "").strip()
                pause = float(asked) if asked.isdecimal() else min(0.5 * 2.0**attempt, 8.0)
                is_busy = response.status_code in (429, 503)
                if not is_busy or time.monotonic() + pause > until:
                    raise self._refusal(path, response, content)
                time.sleep(pause)

    def _sent(self, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        request = self._client.build_request("GET" if body is None else "POST", path, json=body)
        try:
            return self._client.send(request, stream=True)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            # The server closed an idle connection at the same time.
            return self._client.send(request, stream=True)

    def _bounded(self, response: httpx.Response, path: str) -> Iterator[bytes]:
        size, until = 0, time.monotonic() + self._timeout_s
        for chunk in response.iter_bytes():
            size += len(chunk)
            if size > LARGEST:
                reason = f"the response is larger than {LARGEST >> 20} MiB"
                raise ServerError(f"{self.url}{path}: {reason}", code="response")
            if time.monotonic() > until:
                raise httpx.ReadTimeout("no end")
            yield chunk

    def _refusal(self, path: str, response: httpx.Response, content: bytes) -> ServerError:
        text, location = _reason(content), response.headers.get("location", "")
        code, hint = _REFUSALS.get(response.status_code, ("request", ""))
        if response.is_redirect:
            text = f"redirects to {redact_url(location) or 'another address'}"
            hint = "url= with the address that it redirects to"
        elif code == "request" and _TOO_LONG.search(text):
            code = "length"
        return ServerError(
            f"{self.url}{path}: {response.status_code}: {text}", hint=hint, code=code
        )

    @contextmanager
    def _readable(self, path: str) -> Iterator[None]:
        """Raise ServerError for what can go wrong below HTTP."""
        try:
            yield
        except httpx.ConnectTimeout:
            problem, hint, code = "does not answer", _START, "unreachable"
        except httpx.TimeoutException:
            problem = f"no full response within {self._timeout_s:g} s"
            hint, code = "a longer timeout_s=, or fewer workers=", "busy"
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            problem, code = f"{type(error).__name__}: {error}", "unreachable"
            hint = "the log of the server says why it ended the connection"
            if isinstance(error, httpx.ConnectError):
                text = str(error).upper()
                hint = "http://" if "SSL" in text else _START
                hint = "ca=FILE names the certificates to trust" if "CERTIFICATE" in text else hint
        else:
            return
        raise ServerError(f"{self.url}{path}: {problem}", hint=hint, code=code)


_START = "start the server, wait until it is ready, or correct url="


def parallel(
    work: Callable[[_ITEM], _RESULT], items: Sequence[_ITEM], workers: int
) -> list[_RESULT]:
    """Return the results of a function for all items, in their order, `workers` at a time.

    The first error ends it; what has not started is left out.
    """
    if min(workers, len(items)) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(workers, len(items))) as pool:
        tasks = [pool.submit(work, item) for item in items]
        try:
            return [task.result() for task in tasks]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _address(url: str) -> str:
    """Return an address as the client needs it; `host:8000` means http."""
    address = url.strip()
    if "://" not in address:
        address = f"http://{address}"
    address = re.sub(r"/(v1/?)?$", "", address.split("?")[0].split("#")[0].rstrip("/"))
    try:
        parsed = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ConfigError(f"url={redact_url(url)} is no address: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(
            f"url={redact_url(url)} is no address of a server", hint="url=http://host:8000"
        )
    return address


def _trusted(ca: str) -> ssl.SSLContext:
    """Return the certificates of a file. Raises ConfigError if it holds none."""
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca={ca} holds no certificates: {error}") from None


def _reason(content: bytes) -> str:
    """Return the message of an error response: of OpenAI's form, FastAPI's, or as it is."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return content[:EXCERPT].decode("utf-8", "replace").strip()
    for _ in range(3):
        if isinstance(body, dict):
            keys = ("error", "message", "detail", "error_message")
            body = next((body[key] for key in keys if body.get(key)), str(body))
    return str(body)[:EXCERPT]
