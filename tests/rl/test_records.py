"""What is noted of an iteration: by hand, from replies that are known."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch

from tasks.rl.algorithms.batch import Estimated
from tasks.rl.algorithms.correction import mismatch
from tasks.rl.experience.collect import Clock
from tasks.rl.experience.packed_rows import experience
from tasks.rl.experience.records import (
    collected,
    compared,
    estimates,
    evaluated,
    samples_of,
    speeds,
)
from tasks.rl.experience.responses import Scored
from tests.rl.making import reply
from tests.settings import Rollout

GIVEN = (("a", True, 1.0), ("abc", True, 0.0), ("ab", False, 0.5), ("abcd", True, 0.5))
"""Text, whether it ended by itself, reward; two to each prompt."""


def scored() -> list[Scored]:
    return [
        Scored(
            reply(f"say {n // 2}", text, ended=ended), n // 2, 2 * value,
            {"model": value, "url": 1.0},
        )
        for n, (text, ended, value) in enumerate(GIVEN)
    ]  # fmt: skip


def test_replies_and_rewards() -> None:
    found = collected(scored(), Rollout())
    assert found == {
        "reward": 1.0,
        "reward/model": 0.5,
        "reward/url": 1.0,
        "reward_std": pytest.approx(math.sqrt(0.5)),
        "length": 3.25,  # with the token that ends a reply: 2, 4, 2, 5
        "length_max": 5.0,
        "truncated": 0.25,
        "groups_without_signal": 0.5,
    }
    heldout = evaluated(scored(), Rollout())
    assert heldout == {name: found[name] for name in heldout}
    assert "reward_std" not in heldout


def test_estimates() -> None:
    got = experience(scored())
    count = len(got.sampled)
    old = torch.linspace(-3, -0.5, count)
    reference = old + torch.linspace(-0.2, 0.4, count)
    values, returns = torch.zeros(count), torch.linspace(0, 1, count)
    got = replace(got, sampled=old - 0.01, old=old, reference=reference, values=values)
    differs = mismatch(old, got.sampled)
    found = compared(old, differs)
    assert found["mismatch/mean_abs"] == pytest.approx(0.01, abs=1e-6)
    assert found["mismatch/max_abs"] == pytest.approx(0.01, abs=1e-6)
    assert found["entropy"] == pytest.approx(1.75, abs=1e-6)
    found = estimates(got, Estimated(torch.arange(count).float(), returns))
    ratio = (reference - old).double()
    assert found["kl"] == pytest.approx(float((ratio.exp() - 1 - ratio).mean()))
    assert found["kl"] > 0
    assert found["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert found["advantage_std"] == pytest.approx(math.sqrt((count**2 - 1) / 12), rel=1e-6)
    bare = estimates(replace(got, reference=None, values=None), Estimated(returns))
    assert bare.keys() == found.keys() - {"kl", "explained_variance"}


def test_seconds_and_tokens_per_second() -> None:
    got = experience(scored())
    clock = Clock({"generate": 2.0, "score": 0.5, "measure": 1.0, "update": 4.0, "publish": 1.0})
    found = speeds(clock, got, time.perf_counter() - 10.0)
    assert found["step_s"] == pytest.approx(10.0, abs=0.5)
    assert found["tokens_per_s/generate"] == 13 / 2
    assert found["tokens_per_s/update"] == len(got.examples.ids) / 4
    assert found["seconds/publish"] == 1.0
    assert found["seconds/other"] == pytest.approx(1.5, abs=0.5)
    assert found["overhead"] == pytest.approx(0.25, abs=0.05)
    del clock.seconds["measure"]  # the update has done it
    found = speeds(clock, got, time.perf_counter() - 10.0)
    assert "tokens_per_s/measure" not in found
    assert found["overhead"] == pytest.approx(1 - 6.5 / 10.0, abs=0.02)


def test_the_table_shows_the_best_and_the_worst() -> None:
    rows = samples_of(scored())
    assert rows[0]["reward"] == 0.0
    assert rows[0]["reply"] == "abc"
    assert rows[1]["reward"] == 2.0
    assert rows[1] == {
        "id": "row of say 0",
        "prompt": "say 0",
        "reply": "a",
        "reward": 2.0,
        "reward/model": 1.0,
        "reward/url": 1.0,
    }
    assert len({row["reply"] for row in rows}) == len(rows)
    assert [row["reply"] for row in samples_of(scored()[:1])] == ["a"]
