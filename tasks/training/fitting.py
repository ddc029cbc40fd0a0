"""The truncation rule, and what became of every sample.

    train.on_overlong=truncate   answers are cut at the end; a prompt that fills `train.max_len` by
                                 itself is an error
    train.on_overlong=refuse     samples that are too long are left out and counted
    train.on_overlong=split      raw texts alone: cut into pieces, each of which is a sample

Prompts are never cut. An answer that was cut has lost the token that ends it: the model does not
learn to stop there, which is counted (`ends_cut`). Pairs whose answers are the same tokens, after
truncation or because the tokenizer does not tell them apart, are left out and counted (`equal`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from tasks.errors import DataError
from tasks.training.documents import pieces
from tasks.training.examples import Example, Tokens

SHOWN = 20
SPLIT = "split"


@dataclass
class Tally:
    """What became of the samples; of several ranks together by `+`.

    Attributes:
        read: samples read.
        kept: samples used; of a text that was cut into pieces every piece.
        truncated: of those, samples of which something was cut off.
        ends_cut: answers that lost their end by it.
        in_pieces: texts cut into pieces.
        refused: samples left out because they are too long.
        equal: pairs left out because both answers are the same tokens.
        fatal: samples that cannot be used, where the rule allows no leaving out.
        only_long: whether all of the fatal ones are too long.
        left_out: the first of them, with reasons.
        wrong: the first fatal ones, with reasons.
    """

    read: int = 0
    kept: int = 0
    truncated: int = 0
    ends_cut: int = 0
    in_pieces: int = 0
    refused: int = 0
    equal: int = 0
    fatal: int = 0
    only_long: bool = True
    left_out: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        mine, theirs = asdict(self), asdict(other)
        found = {f.name: mine[f.name] + theirs[f.name] for f in fields(self)}
        found["only_long"] = self.only_long and other.only_long
        return Tally(**{**found, **{n: found[n][:SHOWN] for n in ("left_out", "wrong")}})

    def counts(self) -> dict[str, Any]:
        """What the event "data" says."""
        names = ("read", "kept", "truncated", "ends_cut", "in_pieces", "refused", "equal")
        return {**{name: getattr(self, name) for name in names}, "left_out": self.left_out}

    def leave_out(self, name: str, why: str) -> None:
        """Note a sample that is not used."""
        if len(self.left_out) < SHOWN:
            self.left_out.append(f"{name}: {why}")

    def refuse(self, name: str, why: str, *, long: bool = False) -> None:
        """Note a sample that cannot be used and may not be left out."""
        self.fatal += 1
        self.only_long = self.only_long and long
        if len(self.wrong) < SHOWN:
            self.wrong.append(f"{name}: {why}")

    def raise_if_unusable(self, source: str) -> None:
        """Refuse samples that cannot be used, and a dataset of which none is left.

        Raises:
            DataError: naming the samples.
        """
        if self.fatal:
            rest = self.fatal - len(self.wrong)
            raise DataError(
                f"{source}: {self.fatal} samples cannot be used, first {self.wrong[0]}",
                details=[*self.wrong, *([f"... and {rest} more"] if rest else [])],
                hint="train.max_len=... (larger) or train.on_overlong=refuse "
                "(leaves them out, counted)"
                if self.only_long
                else "data.chat_template=... or correct the samples",
            )
        if not self.kept:
            counts = f"{self.refused} too long, {self.equal} pairs of equal answers"
            raise DataError(
                f"{source}: no sample is left of {self.read}: {counts}",
                details=self.left_out,
                hint="train.max_len=... (larger), or other data",
            )


@dataclass(frozen=True)
class Rule:
    """How long a sequence may be, and what is done with longer ones."""

    max_len: int
    on_overlong: str

    def examples(self, example: Example, tally: Tally) -> list[Example]:
        """What is used of an example; notes in `tally` what became of it."""
        (whole, *others) = example.sequences
        if self.on_overlong != SPLIT or others or len(whole.ids) <= self.max_len:
            one = self.apply(example, tally)
            return [] if one is None else [one]
        found = [
            example._replace(name=f"{example.name}+{number}", sequences=(piece,))
            for number, piece in enumerate(pieces(whole, self.max_len))
        ]
        tally.read += 1
        tally.in_pieces += 1
        tally.kept += len(found)
        return found

    def apply(self, example: Example, tally: Tally) -> Example | None:
        """The example as it is used, or None; notes in `tally` what became of it."""
        tally.read += 1
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
            tally.leave_out(example.name, f"both answers are the same tokens{after}")
            return None
        tally.kept += 1
        tally.truncated += any(cut)
        tally.ends_cut += sum(cut)
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
    return all(np.array_equal(first, other.ids) for other in sequences[1:])
