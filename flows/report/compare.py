"""Compare two runs: configuration, drift, evaluation and final metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import yaml

from flows.report.collect import Collected, Stage
from flows.report.figures import PLOTTED
from flows.report.results import (
    EXACT,
    OWN,
    PAIRS,
    REWARD,
    SAMPLED,
    Interval,
    Results,
    Scores,
    full_name,
    paired,
    results,
    unpaired,
)

ABSENT = "(not set)"
_MEASURES = (EXACT, SAMPLED, OWN, REWARD, PAIRS)


@dataclass(frozen=True)
class Pair:
    """One number of both runs.

    Attributes:
        name: name of the number.
        a: its value in the first run; None if that run does not have it.
        b: its value in the second run.
    """

    name: str
    a: float | None
    b: float | None

    @property
    def change(self) -> float | None:
        """Value of the second run minus that of the first; None if one is missing."""
        return None if self.a is None or self.b is None else self.b - self.a


@dataclass(frozen=True)
class Evaluated(Pair):
    """One measure of the evaluation of both served models; higher is better.

    Attributes:
        interval: difference with its 95 % interval; None if the runs are not comparable.
        method: how the interval was made, and from how many rows.
        verdict: the result in words.
    """

    interval: Interval | None
    method: str
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """Differences of two runs.

    Attributes:
        a: contents of the first run.
        b: contents of the second run.
        config: key, value in a, value in b; keys that differ only.
        drift: drift of each hand-off.
        evaluation: measures of the evaluation.
        metrics: numbers of the summary, and last values of the curves.
    """

    a: Collected
    b: Collected
    config: list[tuple[str, str, str]] = field(default_factory=list)
    drift: list[Pair] = field(default_factory=list)
    evaluation: list[Evaluated] = field(default_factory=list)
    metrics: list[Pair] = field(default_factory=list)


def compare(a: Collected, b: Collected) -> Comparison:
    """Return the differences of two runs."""
    comparison = Comparison(a, b, config=_config(a.config, b.config))
    drifts = [{_drift_name(s): s.drift.value for s in run.stages if s.drift} for run in (a, b)]
    comparison.drift.extend(_pairs(*drifts))
    for name, first, second in _matched(results(a), results(b)):
        comparison.evaluation.extend(_evaluated(name, first, second))
    comparison.metrics.extend(_pairs(_numbers(a.summary), _numbers(b.summary)))
    for name, first, second in _matched(a.curves, b.curves):
        last = [
            {f"{name} {k}": v[-1][1] for k, v in (each or {}).items() if v and k in PLOTTED}
            for each in (first, second)
        ]
        comparison.metrics.extend(_pairs(*last))
    return comparison


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Return the leaves of a configuration by dotted key, as JSON texts."""
    if isinstance(value, dict) and value:
        parts = [flatten(item, f"{prefix}{key}.") for key, item in value.items()]
        return {key: text for part in parts for key, text in part.items()}
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return {prefix.rstrip("."): text}


def _numbers(summary: Mapping[str, Any]) -> dict[str, float | None]:
    scores = {f"eval/{name}": value for name, value in summary["eval"].items()}
    return {"seconds": summary["seconds"], **scores}


def _config(a: str, b: str) -> list[tuple[str, str, str]]:
    first, second = (flatten(_yaml(text)) for text in (a, b))
    rows = [(k, first.get(k, ABSENT), second.get(k, ABSENT)) for k in sorted({*first, *second})]
    return [row for row in rows if row[1] != row[2] and row[0]]


def _yaml(text: str) -> Any:
    with suppress(yaml.YAMLError):
        return yaml.safe_load(text) or {}
    return {}


def _pairs(a: Mapping[str, float | None], b: Mapping[str, float | None]) -> Iterator[Pair]:
    for name in dict.fromkeys([*a, *b]):
        pair = Pair(name, a.get(name), b.get(name))
        if pair.a is not None or pair.b is not None:
            yield pair


def _drift_name(stage: Stage) -> str:
    assert stage.drift is not None
    return f"{full_name(stage)} {stage.drift.measure}"


def _matched(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, of a, of b); without a common name, the last of each belong together."""
    if a and b and not set(a) & set(b):
        first, second = list(a)[-1], list(b)[-1]
        yield f"{first} / {second}", a[first], b[second]
        return
    for name in dict.fromkeys([*a, *b]):
        yield name, a.get(name), b.get(name)


def _evaluated(
    stage: str, a: Mapping[str, Results] | None, b: Mapping[str, Results] | None
) -> Iterator[Evaluated]:
    for measure in _MEASURES:
        of_a, of_b = ((each or {}).get(measure, Results()) for each in (a, b))
        first, second = of_a.after, of_b.after
        if not first and not second:
            continue
        name = f"{stage}: {measure}"
        mean_a, mean_b = _mean(first), _mean(second)
        if not first or not second:
            missing = "B" if first else "A"
            reason = f"not comparable: {missing} has no results per row"
            yield Evaluated(name, mean_a, mean_b, None, "", reason)
            continue
        if of_a.scale != of_b.scale:
            judge = "reward models" if measure == REWARD else "versions of eval.function"
            reason = f"not comparable: two {judge} gave the numbers"
            yield Evaluated(name, mean_a, mean_b, None, "", reason)
            continue
        if first.keys() == second.keys():
            interval = paired(list(first.values()), [second[key] for key in first])
            method = f"paired, {len(first)} rows"
        else:
            interval = unpaired(list(first.values()), list(second.values()))
            method = f"unpaired, {len(first)} and {len(second)} rows: they are not the same"
        better = "B is better" if interval.value > 0 else "A is better"
        verdict = better if interval.is_significant else "no significant difference"
        yield Evaluated(name, mean_a, mean_b, interval, method, verdict)


def _mean(scores: Scores) -> float | None:
    return sum(scores.values()) / len(scores) if scores else None
