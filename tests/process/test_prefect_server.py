"""The embedded Prefect server wants a login, and ends with its flow, however that ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from flows.servers import answers
from tests.process.conftest import Script, alive, pids, until

FLOW = """
import sys, time
from pathlib import Path
from flows.cli.bootstrap import bootstrap
from flows.servers import _embedded, prefect_server

runs = Path(sys.argv[1])
bootstrap(runs, runs.parent)
with prefect_server(runs):
    for child, settings in _embedded.values():
        print("server", child.pid, *settings.values(), "is up", flush=True)
    time.sleep(600)
"""


def test_nobody_else_has_access_and_kill_9_ends_it(
    script: Callable[..., Script], tmp_path: Path
) -> None:
    flow = script("-c", FLOW, str(tmp_path / "runs"))
    flow.says("is up", 90)
    (server,), ((url, auth),) = (
        pids("server", flow.text), re.findall(r"server \d+ (\S+) (\S+)", flow.text),
    )  # fmt: skip
    assert not answers(url, "/admin/version")
    assert answers(url, "/admin/version", auth)
    flow.process.kill()
    until(lambda: not alive(server), 60)
