"""lm_eval: score the served model and the model before it on tasks of lm-evaluation-harness.

The harness (Gao et al., 2021, "A framework for few-shot language model evaluation") loads both
models with transformers, one after the other, in a child process; `python -m tasks.lm_eval JOB`
is that process. Prompts are those of the tasks, without the chat template.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.core.machine import has_gpu
from tasks.pipeline.stage import StageReport
from tasks.process.launch import launch, python_child
from tasks.process.output import Log

RESULTS = "results.json"
_NAME = re.compile(r"^task:[ \t]*['\"]?([^\s'\"#]+)", re.MULTILINE)
_BATCH = 8
"""Rows that a model scores at the same time."""
_STDERR = "_stderr"


def is_file(task: str) -> bool:
    """Return True if an entry of `eval.lm_eval` is a file of the user, not a name."""
    return task.endswith((".yaml", ".yml"))


def task_name(task: str) -> str:
    """Return the name of a task: that in its file, or the entry itself.

    Raises ValueError if the file names no task, OSError if it cannot be read.
    """
    if not is_file(task):
        return task
    match = _NAME.search(Path(task).expanduser().read_text(encoding="utf-8"))
    if match is None:
        raise ValueError("no line `task: <name>`")
    return match[1]


def identity(tasks: Sequence[str]) -> dict[str, str]:
    """Return a digest of everything beside each task's file: the YAML, its data, its functions."""
    digests = {}
    for task in filter(is_file, tasks):
        digest = hashlib.sha256()
        for path in sorted(Path(task).expanduser().absolute().parent.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(path.name.encode() + path.read_bytes())
        digests[task] = digest.hexdigest()
    return digests


def lm_eval(
    out: Path,
    *,
    served: Path,
    base: Path,
    tasks: Sequence[str],
    files: Mapping[str, str],
    limit: int | None,
    log: Log,
    log_path: Path,
) -> StageReport:
    """Score two models on tasks of lm-evaluation-harness; `out` gets its results as `results.json`.

    `files` are digests as `identity` returns them, part of the stage's key; `limit` is the number
    of rows of each task, None for all. Metrics of the report are `lm_eval/<task>/<metric>/` with
    `before`, `after` and `error`, the standard error of the latter. Raises StageProcessError if
    the harness failed: no such task, no network for its data, no memory.
    """
    paths = [str(Path(task).expanduser().absolute()) if is_file(task) else task for task in tasks]
    models = {"before": str(base.resolve()), "after": str(served.resolve())}
    job = {"models": models, "tasks": paths, "limit": limit, "out": str((out / RESULTS).resolve())}
    log_path.parent.mkdir(parents=True, exist_ok=True)
    job_path = log_path.with_suffix(".job.json")
    job_path.write_text(json.dumps(job))
    launch(
        python_child("tasks.lm_eval", str(job_path.resolve())),
        stage="lm_eval",
        log=log,
        log_path=log_path,
        env={"TOKENIZERS_PARALLELISM": "false"},
    )
    metrics, checks = dict(_metrics(json.loads((out / RESULTS).read_text()))), []
    for name in map(task_name, paths):  # a group has scores of its members, `<group>_<member>`
        own = (f"lm_eval/{name}/", f"lm_eval/{name}_")
        after = [key for key in metrics if key.startswith(own) and key.endswith("/after")]
        scores = ", ".join(f"{key} {metrics[key]:.4g}" for key in after)
        checks.append(Check(name, "a finite score", scores or "none", ok=bool(scores)))
    for name, value in sorted(metrics.items()):
        log.info("%s: %.4g", name, value)
    return StageReport("report", tuple(checks), metrics, {"limit": limit})


def _metrics(results: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the metrics of both models; the harness names them `<metric>,<filter>`."""
    for when, tasks in results.items():
        for task, values in tasks.items():
            for key, value in values.items():
                metric, comma, filtered = key.partition(",")
                if not comma or not isinstance(value, int | float) or not math.isfinite(value):
                    continue
                name, is_error = metric.removesuffix(_STDERR), metric.endswith(_STDERR)
                name = name if filtered == "none" else f"{name}.{filtered}"
                if not is_error or when == "after":
                    yield f"lm_eval/{task}/{name}/{'error' if is_error else when}", float(value)


def main(job_path: str) -> None:
    """Run the harness on a JSON file with `models`, `tasks`, `limit` and `out`."""
    from lm_eval import simple_evaluate  # type: ignore[import-not-found, unused-ignore]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, unused-ignore]

    job = json.loads(Path(job_path).read_text())
    folders = sorted({str(Path(task).parent) for task in job["tasks"] if is_file(task)})
    manager = TaskManager(include_path=folders or None)
    results = {}
    for when, folder in job["models"].items():
        done = simple_evaluate(
            model="hf",
            model_args={"pretrained": folder, "dtype": "auto"},
            tasks=[task_name(task) for task in job["tasks"]],
            batch_size=_BATCH,
            device="cuda:0" if has_gpu() else "cpu",
            limit=job["limit"],
            bootstrap_iters=1000,
            log_samples=False,
            task_manager=manager,
        )
        results[when] = done["results"]
    Path(job["out"]).write_text(json.dumps(results, indent=1, default=str))


if __name__ == "__main__":
    main(sys.argv[1])
