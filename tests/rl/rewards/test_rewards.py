"""Rewards: their weighted sum, the built-in function, and invalid values."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.core.errors import ArtifactError, ConfigError, RewardError
from tasks.rl.rewards import Rewards, open_rewards
from tasks.rl.rewards.exact import ExactMatch
from tasks.rl.rewards.sources import Weighted, validate_rewards
from tasks.rl.settings import Reward
from tests.rl.making import TOKENIZER, Judge, response, responses

LOG = logging.getLogger("tests.rl")


def test_the_total_is_the_weighted_sum_of_unweighted_parts() -> None:
    lengths, mute = (Judge(lambda each: len(each.text)) for _ in range(2))
    exact = Weighted("function", 2.0, ExactMatch())
    sources = [exact, Weighted("model", -0.5, lengths), Weighted("url", 0.0, mute)]
    to_score = [*responses(), response("copy cow", "bull", answer="cow")]
    with Rewards(sources) as rewards:
        total, parts = rewards.score(to_score)
    assert parts["function"].tolist() == [1, 1, 1, 1, 0]
    assert parts["model"].tolist() == parts["url"].tolist() == [3, 6, 3, 26, 4]
    np.testing.assert_array_equal(total, 2 * parts["function"] - 0.5 * parts["model"])
    assert total.dtype == np.float64
    assert lengths.closed == mute.closed == 1
    total, parts = Rewards([Weighted("model", 1.0, lengths)]).score([])
    assert total.shape == parts["model"].shape == (0,), "a rank without responses"


def test_exact_match_is_the_rule_of_smoke_eval() -> None:
    to_score = [
        response("copy ape", " ape\n", answer="ape"),
        response("copy ape", "Ape", answer="ape"),
        response("copy ape", "ape ape", answer="ape"),
        response("copy ape", "ape", answer="ape "),
    ]
    assert ExactMatch()(to_score) == [1.0, 0.0, 0.0, 1.0]
    for columns in ({}, {"answer": 7}):
        with pytest.raises(RewardError, match="row of copy cow.*answer"):
            ExactMatch()([*to_score, response("copy cow", "cow", **columns)])


@pytest.mark.parametrize(
    ("rewards", "named"),
    [
        ([1.0, 2.0, float("nan"), 0.0], "nan for row of copy cat"),
        ([1.0, float("-inf"), 0.0, 0.0], "-inf for row of copy beetle"),
        ([1.0, None, 0.0, 0.0], "None for row of copy beetle"),
        ([1.0, "2", 0.0, 0.0], "2 for row of copy beetle"),
        ([[1.0], 2.0, 0.0, 0.0], r"\[1.0\] for row of copy ape"),
        ([1.0, 2.0], "2 rewards for 4"),
        (None, "None"),
    ],
)
def test_invalid_rewards(rewards: object, named: str) -> None:
    with pytest.raises(RewardError, match=f"judge .*{named}") as caught:
        validate_rewards(rewards, responses(), "judge")
    assert any(line.startswith("prompt: 'copy ") for line in caught.value.details)


def test_numbers_of_all_kinds_are_rewards_and_long_texts_are_shortened() -> None:
    assert validate_rewards([True, 2, -0.5, False], responses(), "judge") == [1.0, 2.0, -0.5, 0.0]
    with pytest.raises(RewardError) as caught:
        validate_rewards([float("nan")], [response("x" * 5000, "y" * 5000)], "judge")
    assert all(len(line) < 300 for line in caught.value.details)
    assert len(caught.value.message) < 200


def test_open_sources_are_closed_if_a_later_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(ExactMatch, "close", lambda self: closed.append(self.label))
    how: dict[str, Any] = {"tokenizer": TOKENIZER, "device": torch.device("cpu"), "log": LOG}
    reward = Reward(function="exact_match", model=str(tmp_path / "nowhere"))
    with pytest.raises(ArtifactError, match="nowhere"):
        open_rewards(reward, logs=tmp_path, **how)
    assert closed == ["reward.function=exact_match"]
    with pytest.raises(ConfigError, match="reward"):  # none at all
        open_rewards(Reward(), logs=tmp_path, **how)
