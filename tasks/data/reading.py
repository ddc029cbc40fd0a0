"""Check rows one by one, and count them for each source and each split."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from tasks.data.columns import wrong_columns
from tasks.data.control import Control
from tasks.data.kinds import PROMPTS, Kind, Payload, content_id, side_id
from tasks.data.messages import Unusable
from tasks.data.sources import MixedRow, Source

MOST_COLUMNS_NOTED = 50
WHO_COMPARES = "reward.function=exact_match"


class Good(NamedTuple):
    """A usable row.

    Attributes:
        identity: hash of its contents (`kinds.content_id`).
        side: hash that decides whether it is held out (`kinds.side_id`).
        payload: its contents.
        again: True if its source was read before.
    """

    identity: str
    side: str
    payload: Payload
    again: bool


@dataclass
class Split:
    """One output file, and the counts of its rows."""

    file: IO[str]
    read: int = 0
    kept: int = 0
    refused: int = 0
    overlapping: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    sides: set[str] = field(default_factory=set)

    def write(self, good: Good) -> None:
        """Append one row; a repeated row gets a numbered id.

        The file is ASCII, so a Unicode line separator in a text cannot start a new line.
        """
        repeat = self.seen.get(good.identity, 0)
        self.seen[good.identity] = repeat + 1
        self.sides.add(good.side)
        row_id = f"{good.identity}-{repeat}" if repeat else good.identity
        self.file.write(json.dumps({"id": row_id, **good.payload}) + "\n")
        self.kept += 1

    def counts(self) -> dict[str, int]:
        """Return the counts. The stage `train` cuts long rows later; it has the tokenizer."""
        return {
            "read": self.read,
            "kept": self.kept,
            "refused": self.refused,
            "overlapping": self.overlapping,
        }


@dataclass
class Reading:
    """State and counts of reading one source.

    Attributes:
        source: the source.
        kind: kind of its rows.
        answered: True if a prompt needs an answer.
        control: control tokens in the texts of rows.
        names: names of its columns.
        fitted: True if a row had the columns that its kind needs.
        rows: number of rows read.
        refused: number of rows that cannot be used.
        repeated: number of rows that were read again, in a mixture.
        controlled: number of rows with a control token outside answers.
        first_controlled: place and text of the first of them.
    """

    source: Source
    kind: Kind
    answered: bool = False
    control: Control = field(default_factory=Control)
    names: set[str] = field(default_factory=set)
    fitted: bool = False
    rows: int = 0
    refused: int = 0
    repeated: int = 0
    controlled: int = 0
    first_controlled: str = ""

    def look(self, mixed: MixedRow) -> Good:
        """Check one row. Raises Unusable with the reason."""
        self.rows += 1
        self.repeated += mixed.again
        values = mixed.row.values
        if len(self.names) < MOST_COLUMNS_NOTED:
            self.names.update(values)
        columns = self.source.columns.among(values)
        self.fitted = self.fitted or self.kind.fit(values, columns)
        try:
            if mixed.row.problem:
                raise Unusable(mixed.row.problem)
            payload, warning = self.control.apply(self.kind.read(values, columns))
            if self.answered and "answer" not in payload:
                raise Unusable(f"no answer, and {WHO_COMPARES} compares with it")
        except Unusable:
            self.refused += not mixed.again
            raise
        if warning and not mixed.again:
            self.controlled += 1
            self.first_controlled = self.first_controlled or f"{mixed.row.place}: {warning}"
        identity = content_id(payload)
        side = side_id(payload)
        return Good(identity, identity if side == identity else side, payload, mixed.again)

    def require_columns(self) -> None:
        """Raise DataError if no row of the source had the columns that its kind needs."""
        if self.names and not self.fitted:
            wanted = self.kind.asked(self.source.columns)
            raise wrong_columns(self.names, wanted, self.source.name)

    def unused(self) -> set[str]:
        """Return the names of columns that are not used."""
        if self.kind is PROMPTS:  # rewards may use all of them
            return set()
        columns = self.source.columns
        sharegpt = columns.among(self.names - {columns.messages})  # a source may have both shapes
        return self.names - self.kind.used(columns) - self.kind.used(sharegpt)

    def counts(self) -> dict[str, Any]:
        """Return the counts of the source for `dataset.json`."""
        return {
            "name": self.source.name,
            "rows": self.rows,
            "refused": self.refused,
            "repeated": self.repeated,
        }
