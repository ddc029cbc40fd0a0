"""A small HTTP server with fixed answers: for servers that cannot run here, and for refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[Any], Any]
"""From the body of a request (None for GET) to a JSON value, a `Reply` or a list of events.

It raises ConnectionAbortedError to hang up instead.
"""


@dataclass(frozen=True)
class Reply:
    """Status, headers and body of a response."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Requests:
    """Address of the server, the server itself, and what it was sent."""

    url: str
    server: ThreadingHTTPServer
    seen: list[tuple[str, Any, Mapping[str, str]]] = field(default_factory=list)

    def bodies(self, path: str) -> list[Any]:
        """Return the bodies of all requests for a path."""
        return [body for name, body, _ in self.seen if name == path]


def refusal(status: int, message: str, **headers: str) -> Reply:
    """Return an error in OpenAI's form."""
    return Reply(status, json.dumps({"error": {"message": message}}).encode(), headers)


@contextmanager
def answering(answers: Mapping[str, Answer]) -> Iterator[Requests]:
    """Start a server that answers by path, and with 404 elsewhere."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            requests.seen.append((self.path, body, dict(self.headers)))
            answer = answers.get(self.path)
            try:
                made = answer(body) if answer else refusal(404, "Not Found")
            except ConnectionAbortedError:
                self.close_connection = True
                return
            if isinstance(made, Iterator):
                lines = b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in made)
                made = Reply(
                    200, lines + b"data: [DONE]\n\n", {"content-type": "text/event-stream"}
                )
            if not isinstance(made, Reply):
                made = Reply(200, json.dumps(made).encode())
            self.send_response(made.status)
            for name, value in made.headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("content-length", str(len(made.body)))
            self.end_headers()
            self.wfile.write(made.body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_port}"
    requests = Requests(url, server)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
