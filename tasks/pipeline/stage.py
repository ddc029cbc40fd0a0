"""The one mechanism around a stage: key -> reuse or run -> contract -> manifest -> rename -> log.

A stage function is a plain function that fills an empty directory and reports what it checked
(`tasks/pipeline/report.py`). Everything that all stages share happens here, once:

* the key: stage name, its configuration, the digests of its inputs, its code and its stack;
* reuse: an artifact with that key that is still intact, byte for byte, is taken as it is;
* the Prefect task run, called directly (the chain is serial, and a direct call stays in the main
  thread, where signals arrive), with Prefect's own caching off: the manifest is the only truth;
* the contract's verdicts, written into the artifact and to the tracker before they are enforced;
* publishing by rename.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tasks.core.contract import Check, require
from tasks.core.errors import ArtifactError, PlumblineError
from tasks.pipeline.artifact import (
    Artifact,
    Origin,
    intact,
    open_artifact,
    publish,
    remember,
    staging,
)
from tasks.pipeline.report import StageReport
from tasks.pipeline.source_closure import PACKAGES, source_digest
from tasks.pipeline.tracking import StageRun, Tracker

CONTRACT = "contract.json"
REFERENCE_LOG = "reference.log"
"""Log of the scorer, which all stages of a run share."""

Observe = Callable[
    [StageRun, Any], contextlib.AbstractContextManager[Callable[[dict[str, Any]], None]]
]
"""(the stage's run, its log) -> a context whose value receives the child's events."""

Call = Callable[[str, Callable[[Any], "StageResult"]], "StageResult"]
"""(name of the stage, its work) -> what the work returns; gives the work its log."""


@dataclass(frozen=True)
class Stage:
    """What identifies a stage beside its configuration and inputs.

    Attributes:
        name: the word of the chain.
        kind: kind of artifact it publishes.
        code: modules that the stage starts from; the source of all they import is part of the key.
        stack: distributions whose versions are part of the key.
        without: packages that `code` names but this stage never runs.
    """

    name: str
    kind: str
    code: tuple[str, ...]
    stack: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def require_covers(self, function: Callable[..., Any]) -> None:
        """Raise PlumblineError if the stage's key does not cover the module of `function`."""
        starts_in = function.__module__
        if starts_in.startswith(PACKAGES) and starts_in not in self.code:
            raise PlumblineError(f"{self.name} runs {starts_in}; its code names {self.code}")

    def versions(self) -> dict[str, str]:
        """Installed versions of the stack, "absent" where a distribution is not installed."""
        return {name: _version(name) for name in self.stack}

    def key(self, config: Mapping[str, Any], inputs: Mapping[str, Artifact]) -> str:
        """Name of the artifact that this configuration and these inputs lead to."""
        parts = [
            self.name,
            self.kind,
            dict(config),
            {role: artifact.digest for role, artifact in inputs.items()},
            source_digest(self.code, without=self.without),
            self.versions(),
        ]
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class StageResult:
    """What the flow learns of one finished stage."""

    name: str
    artifact: Artifact
    reused: bool
    seconds: float
    checks: tuple[Check, ...]
    drift: dict[str, float] | None
    metrics: dict[str, float]


@dataclass
class Mechanism:
    """Runs stages: where artifacts lie, who tracks them, what has to be run again.

    Attributes:
        store: folder of the published artifacts.
        logs: folder for the children's full logs of this flow run.
        tracker: the tracker; owns the MLflow runs.
        force: names of stages that run even if an intact artifact exists.
        call: who calls the stage's work: Prefect, unless a flow does without it.
        results: what has run so far, in order.
        name: of the chain, where a run has several: its stages are called `<name>.<stage>`.
    """

    store: Path
    logs: Path
    tracker: Tracker
    force: frozenset[str] = frozenset()
    call: Call = field(default_factory=lambda: as_prefect_task)
    results: list[StageResult] = field(default_factory=list)
    name: str = ""

    @contextlib.contextmanager
    def link(self, name: str) -> Iterator[Mechanism]:
        """The mechanism of one of several chains: with results of its own, added to these."""
        if not name:
            yield self
            return
        logs = self.logs / name
        logs.mkdir(parents=True, exist_ok=True)
        one = replace(self, logs=logs, results=[], name=name)
        try:
            yield one
        finally:
            self.results.extend(one.results)

    def run(
        self,
        stage: Stage,
        function: Callable[..., StageReport],
        *,
        inputs: Mapping[str, Artifact],
        config: Mapping[str, Any],
        context: Mapping[str, Any] | None = None,
        observe: Observe | None = None,
    ) -> StageResult:
        """Run one stage, or reuse what it published before.

        Args:
            stage: the stage's identity.
            function: called as `function(out, **{role: path}, **config, **context, log=...)`.
            inputs: input artifacts by role; the function gets their paths.
            config: plain JSON values and frozen dataclasses of such that change the result: part of
                the key.
            context: arguments that do not change the result (how to score, where to log).
            observe: makes the function's `on_event`, for stages whose child reports as it goes.

        Raises:
            PlumblineError: the stage's key does not cover the module of `function`.
        """
        stage.require_covers(function)
        final = self.store / stage.kind / stage.key(plain(config), inputs)
        origin = Origin(
            kind=stage.kind,
            stage=stage.name,
            key=final.name,
            inputs={role: artifact.digest for role, artifact in inputs.items()},
            config=plain(config),
            versions=stage.versions(),
        )

        name = f"{self.name}.{stage.name}" if self.name else stage.name

        def work(log: Any) -> StageResult:
            started = time.monotonic()
            with self._stage_named(name), self.tracker.stage(name, origin) as run:
                reused = (
                    None if {name, stage.name} & self.force else self._reusable(final, stage, log)
                )
                if reused is not None:
                    result = _recall(name, reused)
                    log.info("%s: reusing %s", name, final)
                else:
                    arguments = {role: artifact.path for role, artifact in inputs.items()}
                    arguments |= {**config, **(context or {}), "log": log}
                    with _observed(observe, run, arguments):
                        result = self._execute(name, function, final, origin, arguments, run)
                result = _timed(result, time.monotonic() - started)
                run.finish(result.artifact, result.metrics, reused=result.reused)
            return result

        self.results.append(self.call(name, work))
        return self.results[-1]

    @contextlib.contextmanager
    def _stage_named(self, name: str) -> Iterator[None]:
        """Note in an error which stage failed, and the log that its children wrote to."""
        try:
            yield
        except PlumblineError as error:
            error.stage = error.stage or name
            own = self.logs / f"{name.rpartition('.')[2]}.log"
            measured = self.logs.parent / REFERENCE_LOG if self.name else self.logs / REFERENCE_LOG
            error.log = error.log or next((str(p) for p in (own, measured) if p.is_file()), "")
            raise

    def _reusable(self, final: Path, stage: Stage, log: Any) -> Artifact | None:
        if not final.exists():
            return None
        try:
            artifact = open_artifact(final, stage.kind)
            problems = intact(artifact, self.store / ".seen")
        except ArtifactError as error:
            problems = [error.message, *error.details]
        if not problems:
            return artifact
        log.warning("%s: %s was altered, making it again: %s", stage.name, final, problems[0])
        return None

    def _execute(
        self,
        name: str,
        function: Callable[..., StageReport],
        final: Path,
        origin: Origin,
        arguments: dict[str, Any],
        run: StageRun,
    ) -> StageResult:
        with _disk_full_named(final), staging(final) as work:
            report = function(work, **arguments)
            if report.kind != origin.kind:
                raise PlumblineError(f"{origin.stage} made {report.kind}, not {origin.kind}")
            verdicts = [check.as_dict() for check in report.checks]
            (work / CONTRACT).write_text(json.dumps(verdicts, indent=1) + "\n")
            run.contract(verdicts)
            require(report.checks, stage=origin.stage)
            measured = report.drift.as_dict() if report.drift else None
            metrics = {key: float(value) for key, value in report.metrics.items()}
            notes = {**report.notes, "drift": measured, "metrics": metrics}
            run.details({"drift": measured, **report.notes})
            described = Origin(**{**_fields(origin), "notes": notes})
            artifact = publish(work, final, described)
            remember(artifact, self.store / ".seen")
        return StageResult(name, artifact, False, 0.0, tuple(report.checks), measured, metrics)


def as_prefect_task(name: str, work: Callable[[Any], StageResult]) -> StageResult:
    """Run a stage's work as a Prefect task run, called directly."""
    from prefect import get_run_logger, task

    def body() -> Any:
        return _completed(work(get_run_logger()))

    runner = task(body, name=name, cache_policy=None, persist_result=False, log_prints=False)
    returned = runner()
    # A task that returns a State hands that State back when it was called directly.
    result: StageResult = returned if isinstance(returned, StageResult) else returned.result()
    return result


NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def _disk_full_named(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        free = shutil.disk_usage(final.parent).free / 2**30
        raise ArtifactError(
            f"no room to publish {final}: {error.strerror}, {free:.1f} GiB are free there",
            hint="free some space, or choose another folder: paths.runs=<folder>",
        ) from error


@contextlib.contextmanager
def _observed(observe: Observe | None, run: StageRun, arguments: dict[str, Any]) -> Iterator[None]:
    if observe is None:
        yield
        return
    with observe(run, arguments["log"]) as on_event:
        arguments["on_event"] = on_event
        yield


def _recall(name: str, artifact: Artifact) -> StageResult:
    notes = artifact.notes
    verdicts = json.loads((artifact.path / CONTRACT).read_text())
    checks = tuple(Check(**verdict) for verdict in verdicts)
    return StageResult(name, artifact, True, 0.0, checks, notes["drift"], notes["metrics"])


def _timed(result: StageResult, seconds: float) -> StageResult:
    return StageResult(**{**_fields(result), "seconds": round(seconds, 2)})


def _completed(result: StageResult) -> Any:
    """A reused stage shows as `Cached` in Prefect, so that the UI tells the two apart."""
    from prefect.states import Completed

    if not result.reused:
        return result
    return Completed(name="Cached", message=f"reused {result.artifact.path}", data=result)


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as JSON has it, so that key and manifest say the same."""
    document: dict[str, Any] = json.loads(json.dumps(dict(config), default=asdict))
    return document


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"
