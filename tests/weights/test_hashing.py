"""Hashes computed side by side equal hashlib's, for any lengths and any cuts."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.weights.native import hashing, library

needs_kernels = pytest.mark.skipif(library() is None, reason="no C compiler here")


@pytest.fixture(params=[True, False], ids=["lanes", "one by one"])
def _either_way(request, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param and library() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(hashing, "side_by_side", lambda: request.param)


@pytest.mark.usefixtures("_either_way")
def test_every_length_up_to_300() -> None:
    messages = [np.random.default_rng(n).bytes(n) for n in range(301)]
    streams = [hashing.stream() for _ in messages]
    hashing.advance(list(zip(streams, messages, strict=True)))
    assert [s.hexdigest() for s in streams] == [hashlib.sha256(m).hexdigest() for m in messages]


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(
    rounds=st.lists(
        st.dictionaries(st.integers(0, 10), st.integers(0, 300), max_size=11), max_size=6
    )
)
def test_any_cut_of_any_streams(rounds: list[dict[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "side_by_side", lambda: True)
        streams = [hashing.stream() for _ in range(11)]
    wanted = [hashlib.sha256() for _ in streams]
    random = np.random.default_rng(0)
    for lengths in rounds:
        messages = {index: random.bytes(length) for index, length in lengths.items()}
        hashing.advance([(streams[index], raw) for index, raw in messages.items()])
        for index, raw in messages.items():
            wanted[index].update(raw)
    assert [s.hexdigest() for s in streams] == [w.hexdigest() for w in wanted]


@needs_kernels
def test_a_digest_can_be_read_midway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "side_by_side", lambda: True)
    stream = hashing.stream()
    for part in (b"a" * 100, b"b" * 28):
        hashing.advance([(stream, part)])
        stream.hexdigest()
    assert stream.hexdigest() == hashlib.sha256(b"a" * 100 + b"b" * 28).hexdigest()
