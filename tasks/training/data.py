"""The dataset artifact as tokenised samples, the same list on every rank."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.errors import DataError
from tasks.events import emit
from tasks.training.chat import Problem, Sample, encode, read_rows, settle
from tasks.training.engine import Ranks
from tasks.training.job import TrainJob


def load_split(job: TrainJob, split: str, tokenizer: Any, ranks: Ranks) -> list[Sample]:
    """Read, render and tokenise one split; each rank does its share. Emits event "data".

    Raises:
        DataError: on every rank, naming every sample that cannot be used.
    """
    path = job.data / f"{split}.jsonl"
    rows = read_rows(path)
    if not rows:
        raise DataError(f"{path}: no samples", hint="data.path=... or data.eval_fraction=...")
    batch = job.settings.batch
    ends = end_ids(job.base, tokenizer)
    mine = [
        encode(row, tokenizer, ends=ends, max_len=batch.max_len)
        for row in rows[ranks.rank :: ranks.world_size]
    ]
    encoded: list[Sample | Problem] = [None] * len(rows)  # type: ignore[list-item]
    for rank, part in enumerate(ranks.all_objects(mine)):
        encoded[rank :: ranks.world_size] = part
    samples, counts, left_out = settle(
        encoded, max_len=batch.max_len, on_overlong=batch.on_overlong, source=path.name
    )
    if ranks.first:
        shown = [f"{p.id}: {p.text}" for p in left_out[:20]]
        emit("data", split=split, **asdict(counts), left_out=shown)
    return samples


def end_ids(base: Path, tokenizer: Any) -> frozenset[int]:
    """Token ids that may end a turn: the tokenizer's EOS and those of the generation config."""
    found = {tokenizer.eos_token_id}
    path = base / "generation_config.json"
    if path.is_file():
        eos = json.loads(path.read_text()).get("eos_token_id")
        found.update(eos if isinstance(eos, list) else [eos])
    return frozenset(int(i) for i in found if i is not None)
