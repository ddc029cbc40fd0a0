"""Reward models and value heads of all tools; scores and heads are the same after delivery."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.core.errors import ContractError, DataError, DriftError
from tasks.drift.reward_drift import reward_drift
from tests.delivery.conftest import Done
from tests.delivery.making import (
    TARGETS,
    Tensors,
    base_of,
    classifier,
    differing,
    llamafactory_ppo,
)
from tests.weights.adapters.making import quiet, save, train
from tests.weights.heads.making import (
    causal,
    change_config,
    head_tensors,
    openrlhf_model,
    rewards,
    save_openrlhf,
    save_trl,
    scores,
)
from tests.weights.making import save_tokenizer, state_of
from tests.weights.rounding import near

Run = Callable[..., Done]
SAME = "convert.dtype=float32"
BASE = "merge.base=original"
SLOW = pytest.mark.slow


def head_artifact(done: Done, tmp_path: Path) -> Tensors:
    """Return the artifact with the value head, and check that OUT has no part of it."""
    (stage,) = (entry for entry in done.summary["stages"] if entry["name"] == "value_head")
    folder = Path(stage["artifact"])
    assert folder.is_relative_to(tmp_path / "runs" / "artifacts" / "value_head")
    assert not [path.name for path in (tmp_path / "out").iterdir() if "head" in path.name]
    assert not [name for name in state_of(tmp_path / "out") if "v_head" in name]
    return load_file(folder / "value_head.safetensors")


def reward_adapter(
    tmp_path: Path, family: str = "qwen", *, heads: int = 4, **normalised: Any
) -> tuple[Path, Path, Any]:
    """Make a base, a reward adapter with its head saved in full, and the trained model."""
    from peft import LoraConfig

    base = base_of(tmp_path / "base", family, heads)
    config = LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["score"])
    wrapped = train(classifier(base), config)
    adapter = save(wrapped, tmp_path / "adapter")
    if normalised:  # OpenRLHF writes tokenizer and config.json beside its adapter
        save_tokenizer(adapter)
        (adapter / "config.json").write_text((base / "config.json").read_text())
        change_config(adapter, **normalised)
    return base, adapter, wrapped


@pytest.mark.parametrize("prefix", [pytest.param("score", marks=SLOW), "value_head"])
def test_an_openrlhf_reward_model(here: Run, prefix: str, tmp_path: Path) -> None:
    model = save_openrlhf(tmp_path / "rm", "llama", prefix=prefix, mean=1.5, std=2.5)
    done = here(f"source={tmp_path / 'rm'}", SAME)
    assert done.stages == ["audit", "convert"]
    with torch.no_grad():
        raw = rewards(model, getattr(model, prefix).weight)
    assert near(scores(tmp_path / "out"), (raw - torch.tensor(1.5)) / torch.tensor(2.5))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert (config["mean"], config["std"]) == (1.5, 2.5)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [pytest.param("", marks=SLOW), "pretrained_model."])
def test_a_trl_policy_with_its_value_head(here: Run, wrapper: str, tmp_path: Path) -> None:
    policy = save_trl(tmp_path / "ppo", "llama", prefix=wrapper)
    done = here(f"source={tmp_path / 'ppo'}", SAME)
    assert done.stages == ["audit", "convert", "value_head"]
    assert differing(state_of(tmp_path / "out"), policy.state_dict()) == []
    assert differing(head_artifact(done, tmp_path), head_tensors()) == []


@pytest.mark.parametrize(
    "normalised", [{}, {"mean": 0.5, "std": 2.0, "value_head_prefix": "score"}]
)
def test_a_reward_adapter_and_its_base(
    here: Run, normalised: dict[str, Any], tmp_path: Path
) -> None:
    base, adapter, wrapped = reward_adapter(tmp_path, "llama", **normalised)
    done = here(f"source={adapter}", f"base={base}", BASE, SAME)
    assert done.stages == ["audit", "merge", "convert"]
    with quiet():
        merged = wrapped.merge_and_unload()
    assert differing(state_of(tmp_path / "out"), merged.state_dict()) == []
    raw = rewards(merged, merged.score.weight.detach())
    mean, std = normalised.get("mean", 0.0), normalised.get("std", 1.0)
    assert near(scores(tmp_path / "out"), (raw - mean) / std)


@pytest.mark.parametrize("pickled", [pytest.param(False, marks=SLOW), True])
def test_a_llamafactory_adapter_with_a_value_head_beside_it(
    here: Run, pickled: bool, tmp_path: Path
) -> None:
    from peft import LoraConfig

    base = base_of(tmp_path / "base")
    wrapped = train(causal("qwen"), LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM"))
    adapter = save(wrapped, tmp_path / "adapter")
    if pickled:
        torch.save(head_tensors(), adapter / "value_head.bin")
    else:
        save_file(head_tensors(), adapter / "value_head.safetensors")
    done = here(f"source={adapter}", f"base={base}", BASE, SAME)
    assert done.stages == ["audit", "merge", "convert", "value_head"]
    with quiet():
        merged = wrapped.merge_and_unload().state_dict()
    assert differing(state_of(tmp_path / "out"), merged) == []
    assert differing(head_artifact(done, tmp_path), head_tensors()) == []


LAYOUTS: dict[str, dict[str, Any]] = {
    "one file": {},
    "shards and their index": {"shard": "40KB"},
    "pickles": {"pickled": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["one file", "shards and their index", pytest.param("pickles", marks=SLOW)],
)
def test_a_llamafactory_model_with_a_value_head_beside_it(
    here: Run, layout: str, tmp_path: Path
) -> None:
    """vLLM would load the head as part of the model, unless an index lists the model's files."""
    policy = causal("qwen")
    llamafactory_ppo(policy, tmp_path / "ppo", **LAYOUTS[layout])
    done = here(f"source={tmp_path / 'ppo'}", SAME)
    assert done.stages == ["audit", "convert", "value_head"]
    assert differing(state_of(tmp_path / "out"), policy.state_dict()) == []
    assert differing(head_artifact(done, tmp_path), head_tensors()) == []
    stray = [each for each in done.summary["findings"] if each["code"] == "STRAY_WEIGHT_FILE"]
    indexed = layout == "shards and their index"
    assert [each["severity"] for each in stray] == ["warning" if indexed else "error"]
    assert indexed or stray[0]["handled"]


