"""Walk from a served model back through manifests to the rows that it was trained on.

    python flows/lineage.py models:/plumbline@champion          of a registered version
    python flows/lineage.py DIR paths.runs=RUNS                 of a served folder
    python flows/lineage.py models:/plumbline/3 json=true       the same as JSON

Every artifact has a line: digest, stage, time, folder. A dataset has the hashes of its rows. Exit
status: 0, 1 a manifest cannot be read, 2 no such version or folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # flows/ would shadow libraries
    from flows.cli.start import start

    start("flows.cli.tool", "lineage")

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from flows.cli.composed import Composed
from flows.cli.registry import named
from tasks.core.terminal import plain
from tasks.release.lineage import Ancestor, lineage


def job(composed: Composed, words: list[str]) -> int:
    """Run the command. Returns the exit status."""
    folder, version = named(composed)
    # A registered folder lies in the store of the runs that made it.
    store = folder.parents[1] if version else composed.runs / "artifacts"
    ancestors = lineage(folder, store)
    if composed.settings["json"]:
        rows = [{**asdict(each), "path": each.path and str(each.path)} for each in ancestors]
        print(json.dumps(rows, indent=1))
        return 0
    if version is not None:
        aliases = "".join(f" @{alias}" for alias in version.aliases)
        print(plain(f"models:/{version.name}{aliases}"))
    print(plain("\n".join(_lines(ancestors))))
    return 0


def _lines(ancestors: Sequence[Ancestor]) -> Iterator[str]:
    for each in ancestors:
        name = f"{'  ' * each.depth}{each.role or each.kind}"
        if each.path is None:
            yield f"{name:<20}  {each.digest[:12]}  not in the store any more"
            continue
        again = ", see above" if each.repeated else ""
        stage = "" if again else f"  {each.stage}  {each.created}  {each.path}"
        yield f"{name:<20}  {each.digest[:12]}{again}{stage}"
        for file, digest in (each.rows or {}).items() if not again else ():
            yield f"{'  ' * each.depth}  {file}  {digest}"
