"""Conversations to token ids, with the answer's tokens marked.

The loss falls on the last assistant turn and the token that ends it, on nothing else. The boundary
is where the template, asked for a generation prompt, stops: that is what a server will feed
the model. It is only trusted when it holds twice over: the rendered prompt is a prefix of the
rendered conversation, and so are its token ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tasks.errors import DataError


class Sample(NamedTuple):
    """One tokenised conversation. `prompt` counts the leading tokens that bear no loss."""

    id: str
    ids: tuple[int, ...]
    prompt: int

    @property
    def supervised(self) -> int:
        """Tokens that bear loss."""
        return len(self.ids) - self.prompt


@dataclass(frozen=True)
class Counts:
    """What became of the samples that were read."""

    read: int
    kept: int
    truncated: int
    refused: int


class Problem(NamedTuple):
    """A sample that cannot be used: `overlong` ones may be left out, others may not."""

    id: str
    text: str
    overlong: bool


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a prepared JSON Lines file.

    Raises:
        DataError: when it is missing or a line is not JSON; names file and line.
    """
    rows = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise DataError(f"{path}:{number}: not JSON: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    return rows


def encode(
    row: dict[str, Any], tokenizer: Any, *, ends: frozenset[int], max_len: int
) -> Sample | Problem:
    """Render and tokenise one conversation.

    Args:
        row: `{"id", "messages"}` whose last message is the assistant's.
        tokenizer: a Hugging Face tokenizer with a chat template.
        ends: token ids that may end a turn.
        max_len: longest prompt that can be trained on is one token less than this.

    Returns:
        The sample, whole even when it is longer than `max_len`, or what is wrong with it.
    """
    name, messages = str(row["id"]), row["messages"]
    if not messages or messages[-1]["role"] != "assistant":
        return Problem(name, "the last message is not the assistant's", overlong=False)
    prompt_text = tokenizer.apply_chat_template(
        messages[:-1], tokenize=False, add_generation_prompt=True
    )
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer(prompt_text, add_special_tokens=False)["input_ids"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not text.startswith(prompt_text) or ids[: len(prompt)] != prompt:
        return Problem(
            name,
            "the chat template is not prefix-stable: the prompt alone is not how the whole "
            "conversation begins, so the answer's first token cannot be told",
            overlong=False,
        )
    end = next((i for i in range(len(ids) - 1, len(prompt) - 1, -1) if ids[i] in ends), None)
    if end is None:
        found = f"none of the ids {sorted(ends)} after the answer"
        return Problem(name, f"the chat template does not end the turn: {found}", overlong=False)
    if len(prompt) >= max_len:
        text = f"prompt of {len(prompt)} tokens leaves no room in {max_len}"
        return Problem(name, text, overlong=True)
    return Sample(name, tuple(ids[: end + 1]), len(prompt))


def settle(
    encoded: Sequence[Sample | Problem], *, max_len: int, on_overlong: str, source: str
) -> tuple[list[Sample], Counts, list[Problem]]:
    """Apply the rule for overlong samples to everything that was encoded.

    `truncate` cuts answers at `max_len`, and a prompt that fills the context by itself is an
    error; `refuse` leaves every overlong sample out.

    Returns:
        Samples to use, counts, and the samples left out.

    Raises:
        DataError: naming every sample that cannot be used, or when none is left.
    """
    kept: list[Sample] = []
    left_out: list[Problem] = []
    fatal: list[Problem] = []
    truncated = 0
    for one in encoded:
        if isinstance(one, Problem):
            (left_out if one.overlong and on_overlong == "refuse" else fatal).append(one)
        elif len(one.ids) <= max_len:
            kept.append(one)
        elif on_overlong == "refuse":
            text = f"{len(one.ids)} tokens, train.max_len is {max_len}"
            left_out.append(Problem(one.id, text, overlong=True))
        else:
            truncated += 1
            kept.append(one._replace(ids=one.ids[:max_len]))
    _raise_for(fatal, source)
    if not kept:
        raise DataError(
            f"{source}: no sample is left of {len(encoded)}",
            details=[f"{p.id}: {p.text}" for p in left_out[:20]],
            hint="train.max_len=... (larger), or other data",
        )
    return kept, Counts(len(encoded), len(kept), truncated, len(left_out)), left_out


def _raise_for(fatal: Sequence[Problem], source: str) -> None:
    if not fatal:
        return
    lines = [f"{p.id}: {p.text}" for p in fatal[:20]]
    if len(fatal) > len(lines):
        lines.append(f"... and {len(fatal) - len(lines)} more")
    overlong = all(p.overlong for p in fatal)
    raise DataError(
        f"{source}: {len(fatal)} samples cannot be used, first {fatal[0].id}: {fatal[0].text}",
        details=lines,
        hint="train.max_len=... (larger) or train.on_overlong=refuse (leaves them out, counted)"
        if overlong
        else "data.chat_template=... or correct the samples",
    )
