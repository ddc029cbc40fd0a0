"""Send requests to a server: API key, time limits, bounded responses, errors that say what to type.

A response is untrusted: its size and time are bounded, and its texts are printed through
`tasks.core.terminal.plain`, which every `PlumblineError` does. Redirects are not followed, so that
the key goes to the host that was typed and to no other.
"""

from __future__ import annotations

import email.utils
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from tasks.core.errors import ConfigError
from tasks.core.redaction import hide, hide_in_url, redact_url
from tasks.verify.servers.server import ServerError

KEY_VARIABLE = "PLUMBLINE_API_KEY"
"""Variable with the API key of the server. Keys of other services are never sent."""
LARGEST = 256 * 2**20
"""Bytes of a response; 100 ids for each of 32,768 positions need fewer."""
_EXCERPT = 300
_TOO_LONG = re.compile(r"context (length|size|window)|max_model_len|longer than|too long", re.I)
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
        address = _address(url)
        hide_in_url(address)
        self.url = redact_url(address)
        self.workers = workers
        self._timeout_s = timeout_s
        key = key or os.environ.get(KEY_VARIABLE) or ""
        if key:
            hide(key)
        if ca is not None and not os.path.isfile(ca):
            raise ConfigError(f"no such file with certificates: {ca}")
        try:
            self._client = httpx.Client(
                base_url=address,
                headers={"Authorization": f"Bearer {key.strip()}"} if key.strip() else {},
                timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
                limits=httpx.Limits(max_connections=None),
                # Redirects are not followed: http never becomes https.
                verify=_trusted(ca) if address.startswith("https") else False,
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
                raise ServerError(f"{self.url}{path}: {_reason(line)}", code="request")
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
            excerpt = content[:_EXCERPT].decode("utf-8", "replace")
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
                response = self._client.send(request, stream=True)
            try:
                if response.is_success:
                    yield response
                    return
                content = self._content(response, path)
            finally:
                response.close()
            pause = _pause(response, attempt)
            if response.status_code not in (429, 503) or time.monotonic() + pause > until:
                raise self._refusal(path, response, content)
            self._closed.wait(pause)

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

    def _refusal(self, path: str, response: httpx.Response, content: bytes) -> ServerError:
        status, reason = response.status_code, _reason(content)
        where = f"{self.url}{path}"
        if status in (401, 403):
            problem = "refuses the key" if self._has_key else "asks for a key"
            return ServerError(
                f"{where} {problem} ({status})",
                hint=f"export {KEY_VARIABLE}=... with a key of this server",
                code="login",
            )
        if status in (429, 503):
            hint = "fewer workers=, or wait until the server is ready"
            return ServerError(f"{where} is busy ({status}): {reason}", hint=hint, code="busy")
        if 300 <= status < 400:
            target = redact_url(response.headers.get("location", "another address"))
            return ServerError(
                f"{where} redirects to {target}",
                hint="url= with the address that it redirects to",
                code="request",
            )
        code = "missing" if status in (404, 405, 501) else "request"
        if code == "request" and _TOO_LONG.search(reason):
            code = "length"
        return ServerError(f"{where}: {status}: {reason}", code=code)


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


def _trusted(ca: str | None) -> Any:
    """Return the certificates to trust."""
    if ca is None:
        return True
    import ssl

    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca={ca} holds no certificates: {error}") from None


def _pause(response: httpx.Response, attempt: int) -> float:
    """Return the seconds to wait before another attempt, by Retry-After where it is sent."""
    wanted = response.headers.get("retry-after", "").strip()
    if wanted.isdecimal():
        return float(wanted)
    date = email.utils.parsedate_tz(wanted) if wanted else None
    if date is not None:
        return max(0.0, email.utils.mktime_tz(date) - time.time())
    return min(0.5 * 2.0**attempt, 8.0)


def _reason(content: bytes) -> str:
    """Return the message of an error response: of OpenAI's form, FastAPI's, or as it is."""
    text = content[:20_000].decode("utf-8", "replace")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text[:_EXCERPT].strip()
    for _ in range(3):
        if not isinstance(body, dict):
            break
        keys = ("error", "message", "detail", "error_message")
        body = next((body[key] for key in keys if body.get(key)), str(body))
    if isinstance(body, list):  # FastAPI: one entry per field
        body = "; ".join(
            str(part.get("msg", part)) if isinstance(part, dict) else str(part) for part in body
        )
    return str(body)[:_EXCERPT]
