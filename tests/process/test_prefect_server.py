"""The embedded Prefect server loses no record and ends with the flow, however that ends."""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.servers.server_api import Api, RefusedError
from tests.process.conftest import HERE, Script, alive, pids, until

Start = Callable[[str], Script]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with three flow runs of one process, as of a `--multirun`."""
    folder = tmp_path_factory.mktemp("flow")
    argv = [str(HERE / "flow_script.py"), str(folder / "runs"), "quick", "fail", "quick"]
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
    """Three flow runs in one process; a failure takes less than a screen."""
    assert flow_states(runs, "quick") == ["COMPLETED", "COMPLETED"]
    assert task_states(runs, "quick") == {"COMPLETED": 40}
    assert flow_states(runs, "fail") == ["FAILED"]
    assert task_states(runs, "fail") == {"COMPLETED": 20}
    text = (runs.parent / "first.out").read_text()
    assert len(pids("server", text)) == 3
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


def check_that_another_user_has_no_access(flow: Script) -> None:
    (url,) = re.findall(r"server \d+ (\S+)", flow.text)
    assert Api(url).answers("/health")
    with pytest.raises(RefusedError, match="401"):
        Api(url).post("/flow_runs/filter", {})
    request = urllib.request.Request(f"{url}/health", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request)


def check_signal(
    start: Start,
    runs: Path,
    number: signal.Signals,
    status: int,
    before: Callable[[Script], None] = lambda _: None,
) -> None:
    mode = f"long-{status}"
    flow, child, server = begun(start, mode)
    before(flow)
    flow.signal_group(number)
    flow.signal_group(number)  # an impatient user
    until(lambda: not alive(child), 60)
    assert flow.process.wait(15) == status, flow.text
    until(lambda: not alive(server), 60)
    assert flow_states(runs, mode) == ["CRASHED"]
    assert task_states(runs, mode) == {"COMPLETED": 20, "CRASHED": 1}


@pytest.mark.slow
def test_another_user_has_no_access_and_sigterm_ends_everything(start: Start, runs: Path) -> None:
    check_signal(start, runs, signal.SIGTERM, 143, before=check_that_another_user_has_no_access)


@pytest.mark.slow
def test_kill_9_and_then_ctrl_c(start: Start, runs: Path) -> None:
    flow, child, server = begun(start, "long-killed")
    flow.process.kill()
    until(lambda: not alive(child) and not alive(server), 60)
    assert flow_states(runs, "long-killed") == ["RUNNING"]  # nobody could say otherwise
    check_signal(start, runs, signal.SIGINT, 130)
    assert flow_states(runs, "long-killed") == ["CRASHED"]  # the next one on this folder did


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
