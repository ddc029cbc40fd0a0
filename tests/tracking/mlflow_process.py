"""A real MLflow server of a test, which can be killed and started again with its database."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

START_S = 120.0


class MlflowProcess:
    """`mlflow server` on a free port of loopback; `folder` has its database and files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        if self._process is not None:
            return
        store = [f"--backend-store-uri=sqlite:///{self._folder}/server.db"]
        store += [f"--artifacts-destination={self._folder}/files", "--workers=1"]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", f"--port={self.port}", *store],
                env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.2)
        raise TimeoutError((self._folder / "server.log").read_text())

    def hang(self, *, stop: bool) -> None:
        """Stop the server's processes, or let them go on: connections open, no answer comes."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP if stop else signal.SIGCONT)

    def kill(self) -> None:
        """End the server and its workers at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
