"""Write small checkpoint folders of real layout with numpy, fast enough for every test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tasks.audit.run import Report, audit

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
Arrays = dict[str, Any]
TOKENIZER = {
    "version": "1.0", "added_tokens": [{"id": 2, "content": "<eos>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}  # fmt: skip
TOKENIZER_CONFIG = {
    "eos_token": "<eos>", "chat_template": "{% for m in messages %}{{ m }}{% endfor %}",
    "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, "auto_map": {},
}  # fmt: skip


def config(**changes: Any) -> dict[str, Any]:
    """Return config.json of a tiny Llama."""
    plain = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False,
        "dtype": "float32", "head_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "eos_token_id": 2, "bos_token_id": 1,
    }  # fmt: skip
    return {**SIZES, **plain, **changes}


def tensors(seed: int = 0) -> Arrays:
    """Return the tensors of the tiny Llama, by name."""
    h, f, v = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h)}
    for layer in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": (h, h), at + "self_attn.k_proj.weight": (h // 2, h),
            at + "self_attn.v_proj.weight": (h // 2, h), at + "self_attn.o_proj.weight": (h, h),
            at + "mlp.gate_proj.weight": (f, h), at + "mlp.up_proj.weight": (f, h),
            at + "mlp.down_proj.weight": (h, f), at + "input_layernorm.weight": (h,),
            at + "post_attention_layernorm.weight": (h,),
        }  # fmt: skip
    shapes |= {"model.norm.weight": (h,), "lm_head.weight": (v, h)}
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document))


def make_model(root: Path, arrays: Arrays | None = None, **changes: Any) -> Path:
    """Write a model in one file."""
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / "config.json", config(**changes))
    save_file(tensors() if arrays is None else arrays, root / "model.safetensors")
    return root


def make_shards(root: Path, count: int = 3, **changes: Any) -> Path:
    """Write a model in several files, with their index."""
    root.mkdir(parents=True)
    write_json(root / "config.json", config(**changes))
    arrays = tensors()
    table: dict[str, str] = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = {name: arrays[name] for name in list(arrays)[number::count]}
        save_file(part, root / file)
        table |= dict.fromkeys(part, file)
    total = sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": table}
    write_json(root / "model.safetensors.index.json", index)
    return root


def adapter_tensors() -> Arrays:
    """Return LoRA pairs of rank 4 on the queries and values of attention."""
    h, rng, arrays = SIZES["hidden_size"], np.random.default_rng(0), {}
    for layer in range(SIZES["num_hidden_layers"]):
        for module, rows in (("q_proj", h), ("v_proj", h // 2)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_"
            arrays[f"{at}A.weight"] = rng.standard_normal((4, h), np.float32)
            arrays[f"{at}B.weight"] = rng.standard_normal((rows, 4), np.float32)
    return arrays


def make_adapter(root: Path, arrays: Arrays | None = None, **changes: Any) -> Path:
    """Write a PEFT adapter."""
    root.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "elsewhere/tiny",
        "bias": "none",
    }  # fmt: skip
    write_json(root / "adapter_config.json", {**settings, **changes})
    save_file(adapter_tensors() if arrays is None else arrays, root / "adapter_model.safetensors")
    return root


def merge(root: Path, scale: float = 2.0, **changes: Any) -> Path:
    """Write the model of `tensors` with the adapter of `adapter_tensors` merged into it."""
    arrays, lora = tensors(), adapter_tensors()
    for name in [name for name in lora if name.endswith("lora_A.weight")]:
        key = name.removeprefix("base_model.model.").replace(".lora_A", "")
        arrays[key] = arrays[key] + scale * lora[name.replace("_A", "_B")] @ lora[name]
    return make_model(root, arrays, **changes)


def with_tokenizer(root: Path) -> Path:
    """Add a tokenizer and the settings of generation to a checkpoint."""
    write_json(root / "tokenizer.json", TOKENIZER)
    write_json(root / "tokenizer_config.json", TOKENIZER_CONFIG)
    write_json(root / "generation_config.json", {"eos_token_id": 2, "pad_token_id": 0})
    return root


def wrapped(arrays: Arrays, prefix: str = "module.") -> Arrays:
    """Return tensors with the prefix that a wrapper leaves in their names."""
    return {prefix + name: array for name, array in arrays.items()}


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    document = {**json.loads(path.read_text()), **changes}
    write_json(path, {key: value for key, value in document.items() if value is not None})


def codes(root: Path, *, base: Path | None = None, values: bool | None = None) -> dict[str, str]:
    """Return the severity of each code in an audit."""
    return by_code(audit(root, base=base, values=values))


def by_code(report: Report) -> dict[str, str]:
    return {finding.code: finding.severity.value for finding in reversed(report.findings)}


def errors(severities: Mapping[str, str]) -> set[str]:
    return {code for code, severity in severities.items() if severity == "error"}
