"""`make bench-weights`: merge, gather, convert and plan, beside other tools.

    make bench-weights ARGS='merge convert --sizes 0.5 1.5 3 --runs 3'

Models are made for the run. Contenders take turns in every round, each in its own process. Wall
time is that of the whole process, with interpreter start and imports. Memory is the peak resident
set, with mapped pages. A run of all rows and sizes also goes into `docs/`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.asking import RUNS, make_parser, parse
from benchmarks.report import document, table, write_docs
from benchmarks.rounds import Bench
from benchmarks.rows import ROWS
from benchmarks.shapes import SIZES

ALL_SIZES = ["0.5", "1.5", "3"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the selected rows; print the table and the JSON line."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        bench = Bench(Path(folder).resolve(), options.runs, options.sizes)
        rows = [row for name in options.rows for row in ROWS[name](bench)]
    results = document(rows, options.runs)
    print(table(rows))
    print(json.dumps(results))
    if options.rows == list(ROWS) and options.sizes == ALL_SIZES and options.runs >= RUNS:
        write_docs(options.docs, rows, results)
    else:
        print(f"{options.docs} is left as it is: not every row, every size and {RUNS} runs")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("weights", __doc__, ROWS)
    parser.add_argument("--sizes", nargs="+", default=ALL_SIZES, choices=list(SIZES))
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="for a whole run's result")
    return parse(parser, ROWS, arguments)


if __name__ == "__main__":
    main()
