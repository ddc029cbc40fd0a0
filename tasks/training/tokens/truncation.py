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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tasks.core.errors import DataError
from tasks.training.tokens.examples import Example, Tokens, all_but_first

SHOWN = 20
SPLIT = "split"
WARNED = 0.01
"""Share of rows truncated, or left out for their length, above which there is a warning."""
COUNTED = (
    "kept",  # samples used; each piece of a text counts
    "truncated",  # samples used of which tokens were cut off
    "ends_cut",  # answers that lost their end
    "tokens_cut",  # tokens cut off
    "in_pieces",  # texts cut into pieces
    "refused",  # samples left out because they are too long
    "equal",  # pairs left out because both answers have the same tokens
    "without_loss",  # answers of conversations that train.mask leaves out of the loss
)
"""Counts of the event "data"."""


@dataclass
class Tally:
    """Account of the samples; `+` adds the accounts of several ranks."""

    # those of `COUNTED`, and samples that cannot be used: `too_long` and `unreadable` ones
    counts: Counter[str] = field(default_factory=Counter)
    # tokens of the longest sequence of each sample that is not unreadable, uncut
    lengths: list[int] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # the first samples left out, with reasons
    wrong: list[str] = field(default_factory=list)  # the first that cannot be used, with reasons

    def __add__(self, other: Tally) -> Tally:
        """Return the sum of both accounts."""
        return Tally(
            self.counts + other.counts,
            self.lengths + other.lengths,
            (self.left_out + other.left_out)[:SHOWN],
            (self.wrong + other.wrong)[:SHOWN],
        )

    def note(self, count: str, name: str, why: str) -> None:
        """Count a sample that is not used, under the name of the count."""
        self.counts[count] += 1
        lines = self.left_out if count in COUNTED else self.wrong
        if len(lines) < SHOWN:
            lines.append(f"{name}: {why}")

    def event(self, max_len: int) -> dict[str, Any]:
        """Return the fields of the event "data".

        `fits_99` and `fits_all` are the limits that would truncate at most 1 % and none of the
        samples; 0 if `max_len` does. `lengths` counts samples in four bins per octave.
        """
        read = len(self.lengths) + self.counts["unreadable"]
        lengths = np.maximum(np.array(self.lengths, np.int64), 1)
        long: list[int] = []
        if not self.counts["in_pieces"]:
            long = np.sort(lengths[lengths > max_len])[::-1].tolist()
        spared = math.floor(WARNED * read)
        ends = np.floor(2 ** (np.ceil(4 * np.log2(lengths)) / 4)).astype(int)
        bins, amounts = np.unique(ends, return_counts=True)
        return {
            "read": read,
            **{name: self.counts[name] for name in COUNTED},
            "fits_99": long[spared] if len(long) > spared else 0,
            "fits_all": long[0] if long else 0,
            "lengths": list(zip(bins.tolist(), amounts.tolist(), strict=True)),
            "left_out": self.left_out,
        }

    def problem(self, source: str) -> DataError | None:
        """Return the error for samples that cannot be used, or none that is left; else None."""
        counts, longest = self.counts, max(self.lengths, default=0)
        if fatal := counts["too_long"] + counts["unreadable"]:
            rest = fatal - len(self.wrong)
            hint = "data.chat_template=... or correct the samples"
            if not counts["unreadable"]:
                hint = f"train.max_len={longest} cuts none; train.on_overlong=refuse drops them"
            return DataError(
                f"{source}: {fatal} samples cannot be used, first {self.wrong[0]}",
                details=[*self.wrong, *([f"... and {rest} more"] if rest else [])],
                hint=hint,
            )
        if counts["kept"]:
            return None
        return DataError(
            f"{source}: none of {len(self.lengths)} samples is left: {counts['refused']} too long, "
            f"{counts['equal']} pairs of equal answers",
            details=self.left_out,
            hint=f"train.max_len={longest}, or other data",
        )


def fit(example: Example, tally: Tally, *, max_len: int, on_overlong: str) -> list[Example]:
    """Return the example, truncated if necessary, its pieces, or nothing; count it."""
    name, sequences = example.name, example.sequences
    longest = max(len(s.ids) for s in sequences)
    prompt = max(int(np.argmax(s.bears)) for s in sequences)
    tally.lengths.append(longest)
    if on_overlong == SPLIT and longest > max_len:
        cut = [
            example._replace(name=f"{name}+{number}", sequences=(piece,))
            for number, piece in enumerate(pieces(sequences[0], max_len))
        ]
        tally.counts += Counter(in_pieces=1, kept=len(cut))
        return cut
    why = ""
    if prompt >= max_len:
        why = f"prompt of {prompt} tokens leaves no room in {max_len}"
    elif longest > max_len and on_overlong == "refuse":
        why = f"{longest} tokens, train.max_len is {max_len}"
    if why:
        tally.note("refused" if on_overlong == "refuse" else "too_long", name, why)
        return []
    over = [max(0, len(s.ids) - max_len) for s in sequences]
    sequences = tuple(Tokens(s.ids[:max_len], s.bears[:max_len]) for s in sequences)
    first, *others = (np.asarray(s.ids) for s in sequences)
    if others and all(np.array_equal(first, ids) for ids in others):
        after = f" after truncation to {max_len}" if any(over) else ""
        tally.note("equal", name, f"both answers have the same tokens{after}")
        return []
    ends_cut = sum(tokens > 0 for tokens in over)
    tally.counts += Counter(kept=1, truncated=any(over), ends_cut=ends_cut, tokens_cut=sum(over))
    return [example._replace(sequences=sequences)]


def pieces(tokens: Tokens, max_len: int) -> Iterator[Tokens]:
    """Cut a text into pieces of at most `max_len` tokens, in order.

    Pieces overlap by one token: the last one of a piece is the first of the next, where it bears no
    loss. So every token of a text but its first bears loss exactly once.
    """
    for start in range(0, len(tokens.ids) - 1, max_len - 1):
        yield all_but_first(tokens.ids[start : start + max_len])


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
