"""Send requests to a server: API key, time limits, bounded responses, errors that say what to type.

A response is untrusted: its size and time are bounded, and its texts are printed through
`tasks.core.terminal.plain`, which every `PlumblineError` does. Redirects are not followed, so that
the key goes to the host that was typed and to no other.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from tasks.core.errors import ConfigError
from tasks.core.redaction import hide, hide_in_url, redact_url
from tasks.serving.rollout_servers.remote import KEY_VARIABLE
from tasks.verify.servers.refusals import (
    EXCERPT,
    address_of,
    pause,
    reason,
    refusal,
    trusted,
)
from tasks.verify.servers.server import ServerError

LARGEST = 256 * 2**20
"""Bytes of a response; 100 ids for each of 32,768 positions need fewer."""
_WORD = TypeVar("_WORD")
_RESULT = TypeVar("_RESULT")


class Http:
    """HTTP client of one server. Its methods may be called by several threads.

    Attributes:
        url: address without `/v1`, final slash and password.
        workers: requests at the same time, unless a call says otherwise.

    Args:
        url: address as typed, with or without `/v1`.
        key: API key; None for the variable `KEY_VARIABLE`.
        timeout_s: longest time from a request to the end of its response, in seconds.
        workers: requests at the same time.
        ca: file with the certificates to trust; None for those of the system.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float = 120.0,
        workers: int = 8,
        ca: str | None = None,
    ) -> None:
        address = address_of(url)
        hide_in_url(address)
        self.url = redact_url(address)
        self.workers = workers
        self._timeout_s = timeout_s
        key = key or os.environ.get(KEY_VARIABLE) or ""
        if key:
            hide(key)
        # Redirects are not followed: http never becomes https.
        verify = trusted(ca) if ca is not None else address.startswith("https")
        try:
            self._client = httpx.Client(
                base_url=address,
                headers={"Authorization": f"Bearer {key.strip()}"} if key.strip() else {},
                timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
                limits=httpx.Limits(max_connections=None),
                verify=verify,
            )
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise ConfigError(f"url={self.url}: {error}") from None
        self._has_key = bool(key)
        self._closed = threading.Event()

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        self._client.close()

    def get(self, path: str) -> Any:
        """Return the JSON document at a path."""
        return self._json(path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a JSON document; return the response's."""
        return self._json(path, body)

    def optional(self, path: str) -> Any:
        """Return the JSON document or the text at a path; None if the server has no such path.

        Raises ServerError if nothing answers or the key is refused.
        """
        try:
            return self._json(path, None, texts=True)
        except ServerError as error:
            if error.code in ("unreachable", "login", "busy"):
                raise
            return None

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        """Send a JSON document; yield the parts of a streamed response.

        Parts are server-sent events (`data: {...}`) or one JSON document per line.
        """
        with self._response(path, body) as response:
            buffer, size, until = b"", 0, time.monotonic() + self._timeout_s
            for chunk in self._chunks(response, path):
                size += len(chunk)
                self._bounded(path, size, until)
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    yield from self._part(path, line)
            yield from self._part(path, buffer)

    def parallel(
        self,
        work: Callable[[_WORD], _RESULT],
        items: list[_WORD],
        workers: int | None = None,
    ) -> list[_RESULT]:
        """Return the results of a function for all items, in their order, called by threads.

        The first error ends it; what has not started is left out.
        """
        count = min(workers or self.workers, len(items))
        if count <= 1:
            return [work(item) for item in items]
        with ThreadPoolExecutor(count) as pool:
            tasks = [pool.submit(work, item) for item in items]
            try:
                return [task.result() for task in tasks]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _part(self, path: str, line: bytes) -> Iterator[Any]:
        line = line.strip().removeprefix(b"data:").strip()
        if line.startswith(b"{"):
            part = self._parsed(path, line)
            if isinstance(part, dict) and part.get("error"):
                raise ServerError(f"{self.url}{path}: {reason(line)}", code="request")
            yield part

    def _json(self, path: str, body: Mapping[str, Any] | None, texts: bool = False) -> Any:
        with self._response(path, body) as response:
            content = self._content(response, path)
        if texts and not content.lstrip().startswith((b"{", b"[")):
            return content.decode("utf-8", "replace")
        return self._parsed(path, content)

    def _parsed(self, path: str, content: bytes) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            excerpt = content[:EXCERPT].decode("utf-8", "replace")
            raise ServerError(
                f"{self.url}{path}: the response is no JSON",
                details=[excerpt],
                hint="url= is the address of the server itself, without a path of a page",
                code="response",
            ) from None

    @contextmanager
    def _response(self, path: str, body: Mapping[str, Any] | None) -> Iterator[httpx.Response]:
        """Yield a successful response whose body has not been read; wait where it is asked to."""
        until = time.monotonic() + self._timeout_s
        for attempt in range(1_000):
            request = self._client.build_request("GET" if body is None else "POST", path, json=body)
            with self._readable(path):
                response = self._sent(request)
            try:
                if response.is_success:
                    yield response
                    return
                content = self._content(response, path)
            finally:
                response.close()
            wait = pause(response.headers, attempt)
            if response.status_code not in (429, 503) or time.monotonic() + wait > until:
                location = response.headers.get("location", "")
                where, status = f"{self.url}{path}", response.status_code
                raise refusal(where, status, content, location, self._has_key)
            self._closed.wait(wait)

    def _sent(self, request: httpx.Request) -> httpx.Response:
        """Send a request; once more if the server just closed the connection that was kept."""
        try:
            return self._client.send(request, stream=True)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            return self._client.send(request, stream=True)

    def _content(self, response: httpx.Response, path: str) -> bytes:
        parts, size, until = [], 0, time.monotonic() + self._timeout_s
        for chunk in self._chunks(response, path):
            size += len(chunk)
            self._bounded(path, size, until)
            parts.append(chunk)
        return b"".join(parts)

    def _chunks(self, response: httpx.Response, path: str) -> Iterator[bytes]:
        with self._readable(path):
            yield from response.iter_bytes()

    def _bounded(self, path: str, size: int, until: float) -> None:
        if size > LARGEST:
            raise ServerError(
                f"{self.url}{path}: the response is larger than {LARGEST >> 20} MiB",
                code="response",
            )
        if time.monotonic() > until:
            raise self._too_slow(path)

    @contextmanager
    def _readable(self, path: str) -> Iterator[None]:
        """Raise ServerError for what can go wrong below HTTP."""
        try:
            yield
        except httpx.TimeoutException as error:
            if isinstance(error, httpx.ConnectTimeout):
                raise self._nothing("does not answer") from None
            raise self._too_slow(path) from None
        except httpx.ConnectError as error:
            if "CERTIFICATE" in str(error).upper():
                raise ServerError(
                    f"{self.url}: its certificate is not trusted: {error}",
                    hint="ca=FILE names the certificates to trust",
                    code="unreachable",
                ) from None
            if "SSL" in str(error).upper():
                raise ServerError(
                    f"{self.url}: no TLS there: {error}", hint="http://", code="unreachable"
                ) from None
            raise self._nothing(f"cannot be reached: {error}") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise ServerError(
                f"{self.url}{path}: {type(error).__name__}: {error}",
                hint="the log of the server says why it ended the connection",
                code="unreachable",
            ) from None

    def _nothing(self, problem: str) -> ServerError:
        return ServerError(
            f"{self.url} {problem}",
            hint="start the server, wait until it is ready, or correct url=",
            code="unreachable",
        )

    def _too_slow(self, path: str) -> ServerError:
        return ServerError(
            f"{self.url}{path}: no full response within {self._timeout_s:g} s",
            hint="a longer timeout_s=, or fewer workers=",
            code="busy",
        )
