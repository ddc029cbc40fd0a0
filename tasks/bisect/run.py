"""Bisect two models in a child process; `Explainer` does it for a stage whose drift gate failed."""

from __future__ import annotations

import logging
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.bisect.folders import compare_folders, probes_of
from tasks.bisect.report import Report
from tasks.config.sections import Smoke
from tasks.core.errors import ConfigError
from tasks.core.machine import available_memory, has_gpu
from tasks.evaluation.model_folder import dtype_of
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.process.output import Log
from tasks.serving.vllm.job import CALLS, HEADROOM, Job, VllmChild
from tasks.weights.files.reader import weight_files

TIMEOUT_S = 1800.0
EXPLAIN_S = 300.0
"""Time limit of a bisection that a failed gate starts."""
SHARE = 0.8
"""Share of the stage's remaining time that it may take."""
EXPLAIN_PROBES = 4
EARLIER = "; so the drift is older: what this stage was given is not the model that was trained"


@dataclass(frozen=True)
class Options:
    """Settings of a bisection."""

    texts: Sequence[str] = ()
    limit: int = 32  # most tokens of a text
    ids: Sequence[Sequence[int]] = ()  # token ids of the probes, in place of texts
    profile: str = "strict"  # below its limits nothing counts as a difference
    engine: str = "transformers"  # of b: "transformers" or "vllm"
    threads: int | None = None  # CPU threads; None leaves the choice to torch
    timeout_s: float = TIMEOUT_S


def bisect(a: ModelRef, b: ModelRef, options: Options, *, log: Log, log_path: Path) -> Report:
    """Find the first module in which two models part.

    Raises ConfigError if both do not fit into memory, StageProcessError if the child fails.
    """
    needed, room = _nbytes(a) + _nbytes(b), available_memory()
    if not has_gpu() and needed > room:
        raise ConfigError(
            f"both models together need {needed / 1e9:.0f} GB of memory, {room / 1e9:.0f} GB are "
            "free",
            hint="run it on a machine with more memory",
        )
    scorer = ReferenceScorer(
        log=log, log_path=log_path, threads=options.threads, timeout_s=options.timeout_s
    )
    with tempfile.TemporaryDirectory(prefix="plumbline-bisect-") as folder, scorer:
        calls = None
        if options.engine == "vllm":
            options = replace(options, ids=scorer.perform(probes_of, a, b, options))
            calls = _record_in_vllm(b, options, Path(folder) / "vllm", log, log_path)
        return scorer.perform(compare_folders, a, b, options, calls)


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
    VllmChild().run([job], settings, log=log, log_path=log_path)
    return out / CALLS


def _nbytes(model: ModelRef) -> float:
    """Return the size of a model in memory, from its files."""
    files = weight_files(model.path, "*.safetensors", "*.bin")
    wider = model.dtype == "float32" and dtype_of(model.path) != "float32"
    return sum(file.stat().st_size for file in files) * (2.0 if wider else 1.0)


@dataclass(frozen=True)
class Explainer:
    """Say in one line where two models part, after a failed drift check. Never raises an error."""

    folder: Path  # gets `bisect.json`, the report, and `bisect.log`
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
            path.write_text(report.form(path.name))
        except Exception as error:  # the failed check is the error to report, whatever happens here
            log.warning("bisect: %s", error)
            return f"bisect: no result: {str(error).partition(chr(10))[0][:200]}"
        older = engine == "transformers" and report.verdict in ("same", "noise", "below")
        return f"{report.summary()}{EARLIER if older else ''} (all of it: {path})"
