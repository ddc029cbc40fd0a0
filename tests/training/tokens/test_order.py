"""Assignment of examples to ranks and rows: all once, evenly, within a step's memory."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.training.tokens.order import HELDOUT_ROW, Order, deal, heldout_rounds
from tests.settings import Batch
from tests.training.datasets import make_examples

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=40)


@given(lengths=LENGTHS, rows=st.integers(1, 8))
def test_items_are_dealt_once_and_evenly(lengths: list[int], rows: int) -> None:
    """Graham's bound: no row exceeds the mean by more than its last item, and none is empty."""
    lengths = lengths + [1] * (rows - len(lengths))
    dealt = deal(lengths, rows)
    assert sorted(i for row in dealt for i in row) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in row) for row in dealt]
    assert min(sums) > 0
    assert sums == sorted(sums, reverse=True)
    assert max(sums) <= sum(lengths) / rows + max(lengths) * (1 - 1 / rows)


@given(lengths=LENGTHS, micro=st.integers(1, 12), world=st.integers(1, 5))
def test_every_evaluation_example_counts_once_and_ranks_make_equally_many_passes(
    lengths: list[int], micro: int, world: int
) -> None:
    batch = Batch(micro_batch_size=micro, max_len=64)
    examples = make_examples(lengths)
    ranks = [heldout_rounds(examples, batch, world_size=world, rank=rank) for rank in range(world)]
    assert len({len(rounds) for rounds in ranks}) == 1
    counted = Counter(i for rounds in ranks for row in rounds if row.counted for i in row.chosen)
    assert counted == Counter(range(len(lengths)))


@pytest.mark.parametrize(("roles", "longest", "rows"), [(1, 64, 16), (1, 8, 2), (2, 64, 8)])
def test_an_evaluation_row_needs_no_more_memory_than_a_step(
    roles: int, longest: int, rows: int
) -> None:
    """A row has eight short examples, but only one of the longest if the micro-batch is 1.

    With eight, a 72 B model that trains at 4096 tokens would run out of memory in evaluations.
    """
    batch = Batch(micro_batch_size=1, max_len=64)
    rounds = heldout_rounds(make_examples([longest] * 16, roles=roles), batch, world_size=1, rank=0)
    assert len(rounds) == rows
    assert max(len(row.chosen) for row in rounds) == (HELDOUT_ROW if longest == 8 else 1)


@given(count=st.integers(1, 40), epochs=st.integers(1, 3), ranks=st.integers(1, 3))
def test_an_epoch_has_every_example_once(count: int, epochs: int, ranks: int) -> None:
    """The last step of an epoch is smaller; every rank makes the same passes in it."""
    batch = Batch(micro_batch_size=2, global_batch_size=6 * ranks, epochs=epochs)
    order = Order(make_examples([5] * count), batch, seed=0, world_size=ranks)
    steps = [
        [order.step(step, rank) for rank in range(ranks)] for step in range(1, order.steps + 1)
    ]
    rows = [row for step in steps for of_rank in step for row in of_rank.rows]
    assert {len(of_rank.rows) for step in steps for of_rank in step} == {3}
    seen = Counter(i for row in rows if row.counted for i in row.chosen)
    assert seen == Counter(dict.fromkeys(range(count), epochs))
    assert sum(step[0].totals.examples for step in steps) == count * epochs
    assert order.epoch_at(order.steps) == epochs
