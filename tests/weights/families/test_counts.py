"""Configurations with impossible numbers of layers or experts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import ArtifactError
from tasks.weights.families.counts import MAX_EXPERTS, MAX_LAYERS, oversized
from tasks.weights.plan.contracts import model_facts
from tests.weights.families.making import FAMILIES

HUGE = 10**9


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": HUGE}, "num_hidden_layers 1000000000, models have up to 2000"),
        ({"n_layer": MAX_LAYERS + 1}, "n_layer 2001,"),
        ({"text_config": {"num_hidden_layers": HUGE}}, "num_hidden_layers 1000000000"),
        ({"vision_config": {"depth": HUGE}}, "depth 1000000000"),
        ({"n_routed_experts": MAX_EXPERTS + 1}, "n_routed_experts 20001,"),
        ({"num_layers": 1 << 4000}, "num_layers of more than 18 digits,"),
        ({"num_layers": 1000, "num_experts": 1000}, "1000 layers of 1000 experts"),
    ],
)
def test_oversized_configurations_are_reported(config: dict[str, Any], message: str) -> None:
    assert oversized(config).startswith(message)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": MAX_LAYERS},
        {"num_hidden_layers": 61, "n_routed_experts": 384},
        {"num_hidden_layers": -HUGE, "num_layers": True, "n_layer": "9" * 20, "depth": 1e30},
        {"vocab_size": HUGE, "max_position_embeddings": HUGE, "layers_to_transform": [HUGE]},
    ],
)
def test_other_configurations_are_accepted(config: dict[str, Any]) -> None:
    assert oversized(config) == ""


@pytest.mark.slow
def test_no_family_of_transformers_has_so_many() -> None:
    from transformers import CONFIG_MAPPING

    told, count = {}, 0
    for name, made in CONFIG_MAPPING.items():
        try:
            config = made().to_dict()
        except Exception:  # its defaults take the hub, or a library that is not here
            continue
        count += 1
        told[name] = oversized(config)
    assert count > 300
    assert not {name: message for name, message in told.items() if message}


@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_oversized_models_are_not_built(family: str, tmp_path: Path) -> None:
    """One family from the table, and one that needs transformers."""
    FAMILIES[family].config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text()) | {"num_hidden_layers": HUGE}
    name = {"qwen2": "Qwen2ForCausalLM", "mixtral": "MixtralForCausalLM"}[family]
    path.write_text(json.dumps(document | {"architectures": [name]}))
    began = time.process_time()
    with pytest.raises(ArtifactError, match="num_hidden_layers 1000000000, models have up to"):
        model_facts(tmp_path)
    assert time.process_time() - began < 20  # an import among it; the layers would take hours


@pytest.mark.parametrize("changes", [{"hidden_size": "32"}, {"vocab_size": 10**18}])
def test_errors_of_a_model_class_are_reported(changes: dict[str, Any], tmp_path: Path) -> None:
    FAMILIES["qwen2"].config(architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes | {"head_dim": None}))
    with pytest.raises(ArtifactError, match=r"config\.json describes no usable model"):
        model_facts(tmp_path, disk={"x": (1,)})
