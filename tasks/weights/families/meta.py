"""The model itself, on the meta device: names and shapes at no cost in memory.

The only module of this room that imports transformers to build a model, which takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.errors import ArtifactError


def meta_model(folder: Path, dtype: str) -> Any:
    """The model that a folder's config.json describes, on the meta device. Raises ArtifactError."""
    import torch
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ArtifactError(f"{folder}: no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return auto_class(config).from_config(config, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{folder}: config.json describes no usable model: {error}") from error


def auto_class(config: Any) -> Any:
    """The head that config.json asks for among those served here, else a causal language model.

    A bare backbone (`Qwen2Model`) is a causal language model whose head is tied or new.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    heads = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification)
    able = [head for head in heads if type(config) in head._model_mapping]
    for head in able:
        classes = head._model_mapping[type(config)]
        names = [one.__name__ for one in (classes if isinstance(classes, tuple) else (classes,))]
        if set(names) & set(config.architectures or ()):
            return head
    return able[0] if able else AutoModelForCausalLM


def quantized_names(model: Any) -> tuple[str, ...]:
    """Live names of the weights that the bitsandbytes loader of transformers replaces."""
    from torch.nn import Linear
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    keep = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    return tuple(
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is Linear and should_convert_module(name, keep)
    )
