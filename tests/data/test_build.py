"""Every row is kept unchanged, or counted and reported; splits never overlap; sources mix."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.cli.config import compose_config
from tasks.core.errors import DataError
from tasks.data.build import Options, build_dataset
from tasks.data.kinds import KINDS, PROMPTS
from tasks.data.messages import Columns
from tasks.data.readers import Row, Source, mix, wrong_probabilities
from tasks.prepare import data_settings, prepare_data

LOG = logging.getLogger("tests.data")


def pair(number: int) -> dict[str, Any]:
    return {"prompt": f"question {number}", "response": f"answer {number}"}


def source_of(values: list[dict[str, Any]], name: str = "x", **fields: Any) -> Source:
    rows = [Row(f"{name}:{number}", value) for number, value in enumerate(values, start=1)]
    return Source(name, lambda: iter(rows), Columns(), **fields)


def numbered(name: str, size: int, **fields: Any) -> Source:
    values = [{"prompt": f"{name} {n}", "response": f"answer {n}"} for n in range(1, size + 1)]
    return source_of(values, name, **fields)


def build(
    out: Path, *sources: Source, held_out: Source | None = None, **options: Any
) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    made = Options(**{"eval_fraction": 0.3, **options})
    return build_dataset(out, train=sources, held_out=held_out, options=made, log=LOG)


def rows_of(out: Path, *splits: str) -> list[dict[str, Any]]:
    return [json.loads(x) for s in splits for x in (out / f"{s}.jsonl").read_text().splitlines()]


def questions(out: Path, *splits: str) -> list[str]:
    return [row["messages"][0]["content"] for row in rows_of(out, *splits)]


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_training_rows_that_are_held_out_are_left_out_and_counted(tmp_path: Path) -> None:
    apart = source_of([pair(2)], "y")
    account = build(tmp_path, source_of([pair(1), pair(2), pair(2)]), held_out=apart)
    assert questions(tmp_path, "train") == ["question 1"]
    assert account["splits"]["train"]["overlapping"] == 2
    assert account["splits"]["heldout"]["kept"] == 1


def test_bad_rows_are_all_listed_or_counted(tmp_path: Path) -> None:
    rows = source_of([pair(1), *[{"prompt": "x", "response": ""}] * 25, pair(2)])
    with pytest.raises(DataError) as caught:
        build(tmp_path, rows)
    assert "25 of 27" in caught.value.message
    assert "x:2" in caught.value.message
    assert len(caught.value.details) == 21
    assert "5 more" in caught.value.details[-1]
    assert "data.on_bad_line=skip" in caught.value.hint
    account = build(tmp_path, rows, on_bad_line="skip")
    assert sum(split["refused"] for split in account["splits"].values()) == 25
    assert account["refused_examples"][0].startswith("x:2: ")


def test_too_little_data_and_unknown_columns_are_refused(tmp_path: Path) -> None:
    for rows, named in (
        ([], "empty"),
        ([pair(1)], "empty"),
        ([pair(1), pair(1)], "empty"),
        ([{"promt": "x", "respons": "y"}] * 3, "promt"),
    ):
        with pytest.raises(DataError, match=named) as caught:
            build(tmp_path, source_of(rows), on_bad_line="skip")
    assert caught.value.hint == "data.prompt_key=promt data.response_key=respons"


VALUES = st.sampled_from(["a", "b", "c", " d\n", "é\u2028\x85c\r\nd", ""]) | st.none() | st.just(3)
ROWS = st.lists(
    st.fixed_dictionaries({}, optional={"prompt": VALUES, "response": VALUES}), max_size=12
)


@given(train=ROWS, held_out=st.none() | ROWS, fraction=st.sampled_from([1e-9, 0.2, 0.9]))
def test_every_row_is_kept_unchanged_or_counted(
    train: list[dict[str, Any]],
    held_out: list[dict[str, Any]] | None,
    fraction: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    out = tmp_path_factory.mktemp("out")
    apart = None if held_out is None else source_of(held_out, "y")
    how: dict[str, Any] = {"held_out": apart, "eval_fraction": fraction, "on_bad_line": "skip"}
    try:
        account = build(out, source_of(train), **how)
    except DataError as error:
        if "split is empty" in error.message or "no row has" in error.message:
            return
        raise
    sides = {
        split: [tuple(m["content"] for m in row["messages"]) for row in rows_of(out, split)]
        for split in ("train", "heldout")
    }
    assert not set(sides["train"]) & set(sides["heldout"])
    ids = [row["id"] for row in rows_of(out, "train", "heldout")]
    assert len(set(ids)) == len(ids), "repeated rows have ids of their own"
    good = [
        (row["prompt"], row["response"])
        for row in [*train, *(held_out or [])]
        if all(isinstance(row.get(name), str) for name in ("prompt", "response"))
        and row["response"].strip()
    ]
    splits = account["splits"].values()
    overlapping = sum(split["overlapping"] for split in splits)
    assert len(sides["train"]) + len(sides["heldout"]) + overlapping == len(good)
    assert set(sides["train"]) | set(sides["heldout"]) == set(good)
    bad = len(train) + len(held_out or []) - len(good)
    assert sum(split["refused"] for split in splits) == bad
    for split in splits:
        assert split["read"] == split["kept"] + split["refused"] + split["overlapping"]


def test_prompts_without_a_needed_answer_are_refused(tmp_path: Path) -> None:
    """Exact match needs an answer in every row, and all others are named."""
    good = [{"prompt": f"say {n}", "answer": n} for n in range(60)]
    first = source_of([*good[:30], {"prompt": "say it"}, {"prompt": "x", "answer": " "}], "a")
    second = source_of([*good[30:], {"prompt": "say nothing", "answer": None}], "b")
    for sources, held_out in (((first, second), None), ((first,), second)):
        needed: dict[str, Any] = {"held_out": held_out, "kind": PROMPTS, "answered": True}
        with pytest.raises(DataError) as caught:
            build(tmp_path, *sources, **needed)
        assert "3 of 63" in caught.value.message
        places = sorted(line.partition(": ")[0] for line in caught.value.details)
        assert places == ["a:31", "a:32", "b:31"]
        counts = build(tmp_path, *sources, on_bad_line="skip", **needed)["splits"].values()
        assert [sum(c[key] for c in counts) for key in ("refused", "kept")] == [3, 60]


def drawn(
    *sources: Source, seed: int = 0, stopping: str = "all_exhausted"
) -> list[tuple[str, bool]]:
    return [(row.place, row.again) for row in mix(sources, seed=seed, stopping=stopping)]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=4),
    weights=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    seed=st.integers(0, 3),
)
def test_mixing_reads_every_source_in_its_order(sizes, weights, seed) -> None:
    weights = weights[: len(sizes)]
    sources = [
        numbered(str(n), size, probability=w / sum(weights))
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
    assert min(passes) == 1, "all were read, and one of them just once"
    shorter = drawn(*sources, seed=seed, stopping="first_exhausted")
    assert shorter == everything[: len(shorter)]
    assert not any(again for _, again in shorter)
    counts = Counter(place.partition(":")[0] for place, _ in shorter)
    assert any(counts[str(n)] == size for n, size in enumerate(sizes))


def test_probabilities_have_to_add_up(tmp_path: Path) -> None:
    for wrong in ([0.5, None], [0.5, 0.6], [1.0, 0.0], [1.5, -0.5]):
        assert wrong_probabilities(wrong), wrong
    for right in ([0.1] * 10, [None, None]):
        assert wrong_probabilities(right) == ""
    with pytest.raises(DataError, match="b "):  # no rows to sample from
        build(tmp_path, numbered("a", 5, probability=0.5), numbered("b", 0, probability=0.5))


def test_rows_are_counted_by_source_and_repeats_are_not_held_out(tmp_path: Path) -> None:
    big, small = numbered("big", 400, probability=0.5), numbered("small", 20, probability=0.5)
    account = build(tmp_path, big, small, eval_fraction=0.2)
    first, second = account["sources"]
    assert first == {"name": "big", "rows": 400, "refused": 0, "repeated": 0}
    assert second["rows"] == second["repeated"] + 20 > 300
    held_out = questions(tmp_path, "heldout")
    assert len(held_out) == len(set(held_out))
    assert not set(held_out) & set(questions(tmp_path, "train"))
    for split in account["splits"].values():
        assert split["read"] == split["kept"] + split["refused"] + split["overlapping"]


def test_sources_of_several_kinds_with_columns_of_their_own(tmp_path: Path) -> None:
    rows = ({"chosen": f"good {n}", "bad": "b", "prompt": f"a{n}"} for n in range(10))
    write(tmp_path / "a.jsonl", *rows)
    (tmp_path / "b.csv").write_text(
        "question,chosen,rejected\n" + "".join(f"b{n},good {n},bad\n" for n in range(10))
    )
    (out := tmp_path / "out").mkdir()
    typed = (
        f"data.sources=[{{path: {tmp_path}/a.jsonl, rejected_key: bad, max_samples: 6}},"
        f"{{path: {tmp_path}/b.csv, kind: csv, prompt_key: question}}]"
    )
    settings = compose_config(["train=dpo", "data=jsonl", typed, "data.eval_fraction=0.3"]).settings
    report = prepare_data(out, **data_settings(settings), log=LOG)
    asked = [row["prompt"][0]["content"] for row in rows_of(out, "train", "heldout")]
    assert sorted(asked) == sorted([f"a{n}" for n in range(6)] + [f"b{n}" for n in range(10)])
    assert [s["rows"] for s in report.notes["sources"]] == [6, 10]
    assert all(check.ok for check in report.checks)
    for row in rows_of(out, "heldout"):
        assert row["messages"] == [*row["prompt"], *row["chosen"]]
    wrong = [{"path": str(tmp_path / "b.csv"), "rejected_key": "worse"}]
    with pytest.raises(DataError, match="'worse'"):
        prepare_data(out, kind="csv", rows="pairs", sources=wrong, log=LOG)


def test_raw_texts_pass_unchanged(tmp_path: Path) -> None:
    book = "It was a dark night.\n\n  And stormy.\n"
    path = write(tmp_path / "x.jsonl", *({"body": f"{book}{n}", "n": n} for n in range(60)))
    (out := tmp_path / "out").mkdir()
    how = {"kind": "jsonl", "rows": KINDS["texts"].name, "text_key": "body", "log": LOG}
    prepare_data(out, path=str(path), eval_fraction=0.3, **how)
    rows = rows_of(out, "train", "heldout")
    assert sorted(row["text"] for row in rows) == sorted(f"{book}{n}" for n in range(60))
    assert all(set(row) == {"id", "text"} for row in rows)
