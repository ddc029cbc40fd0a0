"""The gate of a real chain: the table, `candidate`, `champion`, and a run that does not pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Run, client

pytestmark = pytest.mark.slow
QUICK = (
    "+exp=sft_qlora", "train.max_steps=4", "model.steps=20", "smoke.eval_samples=4",
    "smoke.min_stop_rate=0", "smoke.max_degenerate_rate=1", "smoke.engine=transformers",
)  # fmt: skip


def alias(run: Run, name: str) -> str:
    return str(client(run).get_model_version_by_alias("plumbline", name).version)


@pytest.mark.timeout(1500)
def test_a_model_becomes_champion_only_if_it_passes(
    rlhf: Callable[..., Run], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    wrong = rlhf(runs, *QUICK, 'gate.conditions={eval.exact_mach: ">= 1"}')
    assert wrong.code == 2, wrong.output
    assert "gate.conditions.eval.exact_mach" in wrong.output
    assert "eval.exact_match" in wrong.output
    assert not (runs / "artifacts").exists()

    first = rlhf(
        runs, *QUICK, "register.promote=true",
        'gate.conditions={eval.exact_match: ">= champion - 0.01", eval.loss: "<= base + 1"}',
    )  # fmt: skip
    assert first.code == 0, first.output
    assert (alias(first, "candidate"), alias(first, "champion")) == ("1", "1")
    exact, loss = first.summary["gate"]["conditions"]
    assert (exact["ok"], loss["verdict"]) == (True, "ok")
    assert 0 <= exact["low"] <= exact["value"] == first.summary["eval"]["after"] <= exact["high"]
    assert loss["limit"] == pytest.approx(first.summary["eval"]["loss_before"] + 1)
    assert loss["value"] == pytest.approx(first.summary["eval"]["loss_after"])

    second = rlhf(
        runs, *QUICK, "train.lr=1e-4", "register.promote=true",
        'gate.conditions={eval.loss: "<= champion - 9", drift.merge.mean_kl: "<= 1"}',
    )  # fmt: skip
    assert second.code == 1, second.output
    assert "eval.loss <= champion - 9" in second.output
    gate = second.summary["gate"]
    assert (gate["passed"], gate["version"], gate["champion"]) == (False, "models:/plumbline/2", "")
    assert [row["ok"] for row in gate["conditions"]] == [False, True]
    assert gate["conditions"][0]["limit"] == pytest.approx(loss["value"] - 9)
    assert (alias(second, "candidate"), alias(second, "champion")) == ("2", "1")

    tracker, run_id = client(second), second.summary["mlflow_run_id"]
    assert tracker.get_run(run_id).data.metrics["gate/passed"] == 0
    table = json.loads(Path(tracker.download_artifacts(run_id, "gate.json")).read_text())
    assert table["columns"][:2] == ["condition", "value"]
    assert [row[0] for row in table["data"]] == [row["condition"] for row in gate["conditions"]]
