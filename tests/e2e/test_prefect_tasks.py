"""Stages as task runs of a real Prefect server: the edges of its graph, the names of its states."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.cli.config import compose_config
from flows.delivery.run_delivery import Untracked
from flows.orchestration.flow_run import FlowRun, tracker_of
from flows.orchestration.prefect_tasks import PrefectTasks, in_prefect
from flows.servers.services import mlflow_page, record_path, services_of
from tasks.core.errors import DataError
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.report import StageReport
from tasks.pipeline.stage import Mechanism, Stage
from tests.conftest import PROJECT

pytestmark = pytest.mark.slow  # test_chain.py reads the graph of a real run
PATIENCE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def mechanism(tmp_path: Path) -> Mechanism:
    return Mechanism(tmp_path / "artifacts", tmp_path / "logs", Untracked(), PrefectTasks())


def answer(path: str, body: Any = None) -> Any:
    """Return the answer of Prefect's API."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        request = client._client.get(path) if body is None else client._client.post(path, json=body)
        return request.json()


def flow_of(body: Callable[[], object]) -> str:
    """Run a flow. Returns its id, if the flow raises, too."""
    from prefect import flow
    from prefect.runtime import flow_run

    seen: list[str] = []

    @flow(name="edges")
    def edges() -> None:
        seen.append(str(flow_run.id))
        body()

    with contextlib.suppress(BaseException):
        edges()
    return seen[0]


def task_runs(run_id: str) -> list[dict[str, Any]]:
    """Return the task runs of a flow run, once all have a final state."""
    query = {"flow_runs": {"id": {"any_": [run_id]}}}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        runs: list[dict[str, Any]] = answer("/task_runs/filter", query)
        if (runs and all(run["end_time"] for run in runs)) or time.monotonic() > deadline:
            return runs
        time.sleep(0.2)


