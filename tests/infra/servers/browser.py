"""A headless Chromium, driven over its DevTools protocol: open pages, read and photograph them."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--remote-debugging-port=0", "--window-size=1500,1300",
)  # fmt: skip
PATIENCE_S = 120.0


def find_chromium() -> str | None:
    """Return the command of an installed Chromium, or None."""
    return next((name for name in NAMES if shutil.which(name)), None)


class Page:
    """The browser's only page."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol. Returns its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps(command))
        answer: dict[str, Any] = {}
        while answer.get("id") != self._number:  # events come in between
            answer = json.loads(self._socket.recv(timeout=PATIENCE_S))
        assert "error" not in answer, answer
        return dict(answer["result"])

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return done["result"].get("value")

    def open(self, url: str, *words: str) -> str:
        """Open a page and wait until it shows all of these words. Returns its text."""
        self.call("Page.navigate", url=url)
        return self.shows(*words)

    def shows(self, *words: str) -> str:
        """Return the text of the page, once it has all of these words."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            text = str(self.evaluate("document.body ? document.body.innerText : ''"))
            missing = [word for word in words if word not in text]
            if not missing:
                return text
            assert time.monotonic() < deadline, f"the page lacks {missing}:\n{text[-3000:]}"
            time.sleep(0.2)

    def log_in(self, address: str, auth: str) -> None:
        """Log in to Prefect's pages, as its form does: the login is kept by the browser."""
        self.open(address)
        self.evaluate(f"localStorage.setItem('prefect-password', btoa({json.dumps(auth)}))")

    def photograph(self, path: Path) -> None:
        """Write the visible part of the page as a PNG file."""
        path.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Yield a page of a Chromium that lives as long as the block.

    Args:
        folder: a new folder for the browser's profile.
    """
    name = find_chromium()
    assert name is not None
    argv = [name, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(argv, stdout=quiet, stderr=quiet) as process:
        try:
            port = folder / "DevToolsActivePort"
            deadline = time.monotonic() + PATIENCE_S
            while not (port.is_file() and port.read_text()):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            address = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json/list"
            with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
                targets = json.load(answer)
            (target,) = [each for each in targets if each["type"] == "page"]
            with connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
                yield Page(socket)
        finally:
            process.terminate()
