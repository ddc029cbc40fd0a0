"""The bisecting child: loads two models, compares them, and writes a report.

    python -m tasks.bisect.child job.json

Both models are in memory at the same time. `run.bisect` writes the job; `out` gets the report.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.bisect.report import Report
from tasks.core.errors import PlumblineError
from tasks.drift.fingerprint import (
    PROFILES,
    Fingerprint,
    ScorePrint,
    drift,
    exceeds,
    score_drift,
    within,
)
from tasks.process.block_unused_imports import start_lean
from tasks.weights.files.documents import read_json

if TYPE_CHECKING:
    from tasks.bisect.compare import Compared

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
"""Keys of config.json that two comparable models share."""


class RefusedError(PlumblineError):
    """The two models cannot be compared."""


def main() -> None:
    """Run the job of this command line."""
    job = json.loads(Path(sys.argv[1]).read_text())
    start_lean()
    try:
        report = bisect(job)
    except PlumblineError as error:
        reason = "; ".join([error.message, *([error.hint] if error.hint else [])])
        report = Report(_shown(job["a"]), _shown(job["b"]), "refused", reason)
    Path(job["out"]).write_text(json.dumps(report.as_json()))


def bisect(job: Mapping[str, Any]) -> Report:
    """Compare the two models of a job.

    Raises:
        PlumblineError: they cannot be loaded, or not be compared.
    """
    configs = [_config(job[side]) for side in ("a", "b")]
    _require_same_sizes(*configs)
    probes, notes = _probes(job)
    from tasks.bisect.calls import read_calls
    from tasks.bisect.compare import Pair
    from tasks.bisect.tensors import config_changes

    is_reward = any(_is_reward(config) for config in configs)
    threads = job.get("threads")
    if threads:
        import torch

        torch.set_num_threads(threads)
    a = _load(job["a"], is_reward, notes)
    b = a if job["a"] == job["b"] else _load(job["b"], is_reward, notes)
    quantised = any(c.get("quantization_config") for c in configs) or _is_four_bit(job)
    pair = Pair(a, b, quantised)
    if len(pair.missing) > 0.1 * len(pair.in_a):
        raise RefusedError(
            f"other architecture: model_type {configs[0].get('model_type')} and "
            f"{configs[1].get('model_type')}, {len(pair.missing)} modules are in one of them "
            f"alone, first {pair.missing[0]}"
        )
    recordings = read_calls(Path(job["calls"]), len(probes)) if job.get("calls") else None
    moved, limit = _drift(a, b, probes, job, is_reward, recordings)
    compared = pair.compare(probes, recordings)
    config = config_changes(a.config.to_dict(), b.config.to_dict())
    return _judged(job, compared, moved, limit, config, [*notes, *compared.notes[:5]])


def _judged(
    job: Mapping[str, Any],
    compared: Compared,
    moved: dict[str, float],
    limit: str,
    config: list[str],
    notes: list[str],
) -> Report:
    """Return the report: the verdict and its reason."""
    rows = compared.divergences
    largest, name = compared.largest
    formats = ", ".join(compared.roundings)
    stand_out = f"largest: {name}, {largest:.1f} times the noise" if name else ""
    in_engine = job["engine"] != "transformers"
    from tasks.bisect.report import REDO

    # Swapped, transposed, zero or NaN is a fault even if an untrained model hardly moves.
    at_fault = any(
        row.where == "weights" and (row.hint == REDO or " NaN " in row.cause) for row in rows
    )
    if rows and (limit or in_engine or at_fault):
        weights = sum(row.where == "weights" for row in rows)
        others = f"the first of {len(rows)} modules" if len(rows) > 1 else "the only module"
        verdict, reason = "differs", f"{rows[0].module} is {others}"
        if not weights and config:
            reason += f"; the weights are equal, and config.json differs in {_keys(config)}"
        elif weights > 0.8 * sum(map(bool, compared.gaps.values())) and weights > 3:
            reason += "; nearly all weights differ: another checkpoint, or full training"
    elif rows:
        listed = ", ".join(row.module for row in rows[:3])
        verdict, reason = "below", f"differs beyond rounding, but below the gate: {listed}"
    elif formats:
        verdict, reason = "rounding", f"one side is rounded to {formats}; {stand_out}"
        if set(compared.roundings) <= {"bfloat16", "float16"}:
            verdict = "noise"
    elif compared.exact:
        verdict, reason = "same", ""
        if config:
            reason = f"config.json differs in {_keys(config)}, without effect on the probes"
    else:
        verdict, reason = "noise", stand_out
    return Report(
        _shown(job["a"]),
        _shown(job["b"]),
        verdict,
        reason,
        len(compared.order),
        compared.order.index(rows[0].module) if rows else len(compared.order),
        [_with_config(row, config) for row in rows],
        moved,
        limit,
        config,
        notes,
        job["engine"],
    )


def _with_config(row: Any, config: list[str]) -> Any:
    """Return the row with the differing configuration as its cause, if its weights are equal."""
    if row.where == "weights" or not config:
        return row
    hint = "give b's config.json the values of a, or load both with the same ones"
    causes = [*([row.cause] if row.cause else []), "config.json: " + "; ".join(config[:4])]
    return replace(row, cause="; ".join(causes), hint=hint)


def _keys(config: list[str]) -> str:
    return ", ".join(line.partition(":")[0] for line in config[:4])


def _config(side: Mapping[str, Any]) -> dict[str, Any]:
    path = Path(side["path"])
    if not (path / "config.json").is_file():
        raise RefusedError(f"{path}: no config.json in it", hint="name a Hugging Face folder")
    return read_json(path / "config.json")


def _require_same_sizes(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Refuse models whose sizes differ, before they are loaded."""
    a, b = (dict(config.get("text_config") or config) for config in (a, b))
    differing = [
        f"{key} {a[key]} and {b[key]}"
        for key in SIZES
        if key in a and key in b and a[key] != b[key]
    ]
    if not differing:
        return
    types = {str(config.get("model_type")) for config in (a, b)}
    what = "other vocabulary" if differing[0].startswith("vocab") else "other architecture"
    if len(types) > 1:
        differing.insert(0, f"model_type {a.get('model_type')} and {b.get('model_type')}")
        what = "other architecture"
    raise RefusedError(f"{what}: {', '.join(differing)}")


