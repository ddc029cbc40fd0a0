"""Call the JSON API of a server on this machine, without importing Prefect or MLflow."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from tasks.core.errors import PlumblineError

BUSY = 503  # status of Prefect's server while another of its writers has locked SQLite
BUSY_PATIENCE_S = 5.0
ANSWER_S = 30.0


class RefusedError(PlumblineError):
    """A server refused a request."""


@dataclass
class Api:
    """JSON API of a server; `auth` is the `user:password` of a Prefect server."""

    url: str
    auth: str = field(default="", repr=False)
    _csrf: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def answers(self, path: str = "/health") -> bool:
        """Return True if a GET request succeeds."""
        try:
            return self.get(path) is not None
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

        Returns the JSON answer, or the text if it is no JSON; None if the object does not exist.
        Raises RefusedError if the server refused, or stayed busy; PlumblineError without an answer.
        """
        deadline = time.monotonic() + BUSY_PATIENCE_S
        answer = self._send(method, path, body)
        if answer.status_code == 403 and "CSRF" in answer.text:
            # Prefect wants to see this token in every request that changes a thing.
            client = str(uuid.uuid4())
            token = self.get(f"/csrf-token?client={client}")["token"]
            self._csrf = {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": client}
            answer = self._send(method, path, body)
        while answer.status_code == BUSY and time.monotonic() < deadline:
            time.sleep(0.2)
            answer = self._send(method, path, body)
        if answer.status_code == 404:
            return None
        if answer.is_error:
            what = f"{method} {self.url}{path}: status {answer.status_code}"
            raise RefusedError(what, details=[answer.text[:300]])
        try:
            return answer.json() if answer.content else None
        except ValueError:
            return answer.text

    def _send(self, method: str, path: str, body: Any) -> Any:
        import httpx

        user, _, password = self.auth.partition(":")
        try:
            return httpx.request(
                method,
                self.url + path,
                json=body,
                headers=self._csrf,
                auth=(user, password) if self.auth else None,
                timeout=ANSWER_S,
                trust_env=False,  # loopback: no proxy
            )
        except httpx.HTTPError as error:
            raise PlumblineError(f"no answer from {self.url}: {error}") from error
