"""Quirks of published models: never an error, and a warning only where a test says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.audit.making import (
    SIZES,
    adapter_tensors,
    codes,
    edit_json,
    errors,
    make_adapter,
    make_model,
    make_shards,
    tensors,
    write_json,
)

ROWS = SIZES["vocab_size"]


def tokenizer(root: Path, *added: dict[str, Any], **settings: Any) -> Path:
    """Write a tokenizer with an id for every row of the tiny model, and the added tokens."""
    vocabulary = {f"t{number}": number for number in range(ROWS)}
    document = {"added_tokens": list(added), "model": {"type": "BPE", "vocab": vocabulary}}
    write_json(root / "tokenizer.json", document)
    config = {"eos_token": "t2", "chat_template": "{{ messages }}", **settings}
    write_json(root / "tokenizer_config.json", config)
    write_json(root / "generation_config.json", {"eos_token_id": 2})
    return root


def added(text: str, number: int, *, special: bool = True) -> dict[str, Any]:
    return {"id": number, "content": text, "special": special}


def test_the_plain_model_has_no_finding(tmp_path: Path) -> None:
    assert codes(tokenizer(make_model(tmp_path / "it"))) == {}


def test_an_unused_special_token_beyond_the_rows(tmp_path: Path) -> None:
    """Small text models of multimodal families have an image token without a row."""
    root = tokenizer(make_model(tmp_path / "it"), added("<image>", ROWS))
    assert codes(root) == {"TOKENIZER_ROWS": "warning"}


@pytest.mark.parametrize(
    ("token", "settings"),
    [
        (added("[PAD]", ROWS), {"pad_token": "[PAD]"}),
        (added("[PAD]", ROWS), {"pad_token": {"content": "[PAD]"}}),
        (added("<tool>", ROWS, special=False), {}),
    ],
)
def test_a_used_token_beyond_the_rows(
    token: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    root = tokenizer(make_model(tmp_path / "it"), token, **settings)
    assert codes(root) == {"TOKENIZER_ROWS": "error"}


def test_an_old_tokenizer_whose_class_has_the_tokens(tmp_path: Path) -> None:
    root = tokenizer(make_model(tmp_path / "it"))
    edit_json(root / "tokenizer_config.json", eos_token=None)
    assert codes(root) == {}


def test_a_processor_with_a_template_of_its_own(tmp_path: Path) -> None:
    root = tokenizer(make_model(tmp_path / "it"))
    write_json(root / "chat_template.json", {"chat_template": "images: {{ messages }}"})
    assert codes(root) == {"TEMPLATES_DIFFER": "warning"}


def test_several_eos_ids(tmp_path: Path) -> None:
    root = tokenizer(make_model(tmp_path / "it", eos_token_id=[2, 5]), eos_token="t5")
    edit_json(root / "generation_config.json", eos_token_id=[5, 2])
    assert codes(root) == {}


def test_layers_of_multi_token_prediction(tmp_path: Path) -> None:
    arrays = tensors()
    arrays |= {
        key.replace("layers.1.", "layers.2."): array
        for key, array in tensors(1).items()
        if "layers.1." in key
    }
    arrays["model.layers.2.embed_tokens.weight"] = arrays["model.embed_tokens.weight"]
    root = tokenizer(make_model(tmp_path / "it", arrays, num_nextn_predict_layers=1))
    reported = codes(root)
    assert not {"ARCHITECTURE_LAYERS", "MTP_MISSING", "VOCAB_SIZE", "HEAD_ROWS"} & set(reported)


def test_scales_beside_packed_weights_are_not_mixed_dtypes(tmp_path: Path) -> None:
    arrays = tensors()
    for key in [key for key in arrays if "_proj" in key]:
        arrays[key] = arrays[key].astype(np.int8)
        arrays[key.replace(".weight", ".weight_scale")] = np.ones((1, 1), np.float16)
    quantization = {"quant_method": "compressed-tensors"}
    root = tokenizer(make_model(tmp_path / "it", arrays, quantization_config=quantization))
    assert not {code for code in codes(root) if code.startswith(("DTYPE", "QUANT"))}


def test_routers_norms_and_states_are_kept_wider(tmp_path: Path) -> None:
    arrays = {key: array.astype(np.float16) for key, array in tensors().items()}
    arrays["model.norm.weight"] = arrays["model.norm.weight"].astype(np.float32)
    arrays["model.layers.0.mlp.gate.weight"] = np.ones((4, 16), np.float32)
    arrays["model.layers.0.mixer.A_log"] = np.ones((4, 16), np.float32)
    root = tokenizer(make_model(tmp_path / "it", arrays, dtype="float16"))
    assert "DTYPE_MIXED" not in codes(root)


def test_remote_code_may_use_any_keys(tmp_path: Path) -> None:
    arrays = {f"model.vision_tower.{key}": array for key, array in tensors().items()}
    config = {"architectures": ["XyzForCausalLM"], "model_type": "xyz", "auto_map": {"A": "b.C"}}
    reported = codes(tokenizer(make_model(tmp_path / "it", arrays, **config)))
    assert not errors(reported)
    assert reported["VLLM_ARCHITECTURE"] == reported["REMOTE_CODE"] == "warning"


def test_a_native_file_of_the_vendor_beside_an_index(tmp_path: Path) -> None:
    """Some vendors publish their native format beside transformers' shards."""
    root = tokenizer(make_shards(tmp_path / "it"))
    save_file(tensors(), root / "consolidated.safetensors")
    write_json(root / "params.json", {"dim": 16})
    assert not errors(codes(root))


