"""Numbers of runs as a text file for Prometheus: `<paths.runs>/metrics.prom`.

The textfile collector of node_exporter reads it (docs/operations.md). The file is replaced as a
whole while a run goes on, and at its end; between runs it stays as it was. Every number is computed
from the records of runs, so a run that was lost is counted by the next one. Counters start again
when records of old runs are removed, which Prometheus takes for a restart.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.monitoring.run_history import FINAL, STATES, RunState, StageState, history
from flows.monitoring.run_record import replace_file

FILE = "metrics.prom"
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "running_runs": ("runs that go on now", ("flow",)),
    "last_success_timestamp_seconds": ("when a run last completed", ("flow",)),
    "last_run_seconds": ("wall-clock time of the last run that completed", ("flow",)),
    "last_exit_status": ("exit status of the last run; -1: ended without a word", ("flow",)),
    "stage_last_seconds": ("wall-clock time of a stage when it last ran", ("flow", "stage")),
    "stage_started_timestamp_seconds": ("when the running stage began", ("flow", "stage")),
    "step": ("last training step of the newest run", ("flow", "stage")),
    "steps": ("training steps of the newest run in all", ("flow", "stage")),
    "seconds_left": ("estimated time to the last training step", ("flow", "stage")),
    "seconds_per_step": ("wall-clock time of a training step", ("flow", "stage")),
    "tokens_per_second": ("training throughput", ("flow", "stage")),
    "loss": ("training loss of the last step", ("flow", "stage")),
    "reward": ("mean reward of the last step", ("flow", "stage")),
    "kl": ("KL divergence from the reference policy", ("flow", "stage")),
    "disk_bytes": ("disk used by a folder of paths.runs; hard links count once", ("folder",)),
    "disk_free_bytes": ("free disk of paths.runs", ()),
    "written_timestamp_seconds": ("when this file was written", ()),
}
"""Help and labels of each gauge, by name without `plumbline_`; every one also has `runs`."""
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "runs": ("runs that ended, by state: " + ", ".join(STATES), ("flow", "state")),
    "stages": (
        "stages that ended, by result: done, reused, failed, lost",
        ("flow", "stage", "result"),
    ),
    "stage_seconds": ("wall-clock time of all stages that ran", ("flow", "stage")),
}
"""The same of each counter; its samples end in `_total`."""


class MetricsFile:
    """Metrics of all runs in a folder.

    Args:
        runs: `paths.runs`.
        path: the file; None for `FILE` in the folder of runs.
    """

    def __init__(self, runs: Path, path: str | None = None) -> None:
        self._runs, self._path = runs, Path(path).expanduser() if path else runs / FILE
        self._ended: dict[str, RunState] = {}
        self._disk: dict[str, int] = {}

    def write(self, disk: bool = True) -> None:
        """Replace the file.

        Args:
            disk: False to keep the numbers of `disk_bytes`, which take a walk over all files.

        Raises:
            OSError: it cannot be written.
        """
        from prometheus_client import CollectorRegistry, generate_latest

        if disk or not self._disk:
            self._disk = disk_bytes(self._runs)
        states = history(self._runs, known=self._ended)
        self._ended = {state.run: state for state in states if state.state in FINAL}
        registry = CollectorRegistry()
        registry.register(_Families(self._samples(states), str(self._runs)))
        # Others may read it: node_exporter runs as a user of its own. It holds numbers and names.
        replace_file(self._path, generate_latest(registry).decode(), mode=0o644)

    def _samples(self, states: Sequence[RunState]) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Yield name, values of the labels and value of every sample."""
        for flow in sorted({state.flow for state in states if state.flow}):
            own = [state for state in states if state.flow == flow]
            yield from _of_runs(flow, own)
            yield from _of_stages(flow, own)
            yield from _of_newest(flow, own[0])
        for folder, size in self._disk.items():
            yield "disk_bytes", (folder,), size
        yield "disk_free_bytes", (), shutil.disk_usage(self._runs).free
        yield "written_timestamp_seconds", (), time.time()


