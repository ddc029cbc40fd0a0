"""Checks of distribution and adapters: every fault is found, no clean run alarms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tasks.drift.fingerprint import drift
from tasks.verify.compare import Asked
from tasks.verify.reference import read_reference
from tasks.verify.run import run_checks
from tasks.verify.sampling import sampling
from tasks.verify.weights import adapter, base, distribution
from tests.verify.synthetic import ArrayServer, World, noisy, world, write_witness


def bf16(logits: np.ndarray) -> np.ndarray:
    bits = logits.astype(np.float32).view(np.uint32)
    rounded = (np.round(bits / 65536).astype(np.uint32) << 16).view(np.float32)
    return rounded.astype(np.float64)


def served(made: World, *, part: float = 1.0, seed: int = 1) -> ArrayServer:
    change = made.trained - made.base
    models = {
        "base": noisy(made.base, seed + 1),
        "tuned": noisy(made.base + part * change, seed),
    }
    return ArrayServer(made.probes, models)


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 20), marks=pytest.mark.slow)])
def test_twenty_clean_servers_raise_no_alarm(seeds: range) -> None:
    for seed in seeds:
        made = world(seed, vocab=400, moved=0.05 + 0.1 * (seed % 5), spread=1 + seed % 4)
        reference, server = made.reference(), served(made, seed=100 + seed)
        asked = Asked(server, "tuned", "base", reference)
        checks = [check(asked) for check in (distribution, adapter, base, sampling)]
        assert [check.verdict for check in checks] == ["ok"] * 4, checks
        assert server.asked == 2  # each name once
        assert 0.1 < float(checks[0].measured["mass"]) <= 1


@pytest.mark.parametrize(
    ("part", "code"), [(0.0, "base-served"), (0.8, "adapter-scaled"), (2.0, "adapter-scaled")]
)
def test_an_adapter_that_is_not_applied_whole(part: float, code: str) -> None:
    for moved in (0.1, 0.5):  # the first one is too small for the limits of the distribution
        made = world(2, moved=moved)
        reference, server = made.reference(), served(made, part=part)
        asked = Asked(server, "tuned", "base", reference)
        check, both = adapter(asked), distribution(asked)
        assert (check.verdict, check.causes[0].code) == ("fault", code)
        assert check.measured["dose"] == pytest.approx(part, abs=0.05)
        if moved == 0.5:
            assert (both.verdict, both.causes[0].code) == ("fault", code)
        assert both.measured["dose"] == check.measured["dose"]
        part_of = made.base + part * (made.trained - made.base)
        models = {"base": made.base, "tuned": part_of, "other": made.trained}
        swapped = Asked(ArrayServer(made.probes, models), "tuned", "base", reference)
        check = distribution(swapped)
        assert (check.verdict, check.causes[0].code) == ("fault", "adapters-swapped")


@pytest.mark.parametrize("part", [0.0, 0.5, 0.8])
def test_a_merged_model_is_not_loaded_as_an_adapter(part: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    made = world(2, moved=0.5)
    server = ArrayServer(
        made.probes, {"tuned": noisy(made.base + part * (made.trained - made.base), 1)}
    )
    check = distribution(Asked(server, "tuned", None, replace(made.reference(), folder=tmp_path)))
    assert check.verdict == "fault"
    assert f"serve.py {tmp_path}" in check.causes[0].hint
    assert not [cause for cause in check.causes if "lora" in cause.hint or "base=" in cause.hint]


def test_rounding_of_the_trainer_is_no_part_of_the_dose() -> None:
    """Without the limit, a trainer in bf16 makes half of a small adapter out of rounding."""
    for moved, verdict in ((0.0, "unknown"), (0.02, "unknown"), (0.3, "ok")):
        made = world(13, moved=moved)
        rounded = replace(made, base=bf16(made.base), trained=bf16(made.trained))
        server = ArrayServer(made.probes, {"tuned": bf16(noisy(made.trained, 1))})
        recorded = rounded.reference()
        again = replace(rounded, base=bf16(noisy(made.trained, 2))).reference().base
        assert again is not None
        noise = drift(recorded.trained, again).noise
        trained = replace(recorded.trained, formats={"bfloat16": noise})
        check = adapter(Asked(server, "tuned", None, replace(recorded, trained=trained)))
        assert check.verdict == verdict, check


def test_the_checkpoint_that_fits_is_named(tmp_path: Path) -> None:
    made = world(8)
    random = np.random.default_rng(8)
    for step, moved in ((10, 0.2), (20, 0.1), (30, 0.0)):
        trained = made.trained + random.normal(0, moved, made.trained.shape)
        earlier = replace(made, trained=trained)
        write_witness(tmp_path / f"checkpoint-{step}", earlier.reference(), step=step)
        if step == 20:
            at_20 = trained
    reference = read_reference(tmp_path / "checkpoint-30")
    server = ArrayServer(made.probes, {"tuned": noisy(at_20, 1)})
    check = distribution(Asked(server, "tuned", None, reference))
    assert (check.verdict, check.causes[0].code) == ("fault", "other-checkpoint")
    assert "answers as checkpoint-20" in check.causes[0].text
    assert f"source={tmp_path}/checkpoint-20" in check.causes[0].hint


def test_a_server_without_log_probabilities_proves_nothing() -> None:
    made = world(9)
    server = ArrayServer(made.probes, {"tuned": made.trained}, top=0)
    checks = run_checks(Asked(server, "tuned", "base", made.reference()))
    assert {check.verdict for check in checks} == {"unknown"}
