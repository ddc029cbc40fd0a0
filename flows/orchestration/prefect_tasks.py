"""Run a flow in Prefect: its stages as task runs, with the edges of Prefect's flow graph.

A task run ends as `Cached` if its stage was reused, and as `Cancelled` if the user stopped the run,
which Prefect itself would call crashed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import get_run_logger, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.client.schemas.objects import StateDetails
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run, task_run
from prefect.states import Cancelled, Completed
from prefect.utilities.urls import url_for

from flows.orchestration.flow_run import Host
from flows.servers.prefect_server import is_embedded
from tasks.core.redaction import redact, redact_error
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.locks import FOREVER, Patience
from tasks.pipeline.report import StageResult


def in_prefect(name: str, patience: Patience = FOREVER) -> Host:
    """Return the host of the current Prefect flow run.

    Args:
        name: name of the flow.
        patience: how long to wait for other runs.
    """

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
    log = get_run_logger()
    return Host(run_id, log, tasks, tasks.last, show, tags, patience, page, link)


class PrefectTasks:
    """Task runs of one flow run, a `Call` of `Mechanism`.

    An edge of the graph goes from the stage that made an artifact to every stage that reads it.
    Prefect's own links, by the identity of returned objects, would take equal strings and empty
    tuples of two results for the same object.
    """

    def __init__(self) -> None:
        self._made: dict[Path, UUID] = {}  # ids of task runs by the artifact that they made

    def __call__(
        self, name: str, work: Callable[[Any], StageResult], inputs: Mapping[str, Artifact]
    ) -> StageResult:
        """Run one stage, in this thread: signals arrive in the main thread.

        Args:
            name: name of the stage.
            work: work of the stage; gets the logger of its task run.
            inputs: the artifacts that it reads, by role.
        """

        def body(log: Any) -> tuple[StageResult, Any]:
            result = work(log)
            self._made[result.artifact.path] = UUID(task_run.id)
            return result, _state(result)

        return self._run(name, body, inputs)

    def last(self, name: str, work: Callable[[], Any], inputs: Mapping[str, Artifact]) -> Any:
        """Run the last step of a flow, which makes no artifact. Returns its result."""
        return self._run(name, lambda log: (work(), Completed()), inputs)

    def _run(
        self, name: str, work: Callable[[Any], tuple[Any, Any]], inputs: Mapping[str, Artifact]
    ) -> Any:
        ended: list[Any] = []

        def body(**_: Any) -> Any:
            try:
                result, state = work(get_run_logger())
            except (KeyboardInterrupt, SystemExit, TerminationSignal) as signal:
                ended.append(signal)
                return Cancelled(message="the run was stopped")
            except Exception as error:  # Prefect records its message
                redact_error(error)
                raise
            ended.append(result)
            return state

        upstream = self._upstream(inputs)
        names = [Parameter(role, Parameter.KEYWORD_ONLY) for role in upstream]
        body.__signature__ = Signature(names)  # type: ignore[attr-defined]  # Prefect shows the roles
        # Prefect's cache is off, because the manifest decides about reuse.
        runner = task(body, name=name, cache_policy=None, persist_result=False, log_prints=False)
        runner(**upstream)
        if isinstance(ended[0], BaseException):
            raise ended[0]
        return ended[0]

    def _upstream(self, inputs: Mapping[str, Artifact]) -> dict[str, Any]:
        """Return a state for each input that this flow has made; Prefect takes it as an edge."""
        return {
            role.replace(".", "_"): Completed(
                data=artifact.digest,
                state_details=StateDetails(task_run_id=self._made[artifact.path]),
            )
            for role, artifact in inputs.items()
            if artifact.path in self._made
        }


def _state(result: StageResult) -> Any:
    if result.reused:
        return Completed(name="Cached", message=f"reused {result.artifact.path}")
    return Completed()
