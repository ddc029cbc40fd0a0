"""Bisect two models in a child process.

    report = bisect(ModelRef(a), ModelRef(b), Options(texts=[...]), log=log, log_path=path)

`Explainer` does it for a stage whose drift gate has failed.
"""

from __future__ import annotations

import json
import logging
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tasks.bisect.report import AUDIT, Report
from tasks.config.after_training import Smoke
from tasks.core.errors import ConfigError
from tasks.core.machine import available_memory, has_gpu
from tasks.core.terminal import typed
from tasks.evaluation.evaluation_prompts import dtype_of
from tasks.evaluation.scoring import ENV, ModelRef, ReferenceScorer
from tasks.process.launch import launch, python_child
from tasks.process.output import Log
from tasks.serving.vllm.job import CALLS, HEADROOM, Job, run_vllm
from tasks.weights.files.reader import weight_files

STAGE = "bisect"
TIMEOUT_S = 1800.0
"""Default time limit, in seconds."""
EXPLAIN_S = 300.0
"""Time limit of a bisection that a failed gate starts."""
SHARE = 0.8
"""Share of the stage's remaining time that it may take."""
EXPLAIN_PROBES = 4
EARLIER = "; so the drift is older: what this stage was given is not the model that was trained"


@dataclass(frozen=True)
class Options:
    """Settings of a bisection.

    Attributes:
        texts: texts to measure on.
        limit: maximum number of tokens of a text.
        profile: drift profile; below its limits nothing counts as a difference.
        engine: engine of b: `transformers` or `vllm`.
        threads: CPU threads; None leaves the choice to torch.
        timeout_s: time limit in seconds.
        ids: token ids of the probes, in place of texts.
    """

    texts: Sequence[str] = ()
    limit: int = 32
    profile: str = "strict"
    engine: str = "transformers"
    threads: int | None = None
    timeout_s: float = TIMEOUT_S
    ids: Sequence[Sequence[int]] = field(default_factory=tuple)


def bisect(a: ModelRef, b: ModelRef, options: Options, *, log: Log, log_path: Path) -> Report:
    """Find the first module in which two models part.

    Raises:
        ConfigError: both do not fit into memory.
        StageProcessError: the child crashed, or was too slow.
    """
    _require_memory(a, b)
    ends = time.monotonic() + options.timeout_s
    with tempfile.TemporaryDirectory(prefix="plumbline-bisect-") as name:
        folder = Path(name)
        calls = None
        if options.engine == "vllm":
            options = _encoded(a, options, log, log_path)
            calls = str(_record_in_vllm(b, options, folder / "vllm", log, log_path))
        sides = {"a": a.as_request(), "b": b.as_request()}
        job = {**asdict(options), **sides, "calls": calls, "out": str(folder / "report")}
        (folder / "job.json").write_text(json.dumps(job))
        launch(
            python_child("tasks.bisect.child", str(folder / "job.json")),
            stage=STAGE,
            log=log,
            log_path=log_path,
            env=ENV,
            timeout_s=max(1.0, ends - time.monotonic()),
        )
        report = Report.from_json(json.loads((folder / "report").read_text()))
    look = f"python flows/audit.py {typed('source', b.path)} {typed('base', a.path)} values=true"
    rows = [replace(row, hint=row.hint.replace(AUDIT, look)) for row in report.divergences]
    return replace(report, divergences=rows)


def _encoded(a: ModelRef, options: Options, log: Log, log_path: Path) -> Options:
    """Return the options with the token ids of their texts."""
    if options.ids:
        return options
    with ReferenceScorer(log=log, log_path=log_path, timeout_s=options.timeout_s) as scorer:
        ids = scorer.encode_texts(a.path, options.texts, limit=options.limit)
    return replace(options, ids=[probe for probe in ids if len(probe) > 1])


def _record_in_vllm(b: ModelRef, options: Options, out: Path, log: Log, log_path: Path) -> Path:
    """Run the probes in vLLM. Returns the file with the calls of its modules."""
    job = Job(
        served=str(b.path),
        out=str(out),
        prompts=[list(probe) for probe in options.ids],
        max_new_tokens=1,
        max_model_len=max(map(len, options.ids)) + HEADROOM,
        dtype=b.dtype,
        calls=True,
    )
    settings = Smoke(engine="vllm", threads=options.threads, timeout_s=options.timeout_s)
    run_vllm([job], settings, log=log, log_path=log_path)
    return out / CALLS


def _require_memory(*models: ModelRef) -> None:
    """Refuse models that do not fit into this machine's memory together."""
    needed, room = sum(map(_nbytes, models)), available_memory()
    if not has_gpu() and needed > room:
        raise ConfigError(
            f"both models together need {needed / 1e9:.0f} GB of memory, {room / 1e9:.0f} GB are "
            "free",
            hint="run it on a machine with more memory",
        )


def _nbytes(model: ModelRef) -> float:
    """Return the size of a model in memory, from its files."""
    files = weight_files(model.path, "*.safetensors", "*.bin")
    wider = model.dtype == "float32" and dtype_of(model.path) != "float32"
    return sum(file.stat().st_size for file in files) * (2.0 if wider else 1.0)


@dataclass(frozen=True)
class Explainer:
    """Say in one line where two models part, after a failed drift check. Never raises an error.

    Attributes:
        folder: folder for `bisect.json`, the report, and `bisect.log`.
        threads: CPU threads; None leaves the choice to torch.
    """

    folder: Path
    threads: int | None = None

    def __call__(
        self, a: ModelRef, b: ModelRef, probes: Sequence[Sequence[int]], engine: str
    ) -> str:
        """Return the line."""
        log = logging.getLogger("plumbline.bisect")
        left = signal.getitimer(signal.ITIMER_REAL)[0]  # the stage's own time limit: `deadline`
        options = Options(
            ids=[list(probe)[: Options.limit] for probe in probes[:EXPLAIN_PROBES]],
            engine=engine,
            threads=self.threads,
            timeout_s=min(EXPLAIN_S, SHARE * left) if left else EXPLAIN_S,
        )
        log.info("bisect: looking for the module in which %s parts from %s", b.path, a.path)
        path = self.folder / "bisect.json"
        try:
            report = bisect(a, b, options, log=log, log_path=path.with_suffix(".log"))
            path.write_text(json.dumps(report.as_json(), indent=1) + "\n")
        except Exception as error:  # the failed check is the error to report, whatever happens here
            log.warning("bisect: %s", error)
            return f"bisect: no result: {str(error).partition(chr(10))[0][:200]}"
        older = engine == "transformers" and report.verdict in ("same", "noise", "below")
        return f"{report.summary()}{EARLIER if older else ''} (all of it: {path})"
