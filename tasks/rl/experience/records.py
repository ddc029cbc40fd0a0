"""What is noted of an iteration, by the names that it has in the tracker."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tasks.rl.algorithms.batch import Estimated
from tasks.rl.algorithms.correction import Mismatch
from tasks.rl.algorithms.value_loss import explained_variance
from tasks.rl.experience.collect import Clock, silent_groups
from tasks.rl.experience.packed_rows import Experience
from tasks.rl.experience.responses import Scored
from tasks.rl.settings import Rollout

SHOWN = 4
"""Replies of an iteration that go into the table of samples."""


def collected(scored: Sequence[Scored], rollout: Rollout) -> dict[str, float]:
    """Of replies and their rewards."""
    rewards = np.array([one.reward for one in scored])
    found = {**_of_replies(scored, rollout), "reward_std": float(rewards.std())}
    groups = len({one.group for one in scored})
    if groups < len(scored):  # a reply alone is no group
        silent = len(silent_groups([(0, one) for one in scored]))
        found["groups_without_signal"] = silent / groups
    return found


def evaluated(scored: Sequence[Scored], rollout: Rollout) -> dict[str, float]:
    """Of replies to held-out prompts."""
    return _of_replies(scored, rollout)


def _of_replies(scored: Sequence[Scored], rollout: Rollout) -> dict[str, float]:
    lengths = np.array([len(one.reply.generated.ids) for one in scored])
    parts = {
        f"reward/{name}": float(np.mean([one.parts[name] for one in scored]))
        for name in scored[0].parts
    }
    return {
        "reward": float(np.mean([one.reward for one in scored])),
        **parts,
        "length": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "truncated": float(np.mean([not one.reply.generated.ended for one in scored])),
    }


def compared(old_N: torch.Tensor, differs: Mismatch) -> dict[str, float]:
    """Of the trainer's log-probabilities of the replies' tokens, before the update.

    `entropy` is their mean, negated: an unbiased estimate of the distribution's entropy as long as
    the replies were sampled from it.
    """
    return {
        "mismatch/mean_abs": differs.mean_abs,
        "mismatch/max_abs": differs.max_abs,
        "mismatch/kl": differs.kl,
        "entropy": float(-old_N.mean()),
    }


def estimates(got: Experience, estimated: Estimated) -> dict[str, float]:
    """Of what was estimated; `kl` is the k3 estimate of the distance to the reference, nats a
    token.
    """
    found = {"advantage_std": float(estimated.advantages_N.std(correction=0))}
    if got.reference is not None:
        assert got.old is not None
        log_ratio = (got.reference - got.old).double()
        found["kl"] = float((log_ratio.exp() - 1 - log_ratio).mean())
    if got.values is not None and estimated.returns_N is not None:
        found["explained_variance"] = explained_variance(got.values, estimated.returns_N)
    return found


def speeds(clock: Clock, got: Experience, begin: float) -> dict[str, float]:
    """Seconds and tokens a second of each phase, and the share of the iteration outside of them."""
    replied, read = int(got.lengths.sum()), len(got.examples.ids)
    tokens = {"generate": replied, "measure": read, "update": read}
    phases = [name for name in (*tokens, "score") if name in clock.seconds]
    whole = time.perf_counter() - begin
    found = {f"seconds/{name}": spent for name, spent in clock.seconds.items()}
    for name in (one for one in phases if one in tokens):
        found[f"tokens_per_s/{name}"] = tokens[name] / max(clock.seconds[name], 1e-9)
    working = sum(clock.seconds[name] for name in phases)
    found["seconds/other"] = whole - sum(clock.seconds.values())
    return {**found, "overhead": 1.0 - working / whole, "step_s": whole}


def samples_of(scored: Sequence[Scored]) -> list[Mapping[str, Any]]:
    """Rows of the table of samples, the best and the worst reward among them."""
    order = sorted(range(len(scored)), key=lambda i: scored[i].reward)
    picked = list(dict.fromkeys([order[0], order[-1], order[len(order) // 2], 0]))[:SHOWN]
    return [
        {
            "id": str(scored[i].reply.prompt.row.get("id", "")),
            "prompt": _question(scored[i].reply.prompt.row["messages"]),
            "reply": scored[i].reply.text,
            "reward": scored[i].reward,
            **{f"reward/{name}": value for name, value in scored[i].parts.items()},
        }
        for i in picked
    ]


def _question(messages: Sequence[Mapping[str, str]]) -> str:
    """The user's last words."""
    return next(m["content"] for m in reversed(messages) if m["role"] == "user")