class TestAHeadThatIsLost:
    @pytest.mark.parametrize("name", ["openrlhf", "critic", "no head"])
    def test_in_a_model(self, here: Run, name: str, tmp_path: Path) -> None:
        source = tmp_path / "rm"
        save_openrlhf(source, "qwen", name="CriticModel" if name == "critic" else "RewardModel")
        if name == "openrlhf":  # whose head is in adapters only if modules_to_save names it
            self._adapter_of(tmp_path, openrlhf_model("qwen"), ["q_proj", "v_proj"])
            done = here(f"source={tmp_path / 'adapter'}", f"base={tmp_path / 'base'}", code=2)
        else:
            if name == "no head":
                path = source / "model.safetensors"
                tensors = load_file(path)
                del tensors["score.weight"]
                save_file(tensors, path, metadata={"format": "pt"})
            done = here(f"source={source}", code=2)
        assert ("HEAD_OF_CRITIC" if name == "critic" else "HEAD_MISSING") in done.output
        assert "VLLM_ARCHITECTURE" not in done.output or name != "no head"

    def test_as_a_layer_of_an_adapter(self, here: Run, tmp_path: Path) -> None:
        """With `target_modules=all-linear` the random head becomes a LoRA layer and is lost."""
        self._adapter_of(tmp_path, None, "all-linear")
        done = here(f"source={tmp_path / 'adapter'}", f"base={tmp_path / 'base'}", BASE, code=2)
        assert "HEAD_BASE_LOST" in done.output
        assert "base_model.model.score.lora_A.weight" in done.output

    def _adapter_of(self, tmp_path: Path, model: Any, targets: Any) -> None:
        from peft import LoraConfig

        base = base_of(tmp_path / "base")
        wrapped = train(model or classifier(base), LoraConfig(r=4, target_modules=targets))
        save(wrapped, tmp_path / "adapter")


