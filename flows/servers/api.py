"""Call the JSON API of a server on this machine, without importing Prefect or MLflow."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass, field
from typing import Any

from tasks.core.errors import PlumblineError

BUSY = 503  # status of Prefect's server while another of its writers has locked SQLite
BUSY_PATIENCE_S = 5.0
ANSWER_S = 10.0
READS = ("GET", "HEAD")


class RefusedError(PlumblineError):
    """A server refused a request.

    Attributes:
        status: HTTP status.
    """

    status = 0


@dataclass
class Api:
    """JSON API of a server.

    Attributes:
        url: URL that every path is appended to.
        auth: authentication string of a Prefect server; empty for a server without one.
    """

    url: str
    auth: str = field(default="", repr=False)
    _csrf: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def answers(self, path: str = "/health") -> bool:
        """Return True if a GET request succeeds."""
        try:
            return self.call("GET", path) is not None
        except PlumblineError:
            return False

    def get(self, path: str) -> Any:
        """Send a GET request, see `call`."""
        return self.call("GET", path)

    def post(self, path: str, body: Any) -> Any:
        """Send a POST request, see `call`."""
        return self.call("POST", path, body)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request.

        Args:
            path: appended to the URL.

        Returns:
            The JSON answer, or the text if it is no JSON; None if the object does not exist (404).

        Raises:
            RefusedError: the server refused, or stayed busy.
            PlumblineError: the server does not answer.
        """
        deadline = time.monotonic() + BUSY_PATIENCE_S
        while True:
            try:
                return self._send(method, path, body, self._csrf)
            except RefusedError as error:
                details = " ".join(error.details)
                if error.status == 403 and "CSRF" in details and method not in READS:
                    if time.monotonic() > deadline:
                        raise
                    self._renew_csrf_token()
                elif error.status == 404:
                    return None
                elif error.status != BUSY or time.monotonic() > deadline:
                    raise
                else:
                    time.sleep(0.2)

    def _renew_csrf_token(self) -> None:
        """Ask Prefect for the token that it wants to see in every request that changes a thing."""
        client = str(uuid.uuid4())
        token = self._send("GET", f"/csrf-token?client={client}", None, {})["token"]
        self._csrf = {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": client}

    def _send(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Any:
        url = self.url + path
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, dict(headers), method=method)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        if self.auth:
            request.add_header("Authorization", basic_auth(self.auth))
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: no proxy
        try:
            with direct.open(request, timeout=ANSWER_S) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            refused = RefusedError(
                f"{method} {url}: {error}", details=[error.read().decode(errors="replace")[:300]]
            )
            refused.status = error.code
            raise refused from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise PlumblineError(f"no answer from {url}: {reason}") from error
        try:
            return json.loads(text or "null")
        except ValueError:
            return text


def basic_auth(auth: str) -> str:
    """Return the header `Authorization` for Prefect's authentication string."""
    return f"Basic {base64.b64encode(auth.encode()).decode()}"
