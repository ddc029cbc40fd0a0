"""Distance and dose: bounds that hold for every pair of models, and simulations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.drift.fingerprint import PROFILES
from tasks.drift.verdict import adapter_share
from tasks.verify.compare import align, distance, format_of, kl_of
from tasks.verify.server import EMPTY, Entry, Scores
from tests.verify.synthetic import answers, fingerprint, logprobs_of, world

STANDARD = PROFILES["standard"]


def full_kl(p_logits: np.ndarray, q_logits: np.ndarray) -> np.ndarray:
    p, q = logprobs_of(p_logits), logprobs_of(q_logits)
    return (np.exp(p) * (p - q)).sum(1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(3, 200),
    spread=st.floats(0, 8),
    fault=st.floats(0, 10),
    top=st.integers(1, 40),
    kept=st.integers(2, 64),
)
def test_the_coarse_kl_never_exceeds_the_full_kl(
    seed: int, vocab: int, spread: float, fault: float, top: int, kept: int
) -> None:
    made = world(seed, vocab=vocab, count=3, length=8, spread=spread)
    random = np.random.default_rng(seed + 1)
    served = made.trained + random.normal(0, fault, made.trained.shape)
    reference = fingerprint(made.probes, made.trained, min(kept, vocab))
    aligned = align(reference, answers(made.probes, served, min(top, vocab)))
    rest = 1 - np.nansum(np.exp(aligned.logprobs), 1) - aligned.extra_mass
    # Probabilities in float32 that sum to almost 1 leave a rest that is mostly rounding.
    noise = 1e-5 + 1e-7 / np.maximum(rest, 1e-6)
    coarse, full = kl_of(reference, aligned), full_kl(made.trained, served)
    assert (coarse >= 0).all()
    assert (coarse <= full * (1 + 1e-5) + noise).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_the_format_of_a_server_is_in_its_answers(dtype: str, offset: float) -> None:
    made = world(5, vocab=2000, count=6, moved=0.0)
    logits = (made.trained + offset).astype(np.float32)
    reference = fingerprint(made.probes, logits.astype(np.float64))
    rounded = torch.tensor(logits).to(getattr(torch, dtype)).double().numpy()
    aligned = align(reference, answers(made.probes, rounded))
    assert format_of(reference, aligned) == dtype
    assert format_of(replace(reference, steps=None), aligned) is None


def test_positions_that_were_not_measured_are_left_out() -> None:
    made = world(6)
    reference = fingerprint(made.probes, made.trained)
    full = answers(made.probes, made.trained)
    few: list[Scores] = [
        [entry if at % 3 == 0 else EMPTY for at, entry in enumerate(score)] for score in full
    ]
    aligned = align(reference, few)
    measured = distance(reference, aligned, STANDARD)
    assert (~np.isnan(measured.kl)).sum() == 12 * 7
    assert measured.mean_kl < 1e-6
    assert measured.top1_agreement == 1.0
    nan = np.float32("nan")
    broken: list[Scores] = [[Entry(ids, values + nan) for ids, values in score] for score in full]
    with pytest.raises(ValueError, match="no position"):
        distance(reference, align(reference, broken), STANDARD)
    with pytest.raises(ValueError, match="scores of"):
        align(reference, full[:-1])


@pytest.mark.parametrize(("seed", "part"), [(0, 0.0), (2, 1.0), (3, 0.5)])
def test_ties_of_routers_do_not_hide_or_take_the_dose(seed: int, part: float) -> None:
    """At 6 % of the positions the adapter chose other experts; rounding chooses at random."""
    made = world(seed, vocab=200, moved=0.1)
    random = np.random.default_rng(seed)
    switched = random.random(len(made.trained)) < 0.06
    other = made.base + random.normal(0, 1.5, made.base.shape)
    made = replace(made, trained=np.where(switched[:, None], other, made.trained))
    served = made.base + part * (made.trained - made.base)
    back = random.random(len(switched)) < 0.5
    served[switched] = np.where(back[:, None], made.base, made.trained)[switched]
    reference = made.reference()
    assert reference.base is not None
    aligned = align(reference.trained, answers(made.probes, served))
    arguments = reference.base, aligned.logprobs, aligned.measured
    plain = adapter_share(reference.trained, *arguments)
    routed = adapter_share(replace(reference.trained, routed=True), *arguments)
    assert plain is not None
    assert routed is not None
    assert routed.value == pytest.approx(part, abs=0.1)
    assert routed.is_whole is (part == 1.0)
    assert abs(plain.value - part) > abs(routed.value - part)
