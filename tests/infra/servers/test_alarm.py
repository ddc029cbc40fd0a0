"""The alarm of infra/servers/automations.yaml: a real Prefect server calls a real receiver."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from infra.servers.automations import WEBHOOK, apply
from tests.infra.servers.site import PATIENCE_S, Site


class Receiver(ThreadingHTTPServer):
    """Keeps the bodies of the requests that it gets."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook?token=of-this-test"

    def alarm(self, run_id: str) -> dict[str, Any]:
        """Return the alarm of a flow run, once it has come."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for body in self.bodies:
                alarm: dict[str, Any] = json.loads(body)
                if alarm["run_id"] == run_id:
                    return alarm
            time.sleep(0.2)
        pytest.fail(f"no alarm of {run_id}: {self.bodies}")


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None: ...


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def line_of(output: str) -> str:
    (line,) = (line for line in output.splitlines() if line.startswith("alarm"))
    return line


def automations(site: Site) -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = site.services.prefect.post("/automations/filter", {})
    return every


@pytest.mark.slow
def test_the_alarm(site: Site, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off at first; then every deploy finds the same one; a failed run calls the webhook."""
    prefect = site.services.prefect
    monkeypatch.delenv(WEBHOOK, raising=False)
    assert f"off: {WEBHOOK}=<URL>" in apply(prefect)
    assert automations(site) == []

    monkeypatch.setenv(WEBHOOK, "http://127.0.0.1:9/old")
    apply(prefect)
    (first,) = automations(site)
    done = site.command("deploy", **{WEBHOOK: receiver.url})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "webhook for failed and crashed runs" in line_of(done.stdout)
    assert "of-this-test" not in done.stdout + done.stderr
    (automation,) = automations(site)
    assert automation["id"] == first["id"]

    run = site.finished_run(site.start_run("rlhf-qlora", ["no.such.key=1"]))
    assert run["state_type"] == "FAILED"
    alarm = receiver.alarm(run["id"])
    assert alarm["alarm"] == "failed"
    assert (alarm["flow"], alarm["run"]) == ("rlhf", run["name"])
    assert alarm["message"] == run["state"]["message"]
    assert "no.such.key" in alarm["text"]
    assert alarm["page"].endswith(f"/runs/flow-run/{run['id']}")

    monkeypatch.setenv(WEBHOOK, receiver.url)
    prefect.call("PATCH", f"/automations/{automation['id']}", {"enabled": False})
    assert apply(prefect).endswith("paused")
    (paused,) = automations(site)
    assert (paused["id"], paused["enabled"]) == (automation["id"], False)

    monkeypatch.setenv(WEBHOOK, "off")
    assert "off" in apply(prefect)
    assert automations(site) == []
    path = "/block_types/slug/webhook/block_documents/name/plumbline-alarm"
    assert prefect.get(path) is None
    assert sum(json.loads(body)["run_id"] == run["id"] for body in receiver.bodies) == 1
    files = [path for path in site.services.runs.rglob("*") if path.is_file()]
    assert [path for path in files if b"of-this-test" in path.read_bytes()] == []
