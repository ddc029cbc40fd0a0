"""`make bench-weights`: the weights room beside its peers, in one run; a table and a JSON line.

    make bench-weights ARGS='merge convert --sizes 0.5 1.5 3 --runs 3'

Models are made on the spot. Peers take turns with us in every round, each in a process of its own;
wall time is that of the whole process, interpreter start and imports included, and memory is the
peak resident set, mapped pages included. A run of all rows and sizes also goes into `docs/`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.asking import RUNS, asked, asking
from benchmarks.report import document, table, write_docs
from benchmarks.rounds import Bench
from benchmarks.rows import ROWS
from benchmarks.shapes import SIZES

ALL_SIZES = ["0.5", "1.5", "3"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the asked rows; print the table and the JSON line."""
    given = _asked(arguments)
    with tempfile.TemporaryDirectory(dir=given.root) as folder:
        bench = Bench(Path(folder).resolve(), given.runs, given.sizes)
        rows = [row for name in given.rows for row in ROWS[name](bench)]
    found = document(rows, given.runs)
    print(table(rows))
    print(json.dumps(found))
    if given.rows == list(ROWS) and given.sizes == ALL_SIZES and given.runs >= RUNS:
        write_docs(given.docs, rows, found)
    else:
        print(f"{given.docs} is left as it is: not every row, every size and {RUNS} runs")


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = asking("weights", __doc__, ROWS)
    parser.add_argument("--sizes", nargs="+", default=ALL_SIZES, choices=list(SIZES))
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="for a whole run's result")
    return asked(parser, ROWS, arguments)


if __name__ == "__main__":
    main()
