"""Read addresses, refusals and waiting times of servers: what is wrong, and what to type."""

from __future__ import annotations

import email.utils
import json
import os
import re
import ssl
import time
from collections.abc import Mapping

import httpx

from tasks.core.errors import ConfigError
from tasks.core.redaction import redact_url
from tasks.serving.rollout_servers.remote import KEY_VARIABLE
from tasks.verify.servers.server import ServerError

EXCERPT = 300
"""Characters of a response that an error shows."""
# vLLM grants a prompt as long as the context no token: "max_tokens must be at least 1, got 0".
_TOO_LONG = re.compile(
    r"context (length|size|window)|max_model_len|longer than|too long|max_tokens must be at least",
    re.I,
)


def address_of(url: str) -> str:
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


def trusted(ca: str) -> ssl.SSLContext:
    """Return the certificates of a file. Raises ConfigError if it holds none."""
    if not os.path.isfile(ca):
        raise ConfigError(f"no such file with certificates: {ca}")
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca={ca} holds no certificates: {error}") from None


def refusal(where: str, status: int, content: bytes, location: str, has_key: bool) -> ServerError:
    """Return the error of a refused request.

    Args:
        where: address and path.
        status: HTTP status.
        content: body of the response.
        location: where it redirects to; "" for nowhere.
        has_key: True if a key was sent.
    """
    text = reason(content)
    if status in (401, 403):
        problem = "refuses the key" if has_key else "asks for a key"
        return ServerError(
            f"{where} {problem} ({status})",
            hint=f"export {KEY_VARIABLE}=... with a key of this server",
            code="login",
        )
    if status in (429, 503):
        hint = "fewer workers=, or wait until the server is ready"
        return ServerError(f"{where} is busy ({status}): {text}", hint=hint, code="busy")
    if 300 <= status < 400:
        return ServerError(
            f"{where} redirects to {redact_url(location) or 'another address'}",
            hint="url= with the address that it redirects to",
            code="request",
        )
    code = "missing" if status in (404, 405, 501) else "request"
    if code == "request" and _TOO_LONG.search(text):
        code = "length"
    return ServerError(f"{where}: {status}: {text}", code=code)


def pause(headers: Mapping[str, str], attempt: int) -> float:
    """Return the seconds to wait before another attempt, by Retry-After where it is sent."""
    wanted = headers.get("retry-after", "").strip()
    if wanted.isdecimal():
        return float(wanted)
    date = email.utils.parsedate_tz(wanted) if wanted else None
    if date is not None:
        return max(0.0, email.utils.mktime_tz(date) - time.time())
    return min(0.5 * 2.0**attempt, 8.0)


def reason(content: bytes) -> str:
    """Return the message of an error response: of OpenAI's form, FastAPI's, or as it is."""
    text = content[:20_000].decode("utf-8", "replace")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text[:EXCERPT].strip()
    for _ in range(3):
        if not isinstance(body, dict):
            break
        keys = ("error", "message", "detail", "error_message")
        body = next((body[key] for key in keys if body.get(key)), str(body))
    if isinstance(body, list):  # FastAPI: one entry per field
        body = "; ".join(
            str(part.get("msg", part)) if isinstance(part, dict) else str(part) for part in body
        )
    return str(body)[:EXCERPT]
