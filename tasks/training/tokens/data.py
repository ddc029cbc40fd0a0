"""Load a split of the dataset artifact as tokenised examples, memory-mapped by every rank.

Runs share tokenised splits. The folder's name is the digest of everything that determines its
bytes: the split's file, the tokenizer and its template, the settings, and the code. It appears by
one rename, so that runs can make the same split at the same time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tasks.core.disk import flush_tree
from tasks.core.errors import ConfigError, DataError
from tasks.core.events import emit
from tasks.pipeline.artifact import hash_of
from tasks.pipeline.source_closure import source_digest
from tasks.serving.prompts import stop_ids
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import TrainJob
from tasks.training.tokens.chat import Encoder, TextEncoder, Unfit
from tasks.training.tokens.examples import (
    Example,
    Examples,
    Tokens,
    Writer,
    describe,
    join_parts,
    notes_of,
    open_examples,
)
from tasks.training.tokens.rows import Draft, Drafts, holds_texts
from tasks.training.tokens.truncation import SPLIT, Rule, Tally, refuse_truncated

TRAIN = "train"
ABANDONED_S = 86_400
CHUNK = 128
"""Rows tokenised in one call."""


def load_split(
    job: TrainJob, split: str, *, roles: tuple[str, ...], tokenizer: Any, ranks: Ranks
) -> Examples:
    """Read, render and tokenise one split, each rank a part of it. Emits the event "data".

    If the split was tokenised before, with the same data, tokenizer and settings, it is only mapped
    and the event says `cached`. All ranks take part.

    Args:
        job: settings and paths of the run.
        split: `train` or `heldout`.
        roles: the objective's `roles`.
        tokenizer: the model's tokenizer.
        ranks: the process group.

    Raises:
        ConfigError: the objective cannot learn from rows of this kind, or `train.on_overlong=split`
            with rows that are not raw texts.
        DataError: samples cannot be used (raised on every rank, with their names), or too many
            training rows would be truncated.
    """
    path, batch = job.data / f"{split}.jsonl", job.settings.batch
    texts = holds_texts(path)
    if batch.on_overlong == SPLIT and not texts:
        raise ConfigError(
            f"train.on_overlong={SPLIT} is for raw texts, and {path} holds none: a piece of a "
            "conversation has no prompt",
            hint="train.on_overlong=truncate or refuse",
        )
    if not texts and not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {job.side_files} has no chat template to render them",
            hint="data.chat_template=<Jinja file>",
        )
    ends = stop_ids(job.side_files, tokenizer.eos_token_id)
    recipe = {
        "code": source_digest([__name__]),
        "data": split_digest(path),
        "tokenizer": tokenizer_digest(tokenizer),
        "ends": ends,
        "roles": roles,
        "mask": job.settings.mask,
        "max_len": batch.max_len,
        "on_overlong": batch.on_overlong,
        "seed": job.settings.seed if len(roles) > 1 else None,
    }
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    folder = job.token_folder / digest[:24]
    cached = ranks.all_objects(ranks.first and folder.is_dir())[0]
    if not cached:
        drafts = Drafts(path, roles=roles, mask=job.settings.mask, seed=job.settings.seed)
        rule = Rule(batch.max_len, batch.on_overlong)
        encoder = TextEncoder(tokenizer) if texts else Encoder(tokenizer, frozenset(ends))
        share = _Share(drafts, encoder.encode, rule, roles)
        _make(folder, share, ranks, source=path.name)
        drafts.close()
    notes = notes_of(folder)
    if ranks.first:
        emit("data", split=split, cached=cached, **notes)
    if split == TRAIN:  # truncated evaluation rows teach nothing wrong
        refuse_truncated(
            notes, source=path.name, max_len=batch.max_len, most=job.max_truncated, texts=texts
        )
    return open_examples(folder)


class _Part(NamedTuple):
    """Result of one rank: names of its examples' values, an account of its rows, an error."""

    values: tuple[str, ...] | None
    tally: Tally
    error: DataError | None = None


