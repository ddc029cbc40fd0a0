"""Write the responses of a served model to files, and compute their metrics.

Online training raises the mean reward of sampled responses, not that of greedy ones. So a policy
and the model before training also sample, at the temperature of the rollouts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from tasks.evaluation.model_folder import computing_dtype_of, context_of
from tasks.evaluation.prompts import Side, answer_of
from tasks.evaluation.scoring import ModelRef
from tasks.evaluation.serve import Measured, Responses
from tasks.rl.user_code import EVAL, FunctionReference
from tasks.serving.prompts import Chat, chat, exact_match, is_degenerate, matches, question_of

GREEDY, SAMPLED, PAIRS = "generations.jsonl", "drawn.jsonl", "pairs.jsonl"
CHANCE = 0.5
"""Share of pairs that an untrained head puts in the right order."""

Texts = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Measure:
    """The user's `eval.function`, as part of a stage's key."""

    function: str  # path.py:name
    digest: str  # SHA-256 of the file

    @classmethod
    def of(cls, text: str) -> Measure:
        """Read the file that `eval.function` names. Raises ConfigError."""
        reference = FunctionReference.of(text, EVAL)
        return cls(str(reference), reference.digest())


def read_responses(
    measured: Measured, function: Measure | None, reward: Path | None
) -> dict[str, float]:
    """Write the responses of the model before training and of this one, and return metrics.

    Conversations have `exact_matches` as `eval/...`, and with the user's `function` the means of
    its numbers, `eval/function_before` and `eval/function_after`. `reward` scores the sampled ones.
    """
    question, out, agreement = measured.question, measured.setup.out, measured.agreement
    rows, texts, (old, new) = question.rows, measured.texts(), measured.both()
    metrics = {
        **{f"drift/{name}": value for name, value in asdict(measured.drift).items()},
        "greedy/equal": float(agreement.equal),
        "greedy/ties": float(agreement.ties),
        "greedy/differences": float(len(agreement.differences)),
        "tokens_per_s": new.tokens_per_s,
        "engine_load_s": measured.served.load_s,
    }
    if rows is None:
        shown = measured.setup.scorer.decode(question.served.model.path, question.served.prompts)
        each = zip(shown, *texts, strict=True)
        _write(out / GREEDY, ({"text": text, "before": a, "after": b} for text, a, b in each))
        return metrics
    expected = [answer_of(row) for row in rows]
    judged: dict[str, list[float]] = {}
    if function is not None:
        models = zip(reversed(question.sides), (old, new), texts, strict=True)
        for when, model in zip(("before", "after"), models, strict=True):
            judged[f"function_{when}"] = _judged(function, measured, *model)
    _write(
        out / GREEDY,
        (
            {
                "id": row.get("id", str(number)),
                **question_of(row),
                "expected": expected[number],
                "before": texts[0][number],
                "after": texts[1][number],
                "stopped": new.stopped[number],
                "degenerate": is_degenerate(new.tokens[number]),
                "tokens_before": old.tokens[number],
                "tokens_after": new.tokens[number],
                **{name: values[number] for name, values in judged.items()},
            }
            for number, row in enumerate(rows)
        ),
    )
    metrics |= exact_matches(texts, expected, "eval")
    metrics |= {f"eval/{name}": fmean(values) for name, values in judged.items()}
    metrics["eval/samples"], metrics["eval/left_out"] = float(len(rows)), float(question.left_out)
    metrics["stop_rate"] = sum(new.stopped) / len(new.stopped)
    if question.temperature is not None:
        texts = measured.texts(sampled=True)
        metrics |= exact_matches(texts, expected, "drawn") | distance(measured)
        rewards: dict[int, tuple[float, float]] = {}
        if reward is not None:
            scores, rewards = _scored(reward, measured, texts)
            metrics |= scores
        names = "reward_before", "reward_after"  # of the responses that fit the reward model
        _write(
            out / SAMPLED,
            (
                {"id": row.get("id", str(number)), "before": before, "after": after}
                | dict(zip(names, rewards.get(number, ()), strict=False))
                for number, (row, before, after) in enumerate(zip(rows, *texts, strict=True))
            ),
        )
    return metrics


def _judged(
    measure: Measure, measured: Measured, side: Side, made: Responses, texts: Sequence[str]
) -> list[float]:
    """Call `eval.function` with the responses of one model, in a process of its own."""
    from tasks.rl.responses import Prompt, Response
    from tasks.rl.rewards import Function
    from tasks.serving.vllm.colocation import Generated

    assert measured.question.rows is not None
    each = zip(measured.question.rows, side.prompts, made.tokens, made.stopped, texts, strict=True)
    arguments = [
        Response(
            Prompt(row, np.asarray(prompt, np.int32)),
            Generated(np.asarray(ids, np.int32), np.zeros(len(ids), np.float32), stopped),
            text,
        )
        for row, prompt, ids, stopped, text in each
    ]
    reference, setup = FunctionReference.of(measure.function, EVAL), measured.setup
    log_path, limit = setup.log_path.with_name("eval.log"), setup.function_s
    child = Function(reference, timeout_s=limit, log=setup.log, log_path=log_path)
    with closing(child) as function:
        return function(arguments)


def exact_matches(texts: Texts, expected: Sequence[str | None], name: str) -> dict[str, float]:
    """Return exact match over the rows that have an expected answer; empty if none has.

    `texts` are those before and after training. `<name>/before` and `<name>/after` are in [0, 1],
    `<name>/error` is the standard error of their difference, `<name>/compared` the number of rows.
    """
    rows = [row for row in zip(*texts, expected, strict=True) if row[2] is not None]
    if not rows:
        return {}
    olds, news, answers = zip(*rows, strict=True)
    gains = [matches(new, answer) - matches(old, answer) for old, new, answer in rows]
    return {
        f"{name}/error": pstdev(gains) / len(gains) ** 0.5,
        f"{name}/before": exact_match(olds, answers),
        f"{name}/after": exact_match(news, answers),
        f"{name}/compared": float(len(rows)),
    }


def distance(measured: Measured) -> dict[str, float]:
    """Estimate the KL divergence of the served model from the model before training.

    `drawn/kl` is the mean over all tokens of log p_served - log p_before (nats per token), an
    unbiased estimate, `drawn/kl_error` its standard error over responses. Empty if the two models
    render prompts differently, or if the temperature was not 1.
    """
    sides, responses = measured.question.sides, measured.served.sampled[0].tokens
    prompts = sides[0].prompts
    if measured.question.temperature != 1.0 or prompts != sides[1].prompts:
        return {}
    scorer = measured.setup.scorer
    now, before = (scorer.token_logprobs(side.model, prompts, responses) for side in sides)
    sums_S = np.array([sum(a) - sum(b) for a, b in zip(now, before, strict=True)])
    count = sum(map(len, now))
    error = float(sums_S.std(ddof=1)) * len(sums_S) ** 0.5 / count if len(sums_S) > 1 else 0.0
    return {"drawn/kl": float(sums_S.sum()) / count, "drawn/kl_error": error}


def _scored(
    reward: Path, measured: Measured, texts: Texts
) -> tuple[dict[str, float], dict[int, tuple[float, float]]]:
    """Return metrics of the rewards of both models' responses, and the rewards by prompt.

    `scored/before` and `scored/after` are mean rewards, `scored/spread` is the standard deviation
    before training, `scored/left_out` the number of prompts with a response that exceeds the reward
    model's context. A reward model that renders the prompts to other token ids gets the responses
    as texts, in its own chat template.
    """
    rows, scorer = measured.question.rows, measured.setup.scorer
    assert rows is not None
    rendered = scorer.encode(reward, rows).tokens
    if all(rendered == side.prompts for side in measured.question.sides):
        sides = [
            [[*prompt, *ids] for prompt, ids in zip(rendered, made.tokens, strict=True)]
            for made in measured.both(sampled=True)
        ]
    else:
        questions = list(map(question_of, rows))
        sides = [
            scorer.encode_whole(reward, list(map(_answered, questions, side))) for side in texts
        ]
    pairs, context = list(zip(*sides, strict=True)), context_of(reward)
    fitting = {n: pair for n, pair in enumerate(pairs) if max(map(len, pair)) <= context}
    left_out = {"scored/left_out": float(len(pairs) - len(fitting))}
    if not fitting:
        return left_out, {}
    judge = ModelRef(reward, dtype=computing_dtype_of(reward))
    rewards = scorer.rewards(judge, [ids for pair in fitting.values() for ids in pair])
    rewards_S2 = np.array(rewards).reshape(-1, 2)
    metrics = {
        "scored/before": float(rewards_S2[:, 0].mean()),
        "scored/after": float(rewards_S2[:, 1].mean()),
        "scored/spread": float(rewards_S2[:, 0].std()),
        **left_out,
    }
    return metrics, {n: (float(a), float(b)) for n, (a, b) in zip(fitting, rewards_S2, strict=True)}


def _answered(question: Chat, text: str) -> Chat:
    response = {"role": "assistant", "content": text.strip()}
    return chat([*question["messages"], response], question)


def order_of_pairs(out: Path, before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """Write `pairs.jsonl`, and return the share of pairs whose chosen answer scores higher.

    Scores alternate: chosen, rejected. `before` is empty for a model that had no head.
    """
    pairs = list(zip(after[::2], after[1::2], strict=True))
    _write(out / PAIRS, ({"chosen": chosen, "rejected": rejected} for chosen, rejected in pairs))
    old, new = (
        sum(a > b for a, b in zip(each[::2], each[1::2], strict=True)) / len(pairs)
        for each in (before, after)
    )
    share = old if before else CHANCE
    return {"eval/before": share, "eval/after": new, "eval/pairs": float(len(pairs))}


def _write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
