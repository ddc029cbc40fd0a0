"""Checks of the base model against the objective and packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli.config import compose_config
from tasks.config.checks import findings, model
from tasks.config.checks.model import Known
from tasks.config.checks.objective import _TABLES, families, head_exists
from tests.tiny import tiny


def folder(path: Path, config: dict[str, Any]) -> Path:
    """Return the folder of a model of this configuration, initialised at random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    return path


def findings_of(path: Path, config: dict[str, Any], *overrides: str) -> dict[str, str]:
    """Return the findings about base and objective of a run with this base, by key."""
    base = folder(path / str(config["model_type"]), config)
    composed = compose_config([*overrides, "model=hf", f"model.path={base}"]).settings
    about = ("model.path", "model.attn_implementation", "train.objective")
    return {f.what: str(f) for f in findings(composed, path / "runs") if f.what in about}


def of_family(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a family, as transformers writes it."""
    config: dict[str, Any] = tiny(name, **changes).to_dict()
    return config


class TestPacking:
    """Families that `tasks/training/model/packable.py` refuses, before anything starts."""

    def test_a_family_with_recurrent_layers_is_refused(self, tmp_path: Path) -> None:
        findings = findings_of(tmp_path, of_family("Mamba2", head_dim=16, num_heads=4, n_groups=1))
        assert list(findings) == ["model.path"]
        assert "mamba2 has recurrent layers" in findings["model.path"]
        assert "training packs sequences, and none may see its neighbour" in findings["model.path"]

    def test_attention_without_the_soft_cap_is_refused(self, tmp_path: Path) -> None:
        config = of_family("Gemma2", head_dim=32)
        findings = findings_of(tmp_path, config)
        assert list(findings) == ["model.attn_implementation"]
        assert "model.attn_implementation=eager" in findings["model.attn_implementation"]
        (tmp_path / "again").mkdir()
        assert findings_of(tmp_path / "again", config, "model.attn_implementation=eager") == {}

    def test_a_family_of_attention_layers_passes(self, tmp_path: Path) -> None:
        assert findings_of(tmp_path, of_family("Qwen2", architectures=["Qwen2ForCausalLM"])) == {}


class TestHeads:
    @pytest.mark.parametrize(
        ("objective", "config", "words"),
        [
            ("sft", {"model_type": "t5", "is_encoder_decoder": True}, "an encoder with a decoder"),
            (
                "dpo",
                {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
                "BertForMaskedLM predicts masked tokens",
            ),
            ("sft", {"model_type": "clip"}, "no causal language model for clip"),
            ("sft", {"model_type": "made-up"}, "no causal language model for made-up"),
            ("reward", {"model_type": "granite"}, "no score head (...ForSequenceClassification)"),
        ],
    )
    def test_an_objective_that_this_kind_of_model_cannot_have(
        self, objective: str, config: dict[str, Any], words: str
    ) -> None:
        (finding,) = head_exists(objective, Known(config=config))
        assert finding.what == "train.objective"
        assert finding.found == f"{objective} on {config['model_type']}"
        assert words in finding.allowed
        assert finding.override.startswith("model.path=")

    @pytest.mark.parametrize("objective", ["sft", "reward", "dpo", "kto"])
    def test_supported_families_pass(self, objective: str) -> None:
        for family in ("qwen2", "llama", "gpt2", "mixtral", "gemma2"):
            assert head_exists(objective, Known(config={"model_type": family})) == []
        assert head_exists(objective, model.TOY) == []
        assert head_exists(objective, Known()) == []

    def test_a_model_with_its_own_classes_passes(self) -> None:
        config = {"model_type": "made-up", "auto_map": {"AutoModelForCausalLM": "x.Y"}}
        assert head_exists("sft", Known(config=config)) == []
        assert len(head_exists("reward", Known(config=config))) == 1

    def test_the_table_is_that_of_the_installed_transformers(self) -> None:
        from transformers.models.auto import modeling_auto as auto

        for name, table in _TABLES.items():
            assert families(name) == frozenset(getattr(auto, table))

    def test_the_run_is_refused(self, tmp_path: Path) -> None:
        findings = findings_of(tmp_path, of_family("Granite"), "+exp=reward")
        assert "reward on granite" in findings["train.objective"]
        assert "or train.objective=dpo" in findings["train.objective"]


class TestSharedRows:
    """`train.sequence_parallel`: every reason against it, before anything starts."""

    def lines(self, path: Path, config: dict[str, Any], *overrides: str) -> list[str]:
        base = folder(path / str(config["model_type"]), config)
        arguments = [*overrides, "model=hf", f"model.path={base}"]
        composed = compose_config(arguments).settings
        problems = findings(composed, path / "runs")
        return [str(f) for f in problems if f.what == "train.sequence_parallel"]

    def test_every_reason_is_reported_at_once(self, tmp_path: Path) -> None:
        falcon = of_family("Falcon", num_attention_heads=4, alibi=False)
        overrides = ("train.sequence_parallel=3", "train.nproc=4", "train=grpo")
        eager = "model.attn_implementation=eager"
        assert self.lines(tmp_path, falcon, *overrides, eager, "train.max_len=16") == [
            "train.sequence_parallel: 3 with 4 ranks; a divisor of nproc x nodes "
            "-> train.sequence_parallel=2",
            "train.sequence_parallel: 3 with 4 heads; a divisor of the model's 4 attention heads "
            "-> train.sequence_parallel=2",
            "train.sequence_parallel: 3 with train.objective=grpo; responses are sampled and "
            "scored in whole rows -> train.sequence_parallel=1",
            "train.sequence_parallel: 3 with model.attn_implementation=eager; tokens are exchanged "
            "for heads around sdpa alone -> model.attn_implementation=sdpa or "
            "train.sequence_parallel=1",
            "train.sequence_parallel: 3 with falcon; the family's attention in transformers cannot "
            "be replaced -> train.sequence_parallel=1",
        ]

    @pytest.mark.parametrize("objective", ["sft", "dpo", "kto", "orpo", "simpo", "reward"])
    def test_tested_objectives_pass(self, tmp_path: Path, objective: str) -> None:
        overrides = (f"train={objective}", "train.sequence_parallel=2", "train.nproc=4")
        assert self.lines(tmp_path, of_family("Qwen2"), *overrides) == []

    def test_a_number_below_one_is_out_of_range(self, tmp_path: Path) -> None:
        (line,) = self.lines(tmp_path, of_family("Qwen2"), "train.sequence_parallel=0")
        assert line.endswith("at least 1 -> train.sequence_parallel=1")

    def test_families_are_recognised_by_their_code(self) -> None:
        for family in ("qwen2", "llama", "gemma3_text", "mixtral", "made-up", ""):
            assert model.takes_own_attention(family), family
        for family in ("falcon", "stablelm", "gptj"):
            assert not model.takes_own_attention(family), family
