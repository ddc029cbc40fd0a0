"""One iteration's responses on all ranks: nothing is lost, the order stays, metrics add up."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tasks.rl import metrics
from tasks.rl.experience import Experience, pack_experience
from tasks.rl.measure import measure_tokens
from tasks.rl.responses import ScoredResponse
from tasks.rl.update import minibatches
from tests.rl.making import response
from tests.rl.peers import Peer, on_ranks
from tests.settings import Batch, Loop, Settings

TEXTS = ("a", "longer", "bc", "a long one", "d", "efgh", "i", "jk")
ENDS = (True, False, True, True, False, True, True, True)
"""False for the responses that the limit of tokens has cut."""


def scored(*, all_end: bool = True) -> list[ScoredResponse]:
    """Eight responses of different lengths, two for each prompt."""
    return [
        ScoredResponse(
            response(f"say {n // 2}", text, ended=all_end or ends), n // 2, float(n),
            {"model": n / 2, "url": 1.0},
        )
        for n, (text, ends) in enumerate(zip(TEXTS, ENDS, strict=True))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def experience() -> Experience:
    return pack_experience(scored())


def ids_of(experience: Experience) -> list[np.ndarray]:
    return [each.response.generated.ids for each in experience.scored]


def test_responses_lie_end_to_end(experience: Experience) -> None:
    lengths = [len(text) + 1 for text in TEXTS]
    assert experience.lengths.tolist() == lengths
    assert experience.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert experience.rewards.tolist() == list(range(8))
    assert len(experience.sampled) == sum(lengths)
    every = np.concatenate(ids_of(experience))
    assert experience.examples is not None
    bears = experience.examples.ids[experience.examples.bears.astype(bool)]
    np.testing.assert_array_equal(bears, every)
    for chosen in ([0], [3, 1], [7, 0, 5]):
        wanted = np.concatenate([ids_of(experience)[n] for n in chosen])
        np.testing.assert_array_equal(every[experience.places(chosen).numpy()], wanted)
        np.testing.assert_array_equal(experience.row(chosen).targets.numpy(), wanted)


@pytest.mark.parametrize("masked", [False, True])
def test_masked_responses_leave_the_totals_of_a_minibatch(masked: bool) -> None:
    experience = pack_experience(scored(all_end=False))
    batch = Batch(micro_batch_size=8, global_batch_size=8)
    setup: Any = SimpleNamespace(
        job=SimpleNamespace(settings=Settings(batch=batch)),
        ranks=SimpleNamespace(world_size=1, rank=0),
        loop=Loop(mask_truncated=masked),
        rollout=SimpleNamespace(max_new_tokens=9),
    )
    ((_, totals),) = minibatches(setup, 1, experience)
    counted = [n for n, ended in zip(experience.lengths.tolist(), ENDS, strict=True) if ended]
    wanted = (sum(counted), 6) if masked else (int(experience.lengths.sum()), 8)
    assert (totals.tokens, totals.sequences) == wanted


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_response_is_in_one_row_and_measurements_return_to_their_tokens(
    experience: Experience, world: int
) -> None:
    """Each rank measures token ids; afterwards every rank has all responses' ids."""
    dealt = [experience.rows(world, rank, 2) for rank in range(world)]
    assert len({len(rows) for rows in dealt}) == 1
    assert sorted(n for rows in dealt for row in rows for n in row) == list(range(8))
    assert all(row for rows in dealt for row in rows)

    def work(ranks: Peer) -> Experience:
        return measure_tokens(
            experience,
            ranks,  # type: ignore[arg-type]
            size=3,
            measure=lambda row: {"old": row.targets.float(), "values": -row.targets.float()},
        )

    wanted = np.concatenate(ids_of(experience)).astype(np.float32)
    for measured in on_ranks(world, work):
        assert measured.old is not None
        assert measured.values is not None
        assert measured.reference is None
        np.testing.assert_array_equal(measured.old.numpy(), wanted)
        np.testing.assert_array_equal(measured.values.numpy(), -wanted)


def test_metrics_of_responses_and_rewards() -> None:
    few = scored(all_end=False)[:4]  # of 2, 6, 3 and 11 tokens
    few[3] = replace(few[3], reward=2.0)
    measured = metrics.collected(few)
    assert measured == {
        "reward": 1.25,
        "reward/model": 0.75,
        "reward/url": 1.0,
        "reward_std": pytest.approx(math.sqrt(2.75 / 4)),
        "length": 5.5,
        "length_max": 11.0,
        "truncated": 0.25,
        "groups_without_signal": 0.5,
    }
    heldout = metrics.evaluated(few)
    assert heldout == {name: measured[name] for name in heldout}
    assert "reward_std" not in heldout
    rows = metrics.samples_of(scored())
    assert {(row["id"], row["response"], row["reward"]) for row in rows} >= {
        ("row of say 0", "a", 0.0), ("row of say 3", "jk", 7.0),
    }  # fmt: skip
    assert all(row["prompt"] == row["id"].removeprefix("row of ") for row in rows)
    assert all(row["reward/model"] == row["reward"] / 2 for row in rows)
    assert len({row["response"] for row in rows}) == len(rows)
