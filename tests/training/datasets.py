"""Small datasets, and the path from them to tokenised examples in this very process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.training.data import load_split
from tasks.training.examples import Examples
from tasks.training.job import TrainJob
from tasks.training.model import load_tokenizer
from tests.settings import Batch, Settings

Row = dict[str, Any]


class Alone:
    """The ranks of a run that has one."""

    rank, world_size, first = 0, 1, True

    def all_objects(self, value: Any) -> list[Any]:
        """What all ranks say."""
        return [value]

    def barrier(self) -> None:
        """There is nobody to wait for."""


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
    return TrainJob(settings, base, "", folder, folder / "out", folder / "ck",
                    tokens=folder / "tokens")  # fmt: skip


def load(job: TrainJob, roles: tuple[str, ...]) -> Examples:
    ranks: Any = Alone()
    return load_split(job, "train", roles=roles, tokenizer=load_tokenizer(job), ranks=ranks)


def texts(examples: Examples, tokenizer: Any) -> list[list[tuple[str, str]]]:
    """Of every sequence: what bears no loss and what does."""
    found = []
    for example in range(len(examples)):
        sides = []
        for role in range(len(examples.roles)):
            ids, bears = examples.sequence(example, role)
            sides.append((tokenizer.decode(ids[bears == 0]), tokenizer.decode(ids[bears == 1])))
        found.append(sides)
    return found


def data_events(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    lines = [line for line in capfd.readouterr().out.splitlines() if '"event": "data"' in line]
    return [json.loads(line[line.index("{") :]) for line in lines]
