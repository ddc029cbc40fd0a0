"""The mechanism around every stage: key -> reuse or run -> contract -> manifest -> rename -> log.

A stage function is a plain function that fills an empty directory and reports its checks
(`StageReport`). Its work is called in the main thread, where signals arrive; flows
make it a Prefect task run. An artifact with its key is reused if every byte of it is unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.contract import Check, require
from tasks.core.errors import ArtifactError, PlumblineError, StageProcessError, TimeLimitError
from tasks.core.files import disk_full_named, source_digest
from tasks.core.machine import installed
from tasks.pipeline.artifact import Artifact, Origin, intact, open_artifact, publish, remember
from tasks.pipeline.locks import FOREVER, Needs, Patience, staging
from tasks.process.launch import OnEvent

if TYPE_CHECKING:
    from tasks.drift.verdict import Moved

CONTRACT = "contract.json"
_SECTIONS = {"train": "train", "smoke_eval": "smoke", "smoke_quantized": "smoke"}
"""Sections with the time limit of a stage that is not in section `timeouts`."""
REFERENCE_LOG = "reference.log"
"""Log of the scorer, which all stages of a run share."""

Call = Callable[[str, Callable[[Any], Any], Mapping[str, Artifact]], Any]
"""(name of the stage, its work, its inputs by role) -> the result of `work(log)`."""


@dataclass(frozen=True)
class StageReport:
    """Result of one stage function, before anything is published."""

    kind: str
    checks: tuple[Check, ...] = ()  # every assertion; a failed one refuses the artifact
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)  # plain JSON for the manifest
    drift: Moved | None = None  # distance from the trained model; None if not measured
    # Of tensors, by file and tensor, that are known from their writing
    hashes: Mapping[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True)
class StageResult:
    """Result of one finished stage; its name is `<step>.<stage>` if the run has several steps."""

    name: str
    artifact: Artifact
    reused: bool
    seconds: float
    checks: tuple[Check, ...]
    drift: dict[str, float] | None
    metrics: dict[str, float]


@dataclass(frozen=True)
class Stage:
    """Identity of a stage, without its configuration and inputs.

    `kind` is that of the artifact that it publishes, `stack` names the distributions whose versions
    are part of the key, `needs` the devices that other runs must not use meanwhile.
    """

    name: str
    kind: str
    stack: tuple[str, ...] = ()
    needs: Needs = Needs.DEVICE

    def versions(self) -> dict[str, str]:
        """Return the installed version of each distribution of `stack`, or "absent"."""
        return {name: installed(name) or "absent" for name in self.stack}

    def key(self, config: Mapping[str, Any], inputs: Mapping[str, Artifact]) -> str:
        """Return the key, which names the artifact's folder: 20 hexadecimal digits."""
        parts = [
            self.name,
            self.kind,
            dict(config),
            {role: artifact.digest for role, artifact in inputs.items()},
            source_digest(),
            self.versions(),
        ]
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass
class Mechanism:
    """Run stages, publish their artifacts, track them."""

    store: Path  # folder of the published artifacts
    logs: Path  # folder of the child processes' full logs in this flow run
    tracker: Any  # a `Tracker` of tasks/tracking
    call: Call  # calls the work of a stage, as a Prefect task run or directly
    force: frozenset[str] = frozenset()  # stages that run even if an intact artifact exists
    patience: Patience = FOREVER
    # Context in which a stage has its devices
    devices: Callable[[Needs], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    on_event: OnEvent = lambda event: None  # gets the events of every stage's child process
    results: list[StageResult] = field(default_factory=list)  # of the stages so far, in order
    name: str = ""  # the step if a run has several; its stages are called `<name>.<stage>`
    timeouts: Mapping[str, float | None] = field(default_factory=dict)  # seconds by `<stage>_s`

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[Mechanism]:
        """Yield the mechanism of one step of a chain; its results are added to these at the end."""
        if not name:
            yield self
            return
        logs = self.logs / name
        logs.mkdir(parents=True, exist_ok=True)
        step = replace(self, logs=logs, results=[], name=name)
        try:
            yield step
        finally:
            self.results.extend(step.results)

    def run(
        self,
        stage: Stage,
        function: Callable[..., StageReport],
        *,
        inputs: Mapping[str, Artifact],
        config: Mapping[str, Any],
        context: Mapping[str, Any] | None = None,
        observe: Callable[[Any, Any], OnEvent] | None = None,
    ) -> StageResult:
        """Run one stage, or reuse what it published before.

        It is called as `function(out, **{role: path}, **config, **context, log=...)`. `config` are
        the arguments that change the result, and are part of the key: plain JSON values, or frozen
        dataclasses of these. If the stage's child reports events, `observe` makes their receiver of
        the record of the stage and its log.
        """
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

        def make(out: Path, run: Any, log: Any) -> StageResult:
            paths = {role: artifact.path for role, artifact in inputs.items()}
            arguments: dict[str, Any] = {**paths, **config, **(context or {}), "log": log}
            if observe is not None:
                receivers = (self.on_event, observe(run, log))
                arguments["on_event"] = lambda event: [see(event) for see in receivers]
            limit = f"{stage.name}_s"
            with (
                self.devices(stage.needs),
                deadline(name, f"timeouts.{limit}", self.timeouts.get(limit)),
                disk_full_named(final),
            ):
                report = function(out, **arguments)
                return self._published(name, report, out, final, origin, run)

        def work(log: Any) -> StageResult:
            started = time.monotonic()
            forced = bool({name, stage.name} & self.force)
            with self._stage_named(name), self.tracker.stage(name, origin) as run:
                result = None if forced else self._reused(name, final, origin, log)
                if result is None:
                    before = _inode(final)
                    with staging(final, self.patience) as out:
                        if not forced and _inode(final) != before:  # another run was faster
                            result = self._reused(name, final, origin, log)
                        result = result or make(out, run, log)
                result = replace(result, seconds=round(time.monotonic() - started, 2))
                run.finish(result.artifact, result.metrics, reused=result.reused)
            return result

        self.results.append(self.call(name, work, inputs))
        return self.results[-1]

    @contextlib.contextmanager
    def _stage_named(self, name: str) -> Iterator[None]:
        """Add the failed stage and the log of its child processes to an error."""
        try:
            yield
        except PlumblineError as error:
            stage = name.rpartition(".")[2]
            error.stage = error.stage or name
            if isinstance(error, StageProcessError) and error.reason == "timeout":
                section = _SECTIONS.get(stage)
                setting = f"{section}.timeout_s" if section else f"timeouts.{stage}_s"
                error.hint = error.hint or f"{setting}=<more seconds>; finished stages are reused"
            own = self.logs / f"{stage}.log"
            shared = (self.logs.parent if self.name else self.logs) / REFERENCE_LOG
            error.log = error.log or next((str(p) for p in (own, shared) if p.is_file()), "")
            raise

    def _reused(self, name: str, final: Path, origin: Origin, log: Any) -> StageResult | None:
        """Return the result of an earlier run; None if there is none, or it was altered."""
        if not final.exists():
            return None
        try:
            artifact = open_artifact(final, origin.kind)
            problems = intact(artifact, self.store / ".seen")
        except ArtifactError as error:
            problems = [error.message, *error.details]
        if problems:
            text = "%s: %s was altered, making it again: %s"
            log.warning(text, origin.stage, final, problems[0])
            return None
        log.info("%s: reusing %s", name, final)
        notes = artifact.notes
        checks = tuple(map(Check.read, json.loads((final / CONTRACT).read_text())))
        return StageResult(name, artifact, True, 0.0, checks, notes["drift"], notes["metrics"])

    def _published(
        self, name: str, report: StageReport, out: Path, final: Path, origin: Origin, run: Any
    ) -> StageResult:
        """Record the verdicts of a stage, enforce them, and publish what it has made."""
        if report.kind != origin.kind:
            raise PlumblineError(f"{origin.stage} made {report.kind}, not {origin.kind}")
        verdicts = [check.as_dict() for check in report.checks]
        (out / CONTRACT).write_text(json.dumps(verdicts, indent=1) + "\n")
        run.contract(verdicts)
        require(report.checks, stage=origin.stage)
        drift = asdict(report.drift) if report.drift else None
        metrics = {key: float(value) for key, value in report.metrics.items()}
        notes = {**report.notes, "drift": drift, "metrics": metrics}
        own = {"drift": drift, **report.notes}
        run.text("notes.json", json.dumps(own, indent=1, default=str))
        artifact = publish(out, final, replace(origin, notes=notes), report.hashes)
        remember(artifact, self.store / ".seen")
        return StageResult(name, artifact, False, 0.0, tuple(report.checks), drift, metrics)


def _inode(path: Path) -> int:
    """Return the inode of an artifact's folder, another one after each publication; 0 for none."""
    return path.stat().st_ino if path.exists() else 0


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration as plain JSON values, for the key and the manifest."""
    document: dict[str, Any] = json.loads(json.dumps(dict(config), default=asdict))
    return document


class _Expired(BaseException):
    """Unwinds the stage; no `except Exception` on the way can swallow it."""


@contextlib.contextmanager
def deadline(stage: str, setting: str, seconds: float | None) -> Iterator[None]:
    """End the block after a time; its `finally` blocks end the child processes.

    Raises TimeLimitError, which names the setting with the limit.
    """

    def expire(*_: object) -> None:
        raise _Expired

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Expired:
        raise TimeLimitError(
            f"{stage}: not done within {setting}={seconds:g}; its processes have been ended",
            hint=f"{setting}=<more seconds>, or null for no limit; finished stages are reused",
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
