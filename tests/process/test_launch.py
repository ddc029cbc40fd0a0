"""`launch`: status, last lines, order, events, deadlines; no process is left."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import StageProcessError
from tasks.process.launch import launch
from tests.process.conftest import FAMILY, STUBBORN, Script, alive, pids, until

Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path, log: logging.Logger) -> Run:
    def run_code(code: str, **options: Any) -> list[str]:
        argv = [sys.executable, "-c", code]
        return launch(argv, stage="demo", log=log, log_path=tmp_path / "logs/demo.log", **options)

    return run_code


@pytest.mark.parametrize("path", [None, "/nowhere::"])
def test_nothing_is_imported_from_the_working_directory(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    for name in ("hydra", "json"):
        (tmp_path / f"{name}.py").write_text("print('code of a checkpoint')")
    monkeypatch.chdir(tmp_path)
    if path is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", path)
    assert run("import hydra, json, tasks; print('imported')") == ["imported"]


def test_a_failure_carries_status_and_tail(run: Run, tmp_path: Path, log: logging.Logger) -> None:
    with pytest.raises(StageProcessError, match=r"demo.*status 3.*the reason") as caught:
        run("import sys; print('before'); print('the reason', file=sys.stderr); sys.exit(3)")
    assert (caught.value.returncode, caught.value.reason) == (3, "exit")
    assert sorted(caught.value.details) == ["before", "the reason"]
    with pytest.raises(StageProcessError) as caught:
        run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert caught.value.returncode == -signal.SIGSEGV
    with pytest.raises(StageProcessError, match="no-such-program") as caught:
        launch(["no-such-program"], stage="demo", log=log, log_path=tmp_path / "x.log")
    assert caught.value.returncode == 127


def test_events_come_in_order_and_stay_out_of_the_log(run: Run, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    code = """
from tasks.core.events import emit
for i in range(300):
    print("text", i)
    emit("step", step=i, loss=float("nan") if i == 7 else i / 2)
"""
    run(code, on_event=seen.append)
    assert [event["step"] for event in seen] == list(range(300))
    assert seen[8] == {"event": "step", "step": 8, "loss": 4.0}
    assert seen[7]["loss"] != seen[7]["loss"]
    text = (tmp_path / "logs/demo.log").read_text()
    assert text == "".join(f"text {i}\n" for i in range(300))


def test_an_exception_of_the_listener_ends_the_child(run: Run) -> None:
    class Refused(Exception):
        pass

    def refuse(event: dict[str, Any]) -> None:
        child.append(event["pid"])
        raise Refused

    child: list[int] = []
    code = "import os, time; from tasks.core.events import emit; emit('x', pid=os.getpid())"
    with pytest.raises(Refused):
        run(code + "; time.sleep(600)", on_event=refuse)
    assert not alive(child[0])


def test_the_childs_environment(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    login = "PREFECT_SERVER_API_AUTH_STRING"
    values = {"MLFLOW_RUN_ID": "parents-own", "HF_TOKEN": "hf_abcdefghijkl", login: "user:secret",
              "PREFECT_API_AUTH_STRING": "user:secret"}  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir("/")
    names = ("MLFLOW_RUN_ID", "PREFECT_API_AUTH_STRING", login, "PYTHONUNBUFFERED", "HF_TOKEN")
    code = f"import os, tasks.core.events; print(*[os.environ.get(name) for name in {names}])"
    assert run(code) == ["None None None 1 ***"]
    assert run(code, env={login: "its own"}) == ["None None its own 1 ***"]
    assert "abcdef" not in (tmp_path / "logs/demo.log").read_text()


def test_what_a_finished_command_leaves_behind_is_ended(run: Run) -> None:
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
print(child.stdout.readline().decode())
"""
    begin = time.monotonic()
    tail = run(code)
    assert time.monotonic() - begin < 60
    assert [alive(pid) for pid in pids("stubborn", "\n".join(tail))] == [False]


PARENT = f"""
import logging, pathlib, sys
from tasks.process.launch import launch
argv = [sys.executable, "-c", {FAMILY!r}]
launch(argv, stage="demo", log=logging.getLogger(), log_path=pathlib.Path(sys.argv[1]))
"""


def test_kill_9_of_the_parent_ends_everything(
    script: Callable[..., Script], tmp_path: Path
) -> None:
    log_path = tmp_path / "demo.log"
    parent = script("-c", PARENT, str(log_path))
    until(lambda: log_path.exists() and pids("stubborn", log_path.read_text()), 60)
    (grandchild,) = pids("stubborn", log_path.read_text())
    supervisor = parent_of(parent_of(grandchild))
    parent.process.kill()
    until(lambda: not alive(grandchild) and not alive(supervisor), 60)


def test_kill_9_of_the_supervisor_ends_everything(run: Run, tmp_path: Path) -> None:
    log_path = tmp_path / "logs/demo.log"

    def kill_supervisor() -> None:
        until(lambda: log_path.exists() and pids("stubborn", log_path.read_text()), 20)
        (grandchild,) = pids("stubborn", log_path.read_text())
        os.kill(parent_of(parent_of(grandchild)), signal.SIGKILL)

    thread = threading.Thread(target=kill_supervisor)
    thread.start()
    with pytest.raises(StageProcessError) as caught:
        run(FAMILY)
    thread.join()
    assert caught.value.returncode == -signal.SIGKILL
    (grandchild,) = pids("stubborn", log_path.read_text())
    until(lambda: not alive(grandchild), 60)


def parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[1])
