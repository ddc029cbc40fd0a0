"""One iteration's replies as all ranks know them: nothing gets lost, and nothing changes places."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tasks.rl.experience.packed_rows import Experience, experience, measured, together
from tasks.rl.experience.responses import Generated, Scored
from tests.rl.making import reply
from tests.rl.peers import Peer, on_ranks

GIVEN = ("a", "longer", "bc", "a long one", "d", "efgh", "i", "jk")


def scored() -> list[Scored]:
    """Eight replies of different lengths, two to each prompt."""
    return [
        Scored(reply(f"say {n // 2}", text), n // 2, float(n), {"function": float(n)})
        for n, text in enumerate(GIVEN)
    ]


@pytest.fixture(scope="module")
def got() -> Experience:
    return experience(scored())


def ids_of(got: Experience) -> list[np.ndarray]:
    return [one.reply.generated.ids for one in got.scored]


def test_replies_lie_end_to_end(got: Experience) -> None:
    assert got.lengths.tolist() == [len(text) + 1 for text in GIVEN]
    assert got.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert got.rewards.tolist() == list(range(8))
    assert got.owner.tolist() == [n for n, text in enumerate(GIVEN) for _ in range(len(text) + 1)]
    assert len(got.sampled) == sum(got.lengths)
    told = got.examples.ids[got.examples.bears.astype(bool)]
    np.testing.assert_array_equal(told, np.concatenate(ids_of(got)))


def test_places_are_those_of_the_replies_tokens(got: Experience) -> None:
    every = torch.from_numpy(np.concatenate(ids_of(got)))
    for chosen in ([0], [3, 1], [7, 0, 5]):
        wanted = np.concatenate([ids_of(got)[n] for n in chosen])
        np.testing.assert_array_equal(every[got.places(chosen)].numpy(), wanted)


def test_a_rows_targets_are_the_replies_in_the_order_asked(got: Experience) -> None:
    row = got.row([5, 2, 6])
    np.testing.assert_array_equal(
        row.targets.numpy(), np.concatenate([ids_of(got)[n] for n in (5, 2, 6)])
    )
    assert row.sequences == 3


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_reply_is_in_one_row_and_ranks_have_equally_many(got: Experience, world: int) -> None:
    dealt = [got.rows(world, rank, 2) for rank in range(world)]
    assert len({len(rows) for rows in dealt}) == 1
    assert sorted(n for rows in dealt for row in rows for n in row) == list(range(8))
    assert all(row for rows in dealt for row in rows)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_ranks_measure_comes_back_to_its_tokens(got: Experience, world: int) -> None:
    """Asked for a token's id, every rank ends up with all replies' ids."""

    def work(ranks: Peer) -> Experience:
        return measured(
            got,
            ranks,  # type: ignore[arg-type]
            size=3,
            device=torch.device("cpu"),
            measure=lambda row: {"old": row.targets.float(), "values": -row.targets.float()},
        )

    wanted = np.concatenate(ids_of(got)).astype(np.float32)
    for one in on_ranks(world, work):
        assert one.old is not None
        assert one.values is not None
        assert one.reference is None
        np.testing.assert_array_equal(one.old.numpy(), wanted)
        np.testing.assert_array_equal(one.values.numpy(), -wanted)
    assert got.old is None


def test_together_is_in_the_order_of_groups_and_of_replies() -> None:
    """Groups are dealt over ranks one by one; each keeps the order of its replies."""
    every = scored()
    prompts = [every[2 * group].reply.prompt for group in (3, 1, 2, 0)]
    numbers = {3: 0, 1: 1, 2: 2, 0: 3}

    def work(ranks: Peer) -> list[tuple[int, Scored]]:
        mine = [
            (numbers[one.group], one) for one in every if one.group % ranks.world_size == ranks.rank
        ]
        return together(ranks, mine, prompts)  # type: ignore[arg-type]

    for world in (1, 2, 3):
        for found in on_ranks(world, work):
            assert [one.group for _, one in found] == [0, 0, 1, 1, 2, 2, 3, 3]
            assert [one.reply.text for _, one in found] == list(GIVEN)
            assert [one.reward for _, one in found] == list(range(8))
            for number, one in found:
                assert numbers[one.group] == number
                assert one.reply.prompt is prompts[number]
                assert isinstance(one.reply.generated, Generated)
