"""Rules about vLLM agree with the code of the installed vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from tasks.audit.known import DEFAULT_LORA_RANK, known
from tasks.audit.run import audit
from tests.audit.corpus import Corpus
from tests.audit.corpus.clean import CLEAN

pytestmark = pytest.mark.slow

ADAPTERS = [
    name for name, case in CLEAN.items() if case.base and not case.slow and not case.adapter
]


def refusals(folder: Path) -> tuple[bool, bool]:
    """Return if the audit says that vLLM refuses the settings, and the keys, of an adapter."""
    refused = [each for each in audit(folder).findings if each.code == "VLLM_LORA"]
    keys = [each for each in refused if each.tensor and "tower" not in each.tensor]
    return any(each.file == "adapter_config.json" for each in refused), bool(keys)


def refused_settings(folder: Path, **changes: Any) -> str:
    """Return vLLM's error message; "" if it accepts the adapter's settings."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper

    document = json.loads((folder / "adapter_config.json").read_text())
    try:
        PEFTHelper.from_dict({**document, **changes}).validate_legal(LoRAConfig())
    except ValueError as error:
        return str(error)
    return ""


def refused_keys(folder: Path) -> list[str]:
    from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name

    refused = []
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 -- not a mapping
            try:
                if not is_base_embedding_weights(key):
                    parse_fine_tuned_lora_name(key)
            except ValueError:
                refused.append(key)
    return refused


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter(name: str, corpus: Corpus) -> None:
    folder = corpus.clean(name)
    settings, keys = refusals(folder)
    assert bool(refused_settings(folder)) == settings
    if (folder / "adapter_model.safetensors").is_file():
        saved = json.loads((folder / "adapter_config.json").read_text())
        dora = bool(saved.get("use_dora")) or bool(saved.get("modules_to_save"))
        assert bool(refused_keys(folder)) == (keys or (settings and dora))


SETTINGS: list[dict[str, Any]] = [
    {"init_lora_weights": "pissa_niter_16"}, {"lora_bias": True}, {"bias": "all"},
    {"layer_replication": [[0, 1]]}, {"alora_invocation_tokens": [1]}, {"use_qalora": True},
    {"r": 17}, {"rank_pattern": {"q_proj": 64}}, {"init_lora_weights": "loftq"},
    {"init_lora_weights": "gaussian"}, {"init_lora_weights": "eva"}, {"use_rslora": True},
    {"r": 16}, {"modules_to_save": ["score"]}, {"modules_to_save": ["lm_head"]},
]  # fmt: skip


def test_settings(corpus: Corpus, tmp_path: Path) -> None:
    folder = corpus.clean("lora")
    document = json.loads((folder / "adapter_config.json").read_text())
    for changes in SETTINGS:
        (tmp_path / "adapter_config.json").write_text(json.dumps({**document, **changes}))
        settings, _ = refusals(tmp_path)
        assert bool(refused_settings(folder, **changes)) == settings, changes


def test_default_rank() -> None:
    from vllm.config.lora import LoRAConfig

    assert LoRAConfig().max_lora_rank == DEFAULT_LORA_RANK


def test_classes() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    plain = SimpleNamespace(runner_type=None, convert_type=None)
    lists = known()
    names = {name for classes in lists.kinds.values() for name in classes} | {"RewardModel"}
    for name in sorted(names):
        resolved = ModelRegistry._normalize_arch(name, plain)
        assert (resolved in ModelRegistry.models) == lists.serves(name), name
