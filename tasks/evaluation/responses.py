"""Write the responses of a served model to files, and compute their metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.evaluation.evaluation_prompts import answer_of, question_of
from tasks.evaluation.scoring import ReferenceScorer
from tasks.evaluation.smoke import Measured
from tasks.serving.text import exact_match, is_degenerate


def read_answers(
    out: Path, rows: Sequence[Mapping[str, Any]], measured: Measured, scorer: ReferenceScorer
) -> dict[str, float]:
    """Write `generations.jsonl`, and measure exact match before and after training.

    Args:
        out: staging directory.
        rows: conversations of the prompts, with their answers if they have any.
        measured: responses of both models.
        scorer: decodes the tokens.

    Returns:
        `eval/before` and `eval/after`: shares of the rows with an answer in [0, 1];
        `eval/compared`: number of such rows; `eval/samples`: number of rows. If no row has an
        answer, `eval/samples` alone.
    """
    expected = [answer_of(row) for row in rows]
    before, after = measured.texts(scorer)
    old, new = measured.both()
    with (out / "generations.jsonl").open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            line = {
                "id": row.get("id", str(number)),
                "messages": question_of(row),
                "expected": expected[number],
                "before": before[number],
                "after": after[number],
                "stopped": new.stopped[number],
                "degenerate": is_degenerate(new.tokens[number]),
                "tokens_before": old.tokens[number],
                "tokens_after": new.tokens[number],
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


def numbers(measured: Measured, *, left_out: int) -> dict[str, float]:
    """Return the metrics of every smoke test with prompts.

    Args:
        measured: results of the engine.
        left_out: evaluation prompts that were too long, or not suitable.
    """
    agreement, after = measured.agreement, measured.served.after
    return {
        **{f"drift/{name}": value for name, value in asdict(measured.drift).items()},
        "greedy/equal": float(agreement.equal),
        "greedy/ties": float(agreement.ties),
        "greedy/differences": float(len(agreement.differences)),
        "stop_rate": sum(after.stopped) / len(after.stopped),
        "eval/left_out": float(left_out),
        "tokens_per_s": after.tokens_per_s,
        "engine_load_s": measured.served.load_s,
    }
