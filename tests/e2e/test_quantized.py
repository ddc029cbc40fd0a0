"""`convert.quantize` as a user runs it: the model in 16 bits, and its quantised version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Run, client

pytestmark = pytest.mark.slow


def test_both_are_made_checked_and_the_quantised_one_is_registered(
    rlhf: Callable[..., Run], runs: Path
) -> None:
    done = rlhf(runs, "+exp=sft_qlora", "convert=w8a8")
    assert done.code == 0, done.output
    convert, quantized = done.stage("convert"), done.stage("quantize")
    assert done.summary["unquantized"] == convert["artifact"]
    assert done.summary["served"] == quantized["artifact"]
    assert (
        done.stage("smoke_quantized")["drift"]["mean_kl"]
        > done.stage("smoke_eval")["drift"]["mean_kl"]
    )
    before, after = done.summary["eval"]["after"], done.summary["eval"]["quantized"]
    assert before - after <= 0.05
    assert f"quantised: {after:.1%} beside {before:.1%}" in done.output
    version = client(done).get_model_version_by_alias("plumbline", "candidate")
    assert version.tags["quantize"] == "w8a8"
    assert version.tags["digest.served"] != version.tags["digest.unquantized"]
    again = rlhf(runs, "+exp=sft_qlora", "convert=w8a8")
    assert all(stage["reused"] for stage in again.summary["stages"] if stage["name"] != "register")


def test_only_the_last_model_of_a_chain_is_quantised(rlhf: Callable[..., Run], runs: Path) -> None:
    done = rlhf(runs, "+exp=qlora", "convert=fp8", "plan=true")
    assert done.code == 0, done.output
    assert done.output.count("smoke_quantized") == 1
    reward = rlhf(runs, "train=reward", "convert=fp8", "plan=true")
    assert reward.code == 2
    assert "convert.quantize=none" in reward.output
