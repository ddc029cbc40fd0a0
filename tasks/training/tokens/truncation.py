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
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tasks.core.errors import DataError
from tasks.training.tokens.chat import pieces
from tasks.training.tokens.examples import Example, Tokens

SHOWN = 20
SPLIT = "split"
WARNED = 0.01
"""Share of rows truncated, or left out for their length, above which there is a warning."""
COUNTED = {
    "kept": "samples used; each piece of a text counts",
    "truncated": "samples used of which tokens were cut off",
    "ends_cut": "answers that lost their end",
    "tokens_cut": "tokens cut off",
    "in_pieces": "texts cut into pieces",
    "refused": "samples left out because they are too long",
    "equal": "pairs left out because both answers have the same tokens",
    "without_loss": "answers of conversations that train.mask leaves out of the loss",
}
"""Counts of the event "data"."""


@dataclass
class Tally:
    """Account of the samples; `+` adds the accounts of several ranks."""

    # those of `COUNTED`; `fatal` samples, which cannot be used and may not be left out; `too_long`,
    # those of them that are merely too long; `unreadable` ones
    counts: Counter[str] = field(default_factory=Counter)
    # tokens of the longest sequence of each sample that is not unreadable, uncut
    lengths: list[int] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # the first samples left out, with reasons
    wrong: list[str] = field(default_factory=list)  # the first fatal samples, with reasons

    def __add__(self, other: Tally) -> Tally:
        """Return the sum of both accounts."""
        return Tally(
            self.counts + other.counts,
            self.lengths + other.lengths,
            (self.left_out + other.left_out)[:SHOWN],
            (self.wrong + other.wrong)[:SHOWN],
        )

    @property
    def read(self) -> int:
        """Number of all samples."""
        return len(self.lengths) + self.counts["unreadable"]

    def refuse(self, name: str, why: str) -> None:
        """Record a sample that cannot be used and may not be left out."""
        self.counts["fatal"] += 1
        if len(self.wrong) < SHOWN:
            self.wrong.append(f"{name}: {why}")

    def unreadable(self, name: str, why: str) -> None:
        """Record a sample that could not be tokenised."""
        self.counts["unreadable"] += 1
        self.refuse(name, why)

    def leave_out(self, name: str, why: str) -> None:
        """Record a sample that is left out."""
        if len(self.left_out) < SHOWN:
            self.left_out.append(f"{name}: {why}")

    def event(self, max_len: int) -> dict[str, Any]:
        """Return the fields of the event "data".

        `fits_99` and `fits_all` are the limits that would truncate at most 1 % and none of the
        samples; 0 if `max_len` does. `lengths` counts samples in four bins per octave.
        """
        lengths = np.maximum(np.array(self.lengths, np.int64), 1)
        long: list[int] = []
        if not self.counts["in_pieces"]:
            long = np.sort(lengths[lengths > max_len])[::-1].tolist()
        spared = math.floor(WARNED * self.read)
        ends = np.floor(2 ** (np.ceil(4 * np.log2(lengths)) / 4)).astype(int)
        bins, amounts = np.unique(ends, return_counts=True)
        return {
            "read": self.read,
            **{name: self.counts[name] for name in COUNTED},
            "fits_99": long[spared] if len(long) > spared else 0,
            "fits_all": long[0] if long else 0,
            "lengths": list(zip(bins.tolist(), amounts.tolist(), strict=True)),
            "left_out": self.left_out,
        }

    def problem(self, source: str) -> DataError | None:
        """Return the error for fatal samples, or a split without any sample; None if it is fine."""
        counts, longest = self.counts, max(self.lengths, default=0)
        if fatal := counts["fatal"]:
            rest = fatal - len(self.wrong)
            hint = "data.chat_template=... or correct the samples"
            if counts["too_long"] == fatal:
                hint = f"train.max_len={longest} cuts none; train.on_overlong=refuse drops them"
            return DataError(
                f"{source}: {fatal} samples cannot be used, first {self.wrong[0]}",
                details=[*self.wrong, *([f"... and {rest} more"] if rest else [])],
                hint=hint,
            )
        if counts["kept"]:
            return None
        return DataError(
            f"{source}: none of {self.read} samples is left: {counts['refused']} too long, "
            f"{counts['equal']} pairs of equal answers",
            details=self.left_out,
            hint=f"train.max_len={longest}, or other data",
        )


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
            tally.counts += Counter(in_pieces=1, kept=len(cut))
            return cut
        if why := self._too_long(example):
            if self.on_overlong == "refuse":
                tally.counts["refused"] += 1
                tally.leave_out(example.name, why)
            else:
                tally.counts["too_long"] += 1
                tally.refuse(example.name, why)
            return []
        over = [max(0, len(s.ids) - self.max_len) for s in example.sequences]
        sequences = tuple(
            Tokens(s.ids[: self.max_len], s.bears[: self.max_len]) for s in example.sequences
        )
        first, *others = (np.asarray(s.ids) for s in sequences)
        if others and all(np.array_equal(first, ids) for ids in others):
            tally.counts["equal"] += 1
            after = f" after truncation to {self.max_len}" if any(over) else ""
            tally.leave_out(example.name, f"both answers have the same tokens{after}")
            return []
        ends_cut = sum(tokens > 0 for tokens in over)
        tally.counts += Counter(
            kept=1, truncated=any(over), ends_cut=ends_cut, tokens_cut=sum(over)
        )
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

    `counts` is a result of `Tally.event`; the text is empty if there is nothing to say.
    """
    lines = []
    for name, outcome in (("truncated", "cut"), ("refused", "left out")):
        if counts[name] > WARNED * counts["read"]:
            lines.append(
                f"{_share(counts[name], counts['read'])} are longer than train.max_len={max_len} "
                f"and were {outcome}: {_keeps(counts)}"
            )
    if counts["without_loss"]:
        lines.append(
            f"{counts['without_loss']} answers before the last of a conversation bear no loss; "
            "train.mask=every_answer trains on them"
        )
    return "; ".join(lines)


def refuse_truncated(
    counts: Mapping[str, Any], *, source: str, max_len: int, most: float, texts: bool
) -> None:
    """Raise DataError if more than `most` (`data.max_truncated`) of the rows are truncated."""
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
