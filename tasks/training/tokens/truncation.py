"""Truncation of samples longer than `train.max_len`, and an account of all samples.

    train.on_overlong=truncate   answers are cut at the end; a prompt that fills `train.max_len` is
                                 an error
    train.on_overlong=refuse     samples that are too long are left out and counted
    train.on_overlong=split      raw texts only: cut into pieces, each of which is a sample

Prompts are never cut. A truncated answer lacks the token that ends it, so the model does not learn
to stop there. More than `WARNED` of the rows truncated is a warning, more than `data.max_truncated`
of the training rows an error. Pairs whose answers have the same tokens are left out and counted
(`equal`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from tasks.core.errors import DataError
from tasks.training.tokens.chat import pieces
from tasks.training.tokens.examples import Example, Tokens

SHOWN = 20
SPLIT = "split"
WARNED = 0.01
"""Share of rows truncated, or left out for their length, above which there is a warning."""


@dataclass
class Tally:
    """Account of the samples; `+` adds the accounts of several ranks.

    Attributes:
        kept: samples used; each piece of a text counts.
        truncated: samples used of which tokens were cut off.
        ends_cut: answers that lost their end.
        tokens_cut: tokens cut off.
        in_pieces: texts cut into pieces.
        refused: samples left out because they are too long.
        equal: pairs left out because both answers have the same tokens.
        without_loss: answers of conversations that `train.mask` leaves out of the loss.
        fatal: samples that cannot be used and may not be left out.
        too_long: those of them that are merely too long.
        lengths: tokens of the longest sequence of each sample that could be tokenised, uncut.
        unreadable: number of all others.
        left_out: the first samples left out, with reasons.
        wrong: the first fatal samples, with reasons.
    """

    kept: int = 0
    truncated: int = 0
    ends_cut: int = 0
    tokens_cut: int = 0
    in_pieces: int = 0
    refused: int = 0
    equal: int = 0
    without_loss: int = 0
    fatal: int = 0
    too_long: int = 0
    unreadable: int = 0
    lengths: list[int] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        """Return the sum of both accounts."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Tally(**{**sums, **{n: sums[n][:SHOWN] for n in ("left_out", "wrong")}})

    @property
    def read(self) -> int:
        """Number of all samples."""
        return len(self.lengths) + self.unreadable

    def refuse(self, name: str, why: str) -> None:
        """Record a sample that cannot be used and may not be left out."""
        self.fatal += 1
        if len(self.wrong) < SHOWN:
            self.wrong.append(f"{name}: {why}")

    def leave_out(self, name: str, why: str) -> None:
        """Record a sample that is left out."""
        if len(self.left_out) < SHOWN:
            self.left_out.append(f"{name}: {why}")

    def counts(self, max_len: int) -> dict[str, Any]:
        """Return the fields of the event "data".

        `fits_99` and `fits_all` are the limits that would truncate at most 1 % and none of the
        samples; 0 if `max_len` does. `lengths` counts samples in four bins per octave.
        """
        names = (
            "read", "kept", "truncated", "ends_cut", "tokens_cut", "in_pieces", "refused", "equal",
            "without_loss",
        )  # fmt: skip
        lengths = np.maximum(np.array(self.lengths, np.int64), 1)
        long = np.sort(lengths[lengths > max_len])[::-1].tolist() if not self.in_pieces else []
        spared = math.floor(WARNED * self.read)
        ends = np.floor(2 ** (np.ceil(4 * np.log2(lengths)) / 4)).astype(int)
        bins, amounts = np.unique(ends, return_counts=True)
        return {
            **{name: getattr(self, name) for name in names},
            "fits_99": long[spared] if len(long) > spared else 0,
            "fits_all": long[0] if long else 0,
            "lengths": list(zip(bins.tolist(), amounts.tolist(), strict=True)),
            "left_out": self.left_out,
        }

    def problem(self, source: str) -> DataError | None:
        """Return the error for fatal samples, or a split without any sample; None if it is fine."""
        longest = max(self.lengths, default=0)
        if self.fatal:
            rest = self.fatal - len(self.wrong)
            return DataError(
                f"{source}: {self.fatal} samples cannot be used, first {self.wrong[0]}",
                details=[*self.wrong, *([f"... and {rest} more"] if rest else [])],
                hint=f"train.max_len={longest} truncates none; train.on_overlong=refuse leaves "
                "them out"
                if self.too_long == self.fatal
                else "data.chat_template=... or correct the samples",
            )
        if not self.kept:
            counts = f"{self.refused} too long, {self.equal} pairs of equal answers"
            return DataError(
                f"{source}: none of {self.read} samples is left: {counts}",
                details=self.left_out,
                hint=f"train.max_len={longest}, or other data",
            )
        return None


