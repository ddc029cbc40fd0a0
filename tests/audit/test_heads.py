"""Reward and value heads, in the formats of the tools that write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasks.audit.run import audit
from tests.audit.making import (
    Arrays,
    adapter_tensors,
    by_code,
    codes,
    errors,
    make_adapter,
    make_model,
    make_shards,
    tensors,
)  # fmt: skip

V_HEAD = {
    "v_head.summary.weight": np.ones((1, 16), np.float32),
    "v_head.summary.bias": np.zeros(1, np.float32),
}
CLASSIFIER = ["LlamaForSequenceClassification"]


def trunk() -> Arrays:
    return {key: array for key, array in tensors().items() if key != "lm_head.weight"}


def scored(rows: int = 1, name: str = "score") -> Arrays:
    return {**trunk(), f"{name}.weight": np.ones((rows, 16), np.float32)}


class TestKinds:
    @pytest.mark.parametrize(
        ("arrays", "changes", "kind", "dialect"),
        [
            (
                scored(),
                {"architectures": CLASSIFIER, "num_labels": 1},
                "reward-model",
                "a LlamaFor",
            ),
            (scored(), {"architectures": ["RewardModel"]}, "reward-model", "an OpenRLHF reward"),
            (scored(), {"architectures": ["CriticModel"]}, "reward-model", "an OpenRLHF critic"),
            ({**tensors(), **V_HEAD}, {}, "value-head-model", "TRL's"),
        ],
    )
    def test_dialects(
        self, arrays: Arrays, changes: dict[str, Any], kind: str, dialect: str, tmp_path: Path
    ) -> None:
        report = audit(make_model(tmp_path / "it", arrays, **changes))
        assert report.kind == kind
        assert dialect in report.what

    def test_llamafactory_stores_the_head_in_a_side_file(self, tmp_path: Path) -> None:
        root = make_shards(tmp_path / "it")
        save_file(V_HEAD, root / "value_head.safetensors")
        report = audit(root)
        assert (report.kind, "LLaMA-Factory" in report.what) == ("value-head-model", True)
        assert codes(root)["HEAD_SIDE_FILE"] == "warning"
        assert errors(codes(root)) == set()

    def test_llamafactorys_reward_adapter_may_name_the_head(self, tmp_path: Path) -> None:
        root = make_adapter(tmp_path / "it", modules_to_save=["v_head"])
        assert "ADAPTER_SAVED_ABSENT" in codes(root)
        save_file(V_HEAD, root / "value_head.safetensors")
        assert errors(codes(root)) == set()


class TestAbsent:
    @pytest.mark.parametrize("named", [CLASSIFIER, ["RewardModel"]])
    def test_a_reward_model_without_a_head(self, named: list[str], tmp_path: Path) -> None:
        root = make_model(tmp_path / "it", trunk(), architectures=named, num_labels=1)
        assert codes(root)["HEAD_MISSING"] == "error"

    def test_a_lora_reward_model_without_its_head(self, tmp_path: Path) -> None:
        root = make_adapter(tmp_path / "it", task_type="SEQ_CLS")
        assert codes(root)["HEAD_MISSING"] == "error"

    def test_lora_on_a_head_that_was_never_saved(self, tmp_path: Path) -> None:
        """OpenRLHF #682 and #872: the default targets include the head."""
        lora = {
            "base_model.model.score.lora_A.weight": np.ones((4, 16), np.float32),
            "base_model.model.score.lora_B.weight": np.ones((1, 4), np.float32),
        }
        targets = ["q_proj", "v_proj", "score"]
        root = make_adapter(tmp_path / "it", {**adapter_tensors(), **lora}, target_modules=targets)
        assert codes(root)["HEAD_BASE_LOST"] == "error"
        base = make_model(tmp_path / "rm", scored(), architectures=CLASSIFIER, num_labels=1)
        assert "HEAD_BASE_LOST" not in codes(root, base=base)

    def test_a_head_that_was_saved_in_full(self, tmp_path: Path) -> None:
        head = {"base_model.model.score.weight": np.ones((1, 16), np.float32)}
        root = make_adapter(
            tmp_path / "it", {**adapter_tensors(), **head}, task_type="SEQ_CLS",
            modules_to_save=["score"],
        )  # fmt: skip
        assert errors(codes(root)) == set()

    @pytest.mark.parametrize("name", ["RewardModel", "CriticModel"])
    def test_peft_records_the_class_without_a_task_type(self, name: str, tmp_path: Path) -> None:
        wrapped = {"base_model_class": name, "parent_library": "openrlhf.models.model"}
        root = make_adapter(tmp_path / "it", task_type=None, auto_mapping=wrapped)
        assert errors(codes(root)) == {"HEAD_MISSING"}
        base = make_model(tmp_path / "rm", scored(), architectures=CLASSIFIER, num_labels=1)
        assert errors(codes(root, base=base)) == set()  # the base has the head

    def test_a_language_model_that_was_wrapped_without_a_task_type(self, tmp_path: Path) -> None:
        wrapped = {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"}
        root = make_adapter(tmp_path / "it", task_type=None, auto_mapping=wrapped)
        assert errors(codes(root)) == set()


class TestCritics:
    """A critic has one finding, and its fix is not a conversion."""

    @pytest.mark.parametrize("name", ["CriticModel", "LlamaForTokenClassification"])
    def test_a_head_that_gives_a_value_for_every_token(self, name: str, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it", scored(), architectures=[name], num_labels=1)
        report = audit(root)
        assert errors(by_code(report)) == {"HEAD_OF_CRITIC"}
        (finding,) = (finding for finding in report.findings if finding.code == "HEAD_OF_CRITIC")
        assert "deliver" not in finding.fix

    def test_a_token_classifier_is_not_a_critic(self, tmp_path: Path) -> None:
        named = ["LlamaForTokenClassification"]
        root = make_model(tmp_path / "it", scored(9), architectures=named, num_labels=9)
        assert "HEAD_OF_CRITIC" not in codes(root)


class TestPlaceAndShape:
    def test_trls_head_in_the_model(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it", {**tensors(), **V_HEAD})
        assert codes(root)["HEAD_IN_MODEL"] == "error"

    def test_no_number_of_labels(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it", scored(), architectures=["RewardModel"])
        assert codes(root)["HEAD_LABELS"] == "error"

    def test_two_labels(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it", scored(2), architectures=CLASSIFIER, num_labels=2)
        assert codes(root)["HEAD_TWO_LABELS"] == "warning"
        assert errors(codes(root)) == set()

    def test_three_classes_are_a_classifier(self, tmp_path: Path) -> None:
        table = {str(label): f"LABEL_{label}" for label in range(3)}
        root = make_model(tmp_path / "it", scored(3), architectures=CLASSIFIER, id2label=table)
        assert errors(codes(root)) == set()

    def test_another_head_name_in_the_configuration(self, tmp_path: Path) -> None:
        root = make_model(
            tmp_path / "it", scored(name="value_head"), architectures=["RewardModel"],
            value_head_prefix="score", num_labels=1,
        )  # fmt: skip
        assert codes(root)["HEAD_PREFIX"] == "error"

    def test_an_empty_head(self, tmp_path: Path) -> None:
        arrays = {**trunk(), "score.weight": np.ones(0, np.float32)}
        root = make_model(tmp_path / "it", arrays, architectures=CLASSIFIER, num_labels=1)
        assert errors(codes(root)) == {"EMPTY_TENSOR", "HEAD_UNUSABLE"}


class TestNormalisation:
    def test_mean_and_std_only_in_the_configuration(self, tmp_path: Path) -> None:
        named: dict[str, Any] = {"architectures": ["RewardModel"], "num_labels": 1}
        root = make_model(tmp_path / "it", scored(), **named, mean=1.5, std=2.5)
        assert codes(root)["HEAD_NORMALISATION"] == "warning"
        root = make_model(tmp_path / "none", scored(), **named)
        assert codes(root)["HEAD_NOT_NORMALISED"] == "info"

    @pytest.mark.parametrize("numbers", [{"mean": 1.5}, {"mean": 1.5, "std": 0.0}])
    def test_incomplete_or_zero_normalisation(
        self, numbers: dict[str, float], tmp_path: Path
    ) -> None:
        named: dict[str, Any] = {"architectures": ["RewardModel"], "num_labels": 1}
        assert (
            codes(make_model(tmp_path / "it", scored(), **named, **numbers))["HEAD_MEAN_STD"]
            == "error"
        )


class TestHeadsOfSeveralLayers:
    """Heads of encoders have several layers: no `score.weight`, and nothing is missing."""

    def test_in_an_adapter_of_peft_and_in_the_model(self, tmp_path: Path) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import RobertaConfig, RobertaForSequenceClassification

        config = RobertaConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, num_labels=1,
        )  # fmt: skip
        model = RobertaForSequenceClassification(config)
        model.save_pretrained(tmp_path / "model")
        lora = LoraConfig(r=2, task_type="SEQ_CLS", init_lora_weights=False)
        get_peft_model(model, lora).save_pretrained(tmp_path / "it")
        assert errors(codes(tmp_path / "model")) == set()
        assert errors(codes(tmp_path / "it")) == set()
        assert errors(codes(tmp_path / "it", base=tmp_path / "model")) == {"ADAPTER_NO_MERGE"}

    def test_a_missing_head_is_still_reported(self, tmp_path: Path) -> None:
        folder = make_model(
            tmp_path / "it", trunk(), architectures=["RobertaForSequenceClassification"]
        )
        assert "HEAD_MISSING" in errors(codes(folder))
