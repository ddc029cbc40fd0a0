"""Run a flow in Prefect: its stages as task runs, with the edges of Prefect's flow graph.

A task run ends as `Cached` if its stage was reused. Prefect's own cache is off, because the
manifests decide about reuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from prefect.states import Completed
from prefect.utilities.urls import url_for

from flows.orchestration.flow_run import Host
from flows.servers.prefect_server import is_embedded
from tasks.core.redaction import redact, redact_error
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.locks import FOREVER, Patience
from tasks.pipeline.report import StageResult


@task(cache_policy=NO_CACHE, persist_result=False)
def stage(work: Callable[[Any], Any]) -> Any:
    """Run one stage, in the thread of the flow: signals arrive in the main thread."""
    try:
        result = work(get_run_logger())
    except Exception as error:  # Prefect records its message
        redact_error(error)
        raise
    if isinstance(result, StageResult) and result.reused:
        return Completed(name="Cached", message=f"reused {result.artifact.path}", data=result)
    return Completed(data=result)


class PrefectTasks:
    """Task runs of one flow run, a `Call` of `Mechanism`.

    An edge of the graph goes from the stage that made an artifact to every stage that reads it.
    """

    def __init__(self) -> None:
        self._states: dict[Path, Any] = {}  # of task runs by the artifact that they made

    def __call__(
        self, name: str, work: Callable[[Any], StageResult], inputs: Mapping[str, Artifact]
    ) -> StageResult:
        """Run one stage.

        Args:
            work: work of the stage; gets the logger of its task run.
        """
        state = self._run(name, work, inputs)
        result: StageResult = state.result()
        self._states[result.artifact.path] = state
        return result

    def last(self, name: str, work: Callable[[], Any], inputs: Mapping[str, Artifact]) -> Any:
        """Run the last step of a flow, which makes no artifact. Returns its result."""
        return self._run(name, lambda _: work(), inputs).result()

    def _run(self, name: str, work: Callable[[Any], Any], inputs: Mapping[str, Artifact]) -> Any:
        made = [self._states[a.path] for a in inputs.values() if a.path in self._states]
        return stage.with_options(name=name)(work, wait_for=made, return_state=True)


def in_prefect(name: str, patience: Patience = FOREVER) -> Host:
    """Return the host of the current Prefect flow run."""

    def record(what: str, create: Callable[[], object]) -> None:
        try:
            create()
        except Exception as error:
            get_run_logger().warning("Prefect has not recorded %s: %s", what, error)

    def show(table: str) -> None:
        create = partial(create_markdown_artifact, redact(table), key=f"{name}-checks")
        record("the table of checks", partial(create, description="checks"))

    def link(text: str, url: str) -> None:
        url = redact(url)
        create = partial(create_link_artifact, url, text, key=f"{name}-mlflow")
        record(f"the link to {url}", partial(create, description=f"[{text}]({url})"))

    run_id = str(flow_run.id)
    tags = {"prefect.flow_run_id": run_id}
    tasks = PrefectTasks()
    # The server of one run alone has no pages, and is gone when the run has ended.
    page = "" if is_embedded() else url_for("flow-run", obj_id=run_id) or ""
    return Host(run_id, get_run_logger(), tasks, tasks.last, show, tags, patience, page, link)
