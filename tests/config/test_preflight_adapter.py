"""Checks of section `peft`, and of a base with a score head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flows.cli.config import compose_config
from tasks.config.checks import model
from tasks.config.checks.adapter import adapter, new_tokens
from tasks.config.checks.objective import objective_fits
from tasks.core.finding import Finding


def findings_of(*overrides: str, weight_decay: float = 0.0) -> list[Finding]:
    peft: dict[str, Any] = compose_config(["peft=lora", *overrides]).settings["peft"]
    return adapter(peft, model.TOY, weight_decay=weight_decay)


def test_valid_options_of_an_adapter_pass() -> None:
    overrides = ["peft.use_dora=true", "peft.init=pissa", "peft.pissa_niter=4"]
    overrides += ["peft.rank_pattern={q_proj: 4}", "peft.alpha_pattern={layers.1.x.up_proj: 8}"]
    overrides += ["peft.modules_to_save=[embed_tokens,norm]", "peft.exclude_modules=[down_proj]"]
    assert findings_of(*overrides) == []


def test_full_fine_tuning_has_no_adapter_to_set() -> None:
    overrides = ["peft.kind=none", "peft.use_dora=true", "peft.init=pissa", "peft.use_rslora=true"]
    assert [f.what for f in findings_of(*overrides)] == [
        "peft.use_rslora",
        "peft.use_dora",
        "peft.init",
    ]


def test_pissa_and_weight_decay() -> None:
    (finding,) = findings_of("peft.init=pissa", weight_decay=0.01)
    assert finding.override == "train.weight_decay=0"
    (finding,) = findings_of("peft.pissa_niter=4")
    assert finding.found == "4 with peft.init=default"


def test_names_of_modules_that_the_model_does_not_have_are_refused() -> None:
    overrides = ["peft.rank_pattern={q_prj: 4}", "peft.alpha_pattern={k_proj: 0}"]
    overrides += ["peft.modules_to_save=[lm_haed]", "peft.exclude_modules=[gate]"]
    assert [(f.what, f.found) for f in findings_of(*overrides)] == [
        ("peft.rank_pattern", "no 'q_prj' here"),
        ("peft.alpha_pattern", "k_proj: 0"),
        ("peft.exclude_modules", "no 'gate' here"),
        ("peft.modules_to_save", "no 'lm_haed' here"),
    ]


def test_a_module_is_trained_in_full_or_by_an_adapter() -> None:
    overrides = ["peft.target_modules=[q_proj,v_proj]", "peft.modules_to_save=[v_proj]"]
    (finding,) = findings_of(*overrides)
    assert finding.override == "peft.target_modules=[q_proj]"


def test_new_tokens() -> None:
    assert new_tokens(["<a>", "<b>"], 64) == []
    findings_of = new_tokens(["<a>", "<a>"], 0)
    assert [(f.what, f.override) for f in findings_of] == [
        ("model.new_tokens", "model.new_tokens=['<tool>']"),
        ("model.vocab_multiple", "model.vocab_multiple=64"),
    ]


@pytest.mark.parametrize(
    ("objective", "shape", "what"),
    [
        ("sft", (1, 64), "train.objective"),
        ("reward", (2, 64), "model.path"),
        ("reward", (1, 64), None),
        ("reward", None, None),
        ("dpo", None, None),
    ],
)
def test_objectives_and_heads(objective: str, shape: Any, what: str | None) -> None:
    findings = objective_fits(objective, replace(model.TOY, score=shape))
    assert [f.what for f in findings] == ([what] if what else [])
