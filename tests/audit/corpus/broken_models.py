"""Models with broken files, heads, keys, words or formats, as in public reports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.audit import corpus as by
from tests.audit.corpus import INDEX, MODEL, Break, Broken, Corpus, Tensors
from tests.audit.making import edit_json

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _value_head(folder: Path, _: Corpus) -> None:
    by.save_head(folder)


def _value_head_bin(folder: Path, _: Corpus) -> None:
    torch.save({"v_head.summary.weight": torch.randn(1, 32)}, folder / "value_head.bin")


def _adapter_beside(folder: Path, corpus: Corpus) -> None:
    shutil.copyfile(corpus.clean("lora") / by.ADAPTER, folder / by.ADAPTER)


def _lora_folder(folder: Path, corpus: Corpus) -> None:
    shutil.copytree(corpus.clean("lora"), folder / "lora_adapter")


def _only_head_left(folder: Path, corpus: Corpus) -> None:
    _value_head(folder, corpus)
    (folder / MODEL).unlink()


def _shard_gone(folder: Path, _: Corpus) -> None:
    next(folder.glob("model-00002*")).unlink()


def _tensor_gone(folder: Path, corpus: Corpus) -> None:
    """Remove a tensor from its shard, but not from the index."""
    name = next(folder.glob("model-00002*")).name
    by.tensors(lambda weights: weights.pop(next(iter(weights))), name)(folder, corpus)


def _one_tensor_twice(folder: Path, corpus: Corpus) -> None:
    first, second = sorted(folder.glob("model-0000[12]*"))
    name, tensor = next(iter(load_file(second).items()))
    by.tensors(lambda weights: weights.update({name: tensor}), first.name)(folder, corpus)


def _no_index_and_a_shard_gone(folder: Path, corpus: Corpus) -> None:
    (folder / INDEX).unlink()
    _shard_gone(folder, corpus)


def _index(change: Callable[[dict[str, str]], dict[str, str]]) -> Break:
    """Change the table of an index."""

    def how(folder: Path, _: Corpus) -> None:
        table = json.loads((folder / INDEX).read_text())["weight_map"]
        edit_json(folder / INDEX, weight_map=change(table))

    return how


def _fused(weights: Tensors) -> None:
    """Write experts in the memory layout of transformers 5."""
    for layer in (0, 1):
        at = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([weights.pop(f"{at}.{number}.{part}.weight") for number in range(4)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        both = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        weights[f"{at}.gate_up_proj"], weights[f"{at}.down_proj"] = both, parts["down_proj"]


def _half_fused(weights: Tensors) -> None:
    kept = {key: tensor for key, tensor in weights.items() if "layers.0" in key}
    _fused(weights)
    for key in [key for key in weights if "layers.0.mlp.experts" in key]:
        del weights[key]
    weights.update({key: tensor for key, tensor in kept.items() if ".experts." in key})


def _as_base(folder: Path, corpus: Corpus) -> None:
    shutil.copyfile(corpus.clean("qwen2") / MODEL, folder / MODEL)


def _half_rows(key: str) -> Any:
    def edit(weights: Tensors) -> None:
        weights[key] = weights[key][:-8]

    return edit


def _packed_residue(weights: Tensors) -> None:
    key = "model.layers.1.mlp.down_proj.weight"
    weights[f"{key}.absmax"] = torch.ones(24)
    weights[f"{key}.quant_map"] = torch.ones(16)
    weights[f"{key}.quant_state.bitsandbytes__nf4"] = torch.ones(40, dtype=torch.uint8)


def _half_precision(weights: Tensors) -> None:
    for key in list(weights)[: len(weights) // 2]:
        weights[key] = weights[key].float()


def _noise(weights: Tensors) -> None:
    weights[_HEAD] = weights[_EMBEDDING] + 1


def _nan(weights: Tensors) -> None:
    weights["model.norm.weight"][0] = float("nan")


def _constant_row(weights: Tensors) -> None:
    weights["model.layers.1.mlp.up_proj.weight"][5] = 0.25


def _dead(weights: Tensors) -> None:
    weights[_EMBEDDING][250:] = 0


def _unnamed(document: dict[str, Any]) -> None:
    for token in document["added_tokens"]:
        if token["content"] == "<|im_end|>":
            token["content"] = "<|im_over|>"
    vocabulary = document["model"]["vocab"]
    vocabulary["<|im_over|>"] = vocabulary.pop("<|im_end|>")


_OTHER_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


BROKEN_MODELS: dict[str, Broken] = {
    # Files
    "value head beside a .bin": Broken("HEAD_PLACE", "bin", _value_head_bin),
    "a state dict inside a trainer's checkpoint": Broken(
        "BAD_HEADER", "qwen2",
        by.both(by.removed(MODEL), by.state("pytorch_model.bin", lambda: {
            "module": {_EMBEDDING: torch.ones(300, 32)}, "epoch": 3, "optimizer": {}}))),
    "adapter beside a model": Broken(
        "MIXTURE", "qwen2", by.both(_adapter_beside, by.copied("lora", "adapter_config.json"))),
    "adapter weights beside a model": Broken("MIXTURE", "qwen2", _adapter_beside),
    "lora_adapter beside the base": Broken("MIXTURE", "qwen2", _lora_folder),
    "exported reward model's head in a side file": Broken("HEAD_PLACE", "qwen2", _value_head),
    "head without its model": Broken("FILE_MISSING", "qwen2", _only_head_left),
    "truncated": Broken("BAD_HEADER", "qwen2", by.cut()),
    "shard gone": Broken("INDEX_WRONG", "sharded", _shard_gone),
    "index of more than was written": Broken("INDEX_WRONG", "sharded", _tensor_gone),
    "nothing exported": Broken("FILE_MISSING", "qwen2", by.removed(MODEL)),
    "a tensor that the index does not name": Broken(
        "INDEX_WRONG", "sharded",
        _index(lambda table: {k: v for k, v in table.items() if k != "model.norm.weight"}),
        severity="error"),
    "a tensor in two files": Broken("INDEX_WRONG", "sharded", _one_tensor_twice, severity="error"),
    "an index that is none": Broken(
        "INDEX_WRONG", "sharded", by.written(INDEX, '{"weight_map": 3}'), severity="error"),
    "an index that leads out of the folder": Broken(
        "UNSAFE_FILE", "sharded",
        _index(lambda table: {**table, _EMBEDDING: "../other/model.safetensors"}),
        severity="error"),
    "no index and a shard gone": Broken(
        "INDEX_WRONG", "sharded", _no_index_and_a_shard_gone, severity="error"),
    "a single file beside an index": Broken(
        "INDEX_WRONG", "sharded", by.copied("qwen2", MODEL), severity="warning"),
    "a consolidated file, the only one that vLLM reads": Broken(
        "STRAY_WEIGHT_FILE", "sharded",
        lambda folder, _: by.save_head(folder, "consolidated.safetensors"), severity="error"),
    "no configuration": Broken(
        "FILE_MISSING", "qwen2", by.removed("config.json"), severity="error"),
    "a pointer of git LFS": Broken(
        "BAD_HEADER", "qwen2",
        by.written(MODEL, "version https://git-lfs.github.com/spec/v1\noid sha256:1\n"),
        severity="error"),
    **{
        f"a damaged {name}": Broken(
            "JSON_UNREADABLE", "qwen2", by.written(name, "{"), severity="error")
        for name in ("processor_config.json", "preprocessor_config.json", "chat_template.json")
    },
    "final norm not exported": Broken("TENSOR_MISSING", "qwen2", by.dropped("model.norm.weight")),
    "raw state dict": Broken(
        "FOREIGN_FORMAT", "mixtral",
        by.both(by.removed(MODEL), by.state("consolidated.00.pt", lambda: {"w": torch.ones(2)}))),
    # Heads
    "reward model without its head": Broken("HEAD_MISSING", "reward", by.dropped("score")),
    "TRL's head in the model": Broken("HEAD_PLACE", "qwen2", by.head()),
    "one row, two labels": Broken(
        "HEAD_UNUSABLE", "reward", by.edited(id2label=None, label2id=None, num_labels=None)),
    "another head than config.json says": Broken(
        "HEAD_UNUSABLE", "reward",
        by.edited(architectures=["RewardModel"], value_head_prefix="value_head")),
    "mean and std only in config.json": Broken(
        "HEAD_NORMALISATION", "reward",
        by.edited(architectures=["RewardModel"], value_head_prefix="score", mean=1.5, std=2.5)),
    "never normalised": Broken(
        "HEAD_NORMALISATION", "reward",
        by.edited(architectures=["RewardModel"], value_head_prefix="score")),
    "a critic of OpenRLHF": Broken(
        "HEAD_UNUSABLE", "reward", by.edited(architectures=["CriticModel"]), severity="error"),
    "an empty head": Broken(
        "EMPTY_TENSOR", "reward", by.emptied("score", name=MODEL), severity="error"),
    "a head that cannot score": Broken(
        "HEAD_UNUSABLE", "reward", by.emptied("score", name=MODEL), severity="error"),
    # Keys
    "base_layer left by a merge": Broken(
        "PEFT_RESIDUE", "qwen2", by.renamed(lambda k: k.replace("q_proj.", "q_proj.base_layer."))),
    "module. left by a wrapper": Broken(
        "WRAPPER_RESIDUE", "llama", by.renamed(lambda k: f"module.{k}")),
    "pretrained_model. left by TRL": Broken(
        "WRAPPER_RESIDUE", "llama", by.renamed(lambda k: f"pretrained_model.{k}")),
    "text class, multimodal keys": Broken(
        "ARCHITECTURE_KEYS", "gemma3",
        by.edited(architectures=["Gemma3ForCausalLM"], model_type="gemma3_text",
                  vision_config=None, text_config=None)),
    "multimodal class, text keys": Broken(
        "ARCHITECTURE_KEYS", "gemma3",
        by.both(by.dropped("vision_tower", "multi_modal_projector"),
                by.renamed(lambda k: k.replace("language_model.", "")))),
    "a text class with the multimodal model_type": Broken(
        "ARCHITECTURE", "gemma3", by.edited(architectures=["Gemma3ForCausalLM"])),
    "language_model. a level short": Broken(
        "ARCHITECTURE_KEYS", "qwen2_5_vl",
        by.renamed(lambda k: k if "visual" in k else f"language_model.{k.removeprefix('model.')}")),
    "a prefix twice": Broken("ARCHITECTURE_KEYS", "qwen2", by.renamed(lambda k: f"model.{k}")),
    "keys of a bare backbone": Broken(
        "ARCHITECTURE_KEYS", "qwen2", by.renamed(lambda k: k.removeprefix("model."))),
    "a layer gone": Broken("TENSOR_MISSING", "qwen2", by.dropped("layers.1.")),
    "no class named": Broken("ARCHITECTURE", "qwen2", by.edited(architectures=None)),
    "an expert gone": Broken("TENSOR_MISSING", "qwen3_moe", by.dropped("layers.1.mlp.experts.2.")),
    "a layer's experts gone": Broken(
        "TENSOR_MISSING", "mixtral", by.dropped("layers.1.block_sparse_moe.experts")),
    "fused experts": Broken("EXPERTS_FUSED", "qwen3_moe", by.tensors(_fused)),
    "experts in two layouts": Broken("EXPERTS_FUSED", "qwen3_moe", by.tensors(_half_fused)),
    "fewer experts than said": Broken(
        "SHAPE_MISMATCH", "qwen3_moe", by.edited(num_local_experts=3)),
    # Vocabulary
    "tied by config.json, not by values": Broken(
        "TIED_HEAD_ON_DISK", "qwen2", by.tensors(_noise), values=True),
    "untied head gone": Broken("TENSOR_MISSING", "llama", by.dropped(_HEAD)),
    "rows cut": Broken("SHAPE_MISMATCH", "qwen2", by.tensors(_half_rows(_EMBEDDING))),
    "vocab_size of the base": Broken("SHAPE_MISMATCH", "llama", by.edited(vocab_size=292)),
    "head of the base": Broken("SHAPE_MISMATCH", "llama", by.tensors(_half_rows(_HEAD))),
    "[PAD] added, nothing resized": Broken("TOKENIZER_ROWS", "llama", by.padded),
    "reserved tokens never trained": Broken(
        "CONSTANT_ROWS", "llama", by.tensors(_dead), values=True),
    "a constant row": Broken(
        "CONSTANT_ROWS", "llama", by.tensors(_constant_row), values=True, severity="warning"),
    "not a number": Broken("NOT_FINITE", "llama", by.tensors(_nan), values=True),
    # Words
    "EOS of the base in both configurations": Broken(
        "EOS_DISAGREES", "qwen2",
        by.both(by.token_id("config.json", 7), by.token_id("generation_config.json", [7]))),
    "EOS of the base in one": Broken("EOS_DISAGREES", "qwen2", by.token_id("config.json", 7)),
    "turns end with what stops nothing": Broken(
        "EOS_DISAGREES", "qwen2", by.token_id("generation_config.json", 0)),
    "no end token": Broken(
        "EOS_DISAGREES", "qwen2",
        by.both(by.token_id("config.json", None), by.token_id("generation_config.json", None))),
    "special tokens emptied": Broken(
        "TOKEN_UNKNOWN", "qwen2",
        by.both(by.edited("tokenizer_config.json", eos_token=None, pad_token=None),
                by.written("special_tokens_map.json", "{}"))),
    "no pad token": Broken("TOKEN_UNKNOWN", "reward", by.edited(pad_token_id=None)),
    "a special token that is none": Broken(
        "TOKEN_UNKNOWN", "qwen2", by.edited("tokenizer_config.json", eos_token="</s>")),
    "an id beyond the embedding": Broken("TOKEN_UNKNOWN", "qwen2", by.edited(pad_token_id=300)),
    "no tokenizer": Broken(
        "FILE_MISSING", "qwen2", by.removed("tokenizer.json", "tokenizer_config.json")),
    "no template": Broken("FILE_MISSING", "qwen2", by.removed("chat_template.jinja")),
    "another template in the processor": Broken(
        "TEMPLATES_DIFFER", "gemma3",
        by.written("chat_template.json", json.dumps({"chat_template": _OTHER_TEMPLATE}))),
    "another template in the tokenizer": Broken(
        "TEMPLATES_DIFFER", "qwen2",
        by.edited("tokenizer_config.json", chat_template=_OTHER_TEMPLATE)),
    "a template of another tokenizer": Broken("TOKEN_UNKNOWN", "qwen2", by.tokenizer(_unnamed)),
    "a template that is none": Broken(
        "TEMPLATES_DIFFER", "qwen2", by.written("chat_template.jinja", "{% for m in messages %}")),
    "a template of its own": Broken(
        "TEMPLATES_DIFFER", "merged", by.written("chat_template.jinja", _OTHER_TEMPLATE)),
    # Stored
    "quantised by name only": Broken("QUANT_CONFIG", "llama", by.edited(quantization_config=_NF4)),
    "quantised in secret": Broken("QUANT_CONFIG", "nf4", by.edited(quantization_config=None)),
    "states left by a merge": Broken("QUANT_CONFIG", "llama", by.tensors(_packed_residue)),
    "half of it in fp32": Broken("DTYPE_DIFFERS", "llama", by.tensors(_half_precision)),
    "fp16 that config.json calls bf16": Broken(
        "DTYPE_DIFFERS", "fp16", by.edited(dtype="bfloat16")),
    "another dtype than the base": Broken("DTYPE_DIFFERS", "fp16", None, base="llama"),
    "the base again": Broken("MERGED_EQUALS_BASE", "merged", _as_base, values=True),
    "another base": Broken("WRONG_BASE", "merged", None, base="llama"),
    "tensors of the base lost": Broken(
        "TENSOR_MISSING", "merged", by.dropped("layers.0.input_layernorm")),
}  # fmt: skip