def _probes(job: Mapping[str, Any]) -> tuple[list[list[int]], list[str]]:
    """Return the probes' token ids by a's tokenizer, and a note if b's gives others."""
    if job.get("ids"):
        return job["ids"], []
    from tasks.serving.prompts import encode_texts

    sides = []
    for side in ("a", "b"):
        folders = [Path(job[side][key]) for key in ("adapter", "path") if job[side].get(key)]
        folder = next((f for f in folders if (f / "tokenizer_config.json").is_file()), None)
        encoded = encode_texts(folder, job["texts"], job["limit"]) if folder is not None else None
        sides.append(encoded)
    ids = sides[0] or sides[1]
    if ids is None:
        raise RefusedError("no tokenizer in a and none in b: there is nothing to measure on")
    notes = []
    if None not in sides and sides[0] != sides[1]:
        notes.append("the tokenizers of a and b give other ids for the same text; a's are used")
    probes = [probe for probe in ids if len(probe) >= 2]
    if not probes:
        raise RefusedError("no text has two tokens: nothing to measure on")
    return probes, notes


def _is_reward(config: Mapping[str, Any]) -> bool:
    return str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification")


def _is_four_bit(job: Mapping[str, Any]) -> bool:
    return any(job[side].get("quantization") for side in ("a", "b"))


def _load(side: Mapping[str, Any], is_reward: bool, notes: list[str]) -> Any:
    """Load one model as it is on disk."""
    from tasks.serving.reference.load import (
        chosen_device,
        from_folder,
        placement,
        usable_attention,
        wrapped_names,
    )
    from tasks.serving.reference.peft_adapters import with_adapters
    from tasks.serving.reference.rewards import CLASSIFIER
    from tasks.weights.heads import SCORE

    path, adapter = Path(side["path"]), side.get("adapter")
    weighted = side.get("weighted") or ({adapter: 1.0} if adapter else {})
    quantization = side.get("quantization")
    device = chosen_device(side.get("device"))
    extra: dict[str, Any] = {"num_labels": 1} if is_reward else {}
    if wrapped := wrapped_names(path):
        notes.append(f"{path}: {wrapped} tensors have a wrapper's prefix, which is left out here")
    model = from_folder(
        CLASSIFIER if is_reward else None,
        path,
        dtype=side["dtype"],
        attn_implementation=usable_attention(side["attn_implementation"]),
        quantization=quantization,
        gaps=(SCORE, "lm_head.weight") if is_reward and weighted else (),
        device_map=placement(path, device, quantized=quantization is not None),
        as_stored=not weighted,
        **extra,
    )
    if is_reward and model.config.get_text_config().pad_token_id is None:
        model.config.get_text_config().pad_token_id = -1
    return with_adapters(model, weighted).eval() if weighted else model.eval()


def _drift(
    a: Any,
    b: Any,
    probes: list[list[int]],
    job: Mapping[str, Any],
    is_reward: bool,
    recordings: list[Any] | None,
) -> tuple[dict[str, float], str]:
    """Return the drift of b from a, and the limits that it exceeds."""
    import torch

    from tasks.serving.reference.load import input_device
    from tasks.serving.reference.measure import fingerprint, reference

    limit = PROFILES[job["profile"]]
    if not is_reward:
        first = reference(a, probes)
        second = fingerprint(b, first) if recordings is None else _of_engine(first, recordings)
        moved = drift(first, second)
        return asdict(moved), "; ".join(within(moved, limit))
    prints = []
    with torch.no_grad():
        for model in (a, b):
            ids = [torch.tensor([probe], device=input_device(model)) for probe in probes]
            scores = tuple(float(model(input_ids=each).logits[0, 0]) for each in ids)
            prints.append(ScorePrint(tuple(map(tuple, probes)), scores, "transformers"))
    rewards = score_drift(*prints)
    return asdict(rewards), "; ".join(exceeds(rewards, limit.rewards, None))


def _of_engine(first: Fingerprint, recordings: list[Any]) -> Fingerprint:
    """Return the fingerprint of the engine that wrote the recordings, at the ids of `first`."""
    import torch

    logits = torch.cat([each["lm_head"][0].outputs[0][:-1].float() for each in recordings])
    ids = torch.from_numpy(first.ids.astype("int64"))
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids)
    top1 = logits.argmax(dim=-1).to(torch.int32).numpy()
    return replace(first, logprobs=logprobs.numpy(), top1=top1, engine="vllm")


def _shown(side: Mapping[str, Any]) -> str:
    adapters = side.get("weighted") or ([side["adapter"]] if side.get("adapter") else [])
    return f"{' + '.join([side['path'], *adapters])} ({side['dtype']})"


if __name__ == "__main__":
    main()
