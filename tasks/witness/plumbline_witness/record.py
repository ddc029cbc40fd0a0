"""Write the record of a live model into a checkpoint: `witness(model, tokenizer, out)`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .facts import describe, is_reward_model, unwrap
from .measure import measure_logprobs, measure_scores, other_rounding, undisturbed
from .prints import BASE, FINGERPRINT, FOLDER, FORMAT, NOISE, SCORES, Fingerprint, ScorePrint
from .probes import Probe, choose, ids_of_row, text_with_tools

AGAIN = 8
"""Probes that are measured again: the difference is the noise of the engine, or of 16 bits."""


def witness(
    model: Any,
    tokenizer: Any,
    out: str | os.PathLike[str],
    *,
    prompts: Sequence[str] = (),
    rows: Iterable[Any] = (),
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
        facts: further facts to record, e.g. the step.
    """
    rows = list(rows)
    probes = _same_on_all_ranks(choose(tokenizer, prompts=prompts, rows=rows))
    sequences = tuple(probe.ids for probe in probes)
    prints: Mapping[str, Fingerprint | ScorePrint]
    with undisturbed(model):
        if is_reward_model(model):
            prints = {SCORES: _scores(model, sequences)}
        else:
            prints = _fingerprints(model, sequences)
    folder = Path(out) / FOLDER
    if not _distributed() or torch.distributed.get_rank() == 0:
        description = {
            "format": FORMAT,
            **describe(model, tokenizer),
            **(facts or {}),
            "longest_row": max((len(ids_of_row(row)) for row in rows), default=0),
            "probes": [asdict(probe) for probe in probes],
            "text_with_tools": text_with_tools(tokenizer),
        }
        _write(folder, description, prints)
    return folder


def _scores(model: Any, sequences: tuple[tuple[int, ...], ...]) -> ScorePrint:
    """Return the scores, and their mean absolute difference when measured one by one."""
    together = measure_scores(model, sequences)
    alone = measure_scores(model, sequences[:AGAIN], batch=1)
    noise = float(np.abs(np.subtract(together[:AGAIN], alone)).mean())
    return ScorePrint(sequences, tuple(together), "trainer", noise)


def _fingerprints(model: Any, sequences: tuple[tuple[int, ...], ...]) -> dict[str, Fingerprint]:
    """Return the fingerprints by file: trained model, its base, the noise of 16 bits."""
    trained = measure_logprobs(model, sequences)
    prints = {FINGERPRINT: trained}
    inner = unwrap(model)
    if hasattr(inner, "peft_config") and hasattr(inner, "disable_adapter"):
        with inner.disable_adapter():
            prints[BASE] = measure_logprobs(model, sequences, at=trained.ids)
    embeddings = inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None
    if embeddings is not None:
        few = sequences[:AGAIN]
        at = trained.ids[: sum(len(ids) - 1 for ids in few)]
        with other_rounding(model, embeddings) as dtype:
            prints[NOISE] = replace(measure_logprobs(model, few, at=at), dtype=dtype)
    return prints


def _write(
    folder: Path, description: Mapping[str, Any], prints: Mapping[str, Fingerprint | ScorePrint]
) -> None:
    """Write all files into a new folder, then rename it: a record is never half written."""
    staging = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    (staging / "witness.json").write_text(json.dumps(description, indent=1) + "\n")
    for name, measured in prints.items():
        measured.save(staging / name)
        # safetensors 0.8 writes files that nobody else can read.
        shutil.copymode(staging / "witness.json", staging / name)
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _same_on_all_ranks(probes: list[Probe]) -> list[Probe]:
    """Return rank 0's probes: with other probes on another rank, a sharded model would hang."""
    shared: list[Any] = [probes]
    if _distributed():
        with contextlib.suppress(RuntimeError):
            torch.distributed.broadcast_object_list(shared, src=0)
    return list(shared[0])
