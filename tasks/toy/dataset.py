"""Write rows of the toy world as a `dataset` artifact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.toy import calculator
from tasks.toy.splits import Payload, asked, conversation, examples, labelled, pair

ROWS: dict[str, Callable[[Any], Payload]] = {
    "conversations": conversation,
    "pairs": pair,
    "labelled": labelled,
    "prompts": asked,
}
CALCULATOR_ROWS = {"conversations": calculator.demonstration, "prompts": calculator.question}


def write_dataset(
    out: Path,
    *,
    train_size: int,
    heldout_size: int,
    seed: int,
    rows: str = "conversations",
    tasks: str = "letters",
) -> dict[str, Any]:
    """Write train.jsonl and heldout.jsonl into `out`; return the contents of `dataset.json`.

    ValueError if a split is larger than the toy world allows.
    """
    sizes = {"train": train_size, "heldout": heldout_size}
    for split, size in sizes.items():
        held_out = split == "heldout"
        if tasks == "calculator":
            pairs = calculator.sums(size, seed=seed, held_out=held_out)
            payloads = [CALCULATOR_ROWS[rows](pair) for pair in pairs]
        else:
            contrast = rows in ("pairs", "labelled")
            chosen = examples(size, seed=seed, held_out=held_out, wrong_too=contrast)
            payloads = [ROWS[rows](example) for example in chosen]
        with (out / f"{split}.jsonl").open("w", encoding="ascii", newline="\n") as file:
            for number, payload in enumerate(payloads):
                if held_out and "chosen" in payload:  # for evaluation
                    payload = {"messages": [*payload["prompt"], *payload["chosen"]], **payload}
                file.write(json.dumps({"id": f"{split}-{number:05}", **payload}) + "\n")
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
