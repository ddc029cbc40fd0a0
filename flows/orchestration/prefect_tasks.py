"""Run a flow in Prefect: its stages as task runs, with the edges of Prefect's flow graph.

A task run ends as `Cached` if its stage was reused. Prefect's own cache is off, because the
manifests decide about reuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from prefect.states import Completed
from prefect.utilities.urls import url_for

from flows.cli.composed import Composed
from flows.orchestration.flow_run import Host
from flows.servers import is_embedded
from tasks.core.redaction import redact, redact_error
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.locks import Patience, hold
from tasks.pipeline.stage import StageResult


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


def in_deployment() -> bool:
    """Return True within a flow run that a worker started for a deployment."""
    context = FlowRunContext.get()
    return bool(context and context.flow_run and context.flow_run.deployment_id)


@contextmanager
def in_prefect(name: str, composed: Composed) -> Iterator[Host]:
    """Enter the folder of runs, and yield the host of the current Prefect flow run.

    A run of a deployment waits for others as long as it takes; others raise BusyError.
    """
    log, run_id = get_run_logger(), str(flow_run.id)

    states: dict[Path, Any] = {}  # of task runs by the artifact that they made

    def call(name: str, work: Callable[[Any], Any], inputs: Mapping[str, Artifact]) -> Any:
        """Run a stage, with an edge of the graph from each stage that made an input."""
        made = [states[a.path] for a in inputs.values() if a.path in states]
        state = stage.with_options(name=name)(work, wait_for=made, return_state=True)
        result = state.result()
        if isinstance(result, StageResult):
            states[result.artifact.path] = state
        return result

    def show(table: str) -> None:
        try:
            create_markdown_artifact(redact(table), key=f"{name}-checks", description="checks")
        except Exception as error:
            log.warning("Prefect has not recorded an artifact: %s", error)

    wait_s = None if in_deployment() else composed.settings["paths"]["wait_s"]
    patience = Patience(wait_s, log.info)
    # The server of one run alone has no pages, and is gone when the run has ended.
    page = "" if is_embedded() else url_for("flow-run", obj_id=run_id) or ""
    tags = {"prefect.flow_run_id": run_id}
    with hold(composed.runs, patience):
        yield Host(run_id, log, call, show, tags, patience, page)
