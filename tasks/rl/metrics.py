"""Metrics and phases of an iteration, by their names in the tracker."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tasks.rl.advantages import without_signal
from tasks.rl.experience import Experience
from tasks.rl.responses import Response

SHOWN = 4
"""Responses per iteration in the table of samples."""


class Clock:
    """Seconds by phase of an iteration."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to the phase of that name."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin


def collected(responses: Sequence[Response]) -> dict[str, float]:
    """Return metrics of sampled responses and their rewards."""
    spread = float(np.std([response.reward for response in responses]))
    metrics = {**evaluated(responses), "reward_std": spread}
    groups = len({response.group for response in responses})
    if groups < len(responses):  # a single response is no group
        metrics["groups_without_signal"] = len(groups_without_signal(responses)) / groups
    return metrics


def groups_without_signal(responses: Sequence[Response]) -> list[int]:
    """Return the numbers of the groups whose advantages would all be 0."""
    rewards_S = torch.tensor([response.reward for response in responses])
    groups_S = torch.tensor([response.group for response in responses])
    silent: list[int] = groups_S[without_signal(rewards_S, groups_S)].unique().tolist()
    return silent


def evaluated(responses: Sequence[Response]) -> dict[str, float]:
    """Return metrics of responses to evaluation prompts.

    Lengths count sampled tokens. With an environment also `turns`, their mean, and `out_of_turns`,
    the share of episodes that `rl.max_turns` ended.
    """
    lengths = np.array([len(response.generated.ids) for response in responses])
    metrics = {"reward": float(np.mean([response.reward for response in responses]))}
    for name in responses[0].parts:
        metrics[f"reward/{name}"] = float(np.mean([r.parts[name] for r in responses]))
    if any(response.turns for response in responses):
        metrics["turns"] = float(np.mean([len(response.turns) for response in responses]))
        unfinished = [not response.done and response.generated.ended for response in responses]
        metrics["out_of_turns"] = float(np.mean(unfinished))
    return {
        **metrics,
        "length": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "truncated": float(np.mean([not response.generated.ended for response in responses])),
    }


def speeds(clock: Clock, experience: Experience, begin: float) -> dict[str, float]:
    """Return seconds and tokens per second of each phase, and the time outside of the phases."""
    all_tokens = int(experience.sequence_lengths.sum())
    tokens = {
        "generate": int(experience.lengths.sum()), "measure": all_tokens, "update": all_tokens,
    }  # fmt: skip
    total = time.perf_counter() - begin
    metrics = {f"seconds/{name}": spent for name, spent in clock.seconds.items()}
    for name in (name for name in tokens if name in clock.seconds):
        metrics[f"tokens_per_s/{name}"] = tokens[name] / max(clock.seconds[name], 1e-9)
    worked = sum(clock.seconds.get(name, 0.0) for name in (*tokens, "score", "environment"))
    metrics["seconds/other"] = total - sum(clock.seconds.values())
    return {**metrics, "overhead": 1.0 - worked / total, "step_s": total}


def samples_of(responses: Sequence[Response]) -> list[Mapping[str, Any]]:
    """Return rows for the table of samples, the best and the worst reward among them.

    With an environment, a response is the conversation after the prompt.
    """
    order = sorted(range(len(responses)), key=lambda i: responses[i].reward)
    picked = list(dict.fromkeys([order[0], order[-1], order[len(order) // 2], 0]))[:SHOWN]
    rows: list[Mapping[str, Any]] = []
    for response in (responses[i] for i in picked):
        prompt, text = response.prompt.row, response.text
        asked = [m["content"] for m in prompt["messages"] if m["role"] == "user"]
        if response.turns:
            text = "\n".join(f"{m['role']}: {m['content'].strip()}" for m in response.messages)
        rows.append(
            {
                "id": str(prompt.get("id", "")),
                "prompt": asked[-1],
                "response": text,
                "reward": response.reward,
                **{f"reward/{name}": value for name, value in response.parts.items()},
            }
        )
    return rows
