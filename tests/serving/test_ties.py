from __future__ import annotations

import numpy as np
import pytest

from tasks.drift.fingerprint import Fingerprint
from tasks.evaluation.greedy_ties import Agreement, compare_greedy, engine_noise

STEPS = [[(4, 16.0), (5, 15.9), (6, 15.0)], [(7, 3.0), (8, 1.0)]]


@pytest.mark.parametrize(
    ("tokens", "verdict"),
    [
        ([4, 7], Agreement(1, 0, ())),
        ([4, 7, 1, 1], Agreement(1, 0, ())),
        ([5, 9], Agreement(0, 1, ())),  # 0.1 apart, a step is 0.125
        ([6, 7], Agreement(0, 0, ("prompt 0: token 0 is [6], expected [4]",))),
        ([9, 7], Agreement(0, 0, ("prompt 0: token 0 is [9], expected [4]",))),  # no candidate
        ([4, 8], Agreement(0, 0, ("prompt 0: token 1 is [8], expected [7]",))),
        ([4], Agreement(0, 0, ("prompt 0: token 1 is [], expected [7]",))),
    ],
)
def test_compare_greedy(tokens: list[int], verdict: Agreement) -> None:
    assert compare_greedy([tokens], [[4, 7]], [STEPS]) == verdict


def test_a_finer_dtype_has_narrower_ties() -> None:
    assert compare_greedy([[5, 9]], [[4, 7]], [STEPS], dtype="float32").ties == 0


def test_what_lies_within_the_engines_noise_is_a_tie() -> None:
    assert compare_greedy([[6]], [[4, 7]], [STEPS], noise=0.9).ties == 0
    assert compare_greedy([[6]], [[4, 7]], [STEPS], noise=1.1).ties == 1


def test_the_noise_is_that_of_the_lead_where_the_engines_differ_most() -> None:
    ids = np.array([[3, 4, 5], [3, 4, 5]], np.int32)
    first = np.array([[-0.1, -3.0, -4.0], [-1.0, -0.5, -9.0]], np.float32)
    second = first + np.array([[0.0, 0.25, 7.0], [0.5, 0.0, 0.0]], np.float32)
    prints = [
        Fingerprint(((1, 2, 3),), ids, logprobs, np.array([3, 4], np.int32), "x")
        for logprobs in (first, second)
    ]
    assert engine_noise(prints[0], prints[1]) == pytest.approx(0.5)
    assert engine_noise(prints[0], prints[0]) == 0.0
