"""Compare two runs: configuration, drift, evaluation and final metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from flows.report.collect import Collected
from flows.report.figures import PLOTTED
from flows.report.results import (
    EXACT,
    OWN,
    PAIRS,
    REWARD,
    SAMPLED,
    Interval,
    Results,
    paired,
    results,
    unpaired,
)


class Pair(NamedTuple):
    """One number of both runs; None where a run does not have it."""

    name: str
    a: float | None
    b: float | None


class Evaluated(NamedTuple):
    """One measure of the evaluation of both served models; higher is better.

    `interval` is the difference, None if the runs are not comparable; `verdict` is in words.
    """

    name: str
    a: float | None
    b: float | None
    interval: Interval | None
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """Differences of two runs; `config` has key, value in a, value in b where they differ."""

    config: list[tuple[str, str, str]]
    drift: list[Pair]
    evaluation: list[Evaluated]
    metrics: list[Pair]


def compare(a: Collected, b: Collected) -> Comparison:
    """Return the differences of two runs."""
    first, second = (flatten(_yaml(run.config)) for run in (a, b))
    keys = sorted({*first, *second} - {""})
    config = [(key, first.get(key, "(not set)"), second.get(key, "(not set)")) for key in keys]
    last = [
        Pair(f"{stage} {name}", *(of.get(name, [(0, None)])[-1][1] for of in curves))
        for stage, *curves in _matched(a.curves, b.curves)
        for name in dict.fromkeys([*curves[0], *curves[1]])
        if name in PLOTTED
    ]
    return Comparison(
        config=[row for row in config if row[1] != row[2]],
        drift=_pairs(*(_drifts(run) for run in (a, b))),
        evaluation=[
            row for matched in _matched(results(a), results(b)) for row in _evaluated(*matched)
        ],
        metrics=[*_pairs(*(_numbers(run) for run in (a, b))), *last],
    )


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Return the leaves of a configuration by dotted key, as JSON texts."""
    if isinstance(value, dict) and value:
        parts = [flatten(item, f"{prefix}{key}.") for key, item in value.items()]
        return {key: text for part in parts for key, text in part.items()}
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return {prefix.rstrip("."): text}


def _yaml(text: str) -> Any:
    with suppress(yaml.YAMLError):
        return yaml.safe_load(text) or {}
    return {}


def _numbers(run: Collected) -> dict[str, float | None]:
    scores = {f"eval/{name}": value for name, value in run.summary["eval"].items()}
    return {"seconds": run.summary["seconds"], **scores}


def _drifts(run: Collected) -> dict[str, float | None]:
    return {f"{s.full_name} {s.drift['measure']}": s.drift["value"] for s in run.stages if s.drift}


def _pairs(a: Mapping[str, float | None], b: Mapping[str, float | None]) -> list[Pair]:
    pairs = [Pair(name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b])]
    return [pair for pair in pairs if (pair.a, pair.b) != (None, None)]


def _matched(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, of a, of b); without a common name, the last of each belong together."""
    if a and b and not set(a) & set(b):
        first, second = list(a)[-1], list(b)[-1]
        yield f"{first} / {second}", a[first], b[second]
        return
    for name in dict.fromkeys([*a, *b]):
        yield name, a.get(name, {}), b.get(name, {})


def _evaluated(
    stage: str, a: Mapping[str, Results], b: Mapping[str, Results]
) -> Iterator[Evaluated]:
    for measure in (EXACT, SAMPLED, OWN, REWARD, PAIRS):
        of_a, of_b = a.get(measure, Results()), b.get(measure, Results())
        first, second = list(of_a.after.values()), list(of_b.after.values())
        if not first and not second:
            continue
        means = [sum(values) / len(values) if values else None for values in (first, second)]
        interval, method = None, ""
        if not first or not second:
            verdict = f"not comparable: {'B' if first else 'A'} has no results per row"
        elif of_a.scale != of_b.scale:
            judges = "reward models" if measure == REWARD else "versions of eval.function"
            verdict = f"not comparable: two {judges} gave the numbers"
        elif of_a.after.keys() == of_b.after.keys():
            interval = paired(first, [of_b.after[key] for key in of_a.after])
            method = f"paired, {len(first)} rows"
        else:
            interval = unpaired(first, second)
            method = f"unpaired, {len(first)} and {len(second)} rows: they are not the same"
        if interval is not None:
            better = "B is better" if interval.value > 0 else "A is better"
            verdict = better if interval.is_significant else "no significant difference"
            verdict += f" ({method})"
        yield Evaluated(f"{stage}: {measure}", means[0], means[1], interval, verdict)
