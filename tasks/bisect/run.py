"""Bisect two models in a child process; `Explainer` does it for a stage whose drift gate failed."""

from __future__ import annotations

import logging
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.bisect.report import REDO, Divergence, Report
from tasks.config.sections import Smoke
from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.machine import available_memory, has_gpu
from tasks.drift.fingerprint import PROFILES, Drift, Fingerprint, drift
from tasks.evaluation.model_folder import dtype_of
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.process.output import Log
from tasks.serving.vllm.job import CALLS, HEADROOM, Job, VllmChild
from tasks.weights.files.documents import read_json
from tasks.weights.files.reader import weight_files

if TYPE_CHECKING:
    from tasks.bisect.compare import Compared

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


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
"""Keys of config.json that two comparable models share."""


def compare_folders(a: ModelRef, b: ModelRef, options: Options, calls: Path | None) -> Report:
    """Compare two models; those that cannot be loaded or compared are refused in the report.

    `calls` are those of the modules of b in another engine, on the probes of `options.ids`.
    """
    try:
        return _compared(a, b, options, calls)
    except PlumblineError as error:
        reason = "; ".join(filter(None, [error.message, error.hint]))
        return Report(_shown(a), _shown(b), "refused", reason)


def _compared(a: ModelRef, b: ModelRef, options: Options, calls: Path | None) -> Report:
    from tasks.bisect.compare import Pair, read_calls
    from tasks.bisect.tensors import config_changes
    from tasks.serving.reference.requests import load

    configs = [_config(side) for side in (a, b)]
    sizes_a, sizes_b = (config.get("text_config") or config for config in configs)
    both = [key for key in SIZES if key in sizes_a and key in sizes_b]
    if other := [
        f"{key} {sizes_a[key]} and {sizes_b[key]}" for key in both if sizes_a[key] != sizes_b[key]
    ]:
        raise ConfigError(f"other sizes: {', '.join(other)}")
    probes = probes_of(a, b, options)
    a, b = (replace(side, float32=False) for side in (a, b))  # as they are on disk
    first = load(a, as_stored=not a.adapter)
    second = first if a == b else load(b, as_stored=not b.adapter)
    quantised = any(config.get("quantization_config") for config in configs)
    pair = Pair(first, second, quantised or any(side.quantization for side in (a, b)))
    if len(pair.missing) > 0.1 * len(pair.in_a):
        raise ConfigError(
            f"other architecture: {len(pair.missing)} modules are in one of them alone, first "
            f"{pair.missing[0]}"
        )
    recordings = read_calls(calls, len(probes)) if calls else None
    moved = _drift(first, second, probes, recordings)
    exceeded = moved.beyond(PROFILES[options.profile])
    compared = pair.compare(probes, recordings)
    config = config_changes(first.config.to_dict(), second.config.to_dict())
    verdict, reason = _verdict(compared, options.engine, bool(exceeded), config)
    rows = compared.divergences
    return Report(
        _shown(a),
        _shown(b),
        verdict,
        reason,
        len(compared.order),
        compared.order.index(rows[0].module) if rows else len(compared.order),
        [_with_config(row, config) for row in rows],
        asdict(moved),
        "; ".join(exceeded),
        config,
        pair.missing[:5],
        options.engine,
    )


def _verdict(
    compared: Compared, engine: str, is_beyond: bool, config: list[str]
) -> tuple[str, str]:
    """Return the verdict and its reason; `is_beyond` says that the whole model has drifted."""
    rows, formats = compared.divergences, compared.roundings
    keys = ", ".join(line.partition(":")[0] for line in config[:4])
    # Swapped, transposed, zero or NaN is a fault even if an untrained model hardly moves.
    at_fault = any(
        row.where == "weights" and (row.hint == REDO or " NaN " in row.cause) for row in rows
    )
    if rows and (is_beyond or engine != "transformers" or at_fault):
        weights = sum(row.where == "weights" for row in rows)
        count = f"the first of {len(rows)} modules" if len(rows) > 1 else "the only module"
        reason = f"{rows[0].module} is {count}"
        if not weights and config:
            reason += f"; the weights are equal, and config.json differs in {keys}"
        elif weights > max(3, 0.8 * sum(map(bool, compared.gaps.values()))):
            reason += "; nearly all weights differ: another checkpoint, or full training"
        return "differs", reason
    if rows:
        listed = ", ".join(row.module for row in rows[:3])
        return "below", f"differs beyond rounding, but below the gate: {listed}"
    if formats:
        is_cast = formats <= {"bfloat16", "float16"}
        text = f"one side is rounded to {', '.join(sorted(formats))}"
        return "noise" if is_cast else "rounding", text
    if compared.exact:
        return "same", f"config.json differs in {keys}, without effect" if config else ""
    return "noise", ""


def _with_config(row: Divergence, config: list[str]) -> Divergence:
    """Return the row with the differing configuration as its cause, if its weights are equal."""
    if row.where == "weights" or not config:
        return row
    hint = "give b's config.json the values of a, or load both with the same ones"
    cause = "; ".join(filter(None, [row.cause, "config.json: " + "; ".join(config[:4])]))
    return replace(row, cause=cause, hint=hint)


def _config(side: ModelRef) -> dict[str, Any]:
    config = read_json(side.path / "config.json")
    if str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification"):
        raise ConfigError(f"{side.path}: a reward model; language models are bisected")
    return config


def probes_of(a: ModelRef, b: ModelRef, options: Options) -> list[list[int]]:
    """Return the probes' token ids, by a's tokenizer, or by b's if a has none."""
    if options.ids:
        return [list(probe) for probe in options.ids]
    from tasks.serving.prompts import encode_texts

    folders = [folder for side in (a, b) for folder in (side.adapter, side.path) if folder]
    folder = next((f for f in folders if (f / "tokenizer_config.json").is_file()), None)
    if folder is None:
        raise ConfigError("no tokenizer in a and none in b: there is nothing to measure on")
    probes = [ids for ids in encode_texts(folder, options.texts, options.limit) if len(ids) > 1]
    if not probes:
        raise ConfigError("no text has two tokens: there is nothing to measure on")
    return probes


def _drift(a: Any, b: Any, probes: list[list[int]], recordings: list[Any] | None) -> Drift:
    """Return the drift of b, or of the engine that wrote the recordings, from a."""
    import torch

    from tasks.serving.reference.measure import fingerprint, reference
    from tasks.witness.plumbline_witness.measure import of_logits

    first = reference(a, probes)
    if recordings is None:
        return drift(first, fingerprint(b, first))
    logits = torch.cat([each["lm_head"][0].outputs[0][:-1].float() for each in recordings])
    ids, logprobs, top1, _ = of_logits(logits, first.ids)
    return drift(first, Fingerprint(first.probes, ids, logprobs, top1, engine="vllm"))


def _shown(side: ModelRef) -> str:
    adapters = [side.adapter] if side.adapter else []
    return f"{' + '.join(map(str, [side.path, *adapters]))} ({side.dtype})"
