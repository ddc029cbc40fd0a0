"""Services that fail to start, are stopped during a run, or are killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.servers.services import record_of
from infra.servers.services import NAMES
from tasks.pipeline.locks import hold
from tests.e2e.processes import living
from tests.infra.servers.site import FINAL, Site
from tests.process.conftest import until

pytestmark = pytest.mark.slow


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """Services that do not run yet, and are stopped at the end of the test."""
    site = Site.at(tmp_path / "runs")
    yield site
    site.command("down")


def test_the_queue_goes_on_after_down_and_after_kill_9(own_site: Site) -> None:
    """A run that is stopped in the middle must not hold the only slot of its deployment."""
    own_site.require("up")
    own_site.require("deploy")
    waiting = ["+exp=qlora", f"paths.runs={own_site.services.runs / 'planned'}"]
    with hold(own_site.services.runs / "planned", alone=True):
        stopped = running(own_site, waiting)
        queued = own_site.start_run("rlhf-qlora", own_site.overrides())
        assert "runs     1 ended as Crashed" in own_site.require("down")
        own_site.require("up")
        assert own_site.finished_run(stopped)["state_type"] == "CRASHED"
        assert own_site.finished_run(queued)["state_type"] == "COMPLETED"

        killed = running(own_site, waiting)
        for name in NAMES:
            record = record_of(name, own_site.services.home)
            assert record is not None
            process = record.process()
            assert process is not None
            for member in [process, *process.children(recursive=True)]:
                os.kill(member.pid, signal.SIGKILL)
        own_site.require("up")
        assert own_site.finished_run(killed)["state_type"] == "CRASHED"
        queued = own_site.start_run("rlhf-qlora", own_site.overrides())
        assert own_site.finished_run(queued)["state_type"] == "COMPLETED"


def running(site: Site, overrides: list[str]) -> str:
    """Start a flow run and wait until it waits for its folder. Returns its id."""
    run_id = site.start_run("rlhf-qlora", overrides)
    site.logged(run_id, "waits: ")
    return run_id


@pytest.mark.timeout(1500)
def test_a_run_that_is_cancelled_in_prefect_goes_on_when_it_is_started_again(
    own_site: Site,
) -> None:
    """The page asks for the state Cancelling, and the worker ends the run."""
    own_site.require("up")
    own_site.require("deploy")
    runs = own_site.services.runs / "cancelled"
    short = ["train.max_steps=12", "train.save_steps=2", "smoke.engine=transformers"]
    overrides = ["+exp=sft_qlora", *short, "smoke.min_stop_rate=0", f"paths.runs={runs}"]
    run_id = own_site.start_run("rlhf-qlora", overrides)
    until(lambda: bool(list(runs.glob("checkpoints/*/step-*/state.json"))), 900)
    cancelling = {"type": "CANCELLING", "name": "Cancelling"}
    own_site.services.prefect.post(f"/flow_runs/{run_id}/set_state", {"state": cancelling})
    until(lambda: not living(runs), 30)
    assert own_site.finished_run(run_id)["state_type"] == "CANCELLED"
    assert json.loads((runs / "latest/summary.json").read_text())["status"] == "cancelled"

    again = own_site.start_run("rlhf-qlora", overrides)
    until(lambda: own_site.flow_run(again)["state_type"] in FINAL, 900)
    assert own_site.flow_run(again)["state_type"] == "COMPLETED"
    assert any("going on after step" in line for line in own_site.logs(again))
    client = MlflowClient(f"sqlite:///{runs}/mlflow/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "plumbline"]
    ended = client.search_runs(
        [experiment.experiment_id], f"tags.`prefect.flow_run_id` = '{run_id}'"
    )
    assert [run.info.status for run in ended] == ["KILLED"]
    whole = json.loads((runs / "latest/summary.json").read_text())
    trainings = client.search_runs([experiment.experiment_id], "tags.stage = 'train'")
    statuses = {run.data.tags["mlflow.parentRunId"]: run.info.status for run in trainings}
    assert statuses == {ended[0].info.run_id: "KILLED", whole["mlflow_run_id"]: "FINISHED"}
    (resumed,) = [run for run in trainings if run.info.status == "FINISHED"]
    losses = client.get_metric_history(resumed.info.run_id, "train/loss")
    assert [metric.step for metric in losses] == list(range(1, 13))
