"""Exact match and rewards of responses that a served policy samples.

Online training raises the mean reward of sampled responses, not that of greedy ones. So the served
model and the model before training sample responses to the same prompts, at the temperature of the
rollouts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.evaluation.evaluation_prompts import (
    answer_of,
    computing_dtype_of,
    context_of,
)
from tasks.evaluation.responses import exact_matches
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.evaluation.serve import Question
from tasks.evaluation.smoke import Measured
from tasks.serving.prompts import chat, question_of

SAMPLED = "drawn.jsonl"

Tokens = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Sampled:
    """Sampled responses of two models to the same S prompts, as pairs (before training, served).

    Attributes:
        rows: S conversations.
        prompts: token ids of the prompts, rendered for each model.
        tokens: token ids of the responses.
        texts: the responses as texts.
    """

    rows: Sequence[Mapping[str, Any]]
    prompts: tuple[Tokens, Tokens]
    tokens: tuple[Tokens, Tokens]
    texts: tuple[Sequence[str], Sequence[str]]


def read_sampled(
    out: Path,
    rows: Sequence[Mapping[str, Any]],
    measured: Measured,
    scorer: ReferenceScorer,
    reward: Path | None,
) -> dict[str, float]:
    """Write `drawn.jsonl`, and measure exact match and rewards of the sampled responses.

    A row of the file has `id`, `before` and `after`, and if a reward model scored both,
    `reward_before` and `reward_after`.

    Args:
        out: staging directory.
        rows: conversations of the prompts, with their answers if they have any.
        measured: responses of both models.
        scorer: decodes and scores.
        reward: folder of a reward model; None to measure no rewards.

    Returns:
        `drawn/before` and `drawn/after`: exact match over the rows with an answer, in [0, 1]; and
        the metrics of `distance` and `score`. Empty if nothing was sampled.
    """
    if measured.question.temperature is None:
        return {}
    question = measured.question
    before, after = measured.both(sampled=True)
    texts = measured.texts(scorer, sampled=True)
    prompts = (question.base_prompts.tokens, question.prompts.tokens)
    sampled = Sampled(rows, prompts, (before.tokens, after.tokens), texts)
    metrics = exact_matches(*texts, [answer_of(row) for row in rows], "drawn")
    metrics |= distance(question, after.tokens, scorer)
    scored, rewards = ({}, {}) if reward is None else score(reward, sampled, scorer)
    with (out / SAMPLED).open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            line = {"id": row.get("id", str(number)), "before": texts[0][number],
                    "after": texts[1][number]}  # fmt: skip
            if number in rewards:
                line |= dict(zip(("reward_before", "reward_after"), rewards[number], strict=True))
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return metrics | scored


def distance(question: Question, responses: Tokens, scorer: ReferenceScorer) -> dict[str, float]:
    """Estimate the KL divergence of the served model from the model before training.

    Args:
        question: both models and their prompts.
        responses: token ids that the served model sampled.
        scorer: the transformers child.

    Returns:
        `drawn/kl`: the mean over all tokens of log p_served - log p_before, an unbiased estimate
        of KL(served || before), in nats per token; `drawn/kl_error`: its standard error over
        responses. Empty if the two models render prompts differently, or if the temperature was
        not 1.
    """
    prompts = question.prompts.tokens
    if question.temperature != 1.0 or prompts != question.base_prompts.tokens:
        return {}
    assert question.base is not None
    now, before = (
        scorer.token_logprobs(ModelRef(path, dtype=question.dtype), prompts, responses)
        for path in (question.served, question.base)
    )
    sums_S = np.array([sum(a) - sum(b) for a, b in zip(now, before, strict=True)])
    count = sum(map(len, now))
    error = float(sums_S.std(ddof=1)) * len(sums_S) ** 0.5 / count if len(sums_S) > 1 else 0.0
    return {"drawn/kl": float(sums_S.sum()) / count, "drawn/kl_error": error}


def score(
    reward: Path, sampled: Sampled, scorer: ReferenceScorer
) -> tuple[dict[str, float], dict[int, tuple[float, float]]]:
    """Return metrics of the rewards of both models' responses, and the rewards.

    If the reward model renders the prompts to the same token ids, it gets the responses as token
    ids. Otherwise it gets them as texts, in its own chat template.

    Args:
        reward: folder of a reward model.
        sampled: the responses.
        scorer: the transformers child.

    Returns:
        `scored/before` and `scored/after`: mean rewards, normalised if the reward model's files
        have mean and standard deviation; `scored/spread`: standard deviation of the rewards
        before training; `scored/left_out`: prompts with a response that exceeds the reward model's
        context. If no prompt is left, `scored/left_out` alone. The rewards (before, after) of the
        others, by number of the prompt.
    """
    pairs = list(zip(*_conversations(reward, sampled, scorer), strict=True))
    context = context_of(reward)
    fitting = {n: pair for n, pair in enumerate(pairs) if max(map(len, pair)) <= context}
    left_out = {"scored/left_out": float(len(pairs) - len(fitting))}
    if not fitting:
        return left_out, {}
    conversations = [ids for pair in fitting.values() for ids in pair]
    rewards = scorer.rewards(ModelRef(reward, dtype=computing_dtype_of(reward)), conversations)
    rewards_S2 = np.array(rewards).reshape(-1, 2)
    metrics = {
        "scored/before": float(rewards_S2[:, 0].mean()),
        "scored/after": float(rewards_S2[:, 1].mean()),
        "scored/spread": float(rewards_S2[:, 0].std()),
        **left_out,
    }
    return metrics, {n: (float(a), float(b)) for n, (a, b) in zip(fitting, rewards_S2, strict=True)}


def _conversations(
    reward: Path, sampled: Sampled, scorer: ReferenceScorer
) -> list[list[list[int]]]:
    """Return token ids of prompts with responses, for each of the two models."""
    rendered = scorer.encode(reward, sampled.rows).tokens
    if all(rendered == list(prompts) for prompts in sampled.prompts):
        return [
            [[*prompt, *ids] for prompt, ids in zip(rendered, tokens, strict=True)]
            for tokens in sampled.tokens
        ]
    questions = [question_of(row) for row in sampled.rows]
    return [
        scorer.encode_whole(
            reward,
            [
                chat([*row["messages"], {"role": "assistant", "content": text.strip()}], row)
                for row, text in zip(questions, texts, strict=True)
            ],
        )
        for texts in sampled.texts
    ]
