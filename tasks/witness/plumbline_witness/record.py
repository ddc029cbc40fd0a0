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
from .measure import Logprobs, measure_logprobs, measure_scores, other_rounding, undisturbed
from .probes import Probe, choose, ids_of_row

FOLDER = "plumbline.witness"
FORMAT = 1
"""Version of the files. A reader refuses a higher one."""
AGAIN = 8
"""Probes that are measured again: the difference is the noise of the engine, or of 16 bits."""

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
    arrays: dict[str, Logprobs] = {}
    scores: list[float] | None = None
    noise: float | None = None
    dtype = None
    with undisturbed(model):
        if reward:
            scores, noise = _scored(model, sequences)
        else:
            arrays["fingerprint"] = trained = measure_logprobs(model, sequences)
            if (base := _without_adapter(model, sequences, trained)) is not None:
                arrays["base"] = base
            if (embeddings := _embeddings(model)) is not None:
                few = sequences[:AGAIN]
                at = trained.ids[: sum(len(ids) - 1 for ids in few)]
                with other_rounding(model, embeddings) as dtype:
                    arrays["noise"] = measure_logprobs(model, few, at=at)
    folder = Path(out) / FOLDER
    if _rank() == 0:
        description = {
            "format": FORMAT,
            **describe(model, tokenizer),
            **(facts or {}),
            "kind": "scores" if reward else "logprobs",
            "longest_row": max((len(ids_of_row(row)) for row in rows), default=0),
            "probes": [_entry(probe, texts) for probe in probes],
            "seconds": round(time.monotonic() - started, 3),
        }
        print_facts = {"engine": "trainer", "measured_on": None, "noise": noise, "dtype": dtype}
        _write(folder, description, sequences, print_facts, arrays, scores)
    return folder


def _embeddings(model: Any) -> torch.nn.Module | None:
    """Return the input embeddings; None of a model that does not name them."""
    inner = unwrap(model)
    return inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None


def _scored(model: Any, sequences: Sequence[Sequence[int]]) -> tuple[list[float], float]:
    """Return the scores, and their mean absolute difference when measured one by one."""
    together = measure_scores(model, sequences)
    alone = measure_scores(model, sequences[:AGAIN], batch=1)
    return together, float(np.abs(np.subtract(together[:AGAIN], alone)).mean())


def _without_adapter(
    model: Any, sequences: Sequence[Sequence[int]], trained: Logprobs
) -> Logprobs | None:
    """Return the base's log-probabilities at the same ids; None if there is no adapter."""
    inner = unwrap(model)
    if not hasattr(inner, "peft_config") or not hasattr(inner, "disable_adapter"):
        return None
    with inner.disable_adapter():
        return measure_logprobs(model, sequences, at=trained.ids)


def _write(
    folder: Path,
    description: Mapping[str, Any],
    sequences: Sequence[Sequence[int]],
    facts: Mapping[str, Any],
    arrays: Mapping[str, Logprobs],
    scores: list[float] | None,
) -> None:
    """Write all files into a new folder, then rename it: a record is never half written."""
    staging = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for name, logprobs in arrays.items():
        probes, dtype = (
            (sequences[:AGAIN], facts["dtype"]) if name == "noise" else (sequences, None)
        )
        metadata = json.dumps({**facts, "probes": probes, "dtype": dtype})
        save_file(_arrays(logprobs), staging / f"{name}.fp", metadata={"fingerprint": metadata})
    if scores is not None:
        content = {**facts, "probes": sequences, "scores": scores}
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
