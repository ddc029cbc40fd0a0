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

from benchmarks.report import document, table, write_docs
from benchmarks.rounds import Bench
from benchmarks.rows import ROWS
from benchmarks.shapes import SIZES

ALL_SIZES = ["0.5", "1.5", "3"]
RUNS = 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the asked rows; print the table and the JSON line."""
    asked = _asked(arguments)
    asked.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=asked.root) as folder:
        bench = Bench(Path(folder).resolve(), asked.runs, asked.sizes)
        rows = [row for name in asked.rows for row in ROWS[name](bench)]
    found = document(rows, asked.runs)
    print(table(rows))
    print(json.dumps(found))
    if asked.rows == list(ROWS) and asked.sizes == ALL_SIZES and asked.runs >= RUNS:
        write_docs(asked.docs, rows, found)
    else:
        print(f"{asked.docs} is left as it is: not every row, every size and {RUNS} runs")


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-weights", description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; all when none is named")
    parser.add_argument("--sizes", nargs="+", default=ALL_SIZES, choices=list(SIZES))
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--root", type=Path, default=Path(".cache/bench"), help="for the models")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="for a whole run's result")
    asked = parser.parse_args(arguments)
    unknown = sorted(set(asked.rows) - set(ROWS))
    if unknown:
        parser.error(f"no row {unknown[0]}; there are {', '.join(ROWS)}")
    asked.rows = asked.rows or list(ROWS)
    return asked


if __name__ == "__main__":
    main()