class _Families:
    """A collector of the Prometheus client: samples by metric, with help and type."""

    def __init__(self, samples: Any, runs: str) -> None:
        self._samples, self._runs = list(samples), runs

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for known, kind in ((COUNTERS, CounterMetricFamily), (GAUGES, GaugeMetricFamily)):
            for name, (about, labels) in known.items():
                family = kind(f"plumbline_{name}", about, labels=(*labels, "runs"))
                for sample, values, value in self._samples:
                    if sample == name:
                        family.add_metric((*values, self._runs), value)
                if family.samples:
                    yield family


def _of_runs(flow: str, states: Sequence[RunState]) -> Iterator[tuple[str, tuple[str, ...], float]]:
    counts = Counter(state.state for state in states)
    for name in STATES:
        yield "runs", (flow, name), counts[name]
    yield "running_runs", (flow,), counts["running"]
    ended = [state for state in states if state.state != "running"]
    if ended:
        status = ended[0].exit_status
        yield "last_exit_status", (flow,), -1 if status is None else status
    for done in [state for state in ended if state.state == "completed"][:1]:
        yield "last_success_timestamp_seconds", (flow,), done.ended or 0.0
        yield "last_run_seconds", (flow,), done.seconds or 0.0


def _of_stages(
    flow: str, states: Sequence[RunState]
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    results: Counter[tuple[str, str]] = Counter()
    took: defaultdict[str, list[float]] = defaultdict(list)  # newest first
    for state in states:
        for stage in state.stages:
            result = stage.result or ("lost" if state.state == "lost" else "")
            if result:
                results[stage.name, result] += 1
            if stage.result == "done" and stage.seconds is not None:
                took[stage.name].append(stage.seconds)
    for (name, result), count in sorted(results.items()):
        yield "stages", (flow, name, result), count
    for name, seconds in took.items():
        yield "stage_last_seconds", (flow, name), seconds[0]
        yield "stage_seconds", (flow, name), sum(seconds)


def _of_newest(flow: str, state: RunState) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield the numbers of the newest run; those of its last step stay when it has ended."""
    stage = state.stage
    if state.state == "running" and stage is not None and stage.started is not None:
        yield "stage_started_timestamp_seconds", (flow, stage.name), stage.started
    trained = state.trained
    if trained is None:
        return
    values = {
        "step": trained.step,
        "steps": trained.steps,
        "seconds_left": trained.seconds_left if state.state == "running" else None,
        "seconds_per_step": trained.seconds_per_step,
        "tokens_per_second": tokens_per_s(trained),
        **{name: trained.numbers.get(name) for name in ("loss", "reward", "kl")},
    }
    for name, value in values.items():
        if value is not None:
            yield name, (flow, trained.name), value


def tokens_per_s(stage: StageState) -> float | None:
    """Return the tokens per second of a step: of training, else of an update, else of rollouts."""
    names = ("tokens_per_s", "tokens_per_s/update", "tokens_per_s/generate")
    return next((stage.numbers[name] for name in names if name in stage.numbers), None)


def disk_bytes(runs: Path) -> dict[str, int]:
    """Return the bytes on disk of each folder in `runs`, those of artifacts by kind.

    A file with several hard links counts once, in the first folder by name.
    """
    sizes: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()
    for name in _folders(runs):
        inner = [f"{name}/{kind}" for kind in _folders(runs / name)] if name == "artifacts" else []
        for folder in inner or [name]:
            sizes[folder] = sum(_sizes(runs / folder, seen))
    return sizes


def _folders(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _sizes(folder: Path, seen: set[tuple[int, int]]) -> Iterator[int]:
    for root, _, names in os.walk(folder):  # errors are ignored: files come and go meanwhile
        for name in names:
            try:
                status = os.lstat(os.path.join(root, name))
            except OSError:
                continue
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                yield status.st_blocks * 512
