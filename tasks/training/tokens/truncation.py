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
from collections.abc import Mapping, Sequence
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
        read: samples read.
        kept: samples used; each piece of a text counts.
        truncated: samples used of which tokens were cut off.
        ends_cut: answers that lost their end.
        tokens_cut: tokens cut off.
        long: tokens of the longest sequence of each sample above the limit, except texts cut into
            pieces.
        lengths: number of samples by the tokens of their longest sequence before it is cut, in
            four bins an octave (`rounded`).
        in_pieces: texts cut into pieces.
        refused: samples left out because they are too long.
        equal: pairs left out because both answers have the same tokens.
        without_loss: answers of conversations that `train.mask` leaves out of the loss.
        fatal: samples that cannot be used and may not be left out.
        only_long: True if all fatal samples are merely too long.
        left_out: the first samples left out, with reasons.
        wrong: the first fatal samples, with reasons.
    """

    read: int = 0
    kept: int = 0
    truncated: int = 0
    ends_cut: int = 0
    tokens_cut: int = 0
    in_pieces: int = 0
    refused: int = 0
    equal: int = 0
    without_loss: int = 0
    fatal: int = 0
    only_long: bool = True
    long: list[int] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)
    left_out: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        """Return the sum of both accounts."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        sums["only_long"] = self.only_long and other.only_long
        return Tally(**{**sums, **{n: sums[n][:SHOWN] for n in ("left_out", "wrong")}})

    def counts(self) -> dict[str, Any]:
        """Return the fields of the event "data".

        `fits_99` and `fits_all` are the limits that would truncate at most 1 % and none of the
        samples; 0 if the present limit does.
        """
        names = (
            "read", "kept", "truncated", "ends_cut", "tokens_cut", "in_pieces", "refused", "equal",
            "without_loss",
        )  # fmt: skip
        lengths = sorted(self.long, reverse=True)
        spared = math.floor(WARNED * self.read)
        return {
            **{name: getattr(self, name) for name in names},
            "fits_99": lengths[spared] if len(lengths) > spared else 0,
            "fits_all": lengths[0] if lengths else 0,
            "lengths": sorted(self.lengths.items()),
            "left_out": self.left_out,
        }

    def add(self, length: int) -> None:
        """Count a sample with the tokens of its longest sequence."""
        self.read += 1
        self.lengths[rounded(length)] += 1

    def leave_out(self, name: str, why: str) -> None:
        """Record a sample that is left out."""
        if len(self.left_out) < SHOWN:
            self.left_out.append(f"{name}: {why}")

    def refuse(self, name: str, why: str, *, long: bool = False) -> None:
        """Record a sample that cannot be used and may not be left out.

        Args:
            name: id of the sample.
            why: the reason.
            long: True if the sample is merely too long.
        """
        self.fatal += 1
        self.only_long = self.only_long and long
        if len(self.wrong) < SHOWN:
            self.wrong.append(f"{name}: {why}")

    def raise_if_unusable(self, source: str) -> None:
        """Refuse fatal samples, and a split without any sample left.

        Args:
            source: file name of the split.

        Raises:
            DataError: with the names of the samples.
        """
        if self.fatal:
            rest = self.fatal - len(self.wrong)
            longest = max(self.long, default=0)
            raise DataError(
                f"{source}: {self.fatal} samples cannot be used, first {self.wrong[0]}",
                details=[*self.wrong, *([f"... and {rest} more"] if rest else [])],
                hint=f"train.max_len={longest} truncates none; train.on_overlong=refuse leaves "
                "them out"
                if self.only_long
                else "data.chat_template=... or correct the samples",
            )
        if not self.kept:
            counts = f"{self.refused} too long, {self.equal} pairs of equal answers"
            keeps = f"train.max_len={max(self.long)}" if self.long else "train.max_len=<more>"
            raise DataError(
                f"{source}: none of {self.read} samples is left: {counts}",
                details=self.left_out,
                hint=f"{keeps}, or other data",
            )


