"""What reading finds out: usable rows, and an account of each source and each split."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from tasks.data.columns import wrong_columns
from tasks.data.kinds import PROMPTS, Kind, Payload, content_id, side_id
from tasks.data.messages import Unusable
from tasks.data.sources import Drawn, Source

MOST_COLUMNS_NOTED = 50
WHO_COMPARES = "reward.function=exact_match"


class Good(NamedTuple):
    """A usable row: its identity, what decides its side, what it says, whether it is a repeat."""

    identity: str
    side: str
    payload: Payload
    again: bool


@dataclass
class Split:
    """One output file and its account."""

    file: IO[str]
    read: int = 0
    kept: int = 0
    refused: int = 0
    overlapping: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    sides: set[str] = field(default_factory=set)

    def write(self, good: Good) -> None:
        """Append one row; a repeated one gets a numbered id.

        The file is ASCII, so that no reader takes a line separator within a text for a new line.
        """
        repeat = self.seen.get(good.identity, 0)
        self.seen[good.identity] = repeat + 1
        self.sides.add(good.side)
        row_id = f"{good.identity}-{repeat}" if repeat else good.identity
        self.file.write(json.dumps({"id": row_id, **good.payload}) + "\n")
        self.kept += 1

    def counts(self) -> dict[str, int]:
        """Return the account. Rows are cut by the stage `train`, which has the tokenizer."""
        return {
            "read": self.read,
            "kept": self.kept,
            "refused": self.refused,
            "overlapping": self.overlapping,
        }


@dataclass
class Reading:
    """What reading one source found out, beside its rows.

    Attributes:
        source: of the rows.
        kind: what a row has to be.
        answered: whether a prompt has to have an answer.
        names: of its columns.
        fitted: whether a row had the columns that its kind needs.
        rows: read.
        refused: of them.
        repeated: read again, in a mixture.
    """

    source: Source
    kind: Kind
    answered: bool = False
    names: set[str] = field(default_factory=set)
    fitted: bool = False
    rows: int = 0
    refused: int = 0
    repeated: int = 0

    def look(self, drawn: Drawn) -> Good:
        """Check one row.

        Raises:
            Unusable: saying why.
        """
        self.rows += 1
        self.repeated += drawn.again
        values = drawn.row.values
        if len(self.names) < MOST_COLUMNS_NOTED:
            self.names.update(values)
        columns = self.source.columns.among(values)
        self.fitted = self.fitted or self.kind.fit(values, columns)
        try:
            if drawn.row.problem:
                raise Unusable(drawn.row.problem)
            payload = self.kind.read(values, columns)
            if self.answered and "answer" not in payload:
                raise Unusable(f"no answer, and {WHO_COMPARES} compares with it")
        except Unusable:
            self.refused += not drawn.again
            raise
        identity = content_id(payload)
        side = side_id(payload)
        return Good(identity, identity if side == identity else side, payload, drawn.again)

    def require_columns(self) -> None:
        """Refuse a source none of whose rows has the columns."""
        if self.names and not self.fitted:
            asked = self.kind.asked(self.source.columns)
            raise wrong_columns(self.names, asked, self.source.name)

    def unused(self) -> set[str]:
        """Columns that nothing looks at."""
        if self.kind is PROMPTS:  # rewards may look at all of them
            return set()
        columns = self.source.columns
        other = columns.among(self.names - {columns.messages})  # rows may come in both shapes
        return self.names - self.kind.used(columns) - self.kind.used(other)

    def counts(self) -> dict[str, Any]:
        """The source's part of the account."""
        found: dict[str, Any] = {"name": self.source.name, "rows": self.rows}
        return {**found, "refused": self.refused, "repeated": self.repeated}