@dataclass(frozen=True)
class _Share:
    """Tokenises a range of rows and writes them as examples."""

    drafts: Drafts
    encode: Callable[[Sequence[Any]], list[Tokens | Unfit]]
    rule: Rule
    roles: tuple[str, ...]

    def write(self, folder: Path, numbers: range) -> _Part:
        """Tokenise these rows into an empty folder, with one chunk in memory at a time."""
        tally = Tally()
        with Writer(folder, roles=self.roles) as writer:
            for start in range(0, len(numbers), CHUNK):
                drafts = [self.drafts[n] for n in numbers[start : start + CHUNK]]
                for example in self._examples(drafts, tally):
                    writer.add(example)
        return _Part(writer.values, tally)

    def _examples(self, drafts: list[Draft], tally: Tally) -> Iterator[Example]:
        wanted = [turns for draft in drafts for turns in draft.conversations]
        encoded = iter(self.encode(wanted))
        for draft in drafts:
            sequences = [next(encoded) for _ in draft.conversations]
            tally.without_loss += draft.without_loss
            wrong = draft.problem or next((str(s) for s in sequences if isinstance(s, Unfit)), "")
            if wrong:
                tally.read += 1
                tally.refuse(draft.name, wrong)
                continue
            tokens = tuple(s for s in sequences if not isinstance(s, Unfit))
            yield from self.rule.examples(Example(draft.name, tokens, draft.values), tally)


def _make(folder: Path, share: _Share, ranks: Ranks, *, source: str) -> None:
    """Tokenise a split on all ranks, each a range of neighbouring rows, and publish it."""
    staged = Path(ranks.all_objects(str(_stage(folder)) if ranks.first else "")[0])
    total, world = len(share.drafts), ranks.world_size
    begin, end = (total * part // world for part in (ranks.rank, ranks.rank + 1))
    folders = [staged / f"part-{rank:05}" for rank in range(world)]
    parts = ranks.all_objects(_guarded(share, folders[ranks.rank], range(begin, end)))
    tally = sum((part.tally for part in parts), Tally())
    try:
        _raise_first([part.error for part in parts])
        tally.raise_if_unusable(source)
        values = _values([part.values for part in parts], source)
    except DataError:
        if ranks.first:
            shutil.rmtree(staged, ignore_errors=True)
        raise
    if ranks.first:
        whole = staged / "whole"
        whole.mkdir()
        join_parts(whole, folders)
        describe(whole, roles=share.roles, values=values, notes=tally.counts())
        flush_tree(whole)
        try:
            whole.rename(folder)
        except OSError:  # another run has published the same bytes meanwhile
            if not folder.is_dir():
                raise
        shutil.rmtree(staged, ignore_errors=True)
    ranks.barrier()


def _stage(folder: Path) -> Path:
    """Make an empty folder beside `folder`; remove those that killed runs left, after a day."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(".*"):
        if left.stat().st_mtime < time.time() - ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))


def _guarded(share: _Share, folder: Path, numbers: range) -> _Part:
    """Tokenise a rank's rows. Errors are returned, since the other ranks wait for the result."""
    try:
        folder.mkdir()
        return share.write(folder, numbers)
    except DataError as error:
        return _Part(None, Tally(), error)
    except ValueError as error:  # rows with other values than those before them
        wrong = DataError(f"{folder.name}: {error}", hint="data.margin_key: for all rows, or none")
        return _Part(None, Tally(), wrong)
    except OSError as error:
        text = f"{folder}: tokenised data cannot be written: {error.strerror or error}"
        wrong = DataError(text, hint="free space there, or paths.runs=<another disk>")
        return _Part(None, Tally(), wrong)


def _raise_first(errors: Sequence[DataError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


def _values(parts: Sequence[tuple[str, ...] | None], source: str) -> tuple[str, ...]:
    """Return the names of the examples' values, which have to be the same on every rank."""
    several = {names for names in parts if names is not None}
    if len(several) > 1:
        named = [", ".join(names) or "none" for names in sorted(several)]
        raise DataError(f"{source}: some rows carry {named[0]}, others {named[1]}",
                        hint="data.margin_key=<column>, or null for all rows")  # fmt: skip
    return several.pop() if several else ()


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of everything that determines a tokenizer's output."""
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer.to_str()
    else:
        core = json.dumps([tokenizer.get_vocab(), tokenizer.init_kwargs], sort_keys=True,
                          default=str)  # fmt: skip
    parts = [type(tokenizer).__name__, core, str(tokenizer.chat_template),
             json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def split_digest(path: Path) -> str:
    """Return the SHA-256 of a split's file, from the artifact's manifest if there is one.

    Raises:
        DataError: the file or its manifest cannot be read.
    """
    manifest = path.parent / "manifest.json"
    try:
        if manifest.is_file():
            entry = json.loads(manifest.read_text())["files"][path.name]
            return str(entry[hash_of(entry)])
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
