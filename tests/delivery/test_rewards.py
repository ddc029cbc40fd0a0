"""Reward models with an engine: rewards of the reference and of the served folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flows.cli.config import compose_config
from flows.delivery.run_delivery import direct, plan
from tasks.core.errors import ContractError, DataError, DriftError
from tasks.drift.reward_drift import reward_drift
from tests.delivery.conftest import Done
from tests.delivery.test_heads import base_of
from tests.weights.adapters.making import save, train
from tests.weights.heads.making import change_config, save_openrlhf
from tests.weights.heads.test_merging import TARGETS, classifier
from tests.weights.rounding import near

LOG = logging.getLogger("tests.deliver")
Run = Callable[..., Done]


def delivered(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Deliver with the engine transformers, without Prefect."""
    composed = compose_config(
        [
            *arguments, f"out={tmp_path / 'out'}", f"paths.runs={tmp_path / 'runs'}",
            "smoke.engine=transformers", "convert.dtype=float32",
        ],
        config_name="deliver",
    )  # fmt: skip
    return direct(plan(composed), LOG, "rewards")


def report_of(summary: dict[str, Any]) -> dict[str, Any]:
    folder = Path(summary["stages"][-1]["artifact"])
    return dict(json.loads((folder / "report.json").read_text()))


def test_a_normalised_openrlhf_model(tmp_path: Path) -> None:
    save_openrlhf(tmp_path / "rm", "qwen", prefix="value_head", mean=1.5, std=2.5)
    summary = delivered(tmp_path, f"source={tmp_path / 'rm'}")
    assert [stage["name"] for stage in summary["stages"]] == [
        "audit",
        "reference",
        "convert",
        "smoke_eval",
    ]
    report = report_of(summary)
    assert all(check["ok"] for check in report["checks"])
    assert report["mean_difference"] < 1e-5
    assert report["same_order"] == 1.0
    reference = json.loads(Path(summary["stages"][1]["artifact"], "scores.json").read_text())
    assert len(reference["scores"]) == 32
    raw = torch.tensor(reference["scores"]) * 2.5 + 1.5
    assert raw.std() > 0.01


@pytest.mark.slow
def test_an_adapter_is_scored_unmerged(tmp_path: Path) -> None:
    from peft import LoraConfig

    base = base_of(tmp_path / "base")
    config = LoraConfig(r=4, target_modules=TARGETS, task_type="SEQ_CLS")
    adapter = save(train(classifier("qwen", base), config), tmp_path / "adapter")
    (adapter / "config.json").write_text((base / "config.json").read_text())
    change_config(adapter, mean=0.5, std=2.0)
    summary = delivered(tmp_path, f"source={adapter}", f"base={base}", "merge.base=original")
    names = [stage["name"] for stage in summary["stages"]]
    assert names == ["audit", "reference", "merge", "convert", "smoke_eval"]
    report = report_of(summary)
    assert report["mean_difference"] < 1e-5, report


@pytest.mark.slow
def test_another_head_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is altered during conversion."""
    import tasks.convert as conversion

    save_openrlhf(tmp_path / "rm", "qwen")
    honest = conversion.write_configs

    def broken(out: Path, *arguments: Any, **options: Any) -> Any:
        state = load_file(out / "model.safetensors")
        state["score.weight"] = state["score.weight"] + 0.02 * torch.ones_like(
            state["score.weight"]
        )
        (out / "model.safetensors").unlink()
        save_file(state, out / "model.safetensors", metadata={"format": "pt"})
        return honest(out, *arguments, **options)

    monkeypatch.setattr(conversion, "write_configs", broken)
    with pytest.raises(ContractError, match="rewards against those before") as refused:
        delivered(tmp_path, f"source={tmp_path / 'rm'}")
    text = "\n".join([str(refused.value), *refused.value.details])
    assert "bisect: they part at score (its weights)" in text
    assert not (tmp_path / "out").exists()


class TestTheDistance:
    def test_is_stated_in_the_spread_of_the_reference(self) -> None:
        moved = reward_drift([1.0, 3.0, 5.0], [1.5, 3.0, 5.0])
        unit = (8 / 3) ** 0.5
        assert moved.unit == pytest.approx(unit)
        assert moved.mean_difference == pytest.approx(0.5 / 3 / unit)
        assert moved.max_difference == pytest.approx(0.5 / unit)
        assert moved.same_order == 1.0
        scaled = reward_drift([10.0, 30.0, 50.0], [15.0, 30.0, 50.0])
        assert scaled.mean_difference == pytest.approx(moved.mean_difference)

    def test_counts_the_pairs_that_change_places(self) -> None:
        assert reward_drift([1.0, 2.0, 3.0], [2.0, 1.0, 3.0]).same_order == pytest.approx(2 / 3)
        assert reward_drift([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]).same_order == 0.0
        # A pair that the reference cannot tell apart has no order to keep.
        assert reward_drift([1.0, 1.0, 3.0], [2.0, 1.0, 3.0]).same_order == 1.0
        assert reward_drift([1.0, 2.0, 3.0], [1.0, 1.0, 3.0]).same_order == pytest.approx(2 / 3)

    def test_without_a_scale_is_none(self) -> None:
        with pytest.raises(DataError, match="all 2 texts the same reward"):
            reward_drift([1.0, 1.0], [1.0, 2.0])

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_numbers_that_are_not_finite_are_refused(self, bad: float) -> None:
        with pytest.raises(DriftError, match="NaN or infinite"):
            reward_drift([1.0, 2.0], [1.0, bad])


def test_an_end_that_pads_is_not_taken_for_padding(here: Run, tmp_path: Path) -> None:
    """With pad = eos transformers would score the token before EOS."""
    model = save_openrlhf(tmp_path / "rm", "qwen")
    path = tmp_path / "rm" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": "<|endoftext|>"}))
    change_config(tmp_path / "rm", pad_token_id=0, eos_token_id=0)
    done = here(f"source={tmp_path / 'rm'}", f"out={tmp_path / 'out'}", "convert.dtype=float32")
    assert done.code == 0, done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] is None
    from transformers import AutoModelForSequenceClassification

    served = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[7, 8, 9, 0]])
    with torch.no_grad():
        wanted = model.score(model.model(ids).last_hidden_state[:, -1])[0, 0]
        assert near(served(ids).logits[0, 0], wanted)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vllm_gives_the_rewards_of_base_and_adapter(
    deliver: Run, dtype: str, tmp_path: Path
) -> None:
    from peft import LoraConfig

    base = base_of(tmp_path / "base", heads=1)  # of 32, which vLLM has on a CPU
    config = LoraConfig(r=4, target_modules=TARGETS, task_type="SEQ_CLS")
    adapter = save(train(classifier("qwen", base), config), tmp_path / "adapter")
    (adapter / "config.json").write_text((base / "config.json").read_text())
    change_config(adapter, mean=0.5, std=2.0)
    done = deliver(
        f"source={adapter}", f"base={base}", "merge.base=original",
        f"out={tmp_path / 'out'}", f"convert.dtype={dtype}",
        "smoke.probes=8", engine="vllm", timeout=570,
    )  # fmt: skip
    assert done.code == 0, done.output
    assert done.stages == ["audit", "reference", "merge", "convert", "smoke_eval"]
    report = report_of(done.summary)
    assert report["engine"] == "vllm"
    assert report["mean_difference"] < (1e-4 if dtype == "float32" else 0.03), report
