"""Write train.jsonl and heldout.jsonl: what a country's capital and continent are, as JSON.

    pip download --no-deps countryinfo==1.0.1
    python examples/smollm2/rows.py countryinfo-1.0.1-*.whl

The facts are those of countryinfo (MIT). Countries of heldout.jsonl are in no row of train.jsonl.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from zipfile import ZipFile

ASKED = (
    "What is the capital of {}?",
    "Tell me the capital and the continent of {}.",
    "{}: capital and continent?",
)
HELD_OUT = 48


def countries(wheel: Path) -> list[tuple[str, str, str]]:
    """Return name, capital and continent of each country that has all three."""
    with ZipFile(wheel) as archive:
        names = sorted(n for n in archive.namelist() if n.startswith("countryinfo/data/"))
        facts = [json.loads(archive.read(name)) for name in names if name.endswith(".json")]
    rows = [(fact.get("name"), fact.get("capital"), fact.get("region")) for fact in facts]
    return [(name[0].upper() + name[1:], *rest) for name, *rest in rows if name and all(rest)]


def row(country: tuple[str, str, str], asked: str) -> str:
    """Return a line of a file."""
    name, capital, continent = country
    answer = json.dumps({"capital": capital, "continent": continent}, ensure_ascii=False)
    line = {"prompt": f"{asked.format(name)} Answer as JSON.", "answer": answer}
    return json.dumps(line, ensure_ascii=False) + "\n"


def main(wheel: Path) -> None:
    """Write both files beside this one."""
    rows = countries(wheel)
    random.Random(0).shuffle(rows)
    folder = Path(__file__).parent
    train = [row(country, asked) for country in rows[HELD_OUT:] for asked in ASKED]
    (folder / "train.jsonl").write_text("".join(train), encoding="utf-8")
    heldout = [row(country, ASKED[0]) for country in rows[:HELD_OUT]]
    (folder / "heldout.jsonl").write_text("".join(heldout), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
