"""Rows: examples are dealt once and evenly, and every token is packed once."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.training.tokens.rows import (
    BUCKET_WASTE,
    HELDOUT_ROW,
    TRIAL,
    Order,
    Row,
    deal,
    heldout_rounds,
    pack,
    trial_row,
)
from tests.settings import Batch
from tests.training.datasets import make_examples

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=24)


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
    rows = [row for step in steps for of_rank in step for row in of_rank[0]]
    assert {len(of_rank[0]) for step in steps for of_rank in step} == {3}
    seen = Counter(i for row in rows if row.counted for i in row.chosen)
    assert seen == Counter(dict.fromkeys(range(count), epochs))
    assert sum(step[0][1].examples for step in steps) == count * epochs
    assert order.epoch_at(order.steps) == epochs


@pytest.mark.parametrize("ranks", [1, 2])
def test_padded_rows_hold_sequences_of_similar_length(ranks: int) -> None:
    """Dealt as packed rows are, passes would compute twice the real tokens."""
    lengths = np.random.default_rng(0).lognormal(5, 0.5, 512).astype(int) + 1
    examples, batch = make_examples(lengths.tolist()), Batch(8, 128, max_len=8192)
    packed, padded = (
        Order(examples, batch, seed=0, world_size=ranks, padded=padded) for padded in (False, True)
    )
    computed = 0
    for step in range(1, 5):
        mine = [padded.step(step, rank) for rank in range(ranks)]
        others = [packed.step(step, rank) for rank in range(ranks)]
        rows, before = ([row for each in dealt for row in each[0]] for dealt in (mine, others))
        assert {len(row.chosen) for row in rows} == {8}
        assert sorted(i for row in rows for i in row.chosen) == sorted(
            i for row in before for i in row.chosen
        )
        assert {each[1] for each in mine} == {each[1] for each in others}
        computed += sum(8 * lengths[list(row.chosen)].max() for row in rows)
    assert computed < 1.15 * lengths.sum()


def spans(row: Row) -> list[tuple[int, int]]:
    """Return begin and end of each sequence in the row, in the order of `ends`."""
    return [(int(e) - int(row.positions[0, e]), int(e) + 1) for e in row.ends]


@given(lengths=LENGTHS, data=st.data())
@settings(max_examples=60)
def test_every_sequence_is_in_the_row_once(lengths: list[int], data: st.DataObject) -> None:
    examples = make_examples(lengths)
    chosen = data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
    row = pack(examples, chosen)
    assert row.ids.shape == (1, sum(lengths[i] for i in chosen))
    assert sorted(spans(row))[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(sorted(spans(row))))
    for number, (i, (start, end)) in enumerate(zip(chosen, spans(row), strict=True)):
        ids, bears = examples.sequence(i, 0)
        assert row.ids[0, start:end].tolist() == ids.tolist()
        assert row.positions[0, start:end].tolist() == list(range(lengths[i]))
        mine = row.owner == number
        assert (row.wanted[mine] - start).tolist() == np.flatnonzero(bears[1:]).tolist()
        assert row.targets[mine].tolist() == ids[1:][bears[1:] > 0].tolist()
    assert row.values["margin"].tolist() == chosen
    assert row.sums(torch.ones(len(row.wanted))).tolist() == row.counts().tolist()


@given(lengths=LENGTHS)
@settings(max_examples=60)
def test_buckets_keep_sequences_apart(lengths: list[int]) -> None:
    row = pack(make_examples(lengths), range(len(lengths)))
    assert sum(b.count for b in row.buckets) == sum(lengths)
    start, seen = 0, []
    for bucket in row.buckets:
        own = torch.arange(start, start + bucket.count)
        placed = own if bucket.gather is None else own[bucket.gather]
        for places in placed.view(-1, bucket.length):
            real = places[1:] != places[0]
            length = 1 + int(real.sum())
            assert places[:length].tolist() == list(range(int(places[0]), int(places[0]) + length))
            assert bucket.length <= BUCKET_WASTE * length
            seen.append((int(places[0]), int(places[0]) + length))
        if bucket.scatter is not None:
            assert torch.equal(placed[bucket.scatter], own)
        start += bucket.count
    assert sorted(seen) == sorted(spans(row))


def test_roles_keep_their_order() -> None:
    examples = make_examples([9, 3, 4, 12, 5, 5], roles=2)
    row = pack(examples, [2, 0])
    assert [end - start for start, end in spans(row)] == [5, 5, 9, 3]
    only = pack(examples, [2, 1], roles=(1,))
    assert [end - start for start, end in spans(only)] == [5, 12]


def test_the_trial_row_has_two_short_sequences() -> None:
    for examples in (
        make_examples([500, 7, 30]),
        make_examples([500]),
        make_examples([20, 300], roles=2),
        make_examples([1, 9]),
        make_examples([1, 1]),
    ):
        row = trial_row(examples)
        assert row.sequences == 2
        assert sorted(set(row.owner.tolist())) == [0, 1], "something is asked of both"
        assert row.ids.shape[1] <= 2 * TRIAL
        assert len(row.wanted) == row.ids.shape[1] - 2
