"""Checkpoints that servers read otherwise than training wrote them, as in public reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.audit.corpus import Break, Broken, Corpus
from tests.audit.corpus import breaking as by
from tests.audit.making import edit_json

_GENERATION, _TOKENIZER = "generation_config.json", "tokenizer.json"
_LLAMA3 = 'FROM ./model.gguf\nTEMPLATE """<|start_header_id|>{{ .Prompt }}<|eot_id|>"""\n'
CUT = {"direction": "Right", "max_length": 128, "strategy": "LongestFirst", "stride": 0}


def export(**changes: Any) -> Break:
    """Write a GGUF file with the folder's settings, some of them changed."""

    def how(folder: Path, _: Corpus) -> None:
        from gguf import GGUFWriter

        config = json.loads((folder / "config.json").read_text())
        rope = config.get("rope_parameters") or config
        size = config["vocab_size"]
        settings = {
            "chat_template": (folder / "chat_template.jinja").read_text(),
            "eos_token_id": 2, "freq_base": rope["rope_theta"], "add_bos_token": False,
            "tokens": [str(number) for number in range(size)], **changes,
        }  # fmt: skip
        writer = GGUFWriter(folder / "model-q8_0.gguf", "llama")
        writer.add_chat_template(settings["chat_template"])
        writer.add_eos_token_id(settings["eos_token_id"])
        writer.add_rope_freq_base(settings["freq_base"])
        writer.add_add_bos_token(settings["add_bos_token"])
        writer.add_token_list(settings["tokens"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()

    return how


def _packed(folder: Path, _: Corpus) -> None:
    """Write a matrix of 64 columns in 4 bits, with scales for groups of 32."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / by.MODEL
    weights = load_file(path)
    key = "model.layers.0.mlp.gate_proj"
    rows = weights.pop(f"{key}.weight").shape[0]
    weights[f"{key}.weight_packed"] = torch.zeros(rows, 8, dtype=torch.int32)
    weights[f"{key}.weight_scale"] = torch.ones(rows, 2, dtype=torch.bfloat16)
    save_file(weights, path, metadata={"format": "pt"})


def quantised(ignore: list[str], group: int) -> Break:
    scheme = {"weights": {"num_bits": 4, "group_size": group, "strategy": "group"}}
    settings = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ignore,
        "config_groups": {"group_0": {"targets": ["Linear"], **scheme}},
    }  # fmt: skip
    return by.both(
        _packed, lambda folder, _: edit_json(folder / "config.json", quantization_config=settings)
    )


def _cut(document: dict[str, Any]) -> None:
    document["truncation"] = CUT


BROKEN_SERVED: dict[str, Broken] = {
    "greedy by temperature": Broken(
        "GENERATION_SETTINGS", "qwen2", by.edited(_GENERATION, temperature=0.01)),
    "a penalty for every word of the question": Broken(
        "GENERATION_SETTINGS", "qwen2", by.edited(_GENERATION, repetition_penalty=5.0)),
    "truncation left by a trainer": Broken("TOKENIZER_CUTS", "qwen2", by.tokenizer(_cut)),
    "an adapter of expert parameters": Broken(
        "VLLM_LORA", "lora",
        by.edited("adapter_config.json", target_parameters=["mlp.experts.gate_up_proj"])),
    "scales of other groups": Broken(
        "QUANT_CONFIG", "qwen2", quantised(["lm_head", "embed_tokens"], 16), base=""),
    "exported with another template": Broken(
        "EXPORT_DIFFERS", "qwen2", export(chat_template="{{ messages[0].content }}")),
    "exported with another EOS": Broken("EXPORT_DIFFERS", "qwen2", export(eos_token_id=7)),
    "exported with another rope base": Broken("EXPORT_DIFFERS", "qwen2", export(freq_base=5e5)),
    "exported before tokens were added": Broken(
        "EXPORT_DIFFERS", "qwen2", export(tokens=["a", "b"])),
    "a Modelfile of another family": Broken(
        "EXPORT_DIFFERS", "qwen2", by.written("Modelfile", _LLAMA3)),
}  # fmt: skip
