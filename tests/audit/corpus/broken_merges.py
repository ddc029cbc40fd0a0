"""Merged models and adapters that do not fit their base: settings, then values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.audit.corpus import Break, Broken, Corpus
from tests.audit.corpus import breaking as by
from tests.audit.corpus.breaking import ADAPTER, MODEL, Tensors

_TOKENIZER, _ADAPTER_CONFIG = "tokenizer_config.json", "adapter_config.json"
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def _text_names(key: str) -> str:
    return key.replace("model.language_model.layers", "model.layers")


def _merge(edit: Any, base: str = "qwen2") -> Break:
    """Change tensors of a merged model; `edit` also gets those of the base."""

    def how(folder: Path, corpus: Corpus) -> None:
        tensors, original = load_file(folder / MODEL), load_file(corpus.clean(base) / MODEL)
        edit(tensors, original)
        whole = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
        save_file(whole, folder / MODEL, metadata={"format": "pt"})

    return how


def _changed(tensors: Tensors, base: Tensors) -> list[str]:
    return [key for key in base if not tensors[key].equal(base[key])]


def _left_out(tensors: Tensors, base: Tensors) -> None:
    tensors.update({key: base[key] for key in base if "layers.1." in key})


def _scaled(scale: float) -> Any:
    def edit(tensors: Tensors, base: Tensors) -> None:
        for key in _changed(tensors, base):
            added = tensors[key].float() - base[key].float()
            tensors[key] = (base[key].float() + scale * added).bfloat16()

    return edit


def _transposed(tensors: Tensors, _: Tensors) -> None:
    tensors[_O_PROJ] = tensors[_O_PROJ].T


def _damaged(tensors: Tensors, base: Tensors) -> None:
    tensors[_changed(tensors, base)[0]][3] = 0.25


def _norm(tensors: Tensors, _: Tensors) -> None:
    tensors["model.norm.weight"] *= 1.5


def _all_else(tensors: Tensors, _: Tensors) -> None:
    for key in tensors:
        tensors[key] += 0.25


def _swapped(tensors: Tensors, _: Tensors) -> None:
    for key in [key for key in tensors if ".experts.0." in key]:
        second = key.replace(".experts.0.", ".experts.1.")
        tensors[key], tensors[second] = tensors[second], tensors[key]


def _one_expert(tensors: Tensors, base: Tensors) -> None:
    tensors.update({key: base[key] for key in base if ".layers.1." in key and ".experts.0." in key})


def _gone(tensors: Tensors, _: Tensors) -> None:
    del tensors[_O_PROJ]


def _half_packed(tensors: Tensors, base: Tensors) -> None:
    from tasks.weights.quantized.nf4 import as_trained

    for key in _changed(tensors, base)[::2]:
        added = tensors[key].float() - base[key].float()
        seen = as_trained(base[key], {"type": "nf4", "double_quant": True})
        tensors[key] = (seen.float() + added).bfloat16()


SETTINGS: dict[str, Broken] = {
    "another rope_theta than the base": Broken(
        "CONFIG_CHANGED", "merged", by.edited(rope_parameters=_ROPE)
    ),
    "two dtypes": Broken("SETTING_TWICE", "qwen2", by.edited(torch_dtype="float16")),
    "two thetas": Broken("SETTING_TWICE", "qwen2", by.edited(rope_theta=500000.0)),
    "two scalings": Broken(
        "SETTING_TWICE", "qwen2", by.edited(rope_scaling={"type": "linear", "factor": 2.0})
    ),
    "two numbers of layers": Broken("SETTING_TWICE", "qwen2", by.edited(n_layer=5)),
    "another eps than the base": Broken("CONFIG_CHANGED", "merged", by.edited(rms_norm_eps=1e-05)),
    "no eps": Broken("CONFIG_CHANGED", "merged", by.edited(rms_norm_eps=None)),
    "another activation": Broken("CONFIG_CHANGED", "merged", by.edited(hidden_act="gelu")),
    "untied without a head": Broken(
        "CONFIG_CHANGED", "merged", by.edited(tie_word_embeddings=False)
    ),
    "a longer context": Broken(
        "CONFIG_DIFFERS", "merged", by.edited(max_position_embeddings=32768)
    ),
    "another end of text": Broken("CONFIG_DIFFERS", "merged", by.edited(eos_token_id=7)),
    "a sliding window": Broken(
        "CONFIG_DIFFERS", "merged", by.edited(use_sliding_window=True, sliding_window=16)
    ),
    "no rope_theta": Broken("ROPE_THETA_ABSENT", "qwen2", by.edited(rope_parameters=None)),
    "rope_theta where transformers 4 does not look": Broken(
        "ROPE_FORM", "qwen2", by.edited(rope_parameters=_ROPE)
    ),
    "a class of transformers 5": Broken(
        "TOKENIZER_CLASS", "qwen2", by.edited(_TOKENIZER, tokenizer_class="TokenizersBackend")
    ),
    "no processor": Broken("PROCESSOR_MISSING", "gemma3", by.removed("preprocessor_config.json")),
    "a text model's adapter": Broken(
        "ADAPTER_TEXT_NAMES", "gemma3-lora", by.renamed(_text_names, ADAPTER)
    ),
    "an adapter of the instruct model": Broken(
        "WRONG_BASE",
        "lora",
        by.edited(_ADAPTER_CONFIG, base_model_name_or_path="somebody/qwen2-instruct"),
    ),
}


def _proof(code: str, edit: Any) -> Broken:
    return Broken(code, "merged", _merge(edit), values=True, adapter="lora")


VALUES: dict[str, Broken] = {
    "modules left out": _proof("MERGE_LEFT_OUT", _left_out),
    "merged twice": _proof("MERGE_TWICE", _scaled(2)),
    "half the scale": _proof("MERGE_SCALE", _scaled(0.5)),
    "a transposed square": _proof("MERGE_TRANSPOSED", _transposed),
    "rows overwritten": _proof("MERGE_CHANGED", _damaged),
    "a norm that nobody trained": _proof("MERGE_UNTOUCHED", _norm),
    "a merge of another base": _proof("WRONG_BASE", _all_else),
    "a matrix lost": _proof("MERGE_MISSING", _gone),
    "two bases in one merge": _proof("MERGE_MIXED_BASE", _half_packed),
    "an adapter of another model": Broken(
        "MERGE_NOT_PROVEN", "merged", by.as_it_is, values=True, adapter="gpt2-lora"
    ),
    "experts in another order": Broken(
        "MERGE_EXPERTS",
        "merged-experts",
        _merge(_swapped, "mixtral"),
        values=True,
        adapter="moe-experts",
    ),
    "one expert left out": Broken(
        "MERGE_LEFT_OUT",
        "merged-experts",
        _merge(_one_expert, "mixtral"),
        values=True,
        adapter="moe-experts",
    ),
    "half of the layers, no adapter given": Broken(
        "MERGE_PARTIAL", "merged", _merge(_left_out), values=True
    ),
    "a transposed square, no adapter given": Broken(
        "MERGE_TRANSPOSED", "merged", _merge(_transposed), values=True
    ),
}

BROKEN_MERGES = {**SETTINGS, **VALUES}
