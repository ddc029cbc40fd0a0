"""Models whose JSON files and tensors disagree, as in public reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.audit.corpus import Broken, Corpus
from tests.audit.corpus import breaking as by
from tests.audit.corpus.breaking import MODEL, Tensors

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


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

VOCABULARY: dict[str, Broken] = {
    "tied head on disk": Broken(
        "TIED_HEAD_ON_DISK", "gemma2", by.put(_HEAD, lambda weights: weights[_EMBEDDING])
    ),
    "tied by config.json, not by values": Broken(
        "TIED_HEAD_DIFFERS", "qwen2", by.tensors(_noise), values=True
    ),
    "untied head gone": Broken("HEAD_NOT_ON_DISK", "llama", by.dropped(_HEAD)),
    "rows cut": Broken("VOCAB_SIZE", "qwen2", by.tensors(_half_rows(_EMBEDDING))),
    "vocab_size of the base": Broken("VOCAB_SIZE", "llama", by.edited(vocab_size=292)),
    "head of the base": Broken("HEAD_ROWS", "llama", by.tensors(_half_rows(_HEAD))),
    "[PAD] added, nothing resized": Broken("TOKENIZER_ROWS", "llama", by.padded),
    "reserved tokens never trained": Broken(
        "DEAD_EMBEDDING", "llama", by.tensors(_dead), values=True
    ),
    "not a number": Broken("NOT_FINITE", "llama", by.tensors(_nan), values=True),
}

WORDS: dict[str, Broken] = {
    "EOS of the base in both configurations": Broken(
        "EOS_DISAGREES",
        "qwen2",
        by.both(by.token_id("config.json", 7), by.token_id("generation_config.json", [7])),
    ),
    "EOS of the base in one": Broken("EOS_CONFIGS_DIFFER", "qwen2", by.token_id("config.json", 7)),
    "turns end with what stops nothing": Broken(
        "EOS_NOT_TEMPLATE_END", "qwen2", by.token_id("generation_config.json", 0)
    ),
    "no end token": Broken(
        "EOS_MISSING",
        "qwen2",
        by.both(by.token_id("config.json", None), by.token_id("generation_config.json", None)),
    ),
    "special tokens emptied": Broken(
        "SPECIAL_TOKENS_EMPTY",
        "qwen2",
        by.both(
            by.edited("tokenizer_config.json", eos_token=None, pad_token=None),
            by.written("special_tokens_map.json", "{}"),
        ),
    ),
    "a special token that is none": Broken(
        "TOKEN_UNKNOWN", "qwen2", by.edited("tokenizer_config.json", eos_token="</s>")
    ),
    "an id beyond the embedding": Broken("TOKEN_ID_RANGE", "qwen2", by.edited(pad_token_id=300)),
    "no tokenizer": Broken(
        "TOKENIZER_MISSING", "qwen2", by.removed("tokenizer.json", "tokenizer_config.json")
    ),
    "no template": Broken("TEMPLATE_MISSING", "qwen2", by.removed("chat_template.jinja")),
    "another template in the processor": Broken(
        "TEMPLATES_DIFFER",
        "gemma3",
        by.written("chat_template.json", json.dumps({"chat_template": _OTHER_TEMPLATE})),
    ),
    "another template in the tokenizer": Broken(
        "TEMPLATES_DIFFER",
        "qwen2",
        by.edited("tokenizer_config.json", chat_template=_OTHER_TEMPLATE),
    ),
    "a template of another tokenizer": Broken(
        "TEMPLATE_UNKNOWN_TOKENS", "qwen2", by.tokenizer(_unnamed)
    ),
    "a template that is none": Broken(
        "TEMPLATE_BROKEN", "qwen2", by.written("chat_template.jinja", "{% for m in messages %}")
    ),
    "a template of its own": Broken(
        "TEMPLATE_NOT_OF_BASE", "merged", by.written("chat_template.jinja", _OTHER_TEMPLATE)
    ),
}

STORED: dict[str, Broken] = {
    "quantised by name only": Broken(
        "QUANT_CONFIG_STALE", "llama", by.edited(quantization_config=_NF4)
    ),
    "quantised in secret": Broken(
        "QUANT_CONFIG_ABSENT", "nf4", by.edited(quantization_config=None)
    ),
    "states left by a merge": Broken("QUANT_RESIDUE", "llama", by.tensors(_packed_residue)),
    "states lost": Broken(
        "QUANT_PARTIAL", "nf4", by.dropped(".absmax", ".quant_", ".nested_", only=60)
    ),
    "merged into 4 bits": Broken("QUANT_MERGED", "nf4", by.as_it_is),
    "half of it in fp32": Broken("DTYPE_MIXED", "llama", by.tensors(_half_precision)),
    "fp16 that config.json calls bf16": Broken(
        "DTYPE_NOT_CONFIG", "fp16", by.edited(dtype="bfloat16")
    ),
    "another dtype than the base": Broken("DTYPE_NOT_OF_BASE", "fp16", by.as_it_is, base="llama"),
    "the base again": Broken("MERGED_EQUALS_BASE", "merged", _as_base, values=True),
    "another base": Broken("WRONG_BASE", "merged", by.as_it_is, base="llama"),
    "tensors of the base lost": Broken(
        "BASE_TENSORS_LOST", "merged", by.dropped("layers.0.input_layernorm")
    ),
}


BROKEN_WORDS = {**VOCABULARY, **WORDS, **STORED}
