"""Read the held-out rows of a dataset, and select the evaluation prompts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.core import machine
from tasks.core.errors import DataError
from tasks.data.messages import REASONING
from tasks.evaluation.scoring import Prompts
from tasks.serving.prompts import Chat, chat
from tasks.weights.files.documents import read_json
from tasks.weights.files.reader import weight_files

ROWS_AT_MOST = 2000
"""Maximum number of held-out rows to read."""


def read_heldout(path: Path) -> list[dict[str, Any]]:
    """Return the first `ROWS_AT_MOST` held-out conversations.

    A pair is read as the conversation with the chosen answer. A prompt for online training may have
    no answer.

    Raises:
        DataError: the file is missing, is empty, is not JSON, or has a row without an answer.
    """
    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if len(rows) == ROWS_AT_MOST:
                    break
                rows.append(_conversation(json.loads(line)))
                answered = rows[-1]["messages"][-1]["role"] == "assistant"
                if not answered and "columns" not in rows[-1]:
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
    """Return the expected answer of a row.

    None if the row is a prompt alone, or its answer is more than a text: a template writes calls of
    tools and reasoning in its own way.
    """
    last = row["messages"][-1]
    more = last.keys() & {"tool_calls", *REASONING}
    return str(last["content"]) if last["role"] == "assistant" and not more else None


def _conversation(row: dict[str, Any]) -> dict[str, Any]:
    if "chosen" not in row:
        return row
    return {**row, "messages": [*row["prompt"], *row["chosen"]]}


def read_texts(path: Path) -> list[str]:
    """Return the first `ROWS_AT_MOST` held-out raw texts.

    Raises:
        DataError: the file is missing, is empty, or has a row that is not a text.
    """
    texts: list[str] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in itertools.islice(file, ROWS_AT_MOST):
                texts.append(str(json.loads(line)["text"]))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}:{len(texts) + 1}: not a text: {error}") from error
    if not texts:
        raise DataError(f"{path} is empty: nothing to evaluate on", hint="data.eval_fraction=0.05")
    return texts


def read_pairs(path: Path) -> list[tuple[Chat, Chat]]:
    """Return the held-out pairs: the conversations with the chosen and with the rejected answer.

    Raises:
        DataError: the file cannot be read (see `read_heldout`), or a row is not a pair.
    """
    pairs: list[tuple[Chat, Chat]] = []
    for row in read_heldout(path):
        if "rejected" not in row:
            raise DataError(f"{path}: {row.get('id', 'a row')} is not a pair of answers")
        pairs.append((row, chat([*row["prompt"], *row["rejected"]], row)))
    return pairs


def answerable(
    rows: Sequence[Mapping[str, Any]], rendered: Prompts, *, longest: int, answer: int
) -> list[int]:
    """Return the indices of the rows that can be used as evaluation prompts.

    The prompt of such a row leaves room for a full response, and its answer is not marked as
    undesirable.

    Raises:
        DataError: no row can be used.
    """
    limit = longest - answer
    short = [i for i, prompt in enumerate(rendered.tokens) if len(prompt) <= limit]
    if not short:
        raise DataError(
            f"no held-out prompt of {len(rendered.tokens)} leaves room for "
            f"{answer} new tokens in {longest}",
            hint="smoke.max_new_tokens=... (smaller)",
        )
    desirable = [i for i in short if rows[i].get("desirable", True)]
    if not desirable:
        raise DataError(
            f"all {len(short)} held-out answers are marked as undesirable: nothing to compare with",
            hint="data.eval_path=<rows with desirable answers>",
        )
    return desirable


def dtype_of(folder: Path) -> str:
    """Return the torch dtype name in a model's config.json (key `torch_dtype` in older files)."""
    config = read_json(folder / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def computing_dtype_of(folder: Path) -> str:
    """Return the torch name of the dtype in which this machine computes a model."""
    size = sum(file.stat().st_size for file in weight_files(folder, "*.safetensors"))
    return machine.computing_dtype(dtype_of(folder), size)


def context_of(served: Path) -> int:
    """Return the context length of a model in tokens, from its config.json."""
    config = read_json(served / "config.json")
    text = config.get("text_config") or config
    return int(text.get("max_position_embeddings") or 1 << 30)
