"""Write the responses of a served model to files, and compute their metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import pstdev
from typing import Any

from tasks.evaluation.evaluation_prompts import answer_of
from tasks.evaluation.scoring import ReferenceScorer
from tasks.evaluation.serve import Responses
from tasks.evaluation.smoke import Measured
from tasks.process.output import Log
from tasks.rl.user_code import EVAL, FunctionReference
from tasks.serving.prompts import question_of
from tasks.serving.text import exact_match, is_degenerate, matches

Judge = Callable[
    [Sequence[Mapping[str, Any]], Sequence[Sequence[int]], Responses, Sequence[str]], list[float]
]
"""The user's numbers for (rows, token ids of their prompts, responses, the responses as texts)."""


def read_answers(
    out: Path,
    rows: Sequence[Mapping[str, Any]],
    measured: Measured,
    scorer: ReferenceScorer,
    judge: Judge | None = None,
) -> dict[str, float]:
    """Write `generations.jsonl`, and measure exact match before and after training.

    Args:
        out: staging directory.
        rows: conversations of the prompts, with their answers if they have any.
        measured: responses of both models.
        scorer: decodes the tokens.
        judge: the user's function, which judges the responses of both models.

    Returns:
        `eval/before` and `eval/after`: shares of the rows with an answer in [0, 1];
        `eval/error`: standard error of their difference; `eval/compared`: number of such rows;
        `eval/samples`: number of rows. If no row has an answer, `eval/samples` alone. With `judge`
        also `eval/function_before` and `eval/function_after`, the means of its numbers.
    """
    expected = [answer_of(row) for row in rows]
    before, after = measured.texts(scorer)
    old, new = measured.both()
    question = measured.question
    judged: dict[str, list[float]] = {}
    if judge is not None:
        models = ((question.base_prompts, old, before), (question.prompts, new, after))
        judged = {
            f"function_{when}": judge(rows, prompts.tokens, responses, texts)
            for when, (prompts, responses, texts) in zip(("before", "after"), models, strict=True)
        }
    with (out / "generations.jsonl").open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            line = {
                "id": row.get("id", str(number)),
                **question_of(row),
                "expected": expected[number],
                "before": before[number],
                "after": after[number],
                "stopped": new.stopped[number],
                "degenerate": is_degenerate(new.tokens[number]),
                "tokens_before": old.tokens[number],
                "tokens_after": new.tokens[number],
                **{name: values[number] for name, values in judged.items()},
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return {
        **exact_matches(before, after, expected, "eval"),
        **{f"eval/{name}": sum(values) / len(values) for name, values in judged.items()},
        "eval/samples": float(len(rows)),
    }


@dataclass(frozen=True)
class Measure:
    """The user's `eval.function`, as part of a stage's key.

    Attributes:
        function: path.py:name.
        digest: SHA-256 of the file.
    """

    function: str
    digest: str

    @classmethod
    def of(cls, text: str) -> Measure:
        """Read the file that `eval.function` names.

        Raises:
            ConfigError: not of the form path.py:name, or the file cannot be read.
        """
        reference = FunctionReference.of(text, EVAL)
        return cls(str(reference), reference.digest())


def judge_of(measure: Measure, timeout_s: float, log: Log, log_path: Path) -> Judge:
    """Return a judge that calls `eval.function`, in a process of its own for each call.

    Args:
        measure: the user's function; it gets the arguments of `reward.function`.
        timeout_s: seconds for one call, which gets all responses of a model.
        log: gets the function's output.
        log_path: file for the complete output.
    """

    def judge(
        rows: Sequence[Mapping[str, Any]],
        prompts: Sequence[Sequence[int]],
        responses: Responses,
        texts: Sequence[str],
    ) -> list[float]:
        import numpy as np

        from tasks.rl.experience.responses import Prompt, Response
        from tasks.rl.rewards.function import Function
        from tasks.serving.vllm.colocation import Generated

        given = [
            Response(
                Prompt(row, np.asarray(prompt, np.int32)),
                Generated(np.asarray(ids, np.int32), np.zeros(len(ids), np.float32), stopped),
                text,
            )
            for row, prompt, ids, stopped, text in zip(
                rows, prompts, responses.tokens, responses.stopped, texts, strict=True
            )
        ]
        reference = FunctionReference.of(measure.function, EVAL)
        called = Function(reference, timeout_s=timeout_s, log=log, log_path=log_path)
        with closing(called) as function:
            return function(given)

    return judge


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
    gains = [
        matches(after[i], answer) - matches(before[i], answer)
        for i, answer in zip(compared, answers, strict=True)
    ]
    return {
        f"{name}/error": pstdev(gains) / len(gains) ** 0.5,
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
