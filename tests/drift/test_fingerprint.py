"""Drift on distributions whose KL is known on paper."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.core.errors import ArtifactError, DriftError
from tasks.drift.fingerprint import (
    EXACT,
    PROFILES,
    Drift,
    DriftLimit,
    Fingerprint,
    ScorePrint,
    agreeing,
    drift,
    score_drift,
)
from tasks.drift.verdict import adapter_share, limit_in, limit_of_scores, share_checks, verdict
from tasks.witness.plumbline_witness.prints import (
    BASE,
    FINGERPRINT,
    FormatNoise,
    largest_steps,
    rounding_step,
)


def fingerprint(probabilities: list[list[float]]) -> Fingerprint:
    p = np.array(probabilities, dtype=np.float64)
    n, k = p.shape
    return Fingerprint(
        probes=((1,) * (n + 1),),
        ids=np.tile(np.arange(k, dtype=np.int32), (n, 1)),
        logprobs=np.log(p).astype(np.float32),
        top1=p.argmax(axis=1).astype(np.int32),
        engine="test",
    )


def test_kl_is_the_textbook_value_reference_first_with_one_bucket_for_all_other_ids() -> None:
    log = math.log
    for p, q, expected in (
        ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], 0.0),
        ([0.75, 0.25], [0.5, 0.5], 0.75 * log(0.75 / 0.5) + 0.25 * log(0.25 / 0.5)),
        ([0.6, 0.2], [0.6, 0.3], 0.2 * log(0.2 / 0.3) + 0.2 * log(0.2 / 0.1)),
    ):
        measured = drift(fingerprint([p]), fingerprint([q]))
        assert measured.mean_kl == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_other_tokens_and_nan_are_refused_not_averaged_away() -> None:
    first = fingerprint([[0.5, 0.5]])
    for other in (
        replace(first, probes=((1, 2),)),
        replace(first, ids=first.ids + 1),
        replace(first, logprobs=first.logprobs * np.float32("nan")),
    ):
        with pytest.raises(DriftError):
            drift(first, other)


def test_save_and_load_give_the_same_fingerprint(tmp_path: Path) -> None:
    first = replace(
        fingerprint([[0.5, 0.5], [0.25, 0.75]]), noise=1.5e-7, dtype="float32", routed=True,
        measured_on={"device": "cuda", "name": "NVIDIA H100"}, formats={"bfloat16": COARSE},
    )  # fmt: skip
    for steps in (None, np.array([0.125, 0.0625], np.float32)):
        saved = replace(first, steps=steps)
        saved.save(tmp_path / "f.fp")
        loaded = Fingerprint.load(tmp_path / "f.fp")
        for name, value in vars(saved).items():
            again = getattr(loaded, name)
            is_array = isinstance(value, np.ndarray)
            assert again.tobytes() == value.tobytes() if is_array else again == value


def test_the_signal_of_an_adapter_is_half_the_variance_of_its_change() -> None:
    change = 0.01
    for probes in (tuple((1, n) for n in range(2, 8)), tuple((n, 1) for n in range(2, 8))):
        trained, base = (
            of_logits(np.array([[value, 0.0]] * 6, np.float32), torch.float32, probes)
            for value in (change, 0.0)
        )
        share = adapter_share(trained, base, trained.logprobs, np.ones(6, bool))
        if probes[0][0] == 1:
            assert share is None, "equal contexts count once"
        else:
            assert share is not None
            assert share.signal == pytest.approx(change**2 / 8, rel=1e-2)
            assert share.value == pytest.approx(1.0)


def test_what_rounding_adds_to_a_light_adapter_is_no_other_scale_of_it(tmp_path: Path) -> None:
    """Three seeds of unbiased rounding gave SmolLM2 1.04, 1.12 and 1.31 of a light adapter."""
    probes = tuple((n, 1, 2, 3) for n in range(2, 34))
    logits = np.random.default_rng(0).normal(size=(3 * len(probes), 8)).astype(np.float32)
    update, noise = np.zeros(8, np.float32), np.zeros(8, np.float32)
    update[:4], noise[4:] = 0.01, (0.01, -0.01, 0.01, -0.01)
    shares = {"base": 0.0, "half": 0.5, "trained": 1.0, "rounded": 1.12, "twice": 2.0}
    prints = {
        name: of_logits(
            logits + share * update + (name == "rounded") * noise, torch.float32, probes
        )
        for name, share in shares.items()
    }
    prints["base"].save(tmp_path / BASE)
    prints["trained"].save(tmp_path / FINGERPRINT)

    def passes(name: str, *, rounded: bool) -> bool:
        path, limit = tmp_path / FINGERPRINT, PROFILES["standard"]
        (check,) = share_checks(path, prints[name], limit, "float32", rounded=rounded)
        return check.ok

    assert passes("trained", rounded=False)
    assert not passes("rounded", rounded=False)
    right = [name for name in prints if passes(name, rounded=True)]
    assert right == ["trained", "rounded"]


def test_the_noise_of_an_engine_is_no_other_scale_of_an_adapter_below_it(tmp_path: Path) -> None:
    """In vLLM 0.75 (0.55 to 0.95) of an adapter answered whose effect is a quarter of the noise."""
    probes = tuple((n, 1, 2, 3) for n in range(2, 34))
    logits = np.random.default_rng(0).normal(size=(3 * len(probes), 8)).astype(np.float32)
    update = np.full(8, 0.02, np.float32) * [1, 1, 1, 1, -1, -1, -1, -1]
    signal = 0.02**2 / 2  # nats
    noise = FormatNoise(4 * signal, 0.0, 0.0, 1.0)
    prints = {
        share: of_logits((logits + share * update).astype(np.float32), torch.float32, probes)
        for share in (0.0, 0.4, 0.75, 1.0, 2.0)
    }
    prints[0.0].save(tmp_path / BASE)
    replace(prints[1.0], formats={"bfloat16": noise}).save(tmp_path / FINGERPRINT)

    def right(dtype: str) -> list[float]:
        path, limit = tmp_path / FINGERPRINT, PROFILES["standard"]
        checks = {s: share_checks(path, new, limit, dtype)[0] for s, new in prints.items()}
        return [share for share, check in checks.items() if check.ok]

    assert right("bfloat16") == [0.75, 1.0]
    assert right("float32") == [1.0]


def test_repeat_noise_widens_the_limit_of_scores_and_never_narrows_it() -> None:
    live, new = (0.0, 1.0, 2.0, 3.0), (0.01, 1.01, 2.01, 2.99)

    def prints(*noises: float | None) -> list[ScorePrint]:
        both = zip((live, new), noises, strict=True)
        return [ScorePrint(((1, 2),) * 4, scores, "test", noise) for scores, noise in both]

    def limit(*noises: float | None) -> DriftLimit:
        return limit_of_scores(*prints(*noises), EXACT)

    drifted = score_drift(*prints(None, None))
    assert not verdict(drifted, EXACT).ok
    assert verdict(drifted, limit(0.01, None)).ok
    assert not verdict(drifted, limit(0.002, None)).ok
    wide = limit(0.005, 0.01)
    assert wide.difference == pytest.approx(3 * 0.01 / drifted.unit)
    assert limit(0.0, None).difference == EXACT.difference


COARSE = FormatNoise(mean_kl=2e-3, p95_kl=7e-3, median_kl=1e-3, top1_agreement=0.98)
FINE = FormatNoise(mean_kl=3e-5, p95_kl=1e-4, median_kl=2e-5, top1_agreement=1.0)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_a_limit_is_that_of_the_profile_or_three_times_the_noise_of_the_format(profile) -> None:
    reference = replace(
        fingerprint([[0.5, 0.5]]), dtype="float32", formats={"bfloat16": COARSE, "float16": FINE}
    )
    for dtype in ("float32", "int8"):
        limit = limit_in(profile, reference, dtype)
        assert limit == profile, "no noise was measured: that of the profile"
    wide = limit_in(profile, reference, "bfloat16")
    assert wide.mean_kl == max(profile.mean_kl, 6e-3)
    assert wide.p95_kl == max(profile.p95_kl, 21e-3)
    assert wide.top1_agreement == pytest.approx(min(profile.top1_agreement, 0.94))
    small = limit_in(profile, reference, "float16")
    assert small.mean_kl == max(profile.mean_kl, 9e-5)
    assert small == profile or profile is PROFILES["strict"]
    routed = limit_in(profile, replace(reference, routed=True), "bfloat16")
    assert (routed.by_median, routed.mean_kl) == (True, max(profile.mean_kl, 3e-3))
    ties = Drift(mean_kl=1.0, p95_kl=1e-6, max_kl=9.0, top1_agreement=1.0)
    assert ties.beyond(wide) != []
    assert ties.beyond(routed) == [], "few positions where routers tie hold the mean"
    exact = limit_in(profile, replace(reference, routed=True), "float32")
    assert exact == replace(routed, measured=exact.measured), "rounded weights tie as many"


def test_ties_of_the_served_format_are_ties_to_a_reference_in_float32() -> None:
    logits = np.array([[17.0, 16.9, 1.0]], np.float32)
    fine = of_logits(logits, torch.float32, ((5, 6),))
    flipped = np.array([1], np.int32)
    wanted = {None: False, "float32": False, "float16": False, "bfloat16": True}
    assert {dtype: bool(agreeing(fine, flipped, dtype)[0]) for dtype in wanted} == wanted


@pytest.mark.parametrize("damage", [b"", b"\x00" * 64, None])
def test_a_damaged_file_is_an_artifact_error(tmp_path: Path, damage: bytes | None) -> None:
    path = tmp_path / "f.fp"
    if damage is not None:
        path.write_bytes(damage)
    with pytest.raises(ArtifactError, match="f.fp"):
        Fingerprint.load(path)


def test_within_names_each_limit_that_is_exceeded_and_never_max_kl() -> None:
    calm = Drift(mean_kl=1e-6, p95_kl=1e-6, max_kl=9.0, top1_agreement=1.0)
    assert calm.beyond(EXACT, noise=1e-6) == []
    assert len(calm.beyond(EXACT, noise=1e-7)) == 1
    assert verdict(calm, EXACT, 1e-7).bound.limit == 2e-7
    moved = Drift(mean_kl=1e-2, p95_kl=1e-1, max_kl=9.0, top1_agreement=0.5)
    assert len(moved.beyond(PROFILES["standard"])) == 3


def of_logits(logits: np.ndarray, dtype: torch.dtype, probes: tuple[tuple[int, ...], ...]):
    """A fingerprint of these logits, (N, V), rounded to a dtype."""
    values = torch.from_numpy(logits).to(dtype).float()
    return Fingerprint(
        probes=probes,
        ids=np.tile(np.arange(values.shape[1], dtype=np.int32), (len(values), 1)),
        logprobs=torch.log_softmax(values, dim=-1).numpy(),
        top1=values.argmax(dim=-1).to(torch.int32).numpy(),
        engine="test",
        steps=largest_steps(values.numpy()),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@given(value=st.floats(min_value=2.0**-10, max_value=2.0**14))
def test_a_rounding_step_is_the_distance_to_the_next_number(dtype, value: float) -> None:
    number = torch.tensor(value, dtype=dtype)
    word = torch.int32 if dtype == torch.float32 else torch.int16
    step = float((number.view(word) + 1).view(dtype)) - float(number)
    name = str(dtype).removeprefix("torch.")
    assert rounding_step(float(number), name) == step == rounding_step(-float(number), name)


@pytest.mark.parametrize(
    ("lead", "dtype", "agrees"),
    [
        (0.0, torch.bfloat16, True),  # equal
        (0.125, torch.bfloat16, True),  # neighbours
        (0.25, torch.bfloat16, False),
        (0.125, torch.float16, False),
        (2.0**-19, torch.float32, True),
        (0.01, torch.float32, False),
    ],
)
def test_the_other_of_two_best_tokens_agrees_within_rounding(lead, dtype, agrees) -> None:
    logits = np.array([[17.0, 17.0 - lead, 1.0, 0.3]], np.float32)
    reference = of_logits(logits, dtype, ((5, 6),))
    for token, expected in ((0, True), (1, agrees), (2, False)):
        assert agreeing(reference, np.array([token], np.int32)).tolist() == [expected]


def test_a_context_counts_once_however_many_probes_share_it() -> None:
    """32 probes, all of which begin with the same token: one place is one vote."""
    probes = tuple((1, 100 + p, 7) for p in range(32))
    logits = np.tile(np.array([[9.0, 5.0, 1.0]], np.float32), (64, 1))
    reference = of_logits(logits, torch.bfloat16, probes)
    top1 = reference.top1.copy()
    top1[::2] = 1  # behind the first token, of every probe
    assert drift(reference, replace(reference, top1=top1)).top1_agreement == pytest.approx(32 / 33)
    top1[1] = 1
    assert drift(reference, replace(reference, top1=top1)).top1_agreement == pytest.approx(31 / 33)
