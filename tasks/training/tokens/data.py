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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tasks.core.disk import flush_tree
from tasks.core.errors import ConfigError, DataError
from tasks.core.events import emit
from tasks.serving.prompts import stop_ids
from tasks.training.job import TrainJob
from tasks.training.tokens.chat import Encoder, Message, Turns, Unfit, encode_texts
from tasks.training.tokens.examples import (
    VALUES,
    Example,
    Examples,
    Tokens,
    join_examples,
    open_examples,
    save_examples,
)
from tasks.training.tokens.truncation import SPLIT, Rule, Tally, refuse_truncated

if TYPE_CHECKING:
    from tasks.training.engine.deepspeed_engine import Ranks

Encode = Callable[[Sequence[Any]], list[Tokens | Unfit]]
"""Function from conversations, or raw texts, to their token ids and loss marks."""
CONVERSATIONS, PAIRS, LABELLED = ("text",), ("chosen", "rejected"), ("text", "mismatched")
_KINDS = {CONVERSATIONS: "conversations", PAIRS: "pairs", LABELLED: "labelled"}
EVERY_TOKEN = "every_token"
TOKENS, NOTES = "tokens", "notes.json"
CHUNK = 128
"""Rows tokenised in one call."""
PARTNERS = 64
"""Examples searched for a `mismatched` answer."""


class RowFile:
    """A JSON Lines file whose rows are read on demand. Raises DataError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
        self._ends = np.cumsum([len(line) for line in self._file])

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._ends)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return row `number`, counted from 0; DataError if it is not JSON or has no id."""
        self._file.seek(int(self._ends[number - 1]) if number else 0)
        try:
            row = json.loads(self._file.readline())
        except ValueError as error:
            raise DataError(f"{self.path}:{number + 1}: not JSON: {error}") from error
        if not isinstance(row, dict) or "id" not in row:
            raise DataError(f"{self.path}:{number + 1}: not a row of a dataset: no id")
        return row

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def holds_texts(path: Path) -> bool:
    """Return True if the first row of a split is a raw text."""
    with path.open() as file:
        first = file.readline()
    return bool(first) and "text" in json.loads(first)


class Draft(NamedTuple):
    """An example before tokenisation: conversations or raw texts by role, and the row's numbers.

    `without_loss` counts the answers of a conversation that bear no loss.
    """

    conversations: tuple[Any, ...]
    values: Mapping[str, float] = {}
    without_loss: int = 0


