"""MLflow's server as `make up` starts it, which can be killed and started again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from flows.servers import running
from infra.services import Services
from tests.verify.serving import free_port


class MlflowProcess:
    """An MLflow server on a free port of loopback; `folder` has its database and files."""

    def __init__(self, folder: Path) -> None:
        self._services = Services(folder, mlflow_port=free_port())
        self.port, self.uri = self._services.mlflow_port, self._services.mlflow_url
        for name in ("services", "mlflow"):
            (folder / name).mkdir()

    def start(self) -> None:
        """Start the server if it does not run, and wait until it answers."""
        self._services._start("mlflow")

    def hang(self, *, stop: bool) -> None:
        """Stop the server's processes, or let them go on: connections open, no answer comes."""
        service = running("mlflow", self._services.runs)
        assert service is not None
        os.killpg(service.process.pid, signal.SIGSTOP if stop else signal.SIGCONT)

    def kill(self) -> None:
        """End the server and its workers at once."""
        if service := running("mlflow", self._services.runs):
            os.killpg(service.process.pid, signal.SIGKILL)
            service.process.wait()