def test_layers_counted_in_halves(tmp_path: Path) -> None:
    root = tokenizer(make_model(tmp_path / "it", num_layers=2, num_hidden_layers=4))
    assert "ARCHITECTURE_LAYERS" not in codes(root)


def test_two_embeddings_at_the_same_depth(tmp_path: Path) -> None:
    arrays = {f"thinker.{key}": array for key, array in tensors().items()}
    arrays["talker.model.embed_tokens.weight"] = np.ones((4, 16), np.float32)
    config = {"architectures": ["XyzModel"], "model_type": "xyz"}
    reported = codes(tokenizer(make_model(tmp_path / "it", arrays, **config)))
    assert not {"TOKENIZER_ROWS", "VOCAB_SIZE", "TOKEN_ID_RANGE"} & set(reported)


def test_alternating_kinds_of_layers(tmp_path: Path) -> None:
    arrays = adapter_tensors()
    arrays = {key: array for key, array in arrays.items() if "layers.0" in key or "q_proj" in key}
    many = {
        key.replace("layers.0", f"layers.{layer}"): array
        for layer in range(8)
        for key, array in arrays.items()
        if "layers.0" in key and (layer % 4 == 3 or "q_proj" in key)
    }
    assert "ADAPTER_GAPS" not in codes(make_adapter(tmp_path / "it", many))


def test_both_heads_named_and_one_saved(tmp_path: Path) -> None:
    arrays = adapter_tensors()
    arrays["base_model.model.score.weight"] = np.ones((1, 16), np.float32)
    root = make_adapter(
        tmp_path / "it", arrays, task_type="SEQ_CLS", modules_to_save=["classifier", "score"]
    )
    assert not errors(codes(root))


def test_an_old_adapter_without_newer_settings(tmp_path: Path) -> None:
    root = make_adapter(tmp_path / "it")
    document = json.loads((root / "adapter_config.json").read_text())
    kept = ("peft_type", "r", "lora_alpha", "target_modules", "base_model_name_or_path")
    write_json(root / "adapter_config.json", {key: document[key] for key in kept})
    assert codes(root) == {"ADAPTER_IS_NO_MODEL": "info"}


@pytest.mark.parametrize("where", ["hf_quant_config.json", "compression_config", "text_config"])
def test_quantisation_declared_in_another_place(where: str, tmp_path: Path) -> None:
    """NVIDIA's exports, llm-compressor's early ones, multimodal models."""
    arrays: dict[str, Any] = {}
    for key, array in tensors().items():
        packed = key.endswith("_proj.weight")
        arrays[key] = array[:, : array.shape[1] // 2].astype(np.uint8) if packed else array
        if packed:
            arrays[key.replace(".weight", ".weight_scale")] = np.ones((1, 1), np.float32)
    root = tokenizer(make_model(tmp_path / "it", arrays))
    assert "QUANT_CONFIG_ABSENT" in errors(codes(root))
    quantization = {"quant_method": "modelopt"}
    if where.endswith(".json"):
        write_json(root / where, {"quantization": {"quant_algo": "NVFP4"}})
    elif where == "text_config":
        edit_json(root / "config.json", text_config={"quantization_config": quantization})
    else:
        edit_json(root / "config.json", compression_config=quantization)
    assert errors(codes(root)) == set()