class Drafts:
    """The drafts of a split, by number.

    Raises:
        ConfigError: the rows are not of the kind that the roles need.
        DataError: the split is empty or cannot be read.
    """

    def __init__(self, path: Path, *, roles: tuple[str, ...], mask: str, seed: int) -> None:
        self.rows, self._roles, self._mask = RowFile(path), roles, mask
        if not len(self.rows):
            raise DataError(f"{path}: no samples", hint="data.path=... or data.eval_fraction=...")
        first = self.rows[0]
        self.texts = "text" in first
        kind = PAIRS if "chosen" in first else LABELLED if "desirable" in first else CONVERSATIONS
        if kind != roles:
            raise ConfigError(
                f"{path} holds {_KINDS[kind]}, the objective needs {_KINDS[roles]}",
                hint="make the dataset for this objective: prepare_data with train.objective=...",
            )
        if self.texts and mask != EVERY_TOKEN:
            raise ConfigError(
                f"train.mask={mask}, and {path} holds raw texts, which have no answers",
                hint=f"train.mask={EVERY_TOKEN}",
            )
        if roles == LABELLED:
            self._order = np.random.default_rng(seed).permutation(len(self.rows))
            self._place = np.argsort(self._order)

    def draft(self, number: int) -> tuple[str, Draft | Unfit]:
        """Return the id of row `number`, and its draft or the reason why it cannot be used."""
        row = self.rows[number]
        name = str(row["id"])
        try:
            if self._roles == PAIRS:
                return name, self._pair(row)
            if self._roles == LABELLED:
                return name, self._labelled(row, number)
            return name, self._conversation(row)
        except Unfit as unfit:
            return name, unfit
        except (KeyError, TypeError, IndexError) as error:
            return name, Unfit(f"not a row of {_KINDS[self._roles]}: {error!r}")

    def _conversation(self, row: dict[str, Any]) -> Draft:
        if self.texts:
            return Draft((row["text"],))
        messages = row["messages"]
        first = len(messages) - 1 if self._mask == "last_answer" else 0
        turns = Turns(messages, first, self._mask == EVERY_TOKEN, row.get("tools"))
        earlier = sum(message["role"] == "assistant" for message in messages[:first])
        return Draft((turns,), without_loss=earlier)

    def _pair(self, row: dict[str, Any]) -> Draft:
        prompt, tools = row["prompt"], row.get("tools")
        both = tuple(Turns([*prompt, *row[role]], len(prompt), tools=tools) for role in PAIRS)
        return Draft(both, {"margin": float(row["margin"])} if "margin" in row else {})

    def _labelled(self, row: dict[str, Any], number: int) -> Draft:
        *prompt, answer = row["messages"]
        both = ([*prompt, answer], [*prompt, self._partner(number, prompt, answer)])
        return Draft(
            tuple(Turns(each, len(prompt), tools=row.get("tools")) for each in both),
            {"desirable": float(bool(row["desirable"]))},
        )

    def _partner(self, number: int, prompt: list[Message], answer: Message) -> Message:
        """Return the next answer, in a shuffled order, whose prompt and text are both different."""
        place, total = int(self._place[number]), len(self.rows)
        searched = min(PARTNERS, total - 1)
        for step in range(1, searched + 1):
            messages = self.rows[int(self._order[(place + step) % total])]["messages"]
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
    ConfigError if the objective cannot learn from rows of this kind, DataError for samples that
    cannot be used, with their names, or if too many training rows would be truncated.
    """
    path, batch = job.data / f"{split}.jsonl", job.settings.batch
    drafts = Drafts(path, roles=roles, mask=job.settings.mask, seed=job.settings.seed)
    if batch.on_overlong == SPLIT and not drafts.texts:
        raise ConfigError(
            f"train.on_overlong={SPLIT} is for raw texts, and {path} holds none: a piece of a "
            "conversation has no prompt",
            hint="train.on_overlong=truncate or refuse",
        )
    if not drafts.texts and not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {job.side_files} has no chat template to render them",
            hint="data.chat_template=<Jinja file>",
        )
    folder = job.checkpoints / TOKENS / split
    cached = ranks.on_first(folder.is_dir)
    if not cached:
        encode: Encode = partial(encode_texts, tokenizer)
        if not drafts.texts:
            ends = stop_ids(job.side_files, tokenizer.eos_token_id)
            encode = Encoder(tokenizer, frozenset(ends)).encode
        rule = Rule(batch.max_len, batch.on_overlong)
        _tokenise(folder, Tokeniser(drafts, encode, rule), ranks)
    drafts.rows.close()
    notes = json.loads((folder / NOTES).read_text())
    if ranks.first:
        emit("data", split=split, cached=cached, **notes)
    if split == "train":  # truncated evaluation rows teach nothing wrong
        refuse_truncated(
            notes, source=path.name, max_len=batch.max_len, most=job.max_truncated,
            texts=drafts.texts,
        )  # fmt: skip
    return open_examples(folder, roles)


@dataclass(frozen=True)
class Tokeniser:
    """Tokenises rows, one chunk in memory at a time."""

    drafts: Drafts
    encode: Encode
    rule: Rule

    def examples(self, numbers: range, tally: Tally) -> Iterator[Example]:
        """Yield the examples of these rows, and count the rows."""
        for start in range(0, len(numbers), CHUNK):
            drafts = [self.drafts.draft(n) for n in numbers[start : start + CHUNK]]
            good = [draft for _, draft in drafts if isinstance(draft, Draft)]
            encoded = iter(self.encode([c for d in good for c in d.conversations]))
            for name, draft in drafts:
                if isinstance(draft, Unfit):
                    tally.unreadable(name, str(draft))
                    continue
                tally.counts["without_loss"] += draft.without_loss
                sequences = [next(encoded) for _ in draft.conversations]
                unfit = [str(sequence) for sequence in sequences if isinstance(sequence, Unfit)]
                if unfit:
                    tally.unreadable(name, unfit[0])
                    continue
                tokens = tuple(sequence for sequence in sequences if isinstance(sequence, Tokens))
                yield from self.rule.examples(Example(name, tokens, draft.values), tally)


def _tokenise(folder: Path, tokeniser: Tokeniser, ranks: Ranks) -> None:
    """Tokenise a split on all ranks, each a range of neighbouring rows; one rename shows it."""
    staged, rows = folder.with_name(f".{folder.name}"), tokeniser.drafts.rows
    if ranks.first:
        shutil.rmtree(staged, ignore_errors=True)
        (staged / "whole").mkdir(parents=True)
    ranks.barrier()
    total, world = len(rows), ranks.world_size
    begin, end = (total * part // world for part in (ranks.rank, ranks.rank + 1))
    parts = [staged / f"part-{rank:05}" for rank in range(world)]
    # Errors are exchanged, since the other ranks wait.
    tally, error = Tally(), None
    try:
        parts[ranks.rank].mkdir()
        save_examples(parts[ranks.rank], tokeniser.examples(range(begin, end), tally))
    except DataError as wrong:
        error = wrong
    except OSError as wrong:
        error = DataError(
            f"{staged}: tokenised data cannot be written: {wrong.strerror or wrong}",
            hint="free space there, or paths.runs=<another disk>",
        )
    tallies, errors = zip(*ranks.all_objects((tally, error)), strict=True)
    tally, source = sum(tallies, Tally()), rows.path.name
    problem = next(filter(None, errors), None) or tally.problem(source)
    if problem is None and ranks.first:
        whole = staged / "whole"
        join_examples(whole, parts)
        problem = _mixed_values(np.load(whole / "values.npy", mmap_mode="r"), source)
        (whole / NOTES).write_text(json.dumps(tally.event(tokeniser.rule.max_len)) + "\n")
        flush_tree(whole)
        if problem is None:
            whole.rename(folder)
    problem = ranks.all_objects(problem)[0]
    if ranks.first:
        shutil.rmtree(staged, ignore_errors=True)
    if problem is not None:
        raise problem


def _mixed_values(values: np.ndarray[Any, Any], source: str) -> DataError | None:
    """Return the error if some examples have a number that others lack."""
    for name, column in zip(VALUES, np.isnan(values).T, strict=True):
        if column.any() and not column.all():
            return DataError(
                f"{source}: {int((~column).sum())} of {len(column)} rows have a {name}",
                hint="data.margin_key=<column> for all rows, or null",
            )
    return None
