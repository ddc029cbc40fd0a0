"""Every row is kept unchanged, or counted and reported; the splits never overlap."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.core.errors import DataError
from tasks.data.build import Options, build_dataset
from tasks.data.columns import Columns
from tasks.data.kinds import KINDS
from tasks.data.readers import Row
from tasks.data.sources import Source

LOG = logging.getLogger("tests.data")


def _pair(number: int) -> dict[str, Any]:
    return {"prompt": f"question {number}", "response": f"answer {number}"}


def _rows(values: list[dict[str, Any]]) -> list[Row]:
    return [Row(f"x.jsonl:{number}", value) for number, value in enumerate(values, start=1)]


def _source(values: list[dict[str, Any]], name: str = "x.jsonl", **fields: Any) -> Source:
    columns = fields.pop("columns", Columns())
    return Source(name, lambda: iter(_rows(values)), columns, **fields)


def _build(out: Path, train: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    held_out = options.pop("held_out", None)
    sources = options.pop("sources", None) or [_source(train)]
    kind = KINDS[options.pop("rows", "conversations")]
    return build_dataset(
        out,
        train=sources,
        held_out=None if held_out is None else _source(held_out, "y.jsonl"),
        options=Options(kind=kind, **{"eval_fraction": 0.3, **options}),
        log=LOG,
    )


def _read(out: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"{split}.jsonl").read_text().splitlines()]


def _questions(out: Path, split: str) -> list[str]:
    return [row["messages"][0]["content"] for row in _read(out, split)]


def test_a_share_is_held_out_and_nothing_is_lost(tmp_path: Path) -> None:
    account = _build(tmp_path, [_pair(n) for n in range(100)])
    train, held_out = _questions(tmp_path, "train"), _questions(tmp_path, "heldout")
    assert sorted(train + held_out) == sorted(f"question {n}" for n in range(100))
    assert 15 <= len(held_out) <= 45
    assert account["splits"]["train"] == {
        "read": len(train), "kept": len(train), "refused": 0, "overlapping": 0,
    }  # fmt: skip


def test_the_same_rows_give_the_same_bytes_and_another_seed_another_split(tmp_path: Path) -> None:
    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        out = tmp_path / name
        out.mkdir()
        _build(out, [_pair(n) for n in range(50)], seed=seed)
        files.append((out / "heldout.jsonl").read_bytes())
    assert files[0] == files[1] != files[2]


def test_duplicates_keep_ids_apart_and_stay_on_one_side(tmp_path: Path) -> None:
    _build(tmp_path, [_pair(n % 10) for n in range(30)])
    train, held_out = _read(tmp_path, "train"), _read(tmp_path, "heldout")
    assert not set(_questions(tmp_path, "train")) & set(_questions(tmp_path, "heldout"))
    ids = [row["id"] for row in train + held_out]
    assert len(set(ids)) == 30
    assert sum(identity.endswith("-2") for identity in ids) == 10


def test_training_rows_that_are_held_out_are_left_out_and_counted(tmp_path: Path) -> None:
    account = _build(tmp_path, [_pair(1), _pair(2), _pair(2)], held_out=[_pair(2)])
    assert _questions(tmp_path, "train") == ["question 1"]
    assert account["splits"]["train"]["overlapping"] == 2
    assert account["splits"]["heldout"]["kept"] == 1


def test_line_separators_within_a_text_stay_within_one_line(tmp_path: Path) -> None:
    text = "a\u2028b\x85c\r\nd"
    _build(tmp_path, [{"prompt": text, "response": "x"}, _pair(1)], eval_fraction=1e-9)
    questions = _questions(tmp_path, "train") + _questions(tmp_path, "heldout")
    assert sorted(questions) == sorted([text, "question 1"])


def test_bad_rows_are_all_listed(tmp_path: Path) -> None:
    bad = [{"prompt": "x", "response": ""}] * 25
    with pytest.raises(DataError) as caught:
        _build(tmp_path, [_pair(1), *bad, _pair(2)])
    assert "25 of 27" in caught.value.message
    assert "x.jsonl:2" in caught.value.message
    assert len(caught.value.details) == 21
    assert caught.value.details[-1] == "... and 5 more"
    assert "data.on_bad_line=skip" in caught.value.hint


def test_skipped_rows_are_counted(tmp_path: Path) -> None:
    rows = [_pair(n) for n in range(20)] + [{"prompt": "x", "response": 3}]
    account = _build(tmp_path, rows, on_bad_line="skip")
    assert account["splits"]["train"]["refused"] == 1
    assert [line.split(": ")[0] for line in account["refused_examples"]] == ["x.jsonl:21"]


def test_columns_that_no_row_has_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="promt"):
        _build(tmp_path, [{"promt": "x", "response": "y"}] * 3, on_bad_line="skip")


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    for rows in ([], [_pair(1)], [_pair(1), _pair(1)]):
        with pytest.raises(DataError, match="empty"):
            _build(tmp_path, rows)


@pytest.mark.parametrize(
    "options", [{"eval_fraction": 0.0}, {"eval_fraction": 1.0}, {"max_samples": 0},
                {"on_bad_line": "ignore"}]
)  # fmt: skip
def test_options_out_of_range_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=next(iter(options))):
        _build(tmp_path, [_pair(1)], **options)


VALUES = st.sampled_from(["a", "b", "c", " d\n", "é\u2028", ""]) | st.none() | st.integers()
ROWS = st.lists(
    st.fixed_dictionaries({}, optional={"prompt": VALUES, "response": VALUES}), max_size=12
)


@settings(deadline=None)
@given(train=ROWS, held_out=st.none() | ROWS, fraction=st.sampled_from([1e-9, 0.2, 0.9]))
def test_every_row_is_kept_unchanged_or_counted(
    train: list[dict[str, Any]],
    held_out: list[dict[str, Any]] | None,
    fraction: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    out = tmp_path_factory.mktemp("out")
    options: dict[str, Any] = {"held_out": held_out, "eval_fraction": fraction}
    try:
        account = _build(out, train, on_bad_line="skip", **options)
    except DataError as error:
        if "split is empty" in error.message or "no column" in error.message:
            return
        raise
    sides = {split: _kept(_read(out, split)) for split in ("train", "heldout")}
    assert not set(sides["train"]) & set(sides["heldout"])
    good = [p for p in map(_texts, train + (held_out or [])) if p is not None]
    splits = account["splits"].values()
    overlapping = sum(split["overlapping"] for split in splits)
    assert len(sides["train"]) + len(sides["heldout"]) + overlapping == len(good)
    assert set(sides["train"]) | set(sides["heldout"]) == set(good)
    bad = len(train) + len(held_out or []) - len(good)
    assert sum(split["refused"] for split in splits) == bad
    for split in splits:
        assert split["read"] == split["kept"] + split["refused"] + split["overlapping"]


def _texts(row: dict[str, Any]) -> tuple[str, str] | None:
    prompt, response = row.get("prompt"), row.get("response")
    usable = isinstance(prompt, str) and isinstance(response, str) and response.strip()
    return (prompt, response) if usable else None


def _kept(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in rows]