def rounded(length: int) -> int:
    """Return the end of a length's bin: 2^(k/4), rounded down, for the least possible k."""
    return int(2 ** (math.ceil(4 * math.log2(max(length, 1))) / 4))


def truncation(counts: Mapping[str, Any], *, max_len: int) -> str:
    """Return a warning about samples that are too long, above `WARNED`, and answers without loss.

    Args:
        counts: result of `Tally.counts`.
        max_len: the limit.
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
    return "; ".join([*lines, *unlearned(counts)])


def unlearned(counts: Mapping[str, Any]) -> list[str]:
    """Return a line about the answers that bear no loss; none if all do."""
    if not counts["without_loss"]:
        return []
    which = "before the last of a conversation bear no loss; train.mask=every_answer trains on them"
    return [f"{counts['without_loss']} answers {which}"]


def refuse_truncated(
    counts: Mapping[str, Any], *, source: str, max_len: int, most: float, texts: bool
) -> None:
    """Refuse training rows if too many of them are truncated.

    Args:
        counts: result of `Tally.counts`.
        source: file name of the split.
        max_len: the limit.
        most: `data.max_truncated`.
        texts: True if the rows are raw texts, which can be cut into pieces instead.

    Raises:
        DataError: more than `most` of the rows are truncated.
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


@dataclass(frozen=True)
class Rule:
    """Limit of a sequence's length (`train.max_len`), and `train.on_overlong`."""

    max_len: int
    on_overlong: str

    def examples(self, example: Example, tally: Tally) -> list[Example]:
        """Return the example, its pieces or nothing, and count it in `tally`."""
        (whole, *rest) = example.sequences
        if self.on_overlong != SPLIT or rest or len(whole.ids) <= self.max_len:
            used = self.apply(example, tally)
            return [] if used is None else [used]
        cut = [
            example._replace(name=f"{example.name}+{number}", sequences=(piece,))
            for number, piece in enumerate(pieces(whole, self.max_len))
        ]
        tally.add(len(whole.ids))
        tally.in_pieces += 1
        tally.kept += len(cut)
        return cut

    def apply(self, example: Example, tally: Tally) -> Example | None:
        """Return the example, truncated if necessary, or None; count it in `tally`."""
        longest = max(len(s.ids) for s in example.sequences)
        tally.add(longest)
        if longest > self.max_len:
            tally.long.append(longest)
        why = self._too_long(example)
        if why:
            if self.on_overlong == "refuse":
                tally.refused += 1
                tally.leave_out(example.name, why)
            else:
                tally.refuse(example.name, why, long=True)
            return None
        cut = [len(s.ids) > self.max_len for s in example.sequences]
        sequences = tuple(
            Tokens(s.ids[: self.max_len], s.bears[: self.max_len]) for s in example.sequences
        )
        if len(sequences) > 1 and _same(sequences):
            tally.equal += 1
            after = f" after truncation to {self.max_len}" if any(cut) else ""
            tally.leave_out(example.name, f"both answers have the same tokens{after}")
            return None
        tally.kept += 1
        tally.truncated += any(cut)
        tally.ends_cut += sum(cut)
        tally.tokens_cut += sum(max(0, len(s.ids) - self.max_len) for s in example.sequences)
        return example._replace(sequences=sequences)

    def _too_long(self, example: Example) -> str:
        for sequence in example.sequences:
            tokens, prompt = len(sequence.ids), int(np.argmax(sequence.bears))
            if prompt >= self.max_len:
                return f"prompt of {prompt} tokens leaves no room in {self.max_len}"
            if tokens > self.max_len and self.on_overlong == "refuse":
                return f"{tokens} tokens, train.max_len is {self.max_len}"
        return ""


def _same(sequences: Sequence[Tokens]) -> bool:
    first = sequences[0].ids
    return all(np.array_equal(first, sequence.ids) for sequence in sequences[1:])
