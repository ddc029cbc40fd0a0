"""Drift on distributions whose KL is known on paper."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tasks.errors import ArtifactError, DriftError
from tasks.fingerprint import EXACT, PROFILES, Drift, Fingerprint, drift, within


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


def test_equal_fingerprints_have_no_drift() -> None:
    one = fingerprint([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    measured = drift(one, one)
    assert (measured.mean_kl, measured.max_kl, measured.top1_agreement) == (0.0, 0.0, 1.0)
    assert measured.cosine == pytest.approx(1.0, abs=1e-12)


def test_kl_is_the_textbook_value_reference_first() -> None:
    ref, new = fingerprint([[0.75, 0.25]]), fingerprint([[0.5, 0.5]])
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert drift(ref, new).mean_kl == pytest.approx(expected, rel=1e-5)


def test_what_the_ids_leave_over_counts_as_one_bucket() -> None:
    ref, new = fingerprint([[0.6, 0.2]]), fingerprint([[0.6, 0.3]])
    expected = 0.2 * math.log(0.2 / 0.3) + 0.2 * math.log(0.2 / 0.1)
    assert drift(ref, new).mean_kl == pytest.approx(expected, rel=1e-5)


def test_other_probes_or_ids_are_refused() -> None:
    one = fingerprint([[0.5, 0.5]])
    with pytest.raises(DriftError, match="other tokens"):
        drift(one, replace(one, probes=((1, 2),)))
    with pytest.raises(DriftError, match="other tokens"):
        drift(one, replace(one, ids=one.ids + 1))


def test_nan_is_refused_not_averaged_away() -> None:
    one = fingerprint([[0.5, 0.5]])
    with pytest.raises(DriftError, match="no log-probability"):
        drift(one, replace(one, logprobs=one.logprobs * np.float32("nan")))


def test_save_and_load_give_the_same_fingerprint(tmp_path: Path) -> None:
    one = replace(fingerprint([[0.5, 0.5], [0.25, 0.75]]), noise=1.5e-7)
    one.save(tmp_path / "f.fp")
    two = Fingerprint.load(tmp_path / "f.fp")
    assert (two.probes, two.engine, two.noise) == (one.probes, one.engine, one.noise)
    assert two.logprobs.tobytes() == one.logprobs.tobytes()
    assert two.ids.tobytes() == one.ids.tobytes()


@pytest.mark.parametrize("damage", [b"", b"\x00" * 64, None])
def test_a_damaged_file_is_an_artifact_error(tmp_path: Path, damage: bytes | None) -> None:
    path = tmp_path / "f.fp"
    if damage is not None:
        path.write_bytes(damage)
    with pytest.raises(ArtifactError, match="f.fp"):
        Fingerprint.load(path)


def test_within_names_each_limit_that_is_exceeded_and_never_max_kl() -> None:
    calm = Drift(mean_kl=1e-6, p95_kl=1e-6, max_kl=9.0, top1_agreement=1.0, cosine=1.0)
    assert within(calm, EXACT, noise=1e-6) == []
    assert within(calm, EXACT, noise=1e-7) == ["mean KL 1.00e-06 > twice the repeat noise 1.00e-07"]
    moved = Drift(mean_kl=1e-2, p95_kl=1e-1, max_kl=9.0, top1_agreement=0.5, cosine=1.0)
    assert len(within(moved, PROFILES["standard"])) == 3
