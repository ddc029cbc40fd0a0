"""Contracts from configuration: what a checkpoint has to hold, asked of the model's own class.

The class is built on the meta device, which costs no memory, and wrapped by the real peft; so names
and shapes are those of the library that will load the checkpoint, not our idea of them. This is the
only module of the room that imports transformers and peft (about 8 s): call it through
`tasks.weights.worker` where a warm process can answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.contract import Expected
from tasks.errors import ArtifactError
from tasks.weights.reader import DTYPE_NAMES, read_json


@dataclass(frozen=True)
class ModelFacts:
    """What a model class says of its checkpoints.

    Attributes:
        tensors: every tensor of a checkpoint; a tied one appears once, under the key it is
            stored under.
        tied: key that a checkpoint need not hold -> key that holds the same tensor.
        embedding: key of the input embedding, (vocabulary, hidden).
        quantized: keys that transformers turns into 4-bit weights when asked to.
    """

    tensors: tuple[Expected, ...]
    tied: Mapping[str, str]
    embedding: str
    quantized: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ModelFacts:
        """What `as_json` made."""
        return cls(
            tensors=tuple(expected_from_json(entry) for entry in raw["tensors"]),
            tied=dict(raw["tied"]),
            embedding=str(raw["embedding"]),
            quantized=tuple(raw["quantized"]),
        )


def expected_from_json(raw: Mapping[str, Any]) -> Expected:
    """One `Expected` from its plain JSON form."""
    return Expected(raw["name"], tuple(raw["shape"]), raw["dtype"])


def model_facts(config: Path, dtype: str = "bfloat16") -> ModelFacts:
    """Facts of the model that a folder's config.json describes, with parameters in `dtype`.

    Raises:
        ArtifactError: the configuration is unreadable, or names no class this stack has.
    """
    model = _meta_model(config, dtype)
    tied = {str(k): str(v) for k, v in model.all_tied_weights_keys.items()}
    names = {f"torch.{text}": short for text, short in DTYPE_NAMES.items()}
    tensors = tuple(
        Expected(name, tuple(tensor.shape), names.get(str(tensor.dtype)))
        for name, tensor in model.state_dict().items()
        if name not in tied
    )
    embedding = model.get_input_embeddings()
    return ModelFacts(
        tensors=tensors,
        tied=tied,
        embedding=next(n for n, m in model.named_modules() if m is embedding) + ".weight",
        quantized=_quantized(model),
    )


def weights_contract(config: Path, dtype: str = "bfloat16") -> list[Expected]:
    """What a full checkpoint of a folder's config.json holds. Raises ArtifactError."""
    return list(model_facts(config, dtype).tensors)


def adapter_contract(base: Path, adapter_config: Path, dtype: str = "BF16") -> list[Expected]:
    """What `adapter_model.safetensors` has to hold.

    Args:
        base: folder with the base model's config.json.
        adapter_config: PEFT's own adapter_config.json.
        dtype: safetensors name that every tensor must have.

    Raises:
        ArtifactError: an unreadable configuration, or targets that the base does not have.
    """
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    # Initialisers such as PiSSA compute with the base weights, which are not there.
    settings = {**read_json(adapter_config), "init_lora_weights": False, "inference_mode": False}
    try:
        config = LoraConfig(**{k: v for k, v in settings.items() if k != "peft_type"})
        with torch.device("meta"):
            wrapped = get_peft_model(_meta_model(base, "bfloat16"), config)
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{adapter_config}: does not fit {base}: {error}") from error
    state = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    return [Expected(name, tuple(tensor.shape), dtype) for name, tensor in state.items()]


def _meta_model(folder: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise ArtifactError(f"{folder}: no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{folder}: config.json describes no usable model: {error}") from error


def _quantized(model: Any) -> tuple[str, ...]:
    """Keys of the weights that transformers' bitsandbytes loader replaces, by its own rule."""
    from torch.nn import Linear
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    keep = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    return tuple(
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is Linear and should_convert_module(name, keep)
    )
