"""Load a split of the dataset artifact as tokenised examples, memory-mapped by every rank.

Each rank tokenises a range of rows; the joined arrays lie beside the run's checkpoints, where a
resumed run finds them. An example has a sequence for each role of its objective:

rows           roles              loss on
conversations  text               the last answer, every answer, or every token
texts          text               every token, as in pre-training
pairs          chosen, rejected   the answers after the prompt
labelled       text, mismatched   the last answer; `mismatched` is the prompt with the answer
                                  of another example (Ethayarajh et al. 2024, sec. 4.1)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.core.errors import DataError
from tasks.core.events import emit
from tasks.core.files import flush_tree
from tasks.data.messages import Message
from tasks.serving.prompts import stop_ids
from tasks.training.job import Batch, TrainJob
from tasks.training.tokens.chat import Turns, Unfit, encode_conversations, encode_texts
from tasks.training.tokens.examples import (
    VALUES,
    Example,
    Examples,
    Tokens,
    join_examples,
    open_examples,
    save_examples,
)
from tasks.training.tokens.truncation import Tally, fit, refuse_truncated

if TYPE_CHECKING:
    from tasks.training.engine.deepspeed_engine import Ranks

Encode = Callable[[Sequence[Any]], list[Tokens | Unfit]]
"""Function from conversations, or raw texts, to their token ids and loss marks."""
CONVERSATIONS, PAIRS, LABELLED = ("text",), ("chosen", "rejected"), ("text", "mismatched")
EVERY_TOKEN = "every_token"
TOKENS, NOTES = "tokens", "notes.json"
CHUNK = 128
"""Rows tokenised in one call."""
PARTNERS = 64
"""Examples searched for a `mismatched` answer."""


def holds_texts(path: Path) -> bool:
    """Return True if the first row of a split is a raw text."""
    with path.open() as file:
        first = file.readline()
    return bool(first) and "text" in json.loads(first)


class Rows:
    """The rows of a split, read on demand. DataError if there is none."""

    def __init__(self, path: Path, *, roles: tuple[str, ...], mask: str, seed: int) -> None:
        self._roles, self._mask = roles, mask
        self._file = path.open("rb")
        self._ends = np.cumsum([len(line) for line in self._file])
        if not len(self):
            raise DataError(f"{path}: no samples", hint="data.path=... or data.eval_fraction=...")
        self.texts = "text" in self.read(0)
        if roles == LABELLED:
            self._order = np.random.default_rng(seed).permutation(len(self))
            self._place = np.argsort(self._order)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._ends)

    def read(self, number: int) -> dict[str, Any]:
        """Return row `number`, counted from 0."""
        self._file.seek(int(self._ends[number - 1]) if number else 0)
        row: dict[str, Any] = json.loads(self._file.readline())
        return row

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def example(self, number: int) -> Example:
        """Return the example of row `number`."""
        row = self.read(number)
        name, tools = str(row["id"]), row.get("tools")
        try:
            if self.texts:
                return Example(name, (row["text"],))
            if self._roles == PAIRS:
                prompt = row["prompt"]
                both = [Turns([*prompt, *row[r]], len(prompt), tools=tools) for r in PAIRS]
                margin = {"margin": float(row["margin"])} if "margin" in row else {}
                return Example(name, tuple(both), margin)
            messages = row["messages"]
            if self._roles == LABELLED:
                *prompt, answer = messages
                answers = (answer, self._partner(number, prompt, answer))
                both = [Turns([*prompt, each], len(prompt), tools=tools) for each in answers]
                return Example(name, tuple(both), {"desirable": float(bool(row["desirable"]))})
            first = len(messages) - 1 if self._mask == "last_answer" else 0
            turns = Turns(messages, first, self._mask == EVERY_TOKEN, tools)
            earlier = sum(message["role"] == "assistant" for message in messages[:first])
            return Example(name, (turns,), without_loss=earlier)
        except Unfit as unfit:
            return Example(name, problem=str(unfit))
        except (KeyError, TypeError, IndexError) as error:
            kind = " and ".join(self._roles)
            return Example(name, problem=f"not a row for training on {kind}: {error!r}")

    def _partner(self, number: int, prompt: list[Message], answer: Message) -> Message:
        """Return the next answer, in a shuffled order, whose prompt and text are both different."""
        place, total = int(self._place[number]), len(self)
        searched = min(PARTNERS, total - 1)
        for step in range(1, searched + 1):
            messages = self.read(int(self._order[(place + step) % total]))["messages"]
            if messages[-1] != answer and messages[:-1] != prompt:
                partner: Message = messages[-1]
                return partner
        raise Unfit(
            f"none of {searched} other examples has another prompt and another answer, which kto "
            "compares with"
        )


def load_split(
    job: TrainJob, split: str, *, roles: tuple[str, ...], tokenizer: Any, ranks: Ranks
) -> Examples:
    """Read, render and tokenise one split, each rank a part of it. Emits the event "data".

    In a resumed run it is only mapped, and the event says `cached`. All ranks take part. Raises
    DataError for samples that cannot be used, with their names, or if too many training rows would
    be truncated.
    """
    path, batch = job.data / f"{split}.jsonl", job.settings.batch
    rows = Rows(path, roles=roles, mask=job.settings.mask, seed=job.settings.seed)
    if not rows.texts and not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {job.side_files} has no chat template to render them",
            hint="data.chat_template=<Jinja file>",
        )
    folder = job.checkpoints / TOKENS / split
    cached = ranks.on_first(folder.is_dir)
    if not cached:
        encode: Encode = partial(encode_texts, tokenizer)
        if not rows.texts:
            ends = stop_ids(job.side_files, tokenizer.eos_token_id)
            encode = partial(encode_conversations, tokenizer, frozenset(ends))
        _tokenise(folder, rows, encode, batch, ranks, source=path.name)
    rows.close()
    notes = json.loads((folder / NOTES).read_text())
    if ranks.first:
        emit("data", split=split, cached=cached, **notes)
    if split == "train":  # truncated evaluation rows teach nothing wrong
        refuse_truncated(
            notes, source=path.name, max_len=batch.max_len, most=job.max_truncated,
            texts=rows.texts,
        )  # fmt: skip
    return open_examples(folder, roles)


def _tokenise(
    folder: Path, rows: Rows, encode: Encode, batch: Batch, ranks: Ranks, *, source: str
) -> None:
    """Tokenise a split on all ranks, each a range of neighbouring rows; one rename shows it."""
    staged, world = folder.with_name(f".{folder.name}"), ranks.world_size
    if ranks.first:
        shutil.rmtree(staged, ignore_errors=True)
    ranks.barrier()
    parts = [staged / f"part-{rank:05}" for rank in range(world)]
    parts[ranks.rank].mkdir(parents=True)
    begin, end = (len(rows) * part // world for part in (ranks.rank, ranks.rank + 1))
    tally = Tally()
    save_examples(parts[ranks.rank], _examples(rows, range(begin, end), encode, batch, tally))
    tally = sum(ranks.all_objects(tally), Tally())

    def publish() -> None:
        try:
            if problem := tally.problem(source):
                raise problem
            join_examples(staged, parts)
            _refuse_mixed_values(np.load(staged / "values.npy", mmap_mode="r"), source)
            (staged / NOTES).write_text(json.dumps(tally.event(batch.max_len)) + "\n")
            for part in parts:
                shutil.rmtree(part)
            flush_tree(staged)
            staged.rename(folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    ranks.on_first(publish)


def _examples(
    rows: Rows, numbers: range, encode: Encode, batch: Batch, tally: Tally
) -> Iterator[Example]:
    """Yield the examples of these rows, one chunk in memory at a time, and count the rows."""
    for start in range(0, len(numbers), CHUNK):
        read = [rows.example(n) for n in numbers[start : start + CHUNK]]
        encoded = iter(encode([each for example in read for each in example.sequences]))
        for example in read:
            tally.counts["without_loss"] += example.without_loss
            sequences = tuple(next(encoded) for _ in example.sequences)
            problems = [example.problem, *(str(s) for s in sequences if isinstance(s, Unfit))]
            if problem := next(filter(None, problems), ""):
                tally.note("unreadable", example.name, problem)
                continue
            example = example._replace(sequences=sequences)
            yield from fit(example, tally, max_len=batch.max_len, on_overlong=batch.on_overlong)


def _refuse_mixed_values(values: np.ndarray[Any, Any], source: str) -> None:
    """Raise DataError if some examples have a number that others lack."""
    for name, column in zip(VALUES, np.isnan(values).T, strict=True):
        if column.any() and not column.all():
            raise DataError(
                f"{source}: {int((~column).sum())} of {len(column)} rows have a {name}",
                hint="data.margin_key=<column> for all rows, or null",
            )
