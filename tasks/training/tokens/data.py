"""Load a split of the dataset artifact as tokenised examples, memory-mapped by every rank.

Each rank tokenises a range of rows; the joined arrays lie beside the run's checkpoints, where a
resumed run finds them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.core.disk import flush_tree
from tasks.core.errors import ConfigError, DataError
from tasks.core.events import emit
from tasks.serving.prompts import stop_ids
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import TrainJob
from tasks.training.tokens.chat import Encoder, TextEncoder, Unfit
from tasks.training.tokens.examples import (
    VALUES,
    Example,
    Examples,
    join_examples,
    open_examples,
    save_examples,
)
from tasks.training.tokens.rows import Drafts
from tasks.training.tokens.truncation import SPLIT, Rule, Tally, refuse_truncated

TRAIN = "train"
TOKENS, NOTES = "tokens", "notes.json"
CHUNK = 128
"""Rows tokenised in one call."""


def load_split(
    job: TrainJob, split: str, *, roles: tuple[str, ...], tokenizer: Any, ranks: Ranks
) -> Examples:
    """Read, render and tokenise one split, each rank a part of it. Emits the event "data".

    In a resumed run it is only mapped, and the event says `cached`. All ranks take part.

    Raises:
        ConfigError: the objective cannot learn from rows of this kind, or `train.on_overlong=split`
            with rows that are not raw texts.
        DataError: samples cannot be used (raised on every rank, with their names), or too many
            training rows would be truncated.
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
        encoder: Any = TextEncoder(tokenizer)
        if not drafts.texts:
            ends = stop_ids(job.side_files, tokenizer.eos_token_id)
            encoder = Encoder(tokenizer, frozenset(ends))
        share = _Share(drafts, encoder, Rule(batch.max_len, batch.on_overlong))
        _tokenise(folder, share, ranks)
    drafts.close()
    notes = json.loads((folder / NOTES).read_text())
    if ranks.first:
        emit("data", split=split, cached=cached, **notes)
    if split == TRAIN:  # truncated evaluation rows teach nothing wrong
        refuse_truncated(
            notes, source=path.name, max_len=batch.max_len, most=job.max_truncated,
            texts=drafts.texts,
        )  # fmt: skip
    return open_examples(folder, roles)


@dataclass(frozen=True)
class _Share:
    """Tokenises rows, one chunk in memory at a time."""

    drafts: Drafts
    encoder: Any
    rule: Rule

    def examples(self, numbers: range, tally: Tally) -> Iterator[Example]:
        for start in range(0, len(numbers), CHUNK):
            drafts = [self.drafts.draft(n) for n in numbers[start : start + CHUNK]]
            encoded = iter(self.encoder.encode([c for d in drafts for c in d.conversations]))
            for draft in drafts:
                sequences = [next(encoded) for _ in draft.conversations]
                tally.without_loss += draft.without_loss
                wrong = draft.problem or next(
                    (str(s) for s in sequences if isinstance(s, Unfit)), ""
                )
                if wrong:
                    tally.unreadable += 1
                    tally.refuse(draft.name, wrong)
                    continue
                tokens = tuple(s for s in sequences if not isinstance(s, Unfit))
                yield from self.rule.examples(Example(draft.name, tokens, draft.values), tally)


def _tokenise(folder: Path, share: _Share, ranks: Ranks) -> None:
    """Tokenise a split on all ranks, each a range of neighbouring rows; one rename shows it."""
    staged = folder.with_name(f".{folder.name}")
    if ranks.first:
        shutil.rmtree(staged, ignore_errors=True)
        (staged / "whole").mkdir(parents=True)
    ranks.barrier()
    total, world = len(share.drafts), ranks.world_size
    begin, end = (total * part // world for part in (ranks.rank, ranks.rank + 1))
    parts = [staged / f"part-{rank:05}" for rank in range(world)]
    # Errors are exchanged, since the other ranks wait.
    tally, error = Tally(), None
    try:
        parts[ranks.rank].mkdir()
        save_examples(parts[ranks.rank], share.examples(range(begin, end), tally))
    except DataError as wrong:
        error = wrong
    except OSError as wrong:
        error = DataError(
            f"{staged}: tokenised data cannot be written: {wrong.strerror or wrong}",
            hint="free space there, or paths.runs=<another disk>",
        )
    tallies, errors = zip(*ranks.all_objects((tally, error)), strict=True)
    tally, source = sum(tallies, Tally()), share.drafts.path.name
    problem = next(filter(None, errors), None) or tally.problem(source)
    if problem is None and ranks.first:
        whole = staged / "whole"
        join_examples(whole, parts)
        problem = _mixed_values(np.load(whole / "values.npy", mmap_mode="r"), source)
        (whole / NOTES).write_text(json.dumps(tally.counts(share.rule.max_len)) + "\n")
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
