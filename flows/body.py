"""The body of a flow: compose, check, run the chain, and end with a summary whatever happened.

It runs under the command line and in a Prefect worker alike; both hand it Hydra overrides.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from flows.chain import Chain
from flows.config import Composed, compose_config
from flows.lock import hold
from flows.plan import check, render
from flows.summary import Summary, evaluation, stage_entry
from tasks.artifact import Artifact, sweep
from tasks.errors import PlumblineError
from tasks.launch import kill_children_on_abort
from tasks.register import Gate, judge_gate, register
from tasks.scoring import ReferenceScorer
from tasks.stage import Mechanism
from tasks.tracking import Tracker


def run_flow(name: str, overrides: list[str]) -> dict[str, Any]:
    """Run one flow to its end.

    Returns:
        the summary.

    Raises:
        PlumblineError: what ended it; the summary says so too, unless nothing was started.
    """
    composed = compose_config(overrides)
    if composed.settings["plan"]:
        text = render(composed)
        get_run_logger().info("%s", text)
        check(composed)
        return {"status": "planned", "plan": text}
    check(composed)
    with hold(composed.runs, composed.settings["paths"]["wait_s"]), kill_children_on_abort():
        return _Attempt.begin(name, composed, overrides).run()


@dataclass
class _Attempt:
    """One attempt at a flow: what it holds while it runs, and what it came to."""

    composed: Composed
    summary: Summary
    run_id: str
    mechanism: Mechanism
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(cls, name: str, composed: Composed, overrides: list[str]) -> _Attempt:
        runs, settings = composed.runs, composed.settings
        run_id = f"{datetime.now():%Y%m%d-%H%M%S}-{str(flow_run.id)[:8]}"
        logs = runs / "logs" / run_id
        logs.mkdir(parents=True)
        sweep(runs / "artifacts")
        tracker = Tracker(
            composed.tracking_uri, settings["tracking"]["experiment"], composed.tracking_root
        )
        store = runs / "artifacts"
        mechanism = Mechanism(store, logs, tracker, force=frozenset(settings["force"]))
        summary = Summary("running", name, experiment_of(overrides), 0.0)
        return cls(composed, summary, run_id, mechanism)

    def run(self) -> dict[str, Any]:
        """Run the chain inside its MLflow run; write the summary however it ends."""
        tracker = self.mechanism.tracker
        tags = {"exp": self.summary.exp or "", "prefect.flow_run_id": str(flow_run.id)}
        settings = self.composed.settings
        try:
            name = " ".join(filter(None, (self.summary.flow, self.summary.exp)))
            with tracker.flow(name, settings, self.composed.text, tags) as run_id:
                self.summary.mlflow_run_id = run_id
                self._stages()
                self._end("completed")
        except PlumblineError as error:
            self.summary.error = error.message
            self._end("failed")
            raise
        except BaseException as error:
            ended = isinstance(error, Exception)
            self.summary.error = f"{type(error).__name__}: {error}" if ended else "interrupted"
            self._end("failed" if ended else "cancelled")
            raise
        return asdict(self.summary)

    def _stages(self) -> None:
        log = get_run_logger()
        log_path = self.mechanism.logs / "reference.log"
        with ReferenceScorer(log=log, log_path=log_path, threads=self._threads()) as scorer:
            served = Chain(self.composed.settings, self.mechanism, scorer).deliver()
        self.summary.served = str(served.artifact.path)
        self._register(served.artifact)

    def _threads(self) -> int:
        """Those of a rank: with another number of threads sums are rounded differently."""
        train = self.composed.settings["train"]
        return train["threads"] or max(1, len(os.sched_getaffinity(0)) // train["nproc"])

    def _register(self, served: Artifact) -> None:
        """Not a cached stage: the registry may be another one, or may have been emptied."""
        settings, results = self.composed.settings, self.mechanism.results
        metrics = {k: v for result in results for k, v in result.metrics.items()}
        gate = judge_gate(metrics, min_eval_gain=settings["gate"]["min_eval_gain"])
        self.summary.gate = {"passed": gate.passed, "reasons": list(gate.reasons)}
        before = time.monotonic()
        version = task(_write_version, name="register", cache_policy=None)(self, served, gate)
        self.summary.gate["version"] = version
        self.summary.stages = [*map(stage_entry, results), _register_entry(version, before)]

    def _end(self, status: str) -> None:
        """Write the summary, and put it where people look: orchestrator, tracker, disk."""
        self.summary.status = status
        self.summary.seconds = round(time.monotonic() - self.started, 1)
        self.summary.eval = evaluation(self.mechanism.results)
        if not self.summary.stages:
            self.summary.stages = [stage_entry(result) for result in self.mechanism.results]
        runs = self.composed.runs
        self.summary.write(runs, self.run_id, {"config.yaml": self.composed.text})
        if status == "cancelled":
            return  # no request to a server now: there are seconds to be gone in
        create_markdown_artifact(self.summary.markdown(), key="rlhf-checks", description="checks")
        if self.summary.mlflow_run_id and status == "completed":
            files = {"summary.json": (runs / "latest" / "summary.json").read_text()}
            scores = {f"eval/{k}": v for k, v in self.summary.eval.items() if v is not None}
            scores["seconds"] = self.summary.seconds
            self.mechanism.tracker.log_parent(scores, files, self.summary.markdown())


def _write_version(attempt: _Attempt, served: Artifact, gate: Gate) -> str:
    return register(
        attempt.mechanism.tracker,
        served=served,
        gate=gate,
        model_name=attempt.composed.settings["tracking"]["model_name"],
        tags={
            "exp": attempt.summary.exp or "",
            **{f"digest.{r.artifact.kind}": r.artifact.digest for r in attempt.mechanism.results},
        },
    )


def _register_entry(version: str, before: float) -> dict[str, Any]:
    return {
        "name": "register",
        "seconds": round(time.monotonic() - before, 2),
        "reused": False,
        "artifact": version,
        "tensors_checked": 0,
        "drift": None,
    }


def experiment_of(overrides: list[str]) -> str | None:
    """The experiment that the overrides name, if any."""
    named = [o.partition("=")[2] for o in overrides if o.lstrip("+").startswith("exp=")]
    return named[-1] if named else None
