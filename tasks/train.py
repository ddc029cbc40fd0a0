"""train: base + dataset -> shards. Starts `torchrun` and judges what the ranks left.

Every rank writes its own partition of each trained tensor; nothing is gathered. What happens inside
the ranks is in `tasks/training/`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks import errors
from tasks.contract import Check
from tasks.errors import ConfigError, PlumblineError, StageProcessError, TrainingError
from tasks.launch import launch, python_child
from tasks.output import Log
from tasks.report import StageReport
from tasks.training.job import Launch, Settings, TrainJob
from tasks.weights.header import read_header

OnEvent = Callable[[dict[str, Any]], None]


def train(
    out: Path,
    *,
    base: Path,
    data: Path,
    base_digest: str,
    settings: Settings,
    checkpoints: Path,
    log: Log,
    log_path: Path,
    on_event: OnEvent | None = None,
) -> StageReport:
    """Train and leave every rank's shares in `out`.

    Args:
        out: existing empty directory for the `shards` artifact.
        base: HF folder of the base model.
        data: dataset artifact (`train.jsonl`, `heldout.jsonl`).
        base_digest: digest of the base, remembered in `train.json`.
        settings: what to train and how; `Settings.from_sections` makes them of a configuration.
        checkpoints: directory outside of `out` for the last good state; survives a failure.
        log: gets the ranks' output.
        log_path: file with all of it.
        on_event: called with each event of the ranks: data, ready, plan, eval, step, done.

    Raises:
        TrainingError: loss, gradient or weights are not finite; names step and checkpoint.
        DataError: samples that cannot be used; names them.
        StageProcessError: a rank died; all others have ended, and its last lines are there.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    job = TrainJob(
        settings=settings,
        base=base.resolve(),
        base_digest=base_digest,
        data=data.resolve(),
        out=out.resolve(),
        checkpoints=checkpoints.resolve(),
    )
    job_path = job.checkpoints / "job.json"
    job.write(job_path)
    said = _Said(on_event)
    try:
        launch(
            torchrun(settings.launch, job_path),
            stage="train",
            log=log,
            log_path=log_path,
            env=_environment(settings.launch),
            timeout_s=settings.launch.timeout_s,
            on_event=said,
        )
    except StageProcessError as error:
        if said.failure is None:
            raise
        raise _as_error(said.failure) from error
    document = json.loads((out / "train.json").read_text())
    return StageReport(
        kind="shards",
        checks=tuple(_checks(out, document, settings.world_size)),
        metrics=document["metrics"],
        notes={"quantization": document["quantization"], "data": said.data},
    )


def torchrun(how: Launch, job_path: Path) -> list[str]:
    """The command that starts this machine's ranks.

    Raises:
        ConfigError: several nodes are asked for and no meeting point is given.
    """
    if how.nodes == 1:
        meet = ["--standalone"]
    else:
        try:
            address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        except KeyError as error:
            raise ConfigError(
                f"train.nodes={how.nodes} needs the environment variable {error.args[0]}",
                hint="set MASTER_ADDR and MASTER_PORT on every node, or train.nodes=1",
            ) from error
        meet = ["--nnodes", str(how.nodes), "--rdzv-backend", "c10d"]
        meet += ["--rdzv-endpoint", f"{address}:{port}", "--rdzv-id", job_path.parent.name]
    ranks = ["--nproc-per-node", str(how.nproc)]
    return python_child(
        "torch.distributed.run", *meet, *ranks, "-m", "tasks.training", str(job_path)
    )


def _environment(how: Launch) -> dict[str, str]:
    threads = how.threads or max(1, len(os.sched_getaffinity(0)) // how.nproc)
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # everything was resolved to local folders by prepare
    }


class _Said:
    """Passes events on, and keeps those the stage itself needs."""

    def __init__(self, on_event: OnEvent | None) -> None:
        self._on_event = on_event
        self.failure: Mapping[str, Any] | None = None
        self.data: dict[str, Any] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "failure" and self.failure is None:
            self.failure = event
        if event["event"] == "data":
            counts = {k: v for k, v in event.items() if k not in ("event", "split")}
            self.data[event["split"]] = counts
        if self._on_event is not None:
            self._on_event(event)


def _as_error(failure: Mapping[str, Any]) -> PlumblineError:
    kind = getattr(errors, failure["error"], TrainingError)
    error: PlumblineError = kind(
        f"train: {failure['message']}", details=failure["details"], hint=failure["hint"]
    )
    return error


def _checks(out: Path, document: Mapping[str, Any], world_size: int) -> list[Check]:
    losses = document["losses"]
    finite = sum(math.isfinite(x) for x in losses)
    checks = [Check("losses", f"{len(losses)} finite", f"{finite} finite", finite == len(losses))]
    mark = out / "fingerprint.fp"
    found = "present" if mark.is_file() else "missing"
    checks.append(Check("fingerprint.fp", "present", found, mark.is_file()))
    return checks + _coverage(out, world_size)


def _coverage(out: Path, world_size: int) -> list[Check]:
    """One check a rank's file, and one a parameter: its partitions cover it exactly once."""
    wanted = json.loads((out / "partitions.json").read_text())["parameters"]
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in wanted}
    checks = []
    for rank in range(world_size):
        name = f"shards/rank-{rank:05d}-of-{world_size:05d}.safetensors"
        path = out / name
        found = "present" if path.is_file() else "missing"
        checks.append(Check(name, "present", found, path.is_file()))
        if not path.is_file():
            continue
        header = read_header(path)
        for parameter, place in json.loads(header.metadata["partitions"]).items():
            spans.setdefault(parameter, []).append((place["start"], place["end"]))
    for parameter, pieces in spans.items():
        count = math.prod(wanted[parameter]["shape"]) if parameter in wanted else 0
        checks.append(
            Check(parameter, f"elements 0-{count} once", _joined(pieces), _covers(pieces, count))
        )
    return checks


def _joined(pieces: list[tuple[int, int]]) -> str:
    return ", ".join(f"{a}-{b}" for a, b in sorted(pieces)) or "nothing"


def _covers(pieces: list[tuple[int, int]], count: int) -> bool:
    at = 0
    for start, end in sorted(pieces):
        if start != at:
            return False
        at = end
    return at == count
