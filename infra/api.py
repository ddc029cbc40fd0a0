"""Call the servers over HTTP, without importing Prefect or MLflow."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from tasks.core.errors import PlumblineError

BUSY = 503  # status of Prefect's server while another of its writers has locked SQLite
BUSY_PATIENCE_S = 5.0


def answers(url: str) -> bool:
    """Return True if a GET request to this URL succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def call_api(method: str, url: str, body: Any) -> Any:
    """Call a JSON API.

    Args:
        method: HTTP method.
        url: full URL.
        body: sent as JSON.

    Returns:
        The JSON answer; None if the object does not exist (404).

    Raises:
        PlumblineError: the API refused, stayed busy, or does not answer.
    """
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
    deadline = time.monotonic() + BUSY_PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return json.loads(reply.read() or b"null")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            if error.code != BUSY or time.monotonic() > deadline:
                reason = error.read().decode(errors="replace")[:300]
                raise PlumblineError(f"{method} {url}: {error}", details=[reason]) from error
        except urllib.error.URLError as error:
            raise PlumblineError(f"no answer from {url}: {error.reason}") from error
        time.sleep(0.2)
