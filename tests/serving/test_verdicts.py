from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tasks.core.errors import ArtifactError
from tasks.drift.fingerprint import PROFILES, Drift
from tasks.drift.verdict import verdict
from tasks.evaluation import smoke_checks
from tasks.evaluation.greedy_ties import Agreement

CALM = Drift(mean_kl=1e-5, p95_kl=1e-4, max_kl=9.0, top1_agreement=1.0, cosine=1.0)
MOVED = Drift(mean_kl=0.2, p95_kl=0.5, max_kl=1.0, top1_agreement=0.5, cosine=0.7)
STANDARD = PROFILES["standard"]


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"")


def test_strays_beside_a_single_file(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors", "config.json", "fingerprint.fp")
    assert smoke_checks.stray_weights(tmp_path) == []
    touch(tmp_path, "value_head.safetensors", "adapter_model.bin")
    strays = smoke_checks.stray_weights(tmp_path)
    assert strays == ["adapter_model.bin", "value_head.safetensors"]
    check = smoke_checks.no_strays(strays)
    assert (check.ok, check.found) == (False, "adapter_model.bin, value_head.safetensors")


def test_strays_beside_shards(tmp_path: Path) -> None:
    touch(tmp_path, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors",
                            "b": "model-00002-of-00002.safetensors"}}  # fmt: skip
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert smoke_checks.stray_weights(tmp_path) == []
    touch(tmp_path, "model.safetensors")
    assert smoke_checks.stray_weights(tmp_path) == ["model.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ArtifactError, match="no weight_map"):
        smoke_checks.stray_weights(tmp_path)


def test_drift_check_names_the_stage_only_when_it_fails() -> None:
    good = smoke_checks.drift_check(CALM, STANDARD, "")
    assert good.ok
    assert good.found == "mean KL 1.00e-05, p95 KL 1.00e-04, top-1 agreement 1.0000"
    bad = smoke_checks.drift_check(MOVED, STANDARD, "merge")
    assert not bad.ok
    assert bad.found == (
        "mean KL 2.00e-01 > 1e-03; p95 KL 5.00e-01 > 5e-03; top-1 agreement 0.5000 < 0.97; "
        "drift appeared at: merge"
    )


def test_a_failed_drift_check_names_the_profile_that_admits_it() -> None:
    mild = Drift(mean_kl=2e-3, p95_kl=6e-3, max_kl=0.1, top1_agreement=0.99, cosine=1.0)
    assert "gate=relaxed" in verdict(mild, STANDARD, cause="rounding").hint
    assert verdict(MOVED, STANDARD).hint.startswith("no profile admits it")


def test_first_mover() -> None:
    history = {"gather": asdict(CALM), "merge": asdict(MOVED), "convert": asdict(MOVED)}
    assert smoke_checks.first_mover(history, STANDARD) == "merge"
    assert smoke_checks.first_mover({"gather": asdict(CALM)}, STANDARD) is None


def test_greedy_check_counts_ties_and_fails_on_differences() -> None:
    tied = smoke_checks.greedy_check(Agreement(30, 2, ()), 5)
    assert tied.ok
    assert tied.found == "equal on 30 of 32, 2 part at a tie (within 2 rounding steps or the noise)"
    assert not smoke_checks.greedy_check(Agreement(31, 0, ("prompt 3: ...",)), 5).ok
    assert not smoke_checks.greedy_check(Agreement(0, 0, ()), 5).ok  # nothing was compared


def test_stop_and_degenerate_checks() -> None:
    for ended, ok in ((32, True), (27, True), (25, False), (0, False)):  # of 32: 0.9 is 28.8
        assert smoke_checks.stop_check([True] * ended + [False] * (32 - ended), 0.9).ok is ok
    # One of 32 is within the error of 2 %; 12 before training make the limit 38 %.
    for before, after, ok in ((0, 1, True), (0, 3, False), (12, 17, True), (12, 19, False)):
        tokens = ([[1, 2, 3]] * (32 - count) + [[0] * 40] * count for count in (after, before))
        check = smoke_checks.degenerate_check(next(tokens), 0.02, next(tokens))
        assert (check.ok, check.found) == (ok, f"{after} of 32, first prompt {32 - after}")


def test_probes_check_sees_a_changed_template() -> None:
    probes = [[1, 2, 3, 9], [1, 4]]  # the second one was cut within its prompt
    assert smoke_checks.probes_check(probes, [[1, 2, 3], [1, 4, 5]]).ok
    check = smoke_checks.probes_check(probes, [[0, 1, 2, 3], [1, 4, 5]])
    assert (check.ok, check.found) == (False, "1 of 2")