def edges_of(run_id: str, count: int) -> dict[str, list[str]]:
    """Return the parents of every node of Prefect's flow graph, by the name of the task."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        nodes = dict(answer(f"/flow_runs/{run_id}/graph-v2")["nodes"])
        if len(nodes) == count or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert len(nodes) == count, nodes
    labels = {key: node["label"].rpartition("-")[0] for key, node in nodes.items()}
    return {
        # Prefect's query lists a parent once for each of its other children.
        labels[key]: sorted({labels[parent["id"]] for parent in node["parents"]})
        for key, node in nodes.items()
    }


def make(out: Path, *, kind: str, log: object, **inputs: Path) -> StageReport:
    read = [(path / "text.txt").read_text() for path in inputs.values()]
    (out / "text.txt").write_text(f"{kind}({', '.join(read)})")
    return StageReport(kind)


def test_edges_go_from_the_makers_of_artifacts_to_their_readers(mechanism: Mechanism) -> None:
    """Two models: the second one trains on with what the first one serves. Also when reused."""

    def stage(run: Mechanism, name: str, kind: str, **inputs: Artifact) -> Artifact:
        declared = Stage(name, kind, code=("tasks.core.errors",))
        config = {"kind": kind}
        return run.run(declared, make, inputs=inputs, config=config).artifact

    def chain() -> None:
        before = None
        for step in ("sft", "ppo"):
            with mechanism.step(step) as run:
                data = stage(run, "data", "dataset")
                base = before or stage(run, "base", "base")
                trained = stage(run, "train", "shards", data=data, base=base)
                before = served = stage(run, "convert", "served", trained=trained)
                report = stage(run, "smoke_eval", "report", served=served, data=data)
        read = {"served": served, "ppo.smoke_eval": report}
        assert mechanism.call.last("register", lambda: "models:/m/1", read) == "models:/m/1"

    wanted = {
        "sft.data": [],
        "sft.base": [],
        "sft.train": ["sft.base", "sft.data"],
        "sft.convert": ["sft.train"],
        "sft.smoke_eval": ["sft.convert", "sft.data"],
        "ppo.data": [],
        "ppo.train": ["ppo.data", "sft.convert"],
        "ppo.convert": ["ppo.train"],
        "ppo.smoke_eval": ["ppo.convert", "ppo.data"],
        "register": ["ppo.convert", "ppo.smoke_eval"],
    }
    first, again = flow_of(chain), flow_of(chain)
    assert edges_of(first, len(wanted)) == wanted
    assert edges_of(again, len(wanted)) == wanted
    states = {task["name"].rpartition("-")[0]: task["state_name"] for task in task_runs(again)}
    assert {states[name] for name in wanted if name != "register"} == {"Cached"}
    train = next(task for task in task_runs(first) if task["name"].startswith("ppo.train-"))
    assert set(train["task_inputs"]) == {"data", "base"}


def test_the_pages_of_a_run_in_prefect_and_mlflow_are_linked(tmp_path: Path) -> None:
    """`FlowRun` with a server of Prefect that has pages, and MLflow as `make up` serves it."""
    from mlflow import MlflowClient

    runs = tmp_path / "runs"
    composed = compose_config(["+exp=sft_qlora", f"paths.runs={runs}"])
    record = {"pid": os.getpid(), "started": psutil.Process().create_time(), "port": 5999}
    services_of(runs).mkdir(parents=True)
    record_path("mlflow", services_of(runs)).write_text(json.dumps(record))
    summaries: list[dict[str, Any]] = []

    def body() -> None:
        host = in_prefect("rlhf")
        run = FlowRun.begin("rlhf", composed, host, tracker=tracker_of(composed), exp="sft_qlora")
        run.tags = {"objective": "sft", "model": "toy"}
        summaries.append(run.run("sft_qlora sft toy", lambda _: None))

    run_id = flow_of(body)
    (summary,) = summaries
    pages = summary["pages"]
    assert pages["prefect"].endswith(f"/runs/flow-run/{run_id}")
    assert pages["mlflow"].startswith("http://127.0.0.1:5999/#/experiments/")
    assert pages["mlflow"].endswith(f"/runs/{summary['mlflow_run_id']}")
    written = json.loads((runs / "latest" / "summary.json").read_text())
    assert written["pages"] == pages

    client = MlflowClient(composed.tracking_uri)
    run = client.get_run(summary["mlflow_run_id"])
    assert run.info.run_name == "sft_qlora sft toy"
    tags = run.data.tags
    assert tags["prefect.flow_run_url"] == pages["prefect"]
    assert pages["prefect"] in tags["mlflow.note.content"]
    assert (tags["exp"], tags["objective"], tags["model"]) == ("sft_qlora", "sft", "toy")
    assert tags["mlflow.user"] == getpass.getuser()
    assert tags["mlflow.source.name"] == "flows/rlhf.py"
    in_git = (PROJECT / ".git").exists()
    assert len(tags.get("mlflow.source.git.commit", "")) == (40 if in_git else 0)
    query = {"artifacts": {"flow_run_id": {"any_": [run_id]}, "key": {"any_": ["rlhf-mlflow"]}}}
    (link,) = answer("/artifacts/filter", query)
    assert pages["mlflow"] in link["data"]
    query["artifacts"]["key"] = {"any_": ["rlhf-checks"]}
    (table,) = answer("/artifacts/filter", query)
    assert f"[in MLflow]({pages['mlflow']}/artifacts/report.html), " in table["data"]


def test_an_mlflow_server_of_the_users_is_linked_without_its_password(tmp_path: Path) -> None:
    page = "#/experiments/1/runs/2"
    uri = "https://me:s3cret@tracking.example:8443/mlflow/"
    assert mlflow_page(tmp_path, uri, page) == f"https://tracking.example:8443/mlflow/{page}"
    assert mlflow_page(tmp_path, uri, "") == ""
    assert mlflow_page(tmp_path, "sqlite:////elsewhere.db", page) == ""
    assert mlflow_page(tmp_path, None, page) == ""


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_stopped_stage_reads_cancelled_and_the_signal_goes_on(
    mechanism: Mechanism, stop: type[BaseException]
) -> None:
    def stopped(out: Path, *, log: object) -> StageReport:
        raise stop

    def chain() -> None:
        declared = Stage("train", "shards", code=("tasks.core.errors",))
        try:
            mechanism.run(declared, stopped, inputs={}, config={})
        except BaseException as error:
            raised.append(type(error))
            raise

    raised: list[type[BaseException]] = []
    run_id = flow_of(chain)
    assert raised == [stop]
    assert [task["state_type"] for task in task_runs(run_id)] == ["CANCELLED"]


def test_a_failed_stage_stays_failed_and_its_error_goes_on(mechanism: Mechanism) -> None:
    def failing(out: Path, *, log: object) -> StageReport:
        raise DataError("row 3 is empty")

    def chain() -> None:
        declared = Stage("train", "shards", code=("tasks.core.errors",))
        with pytest.raises(DataError, match="row 3 is empty"):
            mechanism.run(declared, failing, inputs={}, config={})

    assert [task["state_type"] for task in task_runs(flow_of(chain))] == ["FAILED"]
