"""Write rows of the toy world as the two files of a `dataset` artifact."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.toy import calculator
from tasks.toy.splits import asked, conversation, examples, labelled, pair

ROWS: Mapping[str, Mapping[str, Callable[[Any], dict[str, Any]]]] = {
    "letters": {
        "conversations": conversation, "pairs": pair, "labelled": labelled, "prompts": asked,
    },
    "calculator": {
        "conversations": calculator.demonstration, "prompts": calculator.question,
    },
}  # fmt: skip
"""Kinds of rows by task, and the functions that make one."""


def write_dataset(
    out: Path,
    sizes: Mapping[str, int],
    *,
    seed: int,
    rows: str = "conversations",
    tasks: str = "letters",
) -> None:
    """Write train.jsonl and heldout.jsonl into `out`; `sizes` are numbers of rows by split.

    ValueError if a split is larger than the toy world allows.
    """
    for split, size in sizes.items():
        how: dict[str, Any] = {"seed": seed, "held_out": split == "heldout"}
        if tasks == "calculator":
            chosen: list[Any] = calculator.sums(size, **how)
        else:
            chosen = examples(size, **how, wrong_too=rows in ("pairs", "labelled"))
        with (out / f"{split}.jsonl").open("w", encoding="ascii", newline="\n") as file:
            for number, payload in enumerate(map(ROWS[tasks][rows], chosen)):
                if split == "heldout" and "chosen" in payload:  # for evaluation
                    payload = {"messages": [*payload["prompt"], *payload["chosen"]], **payload}
                file.write(json.dumps({"id": f"{split}-{number:05}", **payload}) + "\n")
