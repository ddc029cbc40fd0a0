"""Load two models, compare them, and judge the differences. Runs in the reference child."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.bisect.report import REDO, Divergence, Report
from tasks.core.errors import ConfigError, PlumblineError
from tasks.drift.fingerprint import PROFILES, Drift, Fingerprint, drift
from tasks.evaluation.scoring import ModelRef
from tasks.serving.reference.requests import load
from tasks.weights.files.documents import read_json

if TYPE_CHECKING:
    from tasks.bisect.compare import Compared
    from tasks.bisect.run import Options

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
    from tasks.bisect.calls import read_calls
    from tasks.bisect.compare import Pair
    from tasks.bisect.tensors import config_changes

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

    first = reference(a, probes)
    if recordings is None:
        return drift(first, fingerprint(b, first))
    logits = torch.cat([each["lm_head"][0].outputs[0][:-1].float() for each in recordings])
    ids = torch.from_numpy(first.ids.astype("int64"))
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids).numpy()
    top1 = logits.argmax(dim=-1).to(torch.int32).numpy()
    return drift(first, Fingerprint(first.probes, first.ids, logprobs, top1, engine="vllm"))


def _shown(side: ModelRef) -> str:
    adapters = [side.adapter] if side.adapter else []
    return f"{' + '.join(map(str, [side.path, *adapters]))} ({side.dtype})"
