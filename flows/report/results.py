"""Read results of the evaluation row by row, and compare them by the bootstrap.

    results(collected)["smoke_eval"]["exact match"].change()     # Interval(0.61, 0.54, 0.67)

Rows are known by a key that tells whether two runs evaluated the same row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flows.report.collect import MANIFEST, Collected, document, read_lines
from tasks.serving.prompts import matches

RESAMPLES = 10_000
SEED = 20_261_124
_AT_ONCE = 4_000_000
"""Most random indices in memory at once."""
EXACT, SAMPLED, PAIRS = "exact match", "sampled exact match", "pairs in the right order"
REWARD, OWN = "sampled reward (std)", "eval.function"


@dataclass(frozen=True)
class Interval:
    """Mean of the second set minus mean of the first, with its 95 % bootstrap interval."""

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
    """Return the difference of the means over the same rows; ValueError if some miss."""
    differences = np.array([b - a for a, b in zip(first, second, strict=True)], dtype=float)
    return _interval(_means(differences, resamples, np.random.default_rng(seed)), differences)


def unpaired(
    first: Sequence[float], second: Sequence[float], *, resamples: int = RESAMPLES, seed: int = SEED
) -> Interval:
    """Return the difference of the means of two sets of other rows. Raises as `paired`."""
    a, b = np.array(first, dtype=float), np.array(second, dtype=float)
    generator = np.random.default_rng(seed)
    means = _means(b, resamples, generator) - _means(a, resamples, generator)
    return _interval(means, b, a)


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


def _interval(means: np.ndarray, values: np.ndarray, less: np.ndarray | float = 0.0) -> Interval:
    low, high = (float(np.quantile(means, share)) for share in (0.025, 0.975))
    return Interval(float(values.mean() - np.mean(less)), low, high)


@dataclass
class Results:
    """Result of each row by its key, before and after training; higher is better.

    `scale` identifies what gave the results; those of two scales cannot be compared.
    """

    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    scale: str = ""

    def change(self) -> Interval | None:
        """Return the mean change with its interval; None if it is not known row by row."""
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
            measured[stage.full_name] = {k: v for k, v in measures.items() if v.after}
    return measured


def response_lengths(folder: Path) -> tuple[list[float], list[float], int]:
    """Return the lengths of greedy responses in tokens, and how many did not stop."""
    rows = [row for row in read_lines(folder / "generations.jsonl") if "stopped" in row]
    before, after = (
        [float(len(row[f"tokens_{when}"])) for row in rows if row.get(f"tokens_{when}")]
        for when in ("before", "after")
    )
    return before, after, sum(not row["stopped"] for row in rows)


def _responses(folder: Path) -> dict[str, Results]:
    """Return exact matches of greedy and sampled responses, the user's numbers, and rewards."""
    sampled = {row.get("id"): row for row in read_lines(folder / "drawn.jsonl")}
    manifest = document(folder / MANIFEST)
    function = str((manifest.get("config", {}).get("function") or {}).get("digest", ""))
    reward = str(manifest.get("inputs", {}).get("reward", ""))
    scales = {EXACT: "", SAMPLED: "", OWN: function, REWARD: reward}
    measures = {name: Results(scale=scale) for name, scale in scales.items()}
    seen: Counter[str] = Counter()
    for row in read_lines(folder / "generations.jsonl"):
        expected, drawn = row.get("expected"), sampled.get(row.get("id"), {})
        text = json.dumps([row.get("id"), row.get("messages"), expected], sort_keys=True)
        seen[text] += 1
        for when in ("before", "after"):
            values = {REWARD: drawn.get(f"reward_{when}"), OWN: row.get(f"function_{when}")}
            for name, response in ((EXACT, row.get(when)), (SAMPLED, drawn.get(when))):
                if expected is not None and isinstance(response, str):
                    values[name] = matches(response, str(expected))
            for name, value in values.items():
                if isinstance(value, int | float):
                    getattr(measures[name], when)[f"{text} {seen[text]}"] = float(value)
    return measures


def _ordered(folder: Path, heldout: str) -> Results:
    """Return which pairs a reward model puts in the right order; the rows are known by number."""
    rows = [r for r in read_lines(folder / "pairs.jsonl") if {"chosen", "rejected"} <= set(r)]
    return Results(
        after={
            f"{heldout} {len(rows)} {number}": float(row["chosen"] > row["rejected"])
            for number, row in enumerate(rows)
        }
    )


def _heldout(run: Collected, step: str) -> str:
    """Return the digest of the evaluation rows of a step; the dataset's path if it is gone."""
    folders = [s.artifact for s in run.stages if (s.step, s.name) == (step, "prepare_data")]
    for folder in folders:
        with suppress(KeyError, TypeError):
            return str(document(Path(folder) / MANIFEST)["files"]["heldout.jsonl"]["blake3"])
    return folders[0] if folders else run.summary.get("run", "")
