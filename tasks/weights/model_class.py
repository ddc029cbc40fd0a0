"""Build the class of a config.json on the meta device: names and shapes at no cost in memory.

The import of transformers takes 6 to 17 s on two busy cores; `model.py` asks it only if it has to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.weights.files.documents import read_json

_BY_ITS_CODE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError,
    AssertionError,
)  # fmt: skip
"""Exceptions that a model class may raise for sizes that do not fit each other."""

_LIMITS = {"layers": 2_000, "experts": 20_000}
"""Published models have up to about 1,000 layers, and 16,384 experts as rows of a table."""
_MAX_PARTS = 600_000
"""Layers times experts."""
_COUNTED = re.compile(r"(?:.*_)?(?:(layers?|depth|blocks)|experts)")
_DEEPEST = 4


NO_SDPA = frozenset(
    {
        "bloom", "codegen", "deepseek_v4", "falcon_mamba", "gpt_neo", "gpt_oss", "gptj",
        "granite_swa", "granitemoe_swa", "hy_v4", "mamba", "mamba2", "mimo_v2_flash", "mpt", "rwkv",
        "xglm", "xlstm",
    }
)  # fmt: skip
"""Families that transformers 5.19 refuses to load with sdpa attention."""


def loadable_attention(config: Mapping[str, Any], wanted: str) -> str:
    """Return the attention to load a model with: eager if its family has no sdpa."""
    return "eager" if wanted == "sdpa" and config.get("model_type") in NO_SDPA else wanted


def only_bf16(config: Mapping[str, Any]) -> bool:
    """Return True for gated delta nets, which vLLM 0.32 refuses in float32 on a CPU."""
    return "linear_num_value_heads" in (config.get("text_config") or config)


def oversized(config: Mapping[str, Any]) -> str:
    """Return the setting of a config.json that exceeds a limit, as a text; "" if none does.

    With `num_hidden_layers: 1000000000` transformers makes a list of so many names before the first
    layer, and the model on the meta device would fill all memory.
    """
    most = {"layers": 1, "experts": 1}
    for name, value in _numbers(config, _DEEPEST):
        if match := _COUNTED.fullmatch(name):
            kind = "layers" if match[1] else "experts"
            most[kind] = max(most[kind], value)
            if value > _LIMITS[kind]:
                shown = value if value < 10**18 else "of more than 18 digits"
                return f"{name} {shown}, models have up to {_LIMITS[kind]}"
    if most["layers"] * most["experts"] > _MAX_PARTS:
        return f"{most['layers']} layers of {most['experts']} experts"
    return ""


def _numbers(config: Mapping[str, Any], depth: int) -> Iterator[tuple[str, int]]:
    """Yield the integers of a configuration and of those nested in it, by name."""
    for name, value in config.items():
        if type(value) is int and isinstance(name, str):  # configuration objects have other keys
            yield name, value
        elif isinstance(value, Mapping) and depth:
            yield from _numbers(value, depth - 1)


def meta_model(folder: Path, dtype: str) -> Any:
    """Return the model that a folder's config.json describes, on the meta device.

    `dtype` is the torch name of the dtype of the parameters.
    """
    import torch

    config = read_config(folder)
    how = {"dtype": getattr(torch, dtype), "trust_remote_code": False}
    with _config_errors(folder), torch.device("meta"):
        return auto_class(config).from_config(config, **how)


def read_config(folder: Path) -> Any:
    """Return transformers' configuration of a folder, after a check of the model's size."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ArtifactError(f"{folder}: no config.json")
    too_many = oversized(read_json(folder / "config.json"))
    if too_many:
        raise ArtifactError(f"{folder}: config.json describes no usable model: {too_many}")
    try:
        with _config_errors(folder):
            # Left open, transformers asks on the terminal whether to run the model's own code.
            return AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except ArtifactError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ArtifactError(
            f"{folder}/config.json names code of the model's own (auto_map), which is not run",
            hint="a model whose class transformers has; read the code, and if the class is one of "
            "them, remove auto_map and set model_type",
        ) from error


@contextmanager
def _config_errors(folder: Path) -> Iterator[None]:
    """Turn exceptions of a model class into an ArtifactError about config.json."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (*_BY_ITS_CODE, StrictDataclassError) as error:
        raise ArtifactError(f"{folder}: config.json describes no usable model: {error}") from error


def auto_class(config: Any) -> Any:
    """Return the auto class of the architecture in config.json, by default AutoModelForCausalLM.

    A bare backbone (`Qwen2Model`) counts as a causal language model with a tied or new head.
    """
    from transformers import AutoModelForSequenceClassification

    language = language_class(config)
    if _is_of(config, language) or not _is_of(config, AutoModelForSequenceClassification):
        return language
    return AutoModelForSequenceClassification


def language_class(config: Any) -> Any:
    """Return the auto class that predicts tokens: vision-language models have one of their own.

    Some of their configurations stand for a text model, too, which would lose the vision tower.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    whole = AutoModelForImageTextToText
    if type(config) not in whole._model_mapping or _is_of(config, AutoModelForCausalLM):
        return AutoModelForCausalLM
    return whole


def _is_of(config: Any, auto: Any) -> bool:
    """Return True if an auto class knows the architecture in config.json."""
    if type(config) not in auto._model_mapping:
        return False
    classes = auto._model_mapping[type(config)]
    classes = classes if isinstance(classes, tuple) else (classes,)
    return bool({each.__name__ for each in classes} & set(config.architectures or ()))


def trunk_of(model: Any) -> Any:
    """Return the decoder below a model's head, without the towers of other modalities."""
    from transformers import PreTrainedModel

    trunk = model.get_decoder()
    if trunk is not model and trunk.get_output_embeddings() is None:
        return trunk
    # Llama 4's prefix names no module, and its vision-language class wraps a causal model.
    inner = (child for child in trunk.children() if isinstance(child, PreTrainedModel))
    return next(inner, trunk)


def other_towers(model: Any) -> tuple[str, ...]:
    """Return the names of the modules that no text passes: vision, audio, and their projectors."""
    if model.config.get_text_config() is model.config or model.config.is_encoder_decoder:
        return ()
    embeddings = (each.get_output_embeddings() for each in (model, model.get_decoder()))
    heads = (*embeddings, getattr(model, "score", None))
    language = {id(module) for module in (trunk_of(model), *heads)}

    def beside(module: Any, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            if id(child) in language:
                continue
            if any(id(inner) in language for inner in child.modules()):
                yield from beside(child, f"{prefix}{name}.")
            else:
                yield prefix + name

    return tuple(beside(model, ""))


def kept_from_four_bits(folder: Path) -> list[str] | None:
    """Return the modules that training in 4 bits leaves in 16; None: transformers' own choice."""
    if not read_json(folder / "config.json").get("text_config"):
        return None
    return _not_quantized(meta_model(folder, "bfloat16"))


def quantized_names(model: Any) -> tuple[str, ...]:
    """Return the live names of the weights that are quantised in training in 4 bits."""
    from torch.nn import Linear
    from transformers.quantizers.quantizers_utils import should_convert_module

    keep = _not_quantized(model)
    return tuple(
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is Linear and should_convert_module(name, keep)
    )


def _not_quantized(model: Any) -> list[str]:
    """Return what transformers' bitsandbytes loader leaves out, and towers beside the language."""
    from transformers.quantizers.base import HfQuantizer

    names: list[str] = HfQuantizer.get_modules_to_not_convert(
        model, list(other_towers(model)), model._keep_in_fp32_modules, add_default_skips=True
    )
    return sorted(names)
