"""Rewards: their sum, the built-in function, and what no source may give."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.core.errors import ArtifactError, ConfigError, RewardError
from tasks.rl.experience.responses import Reply
from tasks.rl.rewards import Rewards, open_rewards
from tasks.rl.rewards.exact import ExactMatch
from tasks.rl.rewards.sources import Weighted, checked
from tasks.rl.settings import Reward
from tests.rl.making import TOKENIZER, replies, reply

LOG = logging.getLogger("tests.rl")
CPU = torch.device("cpu")


class Lengths:
    """A source that counts characters."""

    who = "lengths"

    def __init__(self) -> None:
        self.closed = 0

    def __call__(self, asked: Sequence[Reply]) -> list[float]:
        return [float(len(one.text)) for one in asked]

    def close(self) -> None:
        self.closed += 1


def test_the_total_is_the_weighted_sum_and_parts_are_before_weights() -> None:
    lengths, mute = Lengths(), Lengths()
    exact = Weighted("function", 2.0, ExactMatch())
    sources = [exact, Weighted("model", -0.5, lengths), Weighted("url", 0.0, mute)]
    asked = [*replies(), reply("copy cow", "bull", answer="cow")]
    with Rewards(sources) as rewards:
        total, parts = rewards.score(asked)
    assert parts["function"].tolist() == [1, 1, 1, 1, 0]
    assert parts["model"].tolist() == parts["url"].tolist() == [3, 6, 3, 26, 4]
    np.testing.assert_array_equal(total, 2 * parts["function"] - 0.5 * parts["model"])
    assert total.dtype == np.float64
    assert lengths.closed == mute.closed == 1


class Unasked(Lengths):
    """A source that must not be asked."""

    def __call__(self, asked: Sequence[Reply]) -> list[float]:
        raise AssertionError(f"asked for {len(asked)} replies")


def test_a_rank_without_replies_gets_empty_arrays() -> None:
    total, parts = Rewards([Weighted("model", 1.0, Unasked())]).score([])
    assert total.shape == parts["model"].shape == (0,)


def test_exact_match_is_the_rule_by_which_served_models_are_judged() -> None:
    asked = [
        reply("copy ape", " ape\n", answer="ape"),
        reply("copy ape", "Ape", answer="ape"),
        reply("copy ape", "ape ape", answer="ape"),
        reply("copy ape", "ape", answer="ape "),
    ]
    assert ExactMatch()(asked) == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("columns", [{}, {"answer": 7}])
def test_a_row_without_an_answer_is_named(columns: dict[str, object]) -> None:
    asked = [*replies(), reply("copy cow", "cow", **columns)]
    with pytest.raises(RewardError, match=r"row row of copy cow has no text 'answer'"):
        ExactMatch()(asked)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1.0, 2.0, float("nan"), 0.0], r"judge gave nan for row of copy cat: 'copy cat'"),
        ([1.0, float("-inf"), 0.0, 0.0], r"judge gave -inf for row of copy beetle"),
        ([1.0, None, 0.0, 0.0], r"judge gave None for row of copy beetle"),
        ([1.0, "2", 0.0, 0.0], r"judge gave 2 for row of copy beetle"),
        ([[1.0], 2.0, 0.0, 0.0], r"judge gave \[1.0\] for row of copy ape"),
        ([1.0, 2.0], r"judge gave 2 rewards for 4 replies"),
        ([1.0] * 5, r"judge gave 5 rewards for 4 replies"),
        (1.0, r"judge gave '1.0' \(float\), not a list of numbers"),
        (None, r"judge gave 'None' \(NoneType\)"),
    ],
)
def test_what_no_source_may_give(given: object, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        checked(given, replies(), "judge")
    assert any(line.startswith("prompt: 'copy ") for line in caught.value.details)
    assert caught.value.hint


def test_numbers_of_every_kind_are_numbers() -> None:
    assert checked([True, 2, -0.5, False], replies(), "judge") == [1.0, 2.0, -0.5, 0.0]


def test_a_long_prompt_is_shortened() -> None:
    asked = [reply("x" * 5000, "y" * 5000)]
    with pytest.raises(RewardError) as caught:
        checked([float("nan")], asked, "judge")
    assert all(len(line) < 300 for line in caught.value.details)
    assert len(caught.value.message) < 200


def test_a_run_without_a_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no source"):
        open_rewards(Reward(), tokenizer=TOKENIZER, device=CPU, log=LOG, logs=tmp_path)


def test_what_was_opened_is_closed_when_a_later_source_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(ExactMatch, "close", lambda self: closed.append(self.who))
    reward = Reward(function="exact_match", model=str(tmp_path / "nowhere"))
    with pytest.raises(ArtifactError, match="is no model: no config.json"):
        open_rewards(
            reward, tokenizer=TOKENIZER, device=torch.device("cpu"), log=LOG, logs=tmp_path
        )
    assert closed == ["reward.function=exact_match"]
