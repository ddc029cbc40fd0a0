"""Packed rows: every token once, at its position, whatever the lengths."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.training.tokens.packing import BUCKET_WASTE, TRIAL, Row, pack, trial_row
from tests.training.datasets import make_examples

LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=24)


def spans(row: Row) -> list[tuple[int, int]]:
    """Return begin and end of each sequence in the row, in the order of `ends`."""
    return [(int(e) - int(row.positions[0, e]), int(e) + 1) for e in row.ends]


@given(lengths=LENGTHS, data=st.data())
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=60, deadline=None)
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
