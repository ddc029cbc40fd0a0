"""Adapters, broken as in public reports."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.audit.corpus import Broken, Corpus
from tests.audit.corpus import breaking as by
from tests.audit.corpus.breaking import ADAPTER, Tensors

_CONFIG = "adapter_config.json"
_LF, _RLHF = "LLaMA-Factory", "OpenRLHF"


def _no_tensors(folder: Path, _: Corpus) -> None:
    save_file({}, folder / ADAPTER)


def _empty_beside_good(folder: Path, corpus: Corpus) -> None:
    """Saving was killed between PEFT's placeholders and OpenRLHF's own .bin."""
    shutil.copyfile(corpus.clean("bin-adapter") / "adapter_model.bin", folder / "adapter_model.bin")
    by.emptied("lora_")(folder, corpus)


def _head_by_lora(weights: Tensors) -> None:
    """With `all-linear` and no task type, the head itself becomes a LoRA layer."""
    del weights["base_model.model.score.weight"]
    weights["base_model.model.score.lora_A.weight"] = torch.randn(4, 32)
    weights["base_model.model.score.lora_B.weight"] = torch.randn(1, 4)


def _zero_b(weights: Tensors) -> None:
    for key in weights:
        if "lora_B" in key:
            weights[key].zero_()


def _other_rank(weights: Tensors) -> None:
    for key in weights:
        if "q_proj.lora_A" in key:
            weights[key] = weights[key][:2]
        elif "q_proj.lora_B" in key:
            weights[key] = weights[key][:, :2]


def _vision_pairs(weights: Tensors) -> None:
    for key in list(weights):
        weights[key.replace("model.layers", "visual.blocks")] = weights.pop(key)


def _foreign_modules(weights: Tensors) -> None:
    for key in list(weights):
        weights[key.replace("model.layers.1", "model.layers.7")] = weights.pop(key)


def _swapped(weights: Tensors) -> None:
    for key in [key for key in weights if "experts" in key and "lora_A" in key]:
        other = key.replace("lora_A", "lora_B")
        weights[key], weights[other] = weights[other].T, weights[key].T


ZERO: dict[str, Broken] = {
    "pairs never gathered": Broken(
        "EMPTY_TENSOR", "lora", by.emptied("lora_"),
        ("peft #1443", "peft #2500", "peft #453", "trl #4416", f"{_RLHF} #651"),
    ),
    "whole modules never gathered": Broken(
        "EMPTY_TENSOR", "saved-whole", by.emptied("embed_tokens", "lm_head"),
        (f"{_LF} #7665", "peft #2450"),
    ),
    "token rows never gathered": Broken(
        "EMPTY_TENSOR", "token-rows", by.emptied("trainable_tokens_delta")
    ),
    "a file of 40 bytes": Broken(
        "NO_TENSORS", "lora", _no_tensors, ("peft #2500", "trl #4416", "Flow-Factory #156")
    ),
    "empty beside a good .bin": Broken(
        "TWO_WEIGHT_SETS", "lora", _empty_beside_good, (f"{_RLHF} #651",)
    ),
    "a pickle under ZeRO-3": Broken("PICKLED_WEIGHTS", "bin-adapter", by.as_it_is),
    "no weights at all": Broken(
        "WEIGHTS_MISSING", "lora", by.removed(ADAPTER), (f"{_RLHF} #1126", f"{_LF} #3238")
    ),
}  # fmt: skip

HEADS: dict[str, Broken] = {
    "LoRA on the head, the head itself lost": Broken(
        "HEAD_BASE_LOST", "reward-lora", by.tensors(_head_by_lora, ADAPTER),
        (f"{_RLHF} #682", f"{_RLHF} #872", f"{_RLHF} PR #1342"), base="",
    ),
    "the head left at its random start": Broken(
        "HEAD_MISSING", "reward-lora", by.dropped("score", name=ADAPTER),
        (f"{_RLHF} #873", f"{_LF} #7706"), base="",
    ),
}  # fmt: skip

SETTINGS: dict[str, Broken] = {
    "not LoRA": Broken("ADAPTER_TYPE", "lora", by.edited(_CONFIG, peft_type="IA3")),
    "no rank": Broken("ADAPTER_CONFIG", "lora", by.edited(_CONFIG, r=0)),
    "alpha 0": Broken(
        "ADAPTER_ALPHA", "lora", by.edited(_CONFIG, lora_alpha=0),
        ("verl PR #1821", "verl PR #5326", "verl #7285"),
    ),
    "a pattern that matches nothing": Broken(
        "ADAPTER_PATTERN", "lora", by.edited(_CONFIG, alpha_pattern={"query_key_value": 4})
    ),
    "half of a pair": Broken(
        "ADAPTER_HALF_PAIR", "lora", by.dropped("layers.1.self_attn.q_proj.lora_B", name=ADAPTER)
    ),
    "rank of another run": Broken("ADAPTER_RANK", "lora", by.edited(_CONFIG, r=8)),
    "another rank for some": Broken("ADAPTER_RANK", "lora", by.tensors(_other_rank, ADAPTER)),
    "the patterns lost": Broken("ADAPTER_RANK", "patterns", by.edited(_CONFIG, rank_pattern={})),
    "use_dora lost": Broken("ADAPTER_DORA", "dora", by.edited(_CONFIG, use_dora=False)),
    "magnitudes lost": Broken(
        "ADAPTER_DORA", "dora", by.dropped("lora_magnitude_vector", name=ADAPTER)
    ),
    "a target without a tensor": Broken(
        "ADAPTER_TARGET_ABSENT", "lora", by.dropped("v_proj", name=ADAPTER), base=""
    ),
    "a layer without pairs": Broken(
        "ADAPTER_GAPS", "deep-lora", by.dropped("layers.1.mlp.down_proj", name=ADAPTER), base="",
        issues=(f"{_RLHF} #651",),
    ),
    "whole modules lost": Broken(
        "ADAPTER_SAVED_ABSENT", "saved-whole", by.dropped("lm_head", name=ADAPTER),
        (f"{_LF} #7665",),
    ),
    "modules_to_save lost": Broken(
        "ADAPTER_UNEXPLAINED", "biases", by.edited(_CONFIG, bias="none")
    ),
    "indices of other rows": Broken(
        "ADAPTER_TOKENS", "token-rows",
        by.edited(_CONFIG, trainable_token_indices={"embed_tokens": [1, 2]}),
    ),
    "PiSSA": Broken("ADAPTER_INIT", "lora", by.edited(_CONFIG, init_lora_weights="pissa")),
    "no base named": Broken(
        "ADAPTER_BASE_UNSAID", "lora", by.edited(_CONFIG, base_model_name_or_path=None), base=""
    ),
    "lora_B never trained": Broken(
        "LORA_B_ZERO", "lora", by.tensors(_zero_b, ADAPTER), values=True
    ),
    "the adapter's name in its keys": Broken(
        "ADAPTER_NAME_IN_KEYS", "lora",
        by.renamed(lambda k: k.replace(".weight", ".default.weight"), ADAPTER),
    ),
}  # fmt: skip

BASES: dict[str, Broken] = {
    "half of the keys": Broken(
        "ADAPTER_COVERAGE", "lora", by.dropped("layers.1.", name=ADAPTER),
        (f"{_RLHF} #682", "ms-swift #6481"),
    ),
    "every other key": Broken(
        "ADAPTER_COVERAGE", "lora", by.dropped("layers.0.self_attn", name=ADAPTER),
        (f"{_RLHF} #651",),
    ),
    "modules of another base": Broken(
        "ADAPTER_NO_MODULE", "lora", by.tensors(_foreign_modules, ADAPTER), (f"{_LF} #4913",)
    ),
    "names without model.": Broken(
        "ADAPTER_MODULE_NAMES", "lora",
        by.renamed(lambda k: k.replace(".model.model.", ".model."), ADAPTER), ("vLLM #34186",),
    ),
    "names with model. twice": Broken(
        "ADAPTER_MODULE_NAMES", "lora",
        by.renamed(lambda k: k.replace(".model.model.", ".model.model.model."), ADAPTER),
        ("peft #2566",),
    ),
    "an expert's A and B swapped": Broken(
        "ADAPTER_NO_MERGE", "moe-experts", by.tensors(_swapped, ADAPTER), ("Automodel #3233",)
    ),
    "names of transformers 4.51": Broken(
        "ADAPTER_MODULE_NAMES", "vl-lora",
        by.renamed(lambda k: k.replace(".language_model.layers.", ".layers."), ADAPTER),
        ("ms-swift #5621", "ms-swift #8031"),
    ),
    "a wrapper inside the names": Broken(
        "WRAPPER_RESIDUE", "lora",
        by.renamed(lambda k: k.replace(".self_attn.", "._orig_mod.self_attn."), ADAPTER),
        ("Soup #335", "axolotl #2744"),
    ),
    "a base of other names": Broken(
        "ADAPTER_NO_MODULE", "lora", by.as_it_is, (f"{_LF} #4913",), base="gpt2"
    ),
    "a base of other sizes": Broken(
        "ADAPTER_SHAPE", "lora", by.as_it_is, (f"{_LF} #4913",), base="wide"
    ),
    "a base of another name": Broken(
        "BASE_NAME", "lora", by.as_it_is, (f"{_LF} #6105", f"{_LF} #4913"), base="mistral"
    ),
    "a vocabulary that grew": Broken(
        "ADAPTER_VOCABULARY", "grown", by.as_it_is,
        (f"{_LF} #3125", f"{_LF} #5262", f"{_LF} #3154", f"{_LF} #10186"),
    ),
    "one of two tied embeddings": Broken(
        "ADAPTER_PARTS_TIE", "saved-tied", by.as_it_is, ("transformers #45127",)
    ),
    "trained on 4 bits": Broken(
        "QLORA_BASE", "saved-whole", by.as_it_is,
        ("unsloth-zoo PR #810", "peft #2321", "peft #2105", "peft #1043"), base="nf4",
    ),
    "named after 4 bits": Broken(
        "QLORA_BASE", "lora", by.edited(_CONFIG, base_model_name_or_path="x/qwen2-bnb-4bit"),
        ("unsloth-zoo PR #810",),
    ),
    "a tokenizer that grew alone": Broken(
        "TOKENIZER_ROWS", "lora", by.padded, (f"{_RLHF} #87",)
    ),
}  # fmt: skip

SERVING: dict[str, Broken] = {
    "an adapter given as a model": Broken(
        "ADAPTER_IS_NO_MODEL", "lora", by.as_it_is,
        ("unsloth #1191", f"{_LF} #4896", f"{_LF} #7511"),
    ),
    "config.json of the base in the adapter": Broken(
        "CONFIG_BESIDE_ADAPTER", "lora", by.copied("qwen2", "config.json"), (f"{_LF} #4896",)
    ),
    "rank 64": Broken(
        "VLLM_LORA_RANK", "rslora", by.as_it_is,
        ("vLLM #2847", f"{_LF} PR #3794", "gpustack #5438"),
    ),
    "DoRA": Broken("VLLM_LORA_DORA", "dora", by.as_it_is, ("vLLM #6983",)),
    "modules_to_save": Broken(
        "VLLM_LORA_MODULES_TO_SAVE", "saved-whole", by.as_it_is,
        ("vLLM #9280", "vLLM #4186", "vLLM #32599", "vLLM #7441"),
    ),
    "rows of tokens": Broken("VLLM_LORA_KEY", "token-rows", by.as_it_is, ("vLLM #21500",)),
    "pairs on a tower": Broken(
        "VLLM_LORA_TOWER", "lora", by.tensors(_vision_pairs, ADAPTER), ("vLLM #21500",), base=""
    ),
    "biases": Broken("VLLM_LORA_FEATURE", "biases", by.as_it_is),
}  # fmt: skip

BROKEN_ADAPTERS = {**ZERO, **HEADS, **SETTINGS, **BASES, **SERVING}
