"""Damaged adapters: every finding is reported, and only valid merges pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tasks.core.errors import ArtifactError, ContractError
from tasks.weights.adapters.changes import Changes, changes
from tasks.weights.adapters.live import LiveModel, live_model
from tasks.weights.adapters.read import read_adapter
from tasks.weights.adapters.values import require_values
from tests.weights.adapters.making import Tensors, altered, base_model, opened, save, train

Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def _found(folder: Path, live: LiveModel) -> Changes:
    return changes(opened(folder), live)


def _without(key: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(key)


def _put(key: str, value: torch.Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({key: value})


def _rename(old: str, new: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


LEGACY = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w1.lora_A.weight"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_without(Q0.format("A")), ["covers only 7 of the 8", f"{Q0.format('A')}: missing"]),
        (lambda t: [t.pop(k) for k in list(t) if ".1." in k], ["covers only 4 of the 8"]),
        (lambda t: t.clear() or t.update(x=torch.ones(1)), ["matches nothing", "x: unexpected"]),
        (
            _put(Q0.format("A"), torch.ones(2, 32)),
            ["is [2, 32], the model and the rank need [4, 32]"],
        ),
        (_put(Q0.format("B"), torch.ones(32, 4, dtype=torch.int8)), ["I8 [32, 4] is not a float"]),
        (_put(Q0.format("B"), torch.zeros(0)), ["saved under ZeRO-3 or FSDP"]),
        (_put("base_model.model.model.norm.weight", torch.ones(32)), ["norm.weight: unexpected"]),
        (_put(LEGACY, torch.ones(4, 32)), ["separate experts"]),
        (
            _rename(Q0.format("A"), Q0.format("A").replace("lora_A.", "lora_A.default.")),
            ["contains an adapter's name", "missing"],
        ),
        (_rename(Q0.format("A"), Q0.format("A")[len("base_model.model.") :]), ["start with"]),
        (
            _rename(Q0.format("A"), Q0.format("A").replace("q_proj", "q_porj")),
            ["near: ", "missing"],
        ),
    ],
)
def test_findings(
    edit: Callable[[Tensors], Any], words: list[str], good: Path, live: LiveModel, tmp_path: Path
) -> None:
    total = _found(altered(good, tmp_path / "bad", edit), live)
    text = "\n".join(total.findings)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"target_modules": ["nothing"]}, "matches nothing: the model has none"),
        ({"target_modules": ["q_proj", "o_proj", "down_proj"]}, "covers only 8 of the 12"),
        ({"target_modules": ["q_proj"]}, "down_proj.lora_A.weight: unexpected"),
        ({"r": 8}, "is [4, 32], the model and the rank need [8, 32]"),
        ({"rank_pattern": {"q_proj": 2}}, "need [2, 32]"),
        ({"use_dora": True}, "lora_magnitude_vector: missing"),
        ({"lora_bias": True}, "lora_bias needs a layer with a bias"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight: missing"),
        ({"trainable_token_indices": [5]}, "trainable_tokens_delta: missing"),
        ({"trainable_token_indices": [96]}, "trained token 96 is outside its 96 rows"),
        ({"trainable_token_indices": {"wte": [1]}}, "the model has no ['wte']"),
        ({"target_modules": ["q_proj", "down_proj", "norm"]}, "norm: targeted, but neither"),
        ({"target_parameters": ["o_proj.weight"]}, "o_proj.lora_A.weight: missing"),
        ({"use_dora": True, "target_parameters": ["o_proj.weight"]}, "supports neither use_dora"),
        ({"target_parameters": ["q_proj.weight"]}, "q_proj.weight: changed twice, by"),
        ({"modules_to_save": ["proj"]}, "down_proj.weight: changed twice, by"),
        ({"lora_alpha": 0, "init_lora_weights": "pissa"}, "lora_alpha=0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_fit(
    config: dict[str, Any], words: str, good: Path, live: LiveModel, tmp_path: Path
) -> None:
    total = _found(altered(good, tmp_path / "bad", config=config), live)
    assert words in "\n".join(total.findings)


def test_every_finding_of_a_configuration_at_once(
    good: Path, live: LiveModel, tmp_path: Path
) -> None:
    bad = altered(good, tmp_path / "bad", config={"lora_alpha": 0, "init_lora_weights": "pissa"})
    assert len(_found(bad, live).findings) == 2


def test_a_base_of_another_shape(good: Path, live: LiveModel) -> None:
    from dataclasses import replace

    from tasks.core.contract import Expected

    name = "model.layers.0.self_attn.q_proj.weight"
    larger = replace(live, tensors={**live.tensors, name: Expected(name, (48, 32))})
    assert f"{Q0.format('B')}: is [32, 4], the model and the rank need [48, 4]" in (
        _found(good, larger).findings
    )


def test_a_copy_that_differs_is_refused(tmp_path: Path) -> None:
    """Tied embeddings are stored under both names; neither may silently win."""
    tied = base_model("qwen2")
    config = LoraConfig(r=4, target_modules=["q_proj"])
    folder = save(train(tied, config), tmp_path / "good", save_embedding_layers=True)
    key = "base_model.model.lm_head.weight"
    for at, good in ((0.0, True), (1.0, False)):
        changed = altered(folder, tmp_path / "bad", lambda t, at=at: t[key].add_(at))
        total = _found(changed, live_model(tied))
        assert f"adapter:{key}" in [entry.source for entry in total.dropped]
        if good:
            require_values([read_adapter(changed)], total.copies)
        else:
            with pytest.raises(ContractError, match="differs from"):
                require_values([read_adapter(changed)], total.copies)


def test_a_stray_pair_on_a_tied_head(tmp_path: Path) -> None:
    tied = base_model("qwen2")
    config = LoraConfig(r=4, target_modules=["q_proj"])
    folder = save(train(tied, config), tmp_path / "good", save_embedding_layers=True)
    key = "base_model.model.lm_head.lora_A.weight"
    bad = altered(folder, tmp_path / "bad", _put(key, torch.ones(4, 32)))
    assert any(
        f"{key}: unexpected" in finding for finding in _found(bad, live_model(tied)).findings
    )


def test_no_adapter(tmp_path: Path, good: Path, live: LiveModel) -> None:
    with pytest.raises(ArtifactError, match="not a PEFT adapter"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="adapter_model.safetensors: absent"):
        read_adapter(tmp_path)
    assert changes([], live).findings == ("no adapter to merge",)
    assert "two adapters have the same name" in changes(opened(good) * 2, live).findings


def test_two_kinds_of_file(good: Path, tmp_path: Path) -> None:
    both = altered(good, tmp_path / "both")
    torch.save({}, both / "adapter_model.bin")
    with pytest.raises(ArtifactError, match="stray weight file"):
        read_adapter(both)
