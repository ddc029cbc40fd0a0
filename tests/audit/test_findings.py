"""Findings that name a thing, come alone, or depend on an option; `corpus` has the faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.audit.check import Finding
from tasks.audit.run import audit
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
    with_tokenizer,
    wrapped,
    write_json,
)

EMBED, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"
ROWS = SIZES["vocab_size"]
After = Callable[[Path], Any]


def with_code(root: Path, code: str, **options: Any) -> list[Finding]:
    return [finding for finding in audit(root, **options).findings if finding.code == code]


def test_values_are_named_and_read_unless_declined(tmp_path: Path) -> None:
    arrays = tensors()
    arrays[UP][[1, 3]] = np.nan
    arrays[EMBED][[7, 9]] = arrays[HEAD][[7, 9]] = 0
    root = make_model(tmp_path / "it", arrays)
    assert errors(codes(root, values=False)) == set()
    (finding,) = with_code(root, "NOT_FINITE")
    assert (finding.tensor, finding.found.split()[0]) == (UP, "32")
    (finding,) = with_code(root, "CONSTANT_ROWS")
    assert finding.found.endswith(": 7, 9")
    assert (EMBED in finding.tensor, HEAD in finding.tensor) == (True, True)


def test_one_cause_has_one_finding(tmp_path: Path) -> None:
    base = with_tokenizer(make_model(tmp_path / "base"))
    trained = {key: array * 1.01 for key, array in tensors().items()}
    lost = {key: array for key, array in trained.items() if "layers.1." not in key}
    for name, arrays, eos, expected in (
        ("lost", lost, 2, "TENSOR_MISSING"),
        ("module", wrapped(trained), 2, "WRAPPER_RESIDUE"),
        ("peft", wrapped(trained, "base_model.model."), 2, "PEFT_RESIDUE"),
        ("eos", trained, 7, "EOS_DISAGREES"),
    ):
        root = with_tokenizer(make_model(tmp_path / name, arrays, eos_token_id=eos))
        edit_json(root / "generation_config.json", eos_token_id=eos)
        worse = [f.code for f in audit(root, base=base).findings if f.severity != "info"]
        assert worse == [expected], name


def test_an_untrained_adapter_is_an_error_without_an_option(tmp_path: Path) -> None:
    zero = {key: array * ("lora_A" in key) for key, array in adapter_tensors().items()}
    assert errors(codes(make_adapter(tmp_path / "it", zero))) == {"LORA_B_ZERO"}
    assert errors(codes(tmp_path / "it", values=False)) == set()
    halves = {key: array * ("lora_B" in key) for key, array in adapter_tensors().items()}
    assert errors(codes(make_adapter(tmp_path / "a", halves))) == {"LORA_B_ZERO"}
    first = next(key for key in adapter_tensors() if "lora_B" in key)
    some = {**adapter_tensors(), first: np.zeros_like(adapter_tensors()[first])}
    assert codes(make_adapter(tmp_path / "some", some))["LORA_B_ZERO"] == "warning"
    magnitude = first.replace("lora_B.weight", "lora_magnitude_vector")
    dora = {**adapter_tensors(), magnitude: np.zeros(len(some[first]), np.float32)}
    assert codes(make_adapter(tmp_path / "dora", dora))["LORA_B_ZERO"] == "error"


def test_a_gguf_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\3" + b"\0" * 19)
    report = audit(tmp_path)
    assert (report.kind, report.ok, list(codes(tmp_path))) == ("foreign", True, ["FOREIGN_FORMAT"])


@pytest.mark.parametrize(
    ("names", "what", "fix"),
    [
        ((".metadata", "__0_0.distcp", "common.pt"), "Megatron", "AutoBridge.export_ckpt"),
        (("adapter_config.json", "adapters.safetensors"), "MLX", "mlx_lm.fuse"),
        (("adapter_config.json", "adapter_0.pt"), "torch state dict", "save_pretrained"),
        (("config.json", "pytorch_model_fsdp.bin"), "torch state dict", "save_pretrained"),
    ],
)
def test_a_format_of_another_tool_has_its_conversion(
    names: tuple[str, ...], what: str, fix: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    (finding,) = audit(tmp_path).findings
    assert finding.code == "FOREIGN_FORMAT"
    assert (what in finding.found, fix in finding.fix) == (True, True)


def test_data_against_the_manifest(tmp_path: Path) -> None:
    from tasks.pipeline.artifact import Origin, publish

    root = tmp_path / "artifact"
    publish(make_shards(tmp_path / "it"), root, Origin("weights", "merge", "key"))
    assert errors(codes(root, values=True)) == set()
    file = root / "model-00002-of-00003.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    assert errors(codes(root, values=True)) == {"SHA256_DIFFERS"}
    (root / "added.txt").write_text("later")
    assert codes(root)["MANIFEST_DIFFERS"] == "error"


def test_a_trainers_folder_names_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (500, 1000):
        make_adapter(tmp_path / f"checkpoint-{step}")
    (finding,) = audit(tmp_path).findings
    assert finding.code == "NOTHING_HERE"
    assert finding.fix.endswith(f"source={tmp_path}/checkpoint-1000")


def tokenizer(*added: dict[str, Any], **settings: Any) -> After:
    """Add a tokenizer with an id for every row of the tiny model, and more tokens."""

    def write(root: Path) -> None:
        vocabulary = {f"t{number}": number for number in range(ROWS)}
        document = {"added_tokens": list(added), "model": {"type": "BPE", "vocab": vocabulary}}
        write_json(root / "tokenizer.json", document)
        config = {"eos_token": "t2", "chat_template": "{{ messages }}", **settings}
        config = {key: value for key, value in config.items() if value is not None}
        write_json(root / "tokenizer_config.json", config)
        write_json(root / "generation_config.json", {"eos_token_id": 2})

    return write


def _token(text: str, *, special: bool = True) -> dict[str, Any]:
    return {"id": ROWS, "content": text, "special": special}


TOKENS: dict[str, tuple[After, dict[str, str]]] = {
    "as many as rows": (tokenizer(), {}),
    "an unused one beyond the rows": (tokenizer(_token("<image>")), {"TOKENIZER_ROWS": "warning"}),
    "padding beyond the rows": (
        tokenizer(_token("[PAD]"), pad_token={"content": "[PAD]"}), {"TOKENIZER_ROWS": "error"}
    ),
    "an ordinary one beyond the rows": (
        tokenizer(_token("<tool>", special=False)), {"TOKENIZER_ROWS": "error"}
    ),
    "of a class that knows its end": (tokenizer(eos_token=None), {}),
}  # fmt: skip


def test_tokens_beyond_the_rows(tmp_path: Path) -> None:
    for number, (name, (after, expected)) in enumerate(TOKENS.items()):
        after(folder := make_model(tmp_path / str(number)))
        assert codes(folder) == expected, name
    several = make_model(tmp_path / "several", eos_token_id=[2, 5])
    tokenizer(eos_token="t5")(several)
    edit_json(several / "generation_config.json", eos_token_id=[5, 2])
    assert codes(several) == {}


@pytest.mark.parametrize("where", ["hf_quant_config.json", "compression_config", "text_config"])
def test_quantisation_declared_in_another_place(where: str, tmp_path: Path) -> None:
    """NVIDIA's exports, llm-compressor's early ones, multimodal models."""

    arrays = tensors()
    for key in [key for key in arrays if key.endswith("_proj.weight")]:
        arrays[key] = arrays[key][:, : arrays[key].shape[1] // 2].astype(np.uint8)
        arrays[key.replace(".weight", ".weight_scale")] = np.ones((1, 1), np.float32)
    tokenizer()(root := make_model(tmp_path / "it", arrays))
    assert "QUANT_CONFIG" in errors(codes(root))
    quantization = {"quant_method": "modelopt"}
    if where.endswith(".json"):
        write_json(root / where, {"quantization": {"quant_algo": "NVFP4"}})
    elif where == "text_config":
        edit_json(root / "config.json", text_config={"quantization_config": quantization})
    else:
        edit_json(root / "config.json", compression_config=quantization)
    assert errors(codes(root)) == set()
