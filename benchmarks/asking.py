"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

RUNS = 3


def asking(bench: str, about: str | None, rows: Iterable[str]) -> argparse.ArgumentParser:
    """The parser of `bench-<bench>`, for more options to be added.

    Args:
        bench: its name.
        about: what it says of itself.
        rows: names of its rows.
    """
    parser = argparse.ArgumentParser(prog=f"bench-{bench}", description=about)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(rows)}; all when none is named")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--root", type=Path, default=Path(".cache/bench"), help="for the models")
    return parser


def asked(
    parser: argparse.ArgumentParser, rows: Iterable[str], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """The command line, read: `rows` are all that exist, where none is named; `root` exists.

    Raises:
        SystemExit: a row that does not exist, or what argparse refuses.
    """
    found, known = parser.parse_args(arguments), list(rows)
    unknown = sorted(set(found.rows) - set(known))
    if unknown:
        parser.error(f"no row {unknown[0]}; there are {', '.join(known)}")
    found.rows = found.rows or known
    found.root.mkdir(parents=True, exist_ok=True)
    return found
