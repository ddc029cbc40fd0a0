"""The command line that all benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

RUNS = 3


def make_parser(bench: str, about: str | None, rows: Iterable[str]) -> argparse.ArgumentParser:
    """Return the parser of `bench-<bench>`, to which options can be added.

    Args:
        bench: name of the benchmark.
        about: its description.
        rows: names of its rows.
    """
    parser = argparse.ArgumentParser(prog=f"bench-{bench}", description=about)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(rows)}; all when none is named")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--root", type=Path, default=Path(".cache/bench"), help="for the models")
    return parser


def parse(
    parser: argparse.ArgumentParser, rows: Iterable[str], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the command line. `rows` are all rows if none is named; the folder `root` is made.

    Raises:
        SystemExit: an unknown row, or a wrong option.
    """
    options, known = parser.parse_args(arguments), list(rows)
    unknown = sorted(set(options.rows) - set(known))
    if unknown:
        parser.error(f"no row {unknown[0]}; there are {', '.join(known)}")
    options.rows = options.rows or known
    options.root.mkdir(parents=True, exist_ok=True)
    return options
