"""Small datasets, and their tokenisation in this process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.training.engine.deepspeed_engine import SingleRank
from tasks.training.job import TrainJob
from tasks.training.model.build import load_tokenizer
from tasks.training.tokens.data import load_split
from tasks.training.tokens.examples import Examples
from tests.settings import Batch, Settings

Row = dict[str, Any]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def pair(name: str, question: str, chosen: str, rejected: str, **more: Any) -> Row:
    return {"id": name, "prompt": [user(question)], "chosen": [answer(chosen)],
            "rejected": [answer(rejected)], **more}  # fmt: skip


def write(folder: Path, rows: list[Row], split: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{split}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def job_for(folder: Path, base: Path, **changes: Any) -> TrainJob:
    batch = Batch(max_len=changes.pop("max_len", 64), **changes.pop("batch", {}))
    settings = Settings(batch=batch, **changes)
    checkpoints = Path(tempfile.mkdtemp(dir=folder))
    return TrainJob(settings, base, "", folder, folder / "out", checkpoints)


def load(
    job: TrainJob, roles: tuple[str, ...], tokenizer: Any = None, *, split: str = "train"
) -> Examples:
    tokenizer = tokenizer or load_tokenizer(job)
    return load_split(job, split, roles=roles, tokenizer=tokenizer, ranks=SingleRank())


def texts(examples: Examples, tokenizer: Any) -> list[list[tuple[str, str]]]:
    """Return the texts of every sequence that bear no loss, and those that do."""
    decoded = []
    for example in range(len(examples)):
        sides = []
        for role in range(len(examples.roles)):
            ids, bears = examples.sequence(example, role)
            sides.append((tokenizer.decode(ids[bears == 0]), tokenizer.decode(ids[bears == 1])))
        decoded.append(sides)
    return decoded


def data_events(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    lines = [line for line in capfd.readouterr().out.splitlines() if '"event": "data"' in line]
    return [json.loads(line[line.index("{") :]) for line in lines]


def make_examples(
    lengths: Sequence[int], *, vocabulary: int = 90, roles: int = 1, seed: int = 0
) -> Examples:
    """Make random tokens, 7 in 10 of them supervised; `lengths` by example, then by role."""
    draw = np.random.default_rng(seed)
    total = sum(lengths)
    count = len(lengths) // roles
    return Examples(
        roles=("text",) if roles == 1 else ("chosen", "rejected"),
        names=tuple(f"s{i}" for i in range(count)),
        ids=draw.integers(3, vocabulary, total).astype(np.int32),
        bears=(draw.random(total) < 0.7).astype(np.uint8),
        bounds=np.concatenate([[0], np.cumsum(lengths)]),
        values={"margin": np.arange(count, dtype=np.float32)},
    )


def alone(model: Any, examples: Examples, device: str = "cpu") -> torch.Tensor:
    """Return log-probabilities of supervised tokens, by one forward pass per sequence."""
    datasets = []
    for i in range(len(examples)):
        ids, bears = (torch.tensor(x, device=device) for x in examples.sequence(i, 0))
        places = bears[1:].nonzero()[:, 0]
        logits = model(input_ids=ids[None].long(), use_cache=False).logits[0, places]
        targets = ids[places + 1].long()
        datasets.append(torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0])
    return torch.cat(datasets)
