"""Write the responses of a served model to files, and compute their metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.drift.fingerprint import Drift
from tasks.evaluation.evaluation_prompts import answer_of, question_of
from tasks.evaluation.greedy_ties import Agreement
from tasks.evaluation.scoring import ReferenceScorer
from tasks.evaluation.serve import Question, Served
from tasks.serving.text import exact_match, is_degenerate


def read_answers(
    out: Path,
    rows: Sequence[Mapping[str, Any]],
    question: Question,
    served: Served,
    scorer: ReferenceScorer,
) -> dict[str, float]:
    """Write `generations.jsonl`, and measure exact match before and after training.

    Args:
        out: staging directory.
        rows: conversations of the prompts, with their answers if they have any.
        question: the two models and their prompts.
        served: responses of both models.
        scorer: decodes the tokens.

    Returns:
        `eval/before` and `eval/after`: shares of the rows with an answer in [0, 1];
        `eval/compared`: number of such rows; `eval/samples`: number of rows. If no row has an
        answer, `eval/samples` alone.
    """
    expected = [answer_of(row) for row in rows]
    after = scorer.decode(question.served, served.after.tokens)
    before = scorer.decode(question.base, served.before.tokens)
    with (out / "generations.jsonl").open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            line = {
                "id": row.get("id", str(number)),
                "messages": question_of(row),
                "expected": expected[number],
                "before": before[number],
                "after": after[number],
                "stopped": served.after.stopped[number],
                "degenerate": is_degenerate(served.after.tokens[number]),
                "tokens_before": served.before.tokens[number],
                "tokens_after": served.after.tokens[number],
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return {**exact_matches(before, after, expected, "eval"), "eval/samples": float(len(rows))}


def exact_matches(
    before: Sequence[str], after: Sequence[str], expected: Sequence[str | None], name: str
) -> dict[str, float]:
    """Return exact match over the rows that have an expected answer, as `<name>/...`.

    Args:
        before: responses of the model before training.
        after: responses of the served model.
        expected: answers; None for a row without one.
        name: prefix of the metrics.
    """
    compared = [i for i, answer in enumerate(expected) if answer is not None]
    if not compared:
        return {}
    answers = [answer for answer in expected if answer is not None]
    return {
        f"{name}/before": exact_match([before[i] for i in compared], answers),
        f"{name}/after": exact_match([after[i] for i in compared], answers),
        f"{name}/compared": float(len(compared)),
    }


def describe(metrics: Mapping[str, float]) -> str:
    """Return exact match and rewards as text for the log, as far as they were measured."""
    names = {"exact match": "eval", "reward": "scored"}
    return "".join(
        f"{name} {metrics[f'{key}/before']:.3f} before, {metrics[f'{key}/after']:.3f} after, "
        for name, key in names.items()
        if f"{key}/before" in metrics
    )


def numbers(
    moved: Drift, agreement: Agreement, served: Served, *, left_out: int
) -> dict[str, float]:
    """Return the metrics of every smoke test with prompts.

    Args:
        moved: drift of the engine from the trained model.
        agreement: comparison of the first greedy tokens.
        served: responses of the engine.
        left_out: evaluation prompts that were too long, or not suitable.
    """
    stopped = served.after.stopped
    return {
        **{f"drift/{name}": value for name, value in asdict(moved).items()},
        "greedy/equal": float(agreement.equal),
        "greedy/ties": float(agreement.ties),
        "greedy/differences": float(len(agreement.differences)),
        "stop_rate": sum(stopped) / len(stopped),
        "eval/left_out": float(left_out),
        "tokens_per_s": served.after.tokens_per_s,
        "engine_load_s": served.load_s,
    }


def write_report(
    out: Path,
    checks: Sequence[Check],
    metrics: Mapping[str, float],
    notes: Mapping[str, Any] | None,
) -> None:
    """Write `report.json`; without the key `notes` if `notes` is None."""
    document: dict[str, Any] = {"checks": [c.as_dict() for c in checks], "metrics": metrics}
    if notes is not None:
        document["notes"] = notes
    (out / "report.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