@dataclass(frozen=True)
class Rule:
    """Limit of a sequence's length (`train.max_len`), and `train.on_overlong`."""

    max_len: int
    on_overlong: str

    def examples(self, example: Example, tally: Tally) -> list[Example]:
        """Return the example, truncated if necessary, its pieces, or nothing; count it."""
        longest = max(len(s.ids) for s in example.sequences)
        tally.lengths.append(longest)
        if self.on_overlong == SPLIT and longest > self.max_len:
            cut = [
                example._replace(name=f"{example.name}+{number}", sequences=(piece,))
                for number, piece in enumerate(pieces(example.sequences[0], self.max_len))
            ]
            tally.in_pieces += 1
            tally.kept += len(cut)
            return cut
        if why := self._too_long(example):
            if self.on_overlong == "refuse":
                tally.refused += 1
                tally.leave_out(example.name, why)
            else:
                tally.too_long += 1
                tally.refuse(example.name, why)
            return []
        over = [max(0, len(s.ids) - self.max_len) for s in example.sequences]
        sequences = tuple(
            Tokens(s.ids[: self.max_len], s.bears[: self.max_len]) for s in example.sequences
        )
        first, *others = (np.asarray(s.ids) for s in sequences)
        if others and all(np.array_equal(first, ids) for ids in others):
            tally.equal += 1
            after = f" after truncation to {self.max_len}" if any(over) else ""
            tally.leave_out(example.name, f"both answers have the same tokens{after}")
            return []
        tally.kept += 1
        tally.truncated += any(over)
        tally.ends_cut += sum(tokens > 0 for tokens in over)
        tally.tokens_cut += sum(over)
        return [example._replace(sequences=sequences)]

    def _too_long(self, example: Example) -> str:
        for sequence in example.sequences:
            tokens, prompt = len(sequence.ids), int(np.argmax(sequence.bears))
            if prompt >= self.max_len:
                return f"prompt of {prompt} tokens leaves no room in {self.max_len}"
            if tokens > self.max_len and self.on_overlong == "refuse":
                return f"{tokens} tokens, train.max_len is {self.max_len}"
        return ""


def truncation(counts: Mapping[str, Any], *, max_len: int) -> str:
    """Return a warning about samples that are too long, above `WARNED`, and answers without loss.

    `counts` is a result of `Tally.counts`; the text is empty if there is nothing to say.
    """
    read, lines = counts["read"], []
    if counts["truncated"] > WARNED * read:
        lines.append(
            f"{_share(counts['truncated'], read)} are longer than train.max_len={max_len} and were "
            f"cut: {counts['tokens_cut']} tokens, {counts['ends_cut']} answers without their end"
        )
    if counts["refused"] > WARNED * read:
        lines.append(
            f"{_share(counts['refused'], read)} are longer than train.max_len={max_len} and were "
            "left out (train.on_overlong=refuse)"
        )
    if lines:
        lines.append(_keeps(counts))
    if counts["without_loss"]:
        lines.append(
            f"{counts['without_loss']} answers before the last of a conversation bear no loss; "
            "train.mask=every_answer trains on them"
        )
    return "; ".join(lines)


def refuse_truncated(
    counts: Mapping[str, Any], *, source: str, max_len: int, most: float, texts: bool
) -> None:
    """Refuse training rows if more than `most` of them (`data.max_truncated`) are truncated.

    Raises:
        DataError: too many rows are truncated.
    """
    read, cut = counts["read"], counts["truncated"]
    if cut <= most * read:
        return
    accepted = math.ceil(100 * cut / read) / 100
    way_out = "split cuts them into pieces" if texts else "refuse leaves them out"
    raise DataError(
        f"{source}: {_share(cut, read)} are longer than train.max_len={max_len} and would be cut, "
        f"more than data.max_truncated={most:g}: a model does not learn to stop from an answer "
        "that has lost its end",
        hint=f"{_keeps(counts)}; train.on_overlong={way_out}; "
        f"data.max_truncated={accepted:g} accepts it",
    )


def _share(part: int, read: int) -> str:
    return f"{part} of {read} rows ({part / read:.1%})"


def _keeps(counts: Mapping[str, Any]) -> str:
    """Return the limits that would truncate at most 1 % and none of the rows."""
    most, every = counts["fits_99"], counts["fits_all"]
    if not most or most == every:
        return f"train.max_len={every} keeps all rows whole"
    return f"train.max_len={most} keeps 99 % of the rows whole, train.max_len={every} all"
