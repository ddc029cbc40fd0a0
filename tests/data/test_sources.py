"""Several sources: read in order, or mixed by probability, always with the same result."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import DataError
from tasks.data.build import Options, build_dataset
from tasks.data.columns import Columns
from tasks.data.readers import Row
from tasks.data.sources import Source, mix, wrong_probabilities
from tasks.prepare import prepare_data

LOG = logging.getLogger("tests.data")


def source(name: str, size: int, **fields: Any) -> Source:
    rows = [
        Row(f"{name}:{n}", {"prompt": f"{name} {n}", "response": f"answer {n}"})
        for n in range(1, size + 1)
    ]
    return Source(name, lambda: iter(rows), Columns(), **fields)


def drawn(
    *sources: Source, seed: int = 0, stopping: str = "all_exhausted"
) -> list[tuple[str, bool]]:
    return [(d.row.place, d.again) for d in mix(sources, seed=seed, stopping=stopping)]


def test_without_probabilities_they_follow_each_other() -> None:
    rows = drawn(source("a", 3), source("b", 2, max_samples=1), source("c", 1))
    assert rows == [("a:1", False), ("a:2", False), ("a:3", False), ("b:1", False), ("c:1", False)]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=4),
    weights=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    seed=st.integers(0, 3),
)
def test_mixing_reads_every_source_in_its_order(sizes, weights, seed) -> None:
    weights = weights[: len(sizes)]
    sources = [
        source(str(n), size, probability=w / sum(weights))
        for n, (size, w) in enumerate(zip(sizes, weights, strict=True))
    ]
    everything = drawn(*sources, seed=seed)
    assert everything == drawn(*sources, seed=seed)
    passes = []
    for number, size in enumerate(sizes):
        mine = [(p, again) for p, again in everything if p.startswith(f"{number}:")]
        places = [f"{number}:{n % size + 1}" for n in range(len(mine))]
        assert mine == [(p, n >= size) for n, p in enumerate(places)]
        passes.append(len(mine) // size)
    assert min(passes) == 1  # all were read, and one of them just once
    shorter = drawn(*sources, seed=seed, stopping="first_exhausted")
    assert shorter == everything[: len(shorter)]
    assert not any(again for _, again in shorter)
    counts = Counter(place.partition(":")[0] for place, _ in shorter)
    assert any(counts[str(n)] == size for n, size in enumerate(sizes))


def test_shares_are_those_that_were_asked_for() -> None:
    sources = [source("a", 40_000, probability=0.7), source("b", 40_000, probability=0.3)]
    counts = Counter(p[0] for p, _ in drawn(*sources, stopping="first_exhausted"))
    share = counts["a"] / counts.total()
    assert abs(share - 0.7) < 5 * (0.7 * 0.3 / counts.total()) ** 0.5
    other = drawn(*sources, stopping="first_exhausted", seed=1)
    assert [p for p, _ in other[:50]] != [
        p for p, _ in drawn(*sources, stopping="first_exhausted")[:50]
    ]


def test_probabilities_that_are_none() -> None:
    for wrong in ([0.5, None], [0.5, 0.6], [1.0, 0.0], [1.5, -0.5]):
        assert wrong_probabilities(wrong), wrong
    for right in ([0.1] * 10, [None, None]):
        assert wrong_probabilities(right) == ""


def build(out: Path, *sources: Source, **options: Any) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    return build_dataset(out, train=sources, held_out=None, options=Options(**options), log=LOG)


def rows_of(out: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{split}.jsonl").read_text().splitlines()]


def test_rows_are_counted_by_source_and_repeats_are_not_held_out(tmp_path: Path) -> None:
    big, small = source("big", 400, probability=0.5), source("small", 20, probability=0.5)
    account = build(tmp_path, big, small, eval_fraction=0.2)
    first, second = account["sources"]
    assert first == {"name": "big", "rows": 400, "refused": 0, "repeated": 0}
    assert second["rows"] == second["repeated"] + 20 > 300
    held = [row["messages"][0]["content"] for row in rows_of(tmp_path, "heldout")]
    assert len(held) == len(set(held))
    train = [row["messages"][0]["content"] for row in rows_of(tmp_path, "train")]
    assert not set(held) & set(train)
    for split in account["splits"].values():
        assert split["read"] == split["kept"] + split["refused"] + split["overlapping"]
    ids = [row["id"] for row in rows_of(tmp_path, "train")]
    assert len(set(ids)) == len(ids)


def test_bad_rows_of_a_source_that_is_read_again_are_told_once(tmp_path: Path) -> None:
    bad = [Row("x:1", {"prompt": "q", "response": ""}), Row("x:2", {}, "broken")]
    good = [Row(f"x:{n}", {"prompt": f"q{n}", "response": "a"}) for n in range(3, 9)]
    small = Source("x", lambda: iter([*bad, *good]), Columns(), probability=0.5)
    big = source("big", 200, probability=0.5)
    account = build(tmp_path, big, small, on_bad_line="skip", eval_fraction=0.2)
    assert account["splits"]["train"]["refused"] == account["sources"][1]["refused"] == 2
    assert [line.partition(": ")[0] for line in account["refused_examples"]] == ["x:1", "x:2"]
    with pytest.raises(DataError, match="^2 of"):
        build(tmp_path, big, small, eval_fraction=0.2)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build(
            tmp_path / name,
            source("x", 50, probability=0.8), source("y", 50, probability=0.2), seed=seed,
        )  # fmt: skip
    files = [(tmp_path / name / "train.jsonl").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]


def test_a_source_without_rows_cannot_be_drawn_from(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="b "):
        build(tmp_path, source("a", 5, probability=0.5), source("b", 0, probability=0.5))
    with pytest.raises(DataError, match="0.5"):
        build(tmp_path, source("a", 5, probability=0.5))


def test_sources_of_several_kinds_with_columns_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"chosen": f"good {n}", "bad": "b", "prompt": f"a{n}"}) + "\n"
                for n in range(10))
    )  # fmt: skip
    (tmp_path / "b.csv").write_text(
        "question,chosen,rejected\n" + "".join(f"b{n},good {n},bad\n" for n in range(10))
    )
    out = tmp_path / "out"
    out.mkdir()
    sources = [
        {"path": str(tmp_path / "a.jsonl"), "rejected_key": "bad", "max_samples": 6},
        {"path": str(tmp_path / "b.csv"), "kind": "csv", "prompt_key": "question"},
    ]
    report = prepare_data(out, kind="jsonl", rows="pairs", sources=sources, eval_fraction=0.3,
                          log=LOG)  # fmt: skip
    questions = [r["prompt"][0]["content"] for s in ("train", "heldout") for r in rows_of(out, s)]
    assert sorted(questions) == sorted([f"a{n}" for n in range(6)] + [f"b{n}" for n in range(10)])
    assert [s["rows"] for s in report.notes["sources"]] == [6, 10]
    assert all(check.ok for check in report.checks)
    for row in rows_of(out, "heldout"):
        assert row["messages"] == [*row["prompt"], *row["chosen"]]
    wrong = [{"path": str(tmp_path / "b.csv"), "rejected_key": "worse"}]
    with pytest.raises(DataError, match="'worse'"):
        prepare_data(out, kind="csv", rows="pairs", sources=wrong, log=LOG)
