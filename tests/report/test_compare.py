"""`plumbline compare`: differences of two runs, their intervals, and a user's mistakes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from flows.compare import compare
from flows.report.collect import collect
from flows.report.results import paired, unpaired
from tests.report.recorded import recorded


def answers(folder: Path, right: Sequence[bool], *, first: int = 0) -> None:
    """Replace the evaluation rows of a run; nothing was sampled."""
    (path,) = folder.parents[1].glob("artifacts/report/*/generations.jsonl")
    path.with_name("drawn.jsonl").unlink(missing_ok=True)
    rows = [
        {"id": str(first + i), "messages": [], "expected": "k", "before": "",
         "after": " k" if ok else "x"}
        for i, ok in enumerate(right)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def two(tmp_path: Path, *, hostile: str = "") -> tuple[Path, Path]:
    """Write two runs: B has another seed, and 30 more of the same 200 rows right."""
    a, b = recorded(tmp_path / "a"), recorded(tmp_path / "b")
    (a / "config.yaml").write_text("seed: 0\ntrain: {lr: 0.1, betas: [1, 2]}\nlog: x\n")
    text = json.dumps(hostile or "y")
    (b / "config.yaml").write_text(
        f"seed: 1\ntrain: {{lr: 0.1, betas: [1, 3]}}\nnew: {text}\nlog: x\n"
    )
    answers(a, [i < 100 for i in range(200)])
    answers(b, [i < 130 for i in range(200)])
    return a, b


def test_settings_drift_evaluation_and_metrics_side_by_side(tmp_path: Path) -> None:
    a, b = two(tmp_path)
    compared = compare(collect(a), collect(b))
    assert compared.config == [
        ("new", "(not set)", "y"), ("seed", "0", "1"), ("train.betas", "[1, 2]", "[1, 3]"),
    ]  # fmt: skip
    (drift,) = compared.drift
    assert (drift.name, drift.a, drift.b) == ("merge mean KL", 8.857e-05, 8.857e-05)
    (row,) = compared.evaluation
    assert (row.name, row.a, row.b) == ("smoke_eval: exact match", 0.5, 0.65)
    assert row.interval is not None
    assert 0.09 < row.interval.low < row.interval.value < row.interval.high < 0.21
    assert row.verdict == "B is better (paired, 200 rows)"
    metrics = {pair.name: (pair.a, pair.b) for pair in compared.metrics}
    assert metrics["train loss"] == (0.2, 0.2)
    assert metrics["eval/after"] == (0.53125, 0.53125)


def test_rows_in_another_order_are_paired_and_other_rows_are_not(tmp_path: Path) -> None:
    a, b = two(tmp_path)
    (path,) = b.parents[1].glob("artifacts/report/*/generations.jsonl")
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    (row,) = compare(collect(a), collect(b)).evaluation
    assert row.verdict == "B is better (paired, 200 rows)"
    narrow = row.interval
    answers(b, [i < 130 for i in range(200)], first=1)
    (row,) = compare(collect(a), collect(b)).evaluation
    assert "(unpaired, 200 and 200 rows" in row.verdict
    assert row.interval is not None
    assert narrow is not None
    assert row.interval.high - row.interval.low > 1.5 * (narrow.high - narrow.low)


@pytest.mark.parametrize("same_rows", [True, False])
def test_an_interval_covers_the_true_difference_in_95_of_100_cases(same_rows: bool) -> None:
    """Simulated exact matches: difficulty of a row is common to both models."""
    generator = np.random.default_rng(0)
    cases, rows, covered, true = 300, 100, 0, 0.1
    for case in range(cases):
        ease = generator.uniform(0.1, 0.9, (2, rows))
        ease = ease[[0, 0]] if same_rows else ease
        a = generator.random(rows) < ease[0] - true / 2
        b = generator.random(rows) < ease[1] + true / 2
        interval = (paired if same_rows else unpaired)(
            a.astype(float).tolist(), b.astype(float).tolist(), resamples=500, seed=case
        )
        covered += interval.low <= true <= interval.high
    # Three standard errors of a share of 300 are 3.8 points.
    assert 0.912 <= covered / cases <= 0.988


def test_the_same_results_give_the_same_interval_and_none_gives_an_error() -> None:
    a, b = [0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0]
    assert paired(a, b) == paired(a, b)
    assert paired(a, a).is_significant is False
    assert paired([0.0] * 5, [1.0] * 5).is_significant is True
    assert paired([1.0] * 5, [0.0] * 5).is_significant is True
    with pytest.raises(ValueError, match="no results"):
        unpaired([], [1.0])
