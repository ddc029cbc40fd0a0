"""Write rows of the toy world as a `dataset` artifact."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tasks.toy import calculator
from tasks.toy.splits import Payload, asked, conversation, examples, labelled, pair, prompt
from tasks.toy.world import Example

ROWS: dict[str, Callable[[Example], Payload]] = {
    "conversations": conversation,
    "pairs": pair,
    "labelled": labelled,
    "prompts": asked,
}
CALCULATOR_ROWS = {"conversations": calculator.demonstration, "prompts": calculator.question}
"""Kinds of rows of the calculator's task."""


def write_dataset(
    out: Path,
    *,
    train_size: int,
    heldout_size: int,
    seed: int,
    rows: str = "conversations",
    tasks: str = "letters",
) -> dict[str, Any]:
    """Write train.jsonl, heldout.jsonl and prompts.jsonl into `out`.

    Returns:
        The contents of `dataset.json`.

    Raises:
        ValueError: a split is larger than the toy world allows.
    """
    sizes = {"train": train_size, "heldout": heldout_size}
    payloads = {
        name: _payloads(size, rows, tasks, seed=seed, held_out=name == "heldout")
        for name, size in sizes.items()
    }
    for name, (split, _) in payloads.items():
        _write(out / f"{name}.jsonl", (_row(payload, name, n) for n, payload in enumerate(split)))
    prompts = payloads["train"][1]
    _write(
        out / "prompts.jsonl",
        ({"id": f"prompt-{n:05}", **payload} for n, payload in enumerate(prompts)),
    )
    return {
        "format": 1,
        "rows": rows,
        "splits": {
            name: {"read": size, "kept": size, "refused": 0, "overlapping": 0}
            for name, size in sizes.items()
        },
        "sources": [],
        "refused_examples": [],
    }


def _payloads(
    size: int, rows: str, tasks: str, *, seed: int, held_out: bool
) -> tuple[list[Payload], list[Payload]]:
    """Return the rows of a split, and their prompts alone."""
    if tasks == "calculator":
        pairs = calculator.sums(size, seed=seed, held_out=held_out)
        return [CALCULATOR_ROWS[rows](pair) for pair in pairs], list(
            map(calculator.question, pairs)
        )
    contrast = rows in ("pairs", "labelled")
    chosen = examples(size, seed=seed, held_out=held_out, wrong_too=contrast)
    return [ROWS[rows](example) for example in chosen], list(map(prompt, chosen))


def _row(payload: Payload, split: str, number: int) -> dict[str, Any]:
    """Return the payload with its id; a held-out pair gets `messages`, for evaluation."""
    if split == "heldout" and "chosen" in payload:
        payload = {"messages": [*payload["prompt"], *payload["chosen"]], **payload}
    return {"id": f"{split}-{number:05}", **payload}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="ascii", newline="\n") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
