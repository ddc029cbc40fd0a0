"""The deployments, on a real Prefect server with a real worker: by hand, and by a schedule."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flows.servers.services import pages, running_server
from tasks.config.checks.data import PEEK
from tasks.pipeline.locks import hold
from tests.conftest import PROJECT
from tests.infra.servers.site import Site

pytestmark = pytest.mark.slow


def test_the_printed_command_starts_a_run(site: Site) -> None:
    """Typed on any terminal: in another folder, with nothing of `make` in the environment."""
    printed = site.require("deploy").splitlines()[-1].removeprefix("start").strip()
    assert '["+exp=qlora"]' in printed
    typed = printed.replace('["+exp=qlora"]', json.dumps(site.overrides()))
    started = subprocess.run(
        ["bash", "-c", typed],
        cwd="/", env={"HOME": str(site.services.runs), "PATH": os.environ["PATH"]},
        capture_output=True, text=True,
    )  # fmt: skip
    assert started.returncode == 0, started.stdout + started.stderr
    (found,) = re.findall(r"UUID: (\S+)", started.stdout)
    run = site.finished_run(found)
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["parameters"] == {"overrides": site.overrides(), "tag": "manual"}


def test_a_paused_schedule_stays_paused(site: Site) -> None:
    deployment = site.deployment("rlhf-nightly")
    (nightly,) = (each for each in deployment["schedules"] if each["slug"] == "nightly")
    path = f"/deployments/{deployment['id']}/schedules/{nightly['id']}"
    site.services.prefect.call("PATCH", path, {"active": False})
    assert "0 2 * * * UTC, paused" in site.require("deploy")
    schedules = site.deployment("rlhf-nightly")["schedules"]
    assert {each["slug"]: each["active"] for each in schedules}["nightly"] is False
    site.services.prefect.call("PATCH", path, {"active": True})


def test_a_run_waits_for_a_run_on_a_terminal(site: Site, tmp_path: Path) -> None:
    rows, runs = tmp_path / "rows.jsonl", site.services.runs / "planned"
    pair = [{"role": "user", "content": "say yes"}, {"role": "assistant", "content": "yes"}]
    lines = [json.dumps({"messages": pair})] * (PEEK + 50)
    lines[PEEK + 40] = '{"messages": ['  # after those that the preflight reads
    rows.write_text("\n".join(lines) + "\n")
    overrides = ["+exp=sft_qlora", "data=jsonl", f"data.path={rows}", f"paths.runs={runs}"]
    with hold(runs, alone=True):  # as a prune does
        run_id = site.start_run("rlhf-qlora", overrides)
        site.logged(run_id, "waits: ")
        assert site.flow_run(run_id)["state_type"] == "RUNNING"
    run = site.finished_run(run_id)
    assert "in use by" not in run["state"]["message"]
    assert "rows.jsonl" in run["state"]["message"]  # its turn came, and its own mistake ended it


def test_a_run_on_a_terminal_uses_the_server(site: Site, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "process" / "flow_script.py"
    env = {key: value for key, value in site.env.items() if key != "PLUMBLINE_RUNS"}
    done = subprocess.run(
        [sys.executable, str(script), str(site.services.runs), "quick"],
        cwd=tmp_path, env=env | {"PYTHONPATH": str(PROJECT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "server" not in re.findall(r"^\w+", done.stdout, re.MULTILINE)  # none of its own
    query = {"flow_runs": {"name": {"any_": ["quick"]}}}
    (run,) = site.services.prefect.post("/flow_runs/filter", query)
    assert run["state_type"] == "COMPLETED"
    here = f"http://127.0.0.1:{site.services.prefect_port}"
    assert pages(site.services.runs, PROJECT, {}).startswith(
        f"pages: {here}/runs  http://127.0.0.1:"
    )
    assert running_server(tmp_path) == {}
    assert pages(tmp_path, PROJECT, {}).endswith(str(tmp_path))  # where no server runs


def test_up_again_finds_what_runs(site: Site) -> None:
    again = site.require("up").splitlines()
    assert ["runs already" in line for line in again[:3]] == [True] * 3
    limits = [site.deployment(name)["global_concurrency_limit"]["limit"]
              for name in ("rlhf-qlora", "rlhf-nightly")]  # fmt: skip
    assert limits == [1, 1], "one run at a time"


def test_a_schedule_fires(site: Site) -> None:
    """With SQLAlchemy 2.1 this Prefect never creates a scheduled run; runs by hand go on."""
    deployment = site.deployment("rlhf-nightly")
    schedule = {
        "schedule": {"interval": 15, "anchor_date": datetime.now(UTC).isoformat()},
        "active": True,
        "slug": "soon",
        "parameters": {"overrides": site.overrides(), "tag": "soon"},
    }
    path = f"/deployments/{deployment['id']}/schedules"
    (made,) = site.services.prefect.post(path, [schedule])
    query = {"deployment_id": {"any_": [deployment["id"]]}, "tags": {"all_": ["auto-scheduled"]}}
    try:
        run = site.finished(query)
    finally:  # it would take the only slot from other tests
        site.services.prefect.call("DELETE", f"{path}/{made['id']}")
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["parameters"] == {"overrides": site.overrides(), "tag": "soon"}
