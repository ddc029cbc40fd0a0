"""Models with broken files, heads or keys, as in public reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.audit.corpus import Broken, Corpus
from tests.audit.corpus import breaking as by
from tests.audit.corpus.breaking import MODEL, Tensors

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _value_head(folder: Path, _: Corpus) -> None:
    save_file({"v_head.summary.weight": torch.randn(1, 32)}, folder / "value_head.safetensors")


def _value_head_bin(folder: Path, _: Corpus) -> None:
    torch.save({"v_head.summary.weight": torch.randn(1, 32)}, folder / "value_head.bin")


def _adapter_beside(folder: Path, corpus: Corpus) -> None:
    shutil.copyfile(corpus.clean("lora") / by.ADAPTER, folder / by.ADAPTER)


def _lora_folder(folder: Path, corpus: Corpus) -> None:
    shutil.copytree(corpus.clean("lora"), folder / "lora_adapter")


def _only_head_left(folder: Path, corpus: Corpus) -> None:
    _value_head(folder, corpus)
    (folder / MODEL).unlink()


def _total_size(folder: Path, _: Corpus) -> None:
    path = folder / f"{MODEL}.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] = len(index["weight_map"])
    path.write_text(json.dumps(index))


def _shard_gone(folder: Path, _: Corpus) -> None:
    next(folder.glob("model-00002*")).unlink()


def _tensor_gone(folder: Path, corpus: Corpus) -> None:
    """Remove a tensor from its shard, but not from the index."""
    name = next(folder.glob("model-00002*")).name
    by.tensors(lambda weights: weights.pop(next(iter(weights))), name)(folder, corpus)


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


FILES: dict[str, Broken] = {
    "value head beside a single file": Broken("STRAY_WEIGHT_FILE", "qwen2", _value_head),
    "value head beside a .bin": Broken("STRAY_WEIGHT_FILE", "bin", _value_head_bin),
    "adapter beside a model": Broken(
        "MIXTURE", "qwen2", by.both(_adapter_beside, by.copied("lora", "adapter_config.json"))
    ),
    "adapter weights beside a model": Broken("MIXTURE", "qwen2", _adapter_beside),
    "lora_adapter beside the base": Broken("LORA_BESIDE_MODEL", "qwen2", _lora_folder),
    "exported reward model's head in a side file": Broken("HEAD_SIDE_FILE", "qwen2", _value_head),
    "head without its model": Broken("WEIGHTS_MISSING", "qwen2", _only_head_left),
    "truncated": Broken("BAD_HEADER", "qwen2", by.cut()),
    "header cut": Broken("BAD_HEADER", "qwen2", by.cut(keep=0.01)),
    "shard gone": Broken("INDEX_MISSING_FILE", "sharded", _shard_gone),
    "index of more than was written": Broken("INDEX_MISSING_KEY", "sharded", _tensor_gone),
    "nothing exported": Broken("WEIGHTS_MISSING", "qwen2", by.removed(MODEL)),
    "final norm not exported": Broken("TENSOR_MISSING", "qwen2", by.dropped("model.norm.weight")),
    "total_size counts tensors": Broken("INDEX_TOTAL_SIZE", "sharded", _total_size),
    "raw state dict": Broken(
        "FOREIGN_FORMAT",
        "mixtral",
        by.both(by.removed(MODEL), by.state("consolidated.00.pt", lambda: {"w": torch.ones(2)})),
    ),
    "generation config gone": Broken(
        "GENERATION_CONFIG_MISSING", "qwen2", by.removed("generation_config.json")
    ),
    "remote code": Broken(
        "REMOTE_CODE", "llama", by.edited(auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    ),
}

HEADS: dict[str, Broken] = {
    "reward model without its head": Broken("HEAD_MISSING", "reward", by.dropped("score")),
    "TRL's head in the model": Broken("HEAD_IN_MODEL", "qwen2", by.head()),
    "one row, two labels": Broken(
        "HEAD_LABELS", "reward", by.edited(id2label=None, label2id=None, num_labels=None)
    ),
    "OpenRLHF's class": Broken(
        "VLLM_ARCHITECTURE",
        "reward",
        by.edited(architectures=["RewardModel"], value_head_prefix="score"),
    ),
    "another head than config.json says": Broken(
        "HEAD_PREFIX",
        "reward",
        by.edited(architectures=["RewardModel"], value_head_prefix="value_head"),
    ),
    "mean and std only in config.json": Broken(
        "HEAD_NORMALISATION",
        "reward",
        by.edited(architectures=["RewardModel"], value_head_prefix="score", mean=1.5, std=2.5),
    ),
    "never normalised": Broken(
        "HEAD_NOT_NORMALISED",
        "reward",
        by.edited(architectures=["RewardModel"], value_head_prefix="score"),
    ),
    "no pad token": Broken("PAD_MISSING", "reward", by.edited(pad_token_id=None)),
}

KEYS: dict[str, Broken] = {
    "keys of a live PEFT model": Broken(
        "PEFT_RESIDUE", "qwen2", by.renamed(lambda k: f"base_model.model.{k}")
    ),
    "base_layer left by a merge": Broken(
        "PEFT_RESIDUE", "qwen2", by.renamed(lambda k: k.replace("q_proj.", "q_proj.base_layer."))
    ),
    "module. left by a wrapper": Broken(
        "WRAPPER_RESIDUE", "llama", by.renamed(lambda k: f"module.{k}")
    ),
    "pretrained_model. left by TRL": Broken(
        "TRL_RESIDUE", "llama", by.renamed(lambda k: f"pretrained_model.{k}")
    ),
    "text class, multimodal keys": Broken(
        "ARCHITECTURE_KEYS",
        "gemma3",
        by.edited(
            architectures=["Gemma3ForCausalLM"],
            model_type="gemma3_text",
            vision_config=None,
            text_config=None,
        ),
    ),
    "multimodal class, text keys": Broken(
        "ARCHITECTURE_KEYS",
        "gemma3",
        by.both(
            by.dropped("vision_tower", "multi_modal_projector"),
            by.renamed(lambda k: k.replace("language_model.", "")),
        ),
    ),
    "a text class with the multimodal model_type": Broken(
        "ARCHITECTURE_MODEL_TYPE", "gemma3", by.edited(architectures=["Gemma3ForCausalLM"])
    ),
    "language_model. a level short": Broken(
        "ARCHITECTURE_KEYS",
        "qwen2_5_vl",
        by.renamed(lambda k: k if "visual" in k else f"language_model.{k.removeprefix('model.')}"),
    ),
    "a prefix twice": Broken("ARCHITECTURE_KEYS", "qwen2", by.renamed(lambda k: f"model.{k}")),
    "keys of a bare backbone": Broken(
        "ARCHITECTURE_KEYS", "qwen2", by.renamed(lambda k: k.removeprefix("model."))
    ),
    "a layer gone": Broken("ARCHITECTURE_LAYERS", "qwen2", by.dropped("layers.1.")),
    "no class named": Broken("ARCHITECTURE_ABSENT", "qwen2", by.edited(architectures=None)),
    "multi-token prediction dropped": Broken(
        "MTP_MISSING", "qwen3", by.edited(num_nextn_predict_layers=1)
    ),
    "an expert gone": Broken(
        "EXPERTS_INCOMPLETE", "qwen3_moe", by.dropped("layers.1.mlp.experts.2.")
    ),
    "a layer's experts gone": Broken(
        "EXPERTS_INCOMPLETE", "mixtral", by.dropped("layers.1.block_sparse_moe.experts")
    ),
    "fused experts": Broken("EXPERTS_FUSED", "qwen3_moe", by.tensors(_fused)),
    "experts in two layouts": Broken("EXPERTS_MIXED", "qwen3_moe", by.tensors(_half_fused)),
    "fewer experts than said": Broken("EXPERTS_COUNT", "qwen3_moe", by.edited(num_local_experts=3)),
}


BROKEN_FILES = {**FILES, **HEADS, **KEYS}
