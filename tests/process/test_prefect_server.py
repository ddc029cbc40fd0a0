"""The embedded Prefect server loses no record and ends with the flow, however that ends."""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.servers.server_api import Api, RefusedError
from tests.process.conftest import HERE, Script, alive, pids, until

Start = Callable[[str], Script]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with two flow runs of one process, as of a `--multirun`."""
    folder = tmp_path_factory.mktemp("flow")
    argv = [str(HERE / "flow_script.py"), str(folder / "runs"), "fail", "quick"]
    first = Script(folder / "first.out", *argv)
    assert first.process.wait(150) == 1, first.text
    until(lambda: not any(alive(pid) for pid in pids("server", first.text)), 60)
    shutil.copy(folder / "runs/logs/prefect-server.log", folder / "first.log")
    return folder / "runs"


@pytest.fixture
def start(script: Callable[..., Script], runs: Path) -> Start:
    return lambda mode: script(str(HERE / "flow_script.py"), str(runs), mode)


def ask(runs: Path, query: str, *values: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(runs / "prefect/prefect.db") as database:
        return database.execute(query, values).fetchall()


def flow_states(runs: Path, name: str) -> list[str]:
    return [str(s) for (s,) in ask(runs, "select state_type from flow_run where name = ?", name)]


def task_states(runs: Path, name: str) -> dict[str, int]:
    query = """select t.state_type, count(*) from task_run t join flow_run f
               on t.flow_run_id = f.id where f.name = ? group by 1"""
    return {str(state): int(str(count)) for state, count in ask(runs, query, name)}


def test_a_folder_has_one_server_with_every_record_and_no_other_place(runs: Path) -> None:
    """Two flow runs in one process; a failure takes less than a screen."""
    assert flow_states(runs, "quick") == ["COMPLETED"]
    assert task_states(runs, "quick") == {"COMPLETED": 20}
    assert flow_states(runs, "fail") == ["FAILED"]
    assert task_states(runs, "fail") == {"COMPLETED": 20}
    text = (runs.parent / "first.out").read_text()
    assert len(pids("server", text)) == 2
    assert len(set(re.findall(r"server \d+ \S+", text))) == 1
    assert (runs / "prefect/memo_store.toml").is_file()
    assert (runs.parent / "first.log").read_text() == ""
    begin = text.index("Encountered exception")
    after = text[begin : text.index("Beginning flow run", begin)]
    assert "wrong on purpose" in after
    assert "site-packages/prefect" not in after
    assert len(after.splitlines()) < 25


def begun(start: Start, mode: str) -> tuple[Script, int, int]:
    """A flow in the middle of its long stage; pids of the stage's child and of the server."""
    flow = start(mode)
    flow.says("child", 90)
    (child,), (server,) = pids("child", flow.text), pids("server", flow.text)
    assert alive(server)
    return flow, child, server


@pytest.mark.slow
def test_kill_9_and_then_ctrl_c_end_everything_and_nobody_else_has_access(
    start: Start, runs: Path
) -> None:
    flow, child, server = begun(start, "long-killed")
    (url,) = re.findall(r"server \d+ (\S+)", flow.text)
    with pytest.raises(RefusedError, match="401"):
        Api(url).post("/flow_runs/filter", {})
    flow.process.kill()
    until(lambda: not alive(child) and not alive(server), 60)
    assert flow_states(runs, "long-killed") == ["RUNNING"]  # nobody could say otherwise
    flow, child, server = begun(start, "long-stopped")
    for _ in range(2):  # an impatient user
        flow.signal_group(signal.SIGINT)
    until(lambda: not alive(child), 60)
    assert flow.process.wait(15) == 130, flow.text
    until(lambda: not alive(server), 60)
    assert task_states(runs, "long-stopped") == {"COMPLETED": 20, "CRASHED": 1}
    for name in ("long-killed", "long-stopped"):
        assert flow_states(runs, name) == ["CRASHED"]


@pytest.mark.slow
def test_a_run_on_a_terminal_is_cancelled_in_prefect(start: Start, runs: Path) -> None:
    """Prefect's page asks for the state Cancelling; nobody but the run can end it."""
    flow, child, _ = begun(start, "long-cancelled")
    ((url, auth),) = re.findall(r"server \d+ (\S+) (\S+)", flow.text)
    api = Api(url, auth)
    (run,) = api.post("/flow_runs/filter", {"flow_runs": {"name": {"any_": ["long-cancelled"]}}})
    cancelling = {"type": "CANCELLING", "name": "Cancelling"}
    api.post(f"/flow_runs/{run['id']}/set_state", {"state": cancelling})
    until(lambda: not alive(child), 60)
    assert flow.process.wait(30) == 143, flow.text
    assert flow_states(runs, "long-cancelled") == ["CANCELLED"]
