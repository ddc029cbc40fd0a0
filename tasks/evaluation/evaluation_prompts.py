"""The held-out conversations that a served model is asked with."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.core.errors import DataError
from tasks.evaluation.scoring import Prompts
from tasks.weights.files.reader import read_json

ROWS_AT_MOST = 2000
"""Held-out rows rendered when looking for the probes' conversations."""


def read_heldout(path: Path) -> list[dict[str, Any]]:
    """The held-out conversations, `ROWS_AT_MOST` of them.

    Of a pair it is the one with the chosen answer. A prompt to learn on from one's own replies may
    stand without an answer.

    Raises:
        DataError: missing, not JSON, without an answer, or empty.
    """
    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if len(rows) == ROWS_AT_MOST:
                    break
                rows.append(_conversation(json.loads(line)))
                if answer_of(rows[-1]) is None and "columns" not in rows[-1]:
                    raise DataError(f"{path}:{number}: the last message is not the assistant's")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}:{number}: not a conversation: {error}") from error
    if not rows:
        raise DataError(f"{path} is empty: nothing to evaluate on", hint="data.eval_fraction=0.05")
    return rows


def answer_of(row: Mapping[str, Any]) -> str | None:
    """The answer that a model is held to; None for a prompt that stands alone."""
    last = row["messages"][-1]
    return str(last["content"]) if last["role"] == "assistant" else None


def question_of(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages that are to be answered."""
    messages = list(row["messages"])
    return messages if answer_of(row) is None else messages[:-1]


def _conversation(row: dict[str, Any]) -> dict[str, Any]:
    if "chosen" not in row:
        return row
    return {**row, "messages": [*row["prompt"], *row["chosen"]]}


def read_texts(path: Path) -> list[str]:
    """The held-out raw texts, `ROWS_AT_MOST` of them.

    Raises:
        DataError: missing, not JSON, no texts, or empty.
    """
    found: list[str] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in itertools.islice(file, ROWS_AT_MOST):
                found.append(str(json.loads(line)["text"]))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}:{len(found) + 1}: not a text: {error}") from error
    if not found:
        raise DataError(f"{path} is empty: nothing to evaluate on", hint="data.eval_fraction=0.05")
    return found


def read_pairs(path: Path) -> list[tuple[list[dict[str, str]], list[dict[str, str]]]]:
    """The held-out pairs: conversations with the chosen and with the rejected answer.

    Raises:
        DataError: as of `read_heldout`, or rows that are no pairs.
    """
    found = []
    for row in read_heldout(path):
        if "rejected" not in row:
            raise DataError(f"{path}: {row.get('id', 'a row')} is no pair of answers")
        found.append((row["messages"], [*row["prompt"], *row["rejected"]]))
    return found


def answerable(
    rows: Sequence[Mapping[str, Any]], rendered: Prompts, *, longest: int, answer: int
) -> list[int]:
    """Numbers of the rows that a model can be asked with, and be held to the answer if any.

    Their prompts leave room for a whole answer; and an answer that is marked as not desirable is
    none that a model should repeat.

    Args:
        rows: the conversations.
        rendered: their prompts.
        longest: tokens that the engine takes, prompt and answer together.
        answer: tokens of a whole answer.

    Raises:
        DataError: there is none.
    """
    limit = longest - answer
    short = [i for i, prompt in enumerate(rendered.tokens) if len(prompt) <= limit]
    if not short:
        raise DataError(
            f"no held-out prompt of {len(rendered.tokens)} leaves room for "
            f"{answer} new tokens in {longest}",
            hint="smoke.max_new_tokens=... (smaller)",
        )
    found = [i for i in short if rows[i].get("desirable", True)]
    if not found:
        raise DataError(
            f"none of {len(short)} held-out answers is marked as desirable: nothing to be held to",
            hint="data.eval_path=<rows with desirable answers>",
        )
    return found


def dtype_of(folder: Path) -> str:
    """torch name of a model's dtype, as its config.json has it; older ones say `torch_dtype`."""
    config = read_json(folder / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def context_of(served: Path) -> int:
    """Tokens that the model was made for."""
    config = read_json(served / "config.json")
    text = config.get("text_config") or config
    return int(text.get("max_position_embeddings") or 1 << 30)
