"""Vision-language models trained on text: right numbers, and towers that nothing changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from tasks.training.job import Peft
from tasks.training.model.adapter import add_adapter
from tasks.weights.model_class import language_class, other_towers
from tests.training.model.test_packed_families import require_rows_as_alone
from tests.vision import FAMILIES, make_config

DEFAULT = ("gemma4", "qwen3_5")
EACH = [f if f in DEFAULT else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]


def make_model(family: str) -> Any:
    config = make_config(family)
    torch.manual_seed(0)
    return language_class(config).from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", EACH)
def test_rows_of_text_have_the_losses_and_gradients_of_the_whole_model(family: str) -> None:
    require_rows_as_alone(make_model(family), rounding=5e-5)


@pytest.mark.parametrize("family", DEFAULT)
@pytest.mark.parametrize(
    "targets", ["all-linear", ("q_proj", "proj", "fc1", "embedding_projection")]
)
def test_no_adapter_is_beside_the_language(family: str, targets: Any) -> None:
    peft = Peft("lora", rank=4, alpha=8, target_modules=targets)
    peft = replace(peft, exclude_modules=("k_proj",))
    adapted = add_adapter(make_model(family), peft, head="tokens", dtype=torch.float32)
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert any(".language_model." in name for name in names)
    assert not [name for name in names if ".language_model." not in name or "k_proj" in name]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_head_of_no_family_is_a_tower() -> None:
    """A frozen head would not be trained, and no loss tells."""
    wrong, count = [], 0
    for config in (CONFIG_MAPPING[kind] for kind in sorted(CONFIG_MAPPING)):
        auto = AutoModelForImageTextToText._model_mapping.get(config, ())
        for model_class in auto if isinstance(auto, tuple) else (auto,):
            try:
                with torch.device("meta"):
                    model = model_class._from_config(config(), dtype=torch.bfloat16)
            except Exception:  # incompatible defaults, missing libraries
                continue
            count += 1
            towers = other_towers(model)
            heads = {each.get_output_embeddings() for each in (model, model.get_decoder())} - {None}
            inside = [m for tower in towers for m in model.get_submodule(tower).modules()]
            wrong += [str(config) for module in inside if module in heads]
    assert wrong == []
    assert count >= 55


def test_the_chosen_class_keeps_the_towers(tmp_path: Path) -> None:
    """Qwen3.5's configuration stands for a text model, too, which would lose the vision tower."""
    model = make_model("qwen3_5")
    model.save_pretrained(tmp_path)
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    config = make_config("qwen3_5")
    config.architectures = ["Qwen3_5ForCausalLM"]
    assert language_class(config).__name__ == "AutoModelForCausalLM"