def test_an_end_that_pads_is_not_taken_for_padding(here: Run, tmp_path: Path) -> None:
    """With pad = eos transformers would score the token before EOS."""
    from transformers import AutoModelForSequenceClassification

    model = save_openrlhf(tmp_path / "rm", "qwen")
    path = tmp_path / "rm" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": "<|endoftext|>"}))
    change_config(tmp_path / "rm", pad_token_id=0, eos_token_id=0)
    here(f"source={tmp_path / 'rm'}", SAME)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"] is None
    served = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[7, 8, 9, 0]])
    with torch.no_grad():
        wanted = model.score(model.model(ids).last_hidden_state[:, -1])[0, 0]
        assert near(served(ids).logits[0, 0], wanted)


class TestWithAnEngine:
    """Rewards of the reference, by a child process, and of the served folder."""

    def delivered(self, tmp_path: Path, *arguments: str) -> dict[str, Any]:
        """Deliver with the engine transformers, without Prefect."""
        from flows.cli.config import compose_config
        from flows.delivery.run_delivery import direct, plan

        words = [
            *arguments, f"out={tmp_path / 'out'}", f"paths.runs={tmp_path / 'runs'}",
            "smoke.engine=transformers", SAME,
        ]  # fmt: skip
        composed = compose_config(words, config_name="deliver")
        return direct(plan(composed), logging.getLogger("tests.deliver"), "rewards")

    def report_of(self, summary: dict[str, Any]) -> dict[str, Any]:
        folder = Path(summary["stages"][-1]["artifact"])
        return dict(json.loads((folder / "report.json").read_text()))

    @pytest.mark.slow
    def test_a_normalised_openrlhf_model(self, tmp_path: Path) -> None:
        save_openrlhf(tmp_path / "rm", "qwen", prefix="value_head", mean=1.5, std=2.5)
        summary = self.delivered(tmp_path, f"source={tmp_path / 'rm'}")
        names = [stage["name"] for stage in summary["stages"]]
        assert names == ["audit", "reference", "convert", "smoke_eval"]
        report = self.report_of(summary)
        assert all(check["ok"] for check in report["checks"])
        assert report["mean_difference"] < 1e-5
        assert report["same_order"] == 1.0
        reference = json.loads(Path(summary["stages"][1]["artifact"], "scores.json").read_text())
        assert torch.tensor(reference["scores"]).std() > 0.01

    @pytest.mark.slow
    def test_another_head_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The head is altered during conversion."""
        import tasks.convert as conversion

        save_openrlhf(tmp_path / "rm", "qwen")
        honest = conversion.write_configs

        def broken(out: Path, *arguments: Any, **options: Any) -> Any:
            state = load_file(out / "model.safetensors")
            state["score.weight"] = state["score.weight"] + 0.02
            (out / "model.safetensors").unlink()
            save_file(state, out / "model.safetensors", metadata={"format": "pt"})
            return honest(out, *arguments, **options)

        monkeypatch.setattr(conversion, "write_configs", broken)
        with pytest.raises(ContractError) as refused:
            self.delivered(tmp_path, f"source={tmp_path / 'rm'}")
        text = "\n".join([str(refused.value), *refused.value.details])
        assert "bisect: they part at score (its weights)" in text
        assert not (tmp_path / "out").exists()

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize(
        ("engine", "dtype", "limit"),
        [
            ("transformers", "float32", 1e-5), ("vllm", "float32", 1e-4),
            ("vllm", "bfloat16", 0.03),
        ],
    )  # fmt: skip
    def test_an_adapter_is_scored_unmerged(
        self, deliver: Run, engine: str, dtype: str, limit: float, tmp_path: Path
    ) -> None:
        heads = 1  # of 32, which vLLM has on a CPU
        base, adapter, _ = reward_adapter(tmp_path, heads=heads, mean=0.5, std=2.0)
        done = deliver(
            f"source={adapter}", f"base={base}", BASE, f"convert.dtype={dtype}",
            "smoke.probes=8", engine=engine, timeout=570,
        )  # fmt: skip
        assert done.stages == ["audit", "reference", "merge", "convert", "smoke_eval"]
        report = self.report_of(done.summary)
        assert report["engine"] == engine
        assert report["mean_difference"] < limit, report


class TestTheDistanceOfRewards:
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

    def test_needs_a_scale_and_finite_numbers(self) -> None:
        with pytest.raises(DataError):
            reward_drift([1.0, 1.0], [1.0, 2.0])
        for bad in (float("nan"), float("inf")):
            with pytest.raises(DriftError):
                reward_drift([1.0, 2.0], [1.0, bad])
