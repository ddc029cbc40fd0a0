"""Metrics of an iteration, by their names in the tracker."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tasks.rl.algorithms.batch import Advantages
from tasks.rl.algorithms.correction import Mismatch
from tasks.rl.algorithms.kl import estimate
from tasks.rl.algorithms.value_loss import explained_variance
from tasks.rl.clock import Clock
from tasks.rl.experience.collect import groups_without_signal
from tasks.rl.experience.packed_rows import Experience
from tasks.rl.experience.responses import Response, ScoredResponse

SHOWN = 4
"""Responses per iteration in the table of samples."""


def collected(scored: Sequence[ScoredResponse]) -> dict[str, float]:
    """Return metrics of sampled responses and their rewards."""
    rewards = np.array([response.reward for response in scored])
    metrics = {**evaluated(scored), "reward_std": float(rewards.std())}
    groups = len({response.group for response in scored})
    if groups < len(scored):  # a single response is no group
        no_signal = groups_without_signal([(0, response) for response in scored])
        metrics["groups_without_signal"] = len(no_signal) / groups
    return metrics


def evaluated(scored: Sequence[ScoredResponse]) -> dict[str, float]:
    """Return metrics of responses to evaluation prompts.

    Lengths count sampled tokens. With an environment also `turns`, their mean, and `out_of_turns`,
    the share of episodes that `rl.max_turns` ended.
    """
    lengths = np.array([len(response.response.generated.ids) for response in scored])
    parts = {
        f"reward/{name}": float(np.mean([response.parts[name] for response in scored]))
        for name in scored[0].parts
    }
    responses = [response.response for response in scored]
    turns = {}
    if any(response.turns for response in responses):
        turns["turns"] = float(np.mean([len(response.turns) for response in responses]))
        unfinished = [not response.done and response.generated.ended for response in responses]
        turns["out_of_turns"] = float(np.mean(unfinished))
    return {
        "reward": float(np.mean([response.reward for response in scored])),
        **parts,
        **turns,
        "length": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "truncated": float(np.mean([not response.generated.ended for response in responses])),
    }


def compared(old_N: torch.Tensor, mismatch: Mismatch) -> dict[str, float]:
    """Return metrics of the trainer's log-probabilities of the response tokens, before the update.

    `entropy` is their negated mean: an unbiased estimate of the policy's entropy if the responses
    were sampled from it.
    """
    return {
        "mismatch/mean_abs": mismatch.mean_abs,
        "mismatch/max_abs": mismatch.max_abs,
        "mismatch/kl": mismatch.kl,
        "entropy": float(-old_N.mean()),
    }


def off_policy(experience: Experience, measured: Mismatch, mismatch: float) -> dict[str, float]:
    """Return metrics of responses that an older version of the policy may have sampled."""
    assert experience.old is not None
    return {
        "mismatch/mean_abs": mismatch,
        "off_policy/mean_abs": measured.mean_abs,
        "off_policy/max_abs": measured.max_abs,
        "off_policy/kl": measured.kl,
        "entropy": float(-experience.old.mean()),
    }


def estimates(experience: Experience, advantages: Advantages) -> dict[str, float]:
    """Return metrics of advantages and values.

    Returns:
        `advantage_std`; with a reference the KL to it in nats per token: `kl` by k3, clamped, and
        `kl_k1` by k1, which `rl.kl_limit` and an adaptive `rl.kl_coef` go by; `explained_variance`
        if there is a critic.
    """
    metrics = {"advantage_std": float(advantages.advantages_N.std(correction=0))}
    if experience.reference is not None:
        assert experience.old is not None
        old, reference = experience.old.double(), experience.reference.double()
        metrics["kl"] = float(estimate(old, reference, "k3").mean())
        metrics["kl_k1"] = float((old - reference).mean())
    if experience.values is not None and advantages.returns_N is not None:
        metrics["explained_variance"] = explained_variance(experience.values, advantages.returns_N)
    return metrics


def speeds(clock: Clock, experience: Experience, begin: float) -> dict[str, float]:
    """Return seconds and tokens per second of each phase, and the time outside of the phases."""
    response_tokens, all_tokens = int(experience.lengths.sum()), len(experience.examples.ids)
    tokens = {"generate": response_tokens, "measure": all_tokens, "update": all_tokens}
    working = (*tokens, "score", "environment")
    phases = [name for name in working if name in clock.seconds]
    total = time.perf_counter() - begin
    metrics = {f"seconds/{name}": spent for name, spent in clock.seconds.items()}
    for name in (phase for phase in phases if phase in tokens):
        metrics[f"tokens_per_s/{name}"] = tokens[name] / max(clock.seconds[name], 1e-9)
    worked = sum(clock.seconds[name] for name in phases)
    metrics["seconds/other"] = total - sum(clock.seconds.values())
    return {**metrics, "overhead": 1.0 - worked / total, "step_s": total}


def samples_of(scored: Sequence[ScoredResponse]) -> list[Mapping[str, Any]]:
    """Return rows for the table of samples, the best and the worst reward among them."""
    order = sorted(range(len(scored)), key=lambda i: scored[i].reward)
    picked = list(dict.fromkeys([order[0], order[-1], order[len(order) // 2], 0]))[:SHOWN]
    return [
        {
            "id": str(scored[i].response.prompt.row.get("id", "")),
            "prompt": _question(scored[i].response.prompt.row["messages"]),
            "response": _shown(scored[i].response),
            "reward": scored[i].reward,
            **{f"reward/{name}": value for name, value in scored[i].parts.items()},
        }
        for i in picked
    ]


def _shown(response: Response) -> str:
    """Return the response; with an environment, the conversation after the prompt."""
    if not response.turns:
        return response.text
    return "\n".join(f"{m['role']}: {m['content'].strip()}" for m in response.messages)


def _question(messages: Sequence[Mapping[str, str]]) -> str:
    """Return the last user message."""
    return next(m["content"] for m in reversed(messages) if m["role"] == "user")
