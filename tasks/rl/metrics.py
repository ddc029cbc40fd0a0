"""Metrics and phases of an iteration, by their names in the tracker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tasks.rl.advantages import without_signal
from tasks.rl.experience import Experience
from tasks.rl.responses import Response, ScoredResponse

SHOWN = 4
"""Responses per iteration in the table of samples."""


@dataclass
class Clock:
    """Seconds by phase of an iteration."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to the phase of that name."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


def collected(scored: Sequence[ScoredResponse]) -> dict[str, float]:
    """Return metrics of sampled responses and their rewards."""
    rewards = np.array([response.reward for response in scored])
    metrics = {**evaluated(scored), "reward_std": float(rewards.std())}
    groups = len({response.group for response in scored})
    if groups < len(scored):  # a single response is no group
        no_signal = groups_without_signal(scored)
        metrics["groups_without_signal"] = len(no_signal) / groups
    return metrics


def groups_without_signal(scored: Sequence[ScoredResponse]) -> list[int]:
    """Return the numbers of the groups whose advantages would all be 0."""
    rewards_S = torch.tensor([response.reward for response in scored])
    groups_S = torch.tensor([response.group for response in scored])
    silent: list[int] = groups_S[without_signal(rewards_S, groups_S)].unique().tolist()
    return silent


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


def speeds(clock: Clock, experience: Experience, begin: float) -> dict[str, float]:
    """Return seconds and tokens per second of each phase, and the time outside of the phases."""
    response_tokens = int(experience.lengths.sum())
    all_tokens = int(experience.sequence_lengths.sum())
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
            "response": _conversation(scored[i].response),
            "reward": scored[i].reward,
            **{f"reward/{name}": value for name, value in scored[i].parts.items()},
        }
        for i in picked
    ]


def _conversation(response: Response) -> str:
    """Return the response; with an environment, the conversation after the prompt."""
    if not response.turns:
        return response.text
    return "\n".join(f"{m['role']}: {m['content'].strip()}" for m in response.messages)


def _question(messages: Sequence[Mapping[str, str]]) -> str:
    """Return the last user message."""
    return next(m["content"] for m in reversed(messages) if m["role"] == "user")
