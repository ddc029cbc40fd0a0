"""Adapters, merged models, and what servers read otherwise, broken as in public reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.audit import corpus as by
from tests.audit.corpus import ADAPTER, MODEL, Break, Broken, Corpus, Tensors
from tests.audit.corpus.clean import PACKED
from tests.weights.packing import BITSANDBYTES

_CONFIG = "adapter_config.json"
_TOKENIZER = "tokenizer_config.json"
_OPENRLHF = {"base_model_class": "RewardModel", "parent_library": "openrlhf.models.model"}


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


def _vision_pairs(weights: Tensors) -> None:
    for key in list(weights):
        weights[key.replace("model.layers", "visual.blocks")] = weights.pop(key)


def _foreign_modules(weights: Tensors) -> None:
    for key in list(weights):
        weights[key.replace("model.layers.1", "model.layers.7")] = weights.pop(key)


def _narrow(weights: Tensors) -> None:
    for key in [key for key in weights if "experts" in key and "lora_A" in key]:
        weights[key] = weights[key][:, :-1]


_GENERATION = "generation_config.json"
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def _text_names(key: str) -> str:
    return key.replace("model.language_model.layers", "model.layers")


def _merge(edit: Any, base: str = "qwen2") -> Break:
    """Change tensors of a merged model; `edit` also gets those of the base."""

    def how(folder: Path, corpus: Corpus) -> None:
        original = load_file(corpus.clean(base) / MODEL)
        by.tensors(lambda weights: edit(weights, original))(folder, corpus)

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


def _experts_swapped(tensors: Tensors, _: Tensors) -> None:
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


def _proof(code: str, edit: Any) -> Broken:
    return Broken(code, "merged", _merge(edit), values=True, adapter="lora")


_LLAMA3 = 'FROM ./model.gguf\nTEMPLATE """<|start_header_id|>{{ .Prompt }}<|eot_id|>"""\n'


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


def _cut(document: dict[str, Any]) -> None:
    strategy = {"direction": "Right", "max_length": 128, "strategy": "LongestFirst", "stride": 0}
    document["truncation"] = strategy


def _unpacked(weights: Tensors) -> None:
    at = "model.layers.0.mlp.down_proj.weight"
    for name in [name for name in weights if name.startswith(f"{at}_")]:
        del weights[name]
    weights[at] = torch.randn(32, 48, dtype=torch.bfloat16)


def _quantised(how: str, **changes: Any) -> Break:
    return by.edited(quantization_config={**PACKED[how], **changes})


BROKEN_TUNED: dict[str, Broken] = {
    # Zero
    "pairs never gathered": Broken("EMPTY_TENSOR", "lora", by.emptied("lora_")),
    "a file of 40 bytes": Broken("EMPTY_TENSOR", "lora", _no_tensors),
    "empty beside a good .bin": Broken("STRAY_WEIGHT_FILE", "lora", _empty_beside_good),
    "a pickle under ZeRO-3": Broken("PICKLED_WEIGHTS", "bin-adapter", None),
    "no weights at all": Broken("FILE_MISSING", "lora", by.removed(ADAPTER)),
    # Heads
    "LoRA on the head, the head itself lost": Broken(
        "HEAD_MISSING", "reward-lora", by.tensors(_head_by_lora, ADAPTER), base=""),
    "the head left at its random start": Broken(
        "HEAD_MISSING", "reward-lora", by.dropped("score", name=ADAPTER), base=""),
    "a reward adapter of OpenRLHF without its head": Broken(
        "HEAD_MISSING", "lora", by.edited(_CONFIG, task_type=None, auto_mapping=_OPENRLHF),
        base="", severity="error"),
    # Settings
    "not LoRA": Broken("ADAPTER_CONFIG", "lora", by.edited(_CONFIG, peft_type="IA3")),
    "no rank": Broken("ADAPTER_CONFIG", "lora", by.edited(_CONFIG, r=0)),
    "alpha 0": Broken("ADAPTER_CONFIG", "lora", by.edited(_CONFIG, lora_alpha=0)),
    "half of a pair": Broken(
        "ADAPTER_PAIRS", "lora", by.dropped("layers.1.self_attn.q_proj.lora_B", name=ADAPTER)),
    "rank of another run": Broken("ADAPTER_PAIRS", "lora", by.edited(_CONFIG, r=8)),
    "the patterns lost": Broken("ADAPTER_PAIRS", "patterns", by.edited(_CONFIG, rank_pattern={})),
    "use_dora lost": Broken("ADAPTER_PAIRS", "dora", by.edited(_CONFIG, use_dora=False)),
    "magnitudes lost": Broken(
        "ADAPTER_PAIRS", "dora", by.dropped("lora_magnitude_vector", name=ADAPTER)),
    "a target without a tensor": Broken(
        "ADAPTER_COVERAGE", "lora", by.dropped("v_proj", name=ADAPTER), base=""),
    "a layer without pairs": Broken(
        "ADAPTER_COVERAGE", "deep-lora", by.dropped("layers.1.mlp.down_proj", name=ADAPTER),
        base=""),
    "whole modules lost": Broken(
        "ADAPTER_SAVED", "saved-whole", by.dropped("lm_head", name=ADAPTER)),
    "modules_to_save lost": Broken("ADAPTER_SAVED", "biases", by.edited(_CONFIG, bias="none")),
    "indices of other rows": Broken(
        "ADAPTER_NO_MERGE", "token-rows",
        by.edited(_CONFIG, trainable_token_indices={"embed_tokens": [1, 2]})),
    "a pattern of no module": Broken(
        "ADAPTER_CONFIG", "lora", by.edited(_CONFIG, alpha_pattern={"query_key_value": 4})),
    "rows that were never saved": Broken(
        "ADAPTER_SAVED", "lora", by.edited(_CONFIG, trainable_token_indices=[1, 2])),
    "PiSSA": Broken("ADAPTER_CONFIG", "lora", by.edited(_CONFIG, init_lora_weights="pissa")),
    "no base named": Broken(
        "WRONG_BASE", "lora", by.edited(_CONFIG, base_model_name_or_path=None), base=""),
    "lora_B never trained": Broken(
        "LORA_B_ZERO", "lora", by.tensors(_zero_b, ADAPTER), values=True),
    "the adapter's name in its keys": Broken(
        "PEFT_RESIDUE", "lora",
        by.renamed(lambda k: k.replace(".weight", ".default.weight"), ADAPTER)),
    # Bases
    "half of the keys": Broken("ADAPTER_NO_MERGE", "lora", by.dropped("layers.1.", name=ADAPTER)),
    "modules of another base": Broken(
        "ADAPTER_NO_MERGE", "lora", by.tensors(_foreign_modules, ADAPTER)),
    "names without model.": Broken(
        "ADAPTER_NO_MERGE", "lora",
        by.renamed(lambda k: k.replace(".model.model.", ".model."), ADAPTER)),
    "names with model. twice": Broken(
        "ADAPTER_NO_MERGE", "lora",
        by.renamed(lambda k: k.replace(".model.model.", ".model.model.model."), ADAPTER)),
    "experts of another size": Broken(
        "ADAPTER_NO_MERGE", "moe-experts", by.tensors(_narrow, ADAPTER)),
    "names of transformers 4.51": Broken(
        "ADAPTER_MODULES", "vl-lora",
        by.renamed(lambda k: k.replace(".language_model.layers.", ".layers."), ADAPTER)),
    "a wrapper inside the names": Broken(
        "WRAPPER_RESIDUE", "lora",
        by.renamed(lambda k: k.replace(".self_attn.", "._orig_mod.self_attn."), ADAPTER)),
    "a base of other names": Broken("ADAPTER_NO_MERGE", "lora", None, base="gpt2"),
    "a base of other sizes": Broken("ADAPTER_NO_MERGE", "lora", None, base="wide"),
    "a base of another name": Broken("WRONG_BASE", "lora", None, base="mistral"),
    "trained on 4 bits": Broken("BASE_QUANTISED", "saved-whole", None, base="nf4"),
    "named after 4 bits": Broken(
        "BASE_QUANTISED", "lora", by.edited(_CONFIG, base_model_name_or_path="x/qwen2-bnb-4bit")),
    "a tokenizer that grew alone": Broken("TOKENIZER_ROWS", "lora", by.padded),
    # Serving
    "pairs on a tower": Broken("VLLM_LORA", "lora", by.tensors(_vision_pairs, ADAPTER), base=""),
    # Settings
    "another rope_theta than the base": Broken(
        "CONFIG_CHANGED", "merged", by.edited(rope_parameters=_ROPE)),
    "no eps": Broken("CONFIG_CHANGED", "merged", by.edited(rms_norm_eps=None)),
    "another activation": Broken("CONFIG_CHANGED", "merged", by.edited(hidden_act="gelu")),
    "untied without a head": Broken(
        "CONFIG_CHANGED", "merged", by.edited(tie_word_embeddings=False)),
    "another end of text": Broken("EOS_DISAGREES", "merged", by.edited(eos_token_id=7)),
    "a sliding window": Broken(
        "CONFIG_CHANGED", "merged", by.edited(use_sliding_window=True, sliding_window=16)),
    "rope_theta where transformers 4 does not look": Broken(
        "TRANSFORMERS_4", "qwen2", by.edited(rope_parameters=_ROPE)),
    "scaling where transformers 4 does not look": Broken(
        "TRANSFORMERS_4", "qwen2", by.edited(
            rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0})),
    "a tokenizer class of transformers 5": Broken(
        "TRANSFORMERS_4", "qwen2", by.edited(_TOKENIZER, tokenizer_class="TokenizersBackend")),
    "special tokens as a list": Broken(
        "TRANSFORMERS_4", "qwen2", by.edited(_TOKENIZER, extra_special_tokens=["<a>"])),
    "no processor": Broken("FILE_MISSING", "gemma3", by.removed("preprocessor_config.json")),
    "a text model's adapter": Broken(
        "VLLM_LORA", "gemma3-lora", by.renamed(_text_names, ADAPTER)),
    "an adapter of the instruct model": Broken(
        "WRONG_BASE", "lora",
        by.edited(_CONFIG, base_model_name_or_path="somebody/qwen2-instruct")),
    # Values
    "modules left out": _proof("MERGE_WRONG", _left_out),
    "merged twice": _proof("MERGE_WRONG", _scaled(2)),
    "half the scale": _proof("MERGE_WRONG", _scaled(0.5)),
    "a transposed square": _proof("MERGE_WRONG", _transposed),
    "rows overwritten": _proof("MERGE_WRONG", _damaged),
    "a norm that nobody trained": _proof("MERGE_WRONG", _norm),
    "a merge of another base": _proof("WRONG_BASE", _all_else),
    "a matrix lost": _proof("MERGE_WRONG", _gone),
    "two bases in one merge": _proof("MERGE_WRONG", _half_packed),
    "an adapter of another model": Broken(
        "MERGE_NOT_PROVEN", "merged", None, values=True, adapter="gpt2-lora"),
    "experts in another order": Broken(
        "MERGE_WRONG", "merged-experts", _merge(_experts_swapped, "mixtral"), values=True,
        adapter="moe-experts"),
    "one expert left out": Broken(
        "MERGE_WRONG", "merged-experts", _merge(_one_expert, "mixtral"), values=True,
        adapter="moe-experts"),
    "half of the layers, no adapter given": Broken(
        "MERGED_EQUALS_BASE", "merged", _merge(_left_out), values=True),
    "a transposed square, no adapter given": Broken(
        "NORM_DIFFERS", "merged", _merge(_transposed), values=True),
    # Servers
    "top_p of 5": Broken("GENERATION_SETTINGS", "qwen2", by.edited(_GENERATION, top_p=5.0)),
    "greedy by temperature": Broken(
        "GENERATION_SETTINGS", "qwen2", by.edited(_GENERATION, temperature=0.01)),
    "a penalty for every word of the question": Broken(
        "GENERATION_SETTINGS", "qwen2", by.edited(_GENERATION, repetition_penalty=5.0)),
    "less than no new tokens": Broken(
        "GENERATION_SETTINGS", "qwen2", by.edited(_GENERATION, max_new_tokens=-3)),
    "three new tokens": Broken(
        "GENERATION_SETTINGS", "qwen2", by.edited(_GENERATION, max_new_tokens=3)),
    "an ignore list that is too short": Broken("QUANT_LAYOUT", "compressed", by.tensors(_unpacked)),
    "an ignore list that is too long": Broken(
        "QUANT_LAYOUT", "compressed",
        _quantised("compressed", ignore=["lm_head", r"re:.*layers\.0\.mlp.*"])),
    "a head in 16 bits that is not ignored": Broken(
        "QUANT_LAYOUT", "compressed", _quantised("compressed", ignore=[])),
    "another group size": Broken("QUANT_LAYOUT", "compressed", _quantised(
        "compressed", config_groups={"g": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "strategy": "group", "group_size": 128}}})),
    "another group size of AWQ": Broken("QUANT_LAYOUT", "awq", _quantised("awq", group_size=128)),
    "another group size of GPTQ": Broken("QUANT_LAYOUT", "gptq", _quantised("gptq", group_size=8)),
    "packed by bitsandbytes, and skipped": Broken(
        "QUANT_LAYOUT", "nf4",
        by.edited(quantization_config={**BITSANDBYTES, "llm_int8_skip_modules": ["layers.1.mlp"]})),
    "truncation left by a trainer": Broken("TOKENIZER_CUTS", "qwen2", by.tokenizer(_cut)),
    "an adapter of expert parameters": Broken(
        "VLLM_LORA", "lora",
        by.edited("adapter_config.json", target_parameters=["mlp.experts.gate_up_proj"])),
    "exported with another template": Broken(
        "EXPORT_DIFFERS", "qwen2", export(chat_template="{{ messages[0].content }}")),
    "exported with another EOS": Broken("EXPORT_DIFFERS", "qwen2", export(eos_token_id=7)),
    "exported with another rope base": Broken("EXPORT_DIFFERS", "qwen2", export(freq_base=5e5)),
    "exported before tokens were added": Broken(
        "EXPORT_DIFFERS", "qwen2", export(tokens=["a", "b"])),
    "a Modelfile of another family": Broken(
        "EXPORT_DIFFERS", "qwen2", by.written("Modelfile", _LLAMA3)),
    "a Modelfile that stops at another family's token": Broken(
        "EXPORT_DIFFERS", "qwen2", by.written("Modelfile", 'PARAMETER stop "<|eot_id|>"\n')),
}  # fmt: skip
