"""Write the record of a live model into a checkpoint: `witness(model, tokenizer, out)`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from .facts import describe, is_reward_model, unwrap
from .measure import Logprobs, mean_kl, measure_logprobs, measure_scores, undisturbed
from .probes import Probe, choose, ids_of_row

FOLDER = "plumbline.witness"
FORMAT = 1
"""Version of the files. A reader refuses a higher one."""
SINGLE = 4
"""Probes that are measured again, one at a time: the difference is the engine's repeat noise."""

log = logging.getLogger("plumbline.witness")


def witness(
    model: Any,
    tokenizer: Any,
    out: str | os.PathLike[str],
    *,
    prompts: Sequence[str] = (),
    rows: Iterable[Any] = (),
    texts: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Measure a live model and write `<out>/plumbline.witness`. Every rank has to call it.

    The model is called with `input_ids` and `attention_mask`, in evaluation mode, without
    gradients. Modes and random state are restored.

    Args:
        model: as it is trained: with its adapter, wrapped or not.
        tokenizer: of transformers, with the chat template of the training.
        out: the checkpoint's folder.
        prompts: texts of the user's own, to measure besides the public ones.
        rows: training examples with token ids (`input_ids`).
        texts: True to record the texts of the user's prompts; ids are recorded in any case.
        facts: further facts to record, e.g. the step.

    Returns:
        Path of the record.
    """
    started = time.monotonic()
    rows = list(rows)
    probes = _same_on_all_ranks(choose(tokenizer, prompts=prompts, rows=rows))
    sequences = [probe.ids for probe in probes]
    reward = is_reward_model(model)
    with undisturbed(model):
        arrays, scores, noise = _scored(model, sequences) if reward else _measured(model, sequences)
        base = None if reward else _without_adapter(model, sequences, arrays["fingerprint"])
    folder = Path(out) / FOLDER
    if _rank() == 0:
        description = {
            "format": FORMAT,
            **describe(model, tokenizer),
            **(facts or {}),
            "kind": "scores" if reward else "logprobs",
            "noise": noise,
            "longest_row": max((len(ids_of_row(row)) for row in rows), default=0),
            "probes": [_entry(probe, texts) for probe in probes],
            "seconds": round(time.monotonic() - started, 3),
        }
        _write(folder, description, sequences, {**arrays, **(base or {})}, scores)
    return folder


def _measured(
    model: Any, sequences: Sequence[Sequence[int]]
) -> tuple[dict[str, Logprobs], list[float] | None, float]:
    """Return the log-probabilities, and the mean KL (nats) of measuring one by one."""
    together = measure_logprobs(model, sequences)
    few = sequences[:SINGLE]
    count = sum(len(ids) - 1 for ids in few)
    alone = measure_logprobs(model, few, at=together.ids[:count], batch=1)
    same = Logprobs(*(array[:count] for array in _arrays(together).values()))
    return {"fingerprint": together}, None, mean_kl(same, alone)


def _scored(
    model: Any, sequences: Sequence[Sequence[int]]
) -> tuple[dict[str, Logprobs], list[float] | None, float]:
    """Return the scores, and their mean absolute difference when measured one by one."""
    together = measure_scores(model, sequences)
    alone = measure_scores(model, sequences[:SINGLE], batch=1)
    return {}, together, float(np.abs(np.subtract(together[:SINGLE], alone)).mean())


def _without_adapter(
    model: Any, sequences: Sequence[Sequence[int]], trained: Logprobs
) -> dict[str, Logprobs] | None:
    """Return the base's log-probabilities at the same ids; None if there is no adapter."""
    inner = unwrap(model)
    if not hasattr(inner, "peft_config") or not hasattr(inner, "disable_adapter"):
        return None
    with inner.disable_adapter():
        return {"base": measure_logprobs(model, sequences, at=trained.ids)}


def _write(
    folder: Path,
    description: Mapping[str, Any],
    sequences: Sequence[Sequence[int]],
    arrays: Mapping[str, Logprobs],
    scores: list[float] | None,
) -> None:
    """Write all files into a new folder, then rename it: a record is never half written."""
    staging = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    common = {"probes": sequences, "engine": "trainer", "measured_on": None}
    for name, logprobs in arrays.items():
        noise = description["noise"] if name == "fingerprint" else None
        metadata = json.dumps({**common, "noise": noise})
        save_file(_arrays(logprobs), staging / f"{name}.fp", metadata={"fingerprint": metadata})
    if scores is not None:
        content = {**common, "scores": scores, "noise": description["noise"]}
        (staging / "scores.json").write_text(json.dumps(content) + "\n")
    (staging / "witness.json").write_text(json.dumps(description, indent=1) + "\n")
    for file in staging.glob("*.fp"):  # safetensors 0.8 writes files that nobody else can read
        shutil.copymode(staging / "witness.json", file)
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)


def _arrays(logprobs: Logprobs) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(array) for name, array in vars(logprobs).items()}


def _entry(probe: Probe, texts: bool) -> dict[str, Any]:
    public = probe.kind in ("text", "chat")
    return {
        "kind": probe.kind,
        "number": probe.number,
        "ids": list(probe.ids),
        "text": probe.text if texts or public else None,
    }


def _rank() -> int:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else 0


def _same_on_all_ranks(probes: list[Probe]) -> list[Probe]:
    """Return rank 0's probes: with other probes on another rank, a sharded model would hang."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return probes
    shared: list[Any] = [probes]
    with contextlib.suppress(RuntimeError):
        torch.distributed.broadcast_object_list(shared, src=0)
    return list(shared[0])
