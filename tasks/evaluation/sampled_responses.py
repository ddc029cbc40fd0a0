"""Answers that a served policy draws, and what they are worth to those it learnt from.

Learning from one's own replies raises the mean reward of replies that are drawn, not that of the
likeliest ones; training said what its own rollouts were worth, this is what people will get. The
model that training began with is asked the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.evaluation.evaluation_prompts import answer_of, context_of, dtype_of, question_of
from tasks.evaluation.responses import right
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.evaluation.serve import Question, Served

DRAWN = "drawn.jsonl"

Tokens = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Drawn:
    """What two models answered to the same S questions: (before training, served).

    Attributes:
        rows: conversations that were asked.
        prompts: token ids of the questions, as each of the two was asked.
        tokens: ids of the answers.
        texts: the same as texts.
    """

    rows: Sequence[Mapping[str, Any]]
    prompts: tuple[Tokens, Tokens]
    tokens: tuple[Tokens, Tokens]
    texts: tuple[Sequence[str], Sequence[str]]


def read_drawn(
    out: Path,
    rows: Sequence[Mapping[str, Any]],
    question: Question,
    answered: Served,
    scorer: ReferenceScorer,
    reward: Path | None,
) -> dict[str, float]:
    """Exact match and rewards of drawn answers; writes `drawn.jsonl`. Nothing without draws.

    Args:
        out: staging directory.
        rows: the conversations that were asked, with their answers where there are any.
        question: what was asked.
        answered: what came back.
        scorer: decodes and scores.
        reward: folder of a reward model; None where there is none to ask.

    Returns:
        `drawn/before` and `drawn/after`, the shares of rows with an answer that were answered so,
        and what `distance` and `score` say.
    """
    if answered.drawn_before is None or answered.drawn_after is None:
        return {}
    tokens = (answered.drawn_before.tokens, answered.drawn_after.tokens)
    texts = (scorer.decode(question.base, tokens[0]), scorer.decode(question.served, tokens[1]))
    drawn = Drawn(rows, (question.base_prompts.tokens, question.prompts.tokens), tokens, texts)
    with (out / DRAWN).open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            line = {"id": row.get("id", str(number)), "before": texts[0][number],
                    "after": texts[1][number]}  # fmt: skip
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    found = right(*texts, [answer_of(row) for row in rows], "drawn")
    found |= distance(question, tokens[1], scorer)
    return found if reward is None else found | score(reward, drawn, scorer)


def distance(question: Question, replies: Tokens, scorer: ReferenceScorer) -> dict[str, float]:
    """How far the served model has gone from the one it came from.

    Args:
        question: both models, and what they were asked.
        replies: token ids that the served model drew.
        scorer: the transformers child.

    Returns:
        `drawn/kl`: the mean over all tokens of log p_served - log p_before, an unbiased estimate
        of KL(served || before), nats a token; `drawn/kl_error`: its standard error, over replies.
        Nothing where one of the two does not render the questions to the same ids, or the draws
        were not at temperature 1.
    """
    prompts = question.prompts.tokens
    if question.temperature != 1.0 or prompts != question.base_prompts.tokens:
        return {}
    now, before = (
        scorer.token_logprobs(ModelRef(path, dtype=question.dtype), prompts, replies)
        for path in (question.served, question.base)
    )
    sums_S = np.array([sum(a) - sum(b) for a, b in zip(now, before, strict=True)])
    count = sum(map(len, now))
    error = float(sums_S.std(ddof=1)) * len(sums_S) ** 0.5 / count if len(sums_S) > 1 else 0.0
    return {"drawn/kl": float(sums_S.sum()) / count, "drawn/kl_error": error}


def score(reward: Path, drawn: Drawn, scorer: ReferenceScorer) -> dict[str, float]:
    """Mean rewards of both models' answers.

    A reward model that renders the questions to the very ids that both were asked gets the answers'
    ids as they are; another one gets texts, in its own template.

    Args:
        reward: folder of a reward model.
        drawn: the answers.
        scorer: the transformers child.

    Returns:
        `scored/before` and `scored/after`: means, in the reward model's standard deviations from
        its mean where its files have these; `scored/spread`: standard deviation of the rewards
        before; `scored/left_out`: questions of which an answer is longer than the reward model's
        context. Nothing but the latter when no question is left.
    """
    pairs = list(zip(*_conversations(reward, drawn, scorer), strict=True))
    context = context_of(reward)
    fitting = [pair for pair in pairs if max(map(len, pair)) <= context]
    left_out = {"scored/left_out": float(len(pairs) - len(fitting))}
    if not fitting:
        return left_out
    dtype = dtype_of(reward)
    found = scorer.rewards(ModelRef(reward, dtype=dtype), [ids for pair in fitting for ids in pair])
    rewards_S2 = np.array(found).reshape(-1, 2)
    return {
        "scored/before": float(rewards_S2[:, 0].mean()),
        "scored/after": float(rewards_S2[:, 1].mean()),
        "scored/spread": float(rewards_S2[:, 0].std()),
        **left_out,
    }


def _conversations(reward: Path, drawn: Drawn, scorer: ReferenceScorer) -> list[list[list[int]]]:
    """Token ids of whole conversations, of each of the two models."""
    asked = scorer.encode(reward, drawn.rows).tokens
    if all(asked == list(prompts) for prompts in drawn.prompts):
        return [
            [[*prompt, *ids] for prompt, ids in zip(asked, tokens, strict=True)]
            for tokens in drawn.tokens
        ]
    questions = [question_of(row) for row in drawn.rows]
    return [
        scorer.encode_whole(
            reward,
            [
                [*question, {"role": "assistant", "content": text.strip()}]
                for question, text in zip(questions, texts, strict=True)
            ],
        )
        for texts in drawn.texts
    ]
