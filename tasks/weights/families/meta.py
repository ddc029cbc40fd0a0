"""Build a model on the meta device: names and shapes at no cost in memory.

The only module of this package that builds a transformers model, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.weights.families.counts import oversized
from tasks.weights.files.documents import read_json

_BY_ITS_CODE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError,
    AssertionError,
)  # fmt: skip
"""Exceptions that a model class may raise for sizes that do not fit each other."""


def meta_model(folder: Path, dtype: str) -> Any:
    """Return the model that a folder's config.json describes, on the meta device.

    Args:
        folder: folder with config.json.
        dtype: torch name of the dtype of the parameters.

    Raises:
        ArtifactError: config.json is missing, or describes no usable model.
    """
    import torch

    config = read_config(folder)
    how = {"dtype": getattr(torch, dtype), "trust_remote_code": False}
    with _config_errors(folder), torch.device("meta"):
        return auto_class(config).from_config(config, **how)


def read_config(folder: Path) -> Any:
    """Return transformers' configuration of a folder, after a check of the model's size.

    Raises:
        ArtifactError: config.json is missing, or describes no usable model.
    """
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
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    heads = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification)
    able = [head for head in heads if type(config) in head._model_mapping]
    for head in able:
        classes = head._model_mapping[type(config)]
        names = [
            model_class.__name__
            for model_class in (classes if isinstance(classes, tuple) else (classes,))
        ]
        if set(names) & set(config.architectures or ()):
            return head
    return able[0] if able else AutoModelForCausalLM


def quantized_names(model: Any) -> tuple[str, ...]:
    """Return the live names of the weights that transformers' bitsandbytes loader quantises."""
    from torch.nn import Linear
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    keep = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    return tuple(
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is Linear and should_convert_module(name, keep)
    )
