"""What a served model answered, as files and numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    answered: Served,
    scorer: ReferenceScorer,
) -> dict[str, float]:
    """Exact match before and after; writes `generations.jsonl`.

    It is a share of the rows with an answer, `eval/compared` of them; without any it is not
    measured, and left out.

    Args:
        out: staging directory.
        rows: the conversations that were asked, with their answers where there are any.
        question: what was asked.
        answered: what came back.
        scorer: decodes.
    """
    expected = [answer_of(row) for row in rows]
    after = scorer.decode(question.served, answered.after.tokens)
    before = scorer.decode(question.base, answered.before.tokens)
    with (out / "generations.jsonl").open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            line = {
                "id": row.get("id", str(number)),
                "messages": question_of(row),
                "expected": expected[number],
                "before": before[number],
                "after": after[number],
                "stopped": answered.after.stopped[number],
                "degenerate": is_degenerate(answered.after.tokens[number]),
                "tokens_before": answered.before.tokens[number],
                "tokens_after": answered.after.tokens[number],
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return {**right(before, after, expected, "eval"), "eval/samples": float(len(rows))}


def right(
    before: Sequence[str], after: Sequence[str], expected: Sequence[str | None], name: str
) -> dict[str, float]:
    """Exact match of the answers that there is something to compare with, as `<name>/...`."""
    held = [i for i, answer in enumerate(expected) if answer is not None]
    if not held:
        return {}
    answers = [answer for answer in expected if answer is not None]
    return {
        f"{name}/before": exact_match([before[i] for i in held], answers),
        f"{name}/after": exact_match([after[i] for i in held], answers),
        f"{name}/compared": float(len(held)),
    }


def describe(metrics: Mapping[str, float]) -> str:
    """Exact match and rewards in words, where they were measured."""
    names = {"exact match": "eval", "reward": "scored"}
    return "".join(
        f"{name} {metrics[f'{key}/before']:.3f} before, {metrics[f'{key}/after']:.3f} after, "
        for name, key in names.items()
        if f"{key}/before" in metrics
    )


def numbers(
    moved: Drift, agreement: Agreement, answered: Served, *, left_out: int
) -> dict[str, float]:
    """What was measured, for the tracker; `left_out`: rows that were too long to ask."""
    stopped = answered.after.stopped
    return {
        **{f"drift/{name}": value for name, value in moved.as_dict().items()},
        "greedy/equal": float(agreement.equal),
        "greedy/ties": float(agreement.ties),
        "greedy/differences": float(len(agreement.differences)),
        "stop_rate": sum(stopped) / len(stopped),
        "eval/left_out": float(left_out),
        "tokens_per_s": answered.after.tokens_per_s,
        "engine_load_s": answered.load_s,
    }


def write_report(
    out: Path, checks: Sequence[Check], metrics: Mapping[str, float], notes: Mapping[str, Any]
) -> None:
    """Write `report.json`."""
    document = {"checks": [c.as_dict() for c in checks], "metrics": metrics, "notes": notes}
    (out / "report.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
