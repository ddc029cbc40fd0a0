"""Read results of the evaluation row by row, before and after training, from what a run left.

    results(collected)["smoke_eval"]["exact match"].change()     # Interval(0.61, 0.54, 0.67)

Rows are known by a key that tells whether two runs evaluated the same row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flows.report.collect import Collected, Stage
from tasks.serving.text import matches

RESAMPLES = 10_000
SEED = 20_261_124
LEVEL = 0.95
_AT_ONCE = 4_000_000
"""Most random indices in memory at once."""


@dataclass(frozen=True)
class Interval:
    """Difference of two means with its bootstrap interval.

    Attributes:
        value: mean of the second set minus mean of the first.
        low: lower end of the 95 % interval.
        high: upper end.
    """

    value: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        """True if the interval leaves out zero."""
        return self.low > 0 or self.high < 0


def paired(
    first: Sequence[float], second: Sequence[float], *, resamples: int = RESAMPLES, seed: int = SEED
) -> Interval:
    """Return the difference of the means over the same rows.

    Args:
        first: results of the first model, one per row.
        second: results of the second model on the same rows, in the same order.

    Raises:
        ValueError: there are no rows, or not as many in both.
    """
    differences = np.array([b - a for a, b in zip(first, second, strict=True)], dtype=float)
    means = _means(differences, resamples, np.random.default_rng(seed))
    return _interval(float(differences.mean()), means)


def unpaired(
    first: Sequence[float], second: Sequence[float], *, resamples: int = RESAMPLES, seed: int = SEED
) -> Interval:
    """Return the difference of the means of two independent sets of rows.

    Args:
        first: results of the first model, one per row.
        second: results of the second model on other rows.

    Raises:
        ValueError: one of the sets is empty.
    """
    a, b = np.array(first, dtype=float), np.array(second, dtype=float)
    generator = np.random.default_rng(seed)
    means = _means(b, resamples, generator) - _means(a, resamples, generator)
    return _interval(float(b.mean() - a.mean()), means)


def _means(values: np.ndarray, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Return the means of bootstrap samples, shape [resamples]."""
    count = len(values)
    if not count:
        raise ValueError("no results to compare")
    block = max(_AT_ONCE // count, 1)
    sizes = [min(block, resamples - done) for done in range(0, resamples, block)]
    return np.concatenate(
        [values[generator.integers(count, size=(size, count))].mean(axis=1) for size in sizes]
    )


def _interval(value: float, means: np.ndarray) -> Interval:
    low, high = (float(np.quantile(means, (1 + side * LEVEL) / 2)) for side in (-1, 1))
    return Interval(value, low, high)


Scores = dict[str, float]
"""Result of each row by its key."""
EXACT, SAMPLED, PAIRS = "exact match", "sampled exact match", "pairs in the right order"
REWARD, OWN = "sampled reward (std)", "eval.function"


@dataclass
class Results:
    """Results of one measure; higher is better.

    Attributes:
        before: result of each row before training; empty if that was not measured.
        after: result of each row after it.
        scale: identity of what gave the results; those of two scales cannot be compared.
    """

    before: Scores = field(default_factory=dict)
    after: Scores = field(default_factory=dict)
    scale: str = ""

    def change(self) -> Interval | None:
        """Return the mean change with its 95 % interval; None if it is not known row by row."""
        if not self.after or self.before.keys() != self.after.keys():
            return None
        return paired(list(self.before.values()), list(self.after.values()))


def results(run: Collected) -> dict[str, dict[str, Results]]:
    """Return the results by the name of the stage, then by measure."""
    measured = {}
    for stage in run.stages:
        if stage.name.startswith("smoke") and stage.state != "failed":
            folder = Path(stage.artifact)
            measures = {**_responses(folder), PAIRS: _ordered(folder, _heldout(run, stage.step))}
            measured[full_name(stage)] = {k: v for k, v in measures.items() if v.after}
    return measured


def full_name(stage: Stage) -> str:
    """Return `<step>.<stage>`; without a step, the stage."""
    return f"{stage.step}.{stage.name}".lstrip(".")


def lengths(folder: Path) -> tuple[list[float], list[float], int]:
    """Return the lengths of greedy responses in tokens, and how many did not stop."""
    rows = [row for row in read_lines(folder / "generations.jsonl") if "stopped" in row]
    before, after = (
        [float(len(row[f"tokens_{when}"])) for row in rows if row.get(f"tokens_{when}")]
        for when in ("before", "after")
    )
    return before, after, sum(not row["stopped"] for row in rows)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines, up to a damaged one; none of a missing file."""
    with suppress(OSError, ValueError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def _responses(folder: Path) -> dict[str, Results]:
    """Return exact matches of greedy and sampled responses, the user's numbers, and rewards."""
    drawn = {row.get("id"): row for row in read_lines(folder / "drawn.jsonl")}
    scorer, function = _scorers(folder)
    measures = {
        EXACT: Results(),
        SAMPLED: Results(),
        OWN: Results(scale=function),
        REWARD: Results(scale=scorer),
    }
    seen: Counter[str] = Counter()
    for row in read_lines(folder / "generations.jsonl"):
        key = json.dumps([row.get("id"), row.get("messages"), row.get("expected")], sort_keys=True)
        seen[key] += 1
        key = f"{key} {seen[key]}"
        sampled = drawn.get(row.get("id"), {})
        for when in ("before", "after"):
            for name, value in (
                (REWARD, sampled.get(f"reward_{when}")),
                (OWN, row.get(f"function_{when}")),
            ):
                if isinstance(value, int | float):
                    getattr(measures[name], when)[key] = float(value)
            for name, texts in ((EXACT, row), (SAMPLED, sampled)):
                if row.get("expected") is not None and isinstance(texts.get(when), str):
                    right = float(matches(texts[when], str(row["expected"])))
                    getattr(measures[name], when)[key] = right
    return measures


def _scorers(folder: Path) -> tuple[str, str]:
    """Return the digests of the reward model and of the user's function; empty without one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        manifest = json.loads((folder / "manifest.json").read_text())
        function = manifest["config"].get("function") or {}
        return str(manifest["inputs"].get("reward", "")), str(function.get("digest", ""))
    return "", ""


def _ordered(folder: Path, heldout: str) -> Results:
    """Return which pairs a reward model puts in the right order; the rows are known by number."""
    rows = [r for r in read_lines(folder / "pairs.jsonl") if {"chosen", "rejected"} <= set(r)]
    keys = [f"{heldout} {len(rows)} {number}" for number in range(len(rows))]
    right = [float(row["chosen"] > row["rejected"]) for row in rows]
    return Results(after=dict(zip(keys, right, strict=True)))


def _heldout(run: Collected, step: str) -> str:
    """Return the digest of the evaluation rows of a step; the dataset's path if it is gone."""
    folders = [s.artifact for s in run.stages if (s.step, s.name) == (step, "prepare_data")]
    for folder in folders:
        with suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads((Path(folder) / "manifest.json").read_text())
            return str(manifest["files"]["heldout.jsonl"]["blake3"])
    return folders[0] if folders else run.summary.get("run", "")
