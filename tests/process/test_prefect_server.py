"""The embedded Prefect server loses no record and ends with the flow, however that ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flows.servers.server_api import Api, RefusedError
from tests.process.conftest import HERE, PROJECT, Script, alive, pids, until

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


@pytest.mark.slow
def test_every_task_run_is_recorded(runs: Path) -> None:
    assert flow_states(runs, "quick") == ["COMPLETED", "COMPLETED"]
    assert task_states(runs, "quick") == {"COMPLETED": 40}
    assert flow_states(runs, "fail") == ["FAILED"]
    assert task_states(runs, "fail") == {"COMPLETED": 20}


def test_one_process_has_one_server(runs: Path) -> None:
    text = (runs.parent / "first.out").read_text()
    assert len(pids("server", text)) == 3
    assert len(set(re.findall(r"server \d+ \S+", text))) == 1


def test_nothing_of_prefect_is_outside_of_runs(runs: Path) -> None:
    assert (runs / "prefect/prefect.db").is_file()
    assert (runs / "prefect/memo_store.toml").is_file()
    assert "Failed to create" not in (runs.parent / "first.out").read_text()
    assert (runs.parent / "first.log").read_text() == ""


def test_a_failure_takes_less_than_a_screen(runs: Path) -> None:
    text = (runs.parent / "first.out").read_text()
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


def signal_server(flow: Script, number: signal.Signals) -> None:
    """Send a signal to the embedded server, not to its supervisor."""
    (supervisor,) = pids("server", flow.text)
    for server in psutil.Process(supervisor).children(recursive=True):
        server.send_signal(number)


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


def test_another_user_has_no_access_and_sigterm_ends_everything(start: Start, runs: Path) -> None:
    check_signal(start, runs, signal.SIGTERM, 143, before=check_that_another_user_has_no_access)


def test_kill_9_and_then_ctrl_c(start: Start, runs: Path) -> None:
    flow, child, server = begun(start, "long-killed")
    flow.process.kill()
    until(lambda: not alive(child) and not alive(server), 60)
    assert flow_states(runs, "long-killed") == ["RUNNING"]  # nobody could say otherwise
    check_signal(start, runs, signal.SIGINT, 130)
    assert flow_states(runs, "long-killed") == ["CRASHED"]  # the next one on this folder did


def test_a_server_that_no_flow_needs_opens_nothing_and_ends(runs: Path, tmp_path: Path) -> None:
    """It is started before the checks of a run, which may refuse it."""
    mine = tmp_path / "runs"  # a server of an earlier test may still be writing in the other
    shutil.copytree(runs, mine)
    database = mine / "prefect/prefect.db"
    before = {path.name: path.stat().st_mtime_ns for path in database.parent.glob("prefect.db*")}
    script = [sys.executable, str(HERE / "flow_script.py"), str(mine), "refuse"]
    with subprocess.Popen(
        script, cwd="/", env={**os.environ, "PYTHONPATH": str(PROJECT)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        _, pid, url, auth = process.stdout.readline().split()
        supervisor = psutil.Process(int(pid))
        until(lambda: any(map(_has_loaded_prefect, supervisor.children())), 150)
        members = [supervisor, *supervisor.children()]
        assert not Api(url, auth).answers()
        process.communicate("\n")
    assert process.returncode == 2
    until(lambda: not any(alive(member.pid) for member in members), 60)
    after = {path.name: path.stat().st_mtime_ns for path in database.parent.glob("prefect.db*")}
    assert after == before


def _has_loaded_prefect(process: psutil.Process) -> bool:
    """Return True if a process sleeps and has loaded the libraries of Prefect's server."""
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return "asyncpg" in maps and process.status() == psutil.STATUS_SLEEPING


def test_a_server_of_the_users_is_used(
    script: Callable[..., Script], runs: Path, tmp_path: Path
) -> None:
    env = {"PREFECT_API_URL": "http://127.0.0.1:9/api"}  # nobody is there: it was tried
    flow = script(str(HERE / "flow_script.py"), str(tmp_path / "runs"), "quick", env=env)
    assert flow.process.wait(90) == 1
    assert "server" not in re.findall(r"^\w+", flow.text, re.MULTILINE)
    assert "Failed to reach API at http://127.0.0.1:9/api" in flow.text
    assert not (tmp_path / "runs/prefect").exists()


@pytest.mark.slow  # tests/e2e/test_outage.py kills the server of a whole chain
def test_a_flow_goes_on_to_its_end_when_its_server_is_killed(start: Start, runs: Path) -> None:
    flow = start("wait-outage")
    flow.says("waiting", 90)
    signal_server(flow, signal.SIGKILL)
    (runs / "logs/wait-outage").touch()
    assert flow.process.wait(200) == 0, flow.text
    assert flow.text.count("The run goes on") == 1
    assert "{'mode': 'wait-outage'} Prefect's server at http://127.0.0.1:" in flow.text
    assert "are not recorded there, the end of this run neither" in flow.text
    assert "Traceback" not in flow.text
    assert flow_states(runs, "wait-outage") == ["RUNNING"]


@pytest.mark.slow
def test_sigterm_after_the_server_was_killed(start: Start) -> None:
    flow, child, server = begun(start, "long-alone")
    signal_server(flow, signal.SIGKILL)
    until(lambda: not alive(server), 60)
    flow.process.terminate()
    assert flow.process.wait(30) == 143, flow.text
    assert not alive(child)


@pytest.mark.slow
def test_sigterm_while_the_server_hangs(start: Start) -> None:
    flow, child, _ = begun(start, "long-hung")
    signal_server(flow, signal.SIGSTOP)
    flow.process.terminate()
    assert flow.process.wait(30) == 143, flow.text
    assert not alive(child)


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
    assert "this run was cancelled in Prefect" in flow.text
    assert flow_states(runs, "long-cancelled") == ["CANCELLED"]
