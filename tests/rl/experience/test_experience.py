"""One iteration's responses on all ranks: nothing is lost, and the order stays."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tasks.rl.experience.packed_rows import (
    Experience,
    gather_responses,
    measure_tokens,
    pack_experience,
)
from tasks.rl.experience.responses import ScoredResponse
from tasks.rl.update import minibatches
from tests.rl.making import response
from tests.rl.peers import Peer, on_ranks
from tests.settings import Batch, Loop, Settings

GIVEN = ("a", "longer", "bc", "a long one", "d", "efgh", "i", "jk")


def scored() -> list[ScoredResponse]:
    """Eight responses of different lengths, two for each prompt."""
    return [
        ScoredResponse(response(f"say {n // 2}", text), n // 2, float(n), {"function": float(n)})
        for n, text in enumerate(GIVEN)
    ]


@pytest.fixture(scope="module")
def got() -> Experience:
    return pack_experience(scored())


def ids_of(got: Experience) -> list[np.ndarray]:
    return [scored_response.response.generated.ids for scored_response in got.scored]


def test_responses_lie_end_to_end(got: Experience) -> None:
    assert got.lengths.tolist() == [len(text) + 1 for text in GIVEN]
    assert got.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert got.rewards.tolist() == list(range(8))
    assert got.owner.tolist() == [n for n, text in enumerate(GIVEN) for _ in range(len(text) + 1)]
    assert len(got.sampled) == sum(got.lengths)
    told = got.examples.ids[got.examples.bears.astype(bool)]
    np.testing.assert_array_equal(told, np.concatenate(ids_of(got)))


def test_places_and_targets_are_those_of_the_chosen_responses(got: Experience) -> None:
    every = torch.from_numpy(np.concatenate(ids_of(got)))
    for chosen in ([0], [3, 1], [7, 0, 5]):
        wanted = np.concatenate([ids_of(got)[n] for n in chosen])
        np.testing.assert_array_equal(every[got.places(chosen)].numpy(), wanted)
        np.testing.assert_array_equal(got.row(chosen).targets.numpy(), wanted)


@pytest.mark.parametrize("masked", [False, True])
def test_masked_responses_leave_the_totals_of_a_minibatch(masked: bool) -> None:
    ends = [True, False, True, True, False, True, True, True]
    cut = [
        replace(s, response=response("say", s.response.text, ended=ended))
        for s, ended in zip(scored(), ends, strict=True)
    ]
    experience = pack_experience(cut)
    batch = Batch(micro_batch_size=8, global_batch_size=8)
    setup: Any = SimpleNamespace(
        job=SimpleNamespace(settings=Settings(batch=batch)),
        ranks=SimpleNamespace(world_size=1, rank=0),
        loop=Loop(mask_truncated=masked),
        rollout=SimpleNamespace(max_new_tokens=9),
    )
    ((_, totals),) = minibatches(setup, 1, experience)
    counted = [n for n, ended in zip(experience.lengths.tolist(), ends, strict=True) if ended]
    wanted = (sum(counted), 6) if masked else (int(experience.lengths.sum()), 8)
    assert (totals.tokens, totals.sequences) == wanted


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_response_is_in_one_row_and_ranks_have_equally_many(
    got: Experience, world: int
) -> None:
    dealt = [got.rows(world, rank, 2) for rank in range(world)]
    assert len({len(rows) for rows in dealt}) == 1
    assert sorted(n for rows in dealt for row in rows for n in row) == list(range(8))
    assert all(row for rows in dealt for row in rows)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_measurements_return_to_their_tokens(got: Experience, world: int) -> None:
    """Each rank measures token ids; afterwards every rank has all responses' ids."""

    def work(ranks: Peer) -> Experience:
        return measure_tokens(
            got,
            ranks,  # type: ignore[arg-type]
            size=3,
            device=torch.device("cpu"),
            measure=lambda row: {"old": row.targets.float(), "values": -row.targets.float()},
        )

    wanted = np.concatenate(ids_of(got)).astype(np.float32)
    for measured in on_ranks(world, work):
        assert measured.old is not None
        assert measured.values is not None
        assert measured.reference is None
        np.testing.assert_array_equal(measured.old.numpy(), wanted)
        np.testing.assert_array_equal(measured.values.numpy(), -wanted)
    assert got.old is None


def test_gathered_responses_are_ordered_by_group() -> None:
    """Groups are dealt to ranks one by one; each keeps the order of its responses."""
    every = scored()
    prompts = [every[2 * group].response.prompt for group in (3, 1, 2, 0)]
    numbers = {3: 0, 1: 1, 2: 2, 0: 3}

    def work(ranks: Peer) -> list[tuple[int, ScoredResponse]]:
        mine = [
            (numbers[scored_response.group], scored_response)
            for scored_response in every
            if scored_response.group % ranks.world_size == ranks.rank
        ]
        return gather_responses(ranks, mine, prompts)  # type: ignore[arg-type]

    for world in (1, 2, 3):
        for gathered in on_ranks(world, work):
            assert [s.group for _, s in gathered] == [0, 0, 1, 1, 2, 2, 3, 3]
            assert [s.response.text for _, s in gathered] == list(GIVEN)
            assert [s.reward for _, s in gathered] == list(range(8))
            for number, s in gathered:
                assert numbers[s.group] == number
                assert s.response.prompt is prompts[number]
