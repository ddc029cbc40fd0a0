"""The toy world as a `dataset` artifact."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tasks.toy.splits import conversation, examples, preference, prompt


def write_dataset(out: Path, *, train_size: int, heldout_size: int, seed: int) -> dict[str, Any]:
    """Write conversations, preference pairs and prompts into `out`.

    Returns what belongs into `dataset.json`.

    Raises:
        ValueError: the world does not have that many different examples.
    """
    train = examples(train_size, seed=seed, held_out=False)
    held_out = examples(heldout_size, seed=seed, held_out=True)
    _write(
        out / "train.jsonl", (conversation(e, row_id=f"train-{n:05}") for n, e in enumerate(train))
    )
    _write(
        out / "heldout.jsonl",
        (conversation(e, row_id=f"heldout-{n:05}") for n, e in enumerate(held_out)),
    )
    # A pair needs two different answers: `sort a a` has only one.
    pairs = [(n, example) for n, example in enumerate(train) if example.answer != example.wrong]
    _write(
        out / "preferences.jsonl", (preference(e, row_id=f"preference-{n:05}") for n, e in pairs)
    )
    _write(out / "prompts.jsonl", (prompt(e, row_id=f"prompt-{n:05}") for n, e in enumerate(train)))
    sizes = {"train": len(train), "heldout": len(held_out)}
    return {
        "format": 1,
        "splits": {
            name: {"read": size, "kept": size, "truncated": 0, "refused": 0, "overlapping": 0}
            for name, size in sizes.items()
        },
        "refused_examples": [],
        "unused_columns": [],
    }


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="ascii", newline="\n") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
