"""Metrics of an iteration, checked by hand with known responses."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

from tasks.rl.algorithms.batch import Advantages
from tasks.rl.algorithms.correction import mismatch
from tasks.rl.clock import Clock
from tasks.rl.experience.packed_rows import pack_experience
from tasks.rl.experience.records import (
    collected,
    compared,
    estimates,
    evaluated,
    samples_of,
    speeds,
)
from tasks.rl.experience.responses import ScoredResponse
from tests.rl.making import response

GIVEN = (("a", True, 1.0), ("abc", True, 0.0), ("ab", False, 0.5), ("abcd", True, 0.5))
"""Text, True if it ended by itself, reward; two for each prompt."""


def scored() -> list[ScoredResponse]:
    return [
        ScoredResponse(
            response(f"say {n // 2}", text, ended=ended), n // 2, 2 * value,
            {"model": value, "url": 1.0},
        )
        for n, (text, ended, value) in enumerate(GIVEN)
    ]  # fmt: skip


def test_metrics_of_responses_and_rewards() -> None:
    metrics = collected(scored())
    assert metrics == {
        "reward": 1.0,
        "reward/model": 0.5,
        "reward/url": 1.0,
        "reward_std": pytest.approx(math.sqrt(0.5)),
        "length": 3.25,  # with the token that ends a response: 2, 4, 2, 5
        "length_max": 5.0,
        "truncated": 0.25,
        "groups_without_signal": 0.5,
    }
    heldout = evaluated(scored())
    assert heldout == {name: metrics[name] for name in heldout}
    assert "reward_std" not in heldout


def test_estimates() -> None:
    got = pack_experience(scored())
    count = len(got.sampled)
    old = torch.linspace(-3, -0.5, count)
    reference = old + torch.linspace(-0.2, 0.4, count)
    values, returns = torch.zeros(count), torch.linspace(0, 1, count)
    got = replace(got, sampled=old - 0.01, old=old, reference=reference, values=values)
    differs = mismatch(old, got.sampled)
    metrics = compared(old, differs)
    assert metrics["mismatch/mean_abs"] == pytest.approx(0.01, abs=1e-6)
    assert metrics["mismatch/max_abs"] == pytest.approx(0.01, abs=1e-6)
    assert metrics["entropy"] == pytest.approx(1.75, abs=1e-6)
    metrics = estimates(got, Advantages(torch.arange(count).float(), returns))
    ratio = (reference - old).double()
    assert metrics["kl"] == pytest.approx(float((ratio.exp() - 1 - ratio).mean()))
    assert metrics["kl_k1"] == pytest.approx(float(-ratio.mean()))
    assert metrics["kl"] > 0
    assert metrics["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["advantage_std"] == pytest.approx(math.sqrt((count**2 - 1) / 12), rel=1e-6)
    bare = estimates(replace(got, reference=None, values=None), Advantages(returns))
    assert bare.keys() == metrics.keys() - {"kl", "kl_k1", "explained_variance"}


def test_seconds_and_tokens_per_second() -> None:
    got = pack_experience(scored())
    seconds = {"generate": 2.0, "score": 0.5, "measure": 1.0, "update": 4.0, "sync_weights": 1.0}
    metrics = speeds(Clock(seconds), got, time.perf_counter() - 10.0)
    assert metrics["step_s"] == pytest.approx(10.0, abs=0.5)
    assert metrics["tokens_per_s/generate"] == 13 / 2
    assert metrics["tokens_per_s/update"] == len(got.examples.ids) / 4
    assert metrics["seconds/other"] == pytest.approx(1.5, abs=0.5)
    assert metrics["overhead"] == pytest.approx(0.25, abs=0.05)


def test_the_table_shows_the_best_and_the_worst() -> None:
    rows = samples_of(scored())
    assert [rows[0][name] for name in ("reward", "response")] == [0.0, "abc"]
    assert [rows[1][name] for name in ("id", "prompt", "response")] == [
        "row of say 0",
        "say 0",
        "a",
    ]
    assert [rows[1][name] for name in ("reward", "reward/model", "reward/url")] == [2.0, 1.0, 1.0]
    assert len({row["response"] for row in rows}) == len(rows)
