"""LoRA adapters on the base model, built by peft from section `peft` of the configuration.

A new adapter adds zero, so the model before the first step is the base. In a chain of QLoRA steps
each one continues the adapter of the step before, on the same 4-bit base: quantising merged weights
again would round away most of the training
(docs/decisions.md, 18).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.core.errors import ArtifactError
from tasks.training.job import Peft
from tasks.weights.files.names import live_to_peft
from tasks.weights.lora_config import ALL_LINEAR
from tasks.weights.model_class import other_towers

_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
_NOT_ADAPTED = {**dict.fromkeys(_MAMBA, ("out_proj",)), "llama4_text": ("router",)}
"""Modules that all-linear leaves out, by family: Mamba's kernels read the weight themselves, and
Llama 4's router returns two results; peft can adapt neither."""
ADAPTER = "default"
"""Name of the trained adapter in peft's model."""
TASKS = {"tokens": "CAUSAL_LM", "score": "SEQ_CLS"}
"""peft's task type, by the head of the objective. SEQ_CLS trains the score head in full, saves it
with the adapter (`modules_to_save`) and excludes it from "all-linear"."""


def add_adapter(
    model: Any, peft: Peft, *, head: str, dtype: torch.dtype, new_ids: Sequence[int] = ()
) -> nn.Module:
    """Return peft's model around `model`; only its new LoRA adapter requires gradients."""
    from peft import get_peft_model

    config = lora_config(peft, head=head, model=model)
    if new_ids:
        embedding, out = model.get_input_embeddings(), model.get_output_embeddings()
        tables = [embedding]
        if out is not None and out.weight is not embedding.weight:
            tables.append(out)
        names = [n for n, module in model.named_modules() if any(module is t for t in tables)]
        config.trainable_token_indices = {name: list(new_ids) for name in names}
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    _let_dora_see_its_base(adapted)
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # peft makes adapters of 4-bit layers in fp32
            parameter.data = parameter.data.to(dtype)
    return adapted


def continue_adapter(adapted: nn.Module, folder: Path) -> None:
    """Load the adapter of a PEFT folder, and keep a copy of it for `initial_weights`."""
    loaded = load_into(adapted, folder, ADAPTER)
    adapted.initial = [(parameter, parameter.data.clone()) for parameter in loaded]


def load_into(adapted: Any, folder: Path, adapter: str) -> list[nn.Parameter]:
    """Load the tensors of a PEFT folder into an adapter of the model; return the parameters.

    Only the adapter's `modules_to_save` may be missing from the folder. ArtifactError if the folder
    has an adapter of another scale or with other tensors.
    """
    from peft import LoraConfig
    from safetensors.torch import load_file

    saved, current = LoraConfig.from_pretrained(str(folder)), adapted.peft_config[adapter]
    tensors = load_file(folder / "adapter_model.safetensors")
    own = {n: p for n, p in adapted.named_parameters() if adapter in n.split(".")}
    keys = {live_to_peft(name, adapter): name for name in own}
    # Names and shapes of the tensors do not always show these settings.
    same = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
    differs = [key for key in same if getattr(saved, key) != getattr(current, key)]
    differs += sorted(set(tensors) - set(keys))
    differs += sorted(k for k in set(keys) - set(tensors) if ".modules_to_save." not in keys[k])
    if differs:
        raise ArtifactError(
            f"{folder}: training cannot go on with this adapter: {differs[0]} differs",
            details=differs[:20],
            hint="use the same section peft as in the step before",
        )
    with torch.no_grad():
        return [own[keys[key]].copy_(tensor) for key, tensor in tensors.items()]


@contextlib.contextmanager
def initial_weights(adapted: Any) -> Iterator[None]:
    """Switch to the weights before the first step: no adapter, or the one of `continue_adapter`."""
    initial: list[tuple[nn.Parameter, torch.Tensor]] | None = getattr(adapted, "initial", None)
    if initial is None:
        with adapted.disable_adapter():
            yield
        return
    # DeepSpeed may have moved the model to a GPU since.
    adapted.initial = initial = [(p, tensor.to(p.device)) for p, tensor in initial]
    trained = [parameter.data for parameter, _ in initial]
    try:
        for parameter, tensor in initial:
            parameter.data = tensor
        yield
    finally:
        for (parameter, _), tensor in zip(initial, trained, strict=True):
            parameter.data = tensor


def _let_dora_see_its_base(adapted: nn.Module) -> None:
    """Make ZeRO-3 gather a base weight for DoRA's magnitude, which normalises by it."""
    from peft.tuners.lora import LoraLayer

    for layer in adapted.modules():
        magnitudes = layer.lora_magnitude_vector.values() if isinstance(layer, LoraLayer) else ()
        weight = layer.get_base_layer().weight if magnitudes else None
        if hasattr(weight, "ds_id"):
            import deepspeed

            for magnitude in magnitudes:
                deepspeed.zero.register_external_parameter(magnitude, weight)


def lora_config(peft: Peft, *, head: str, model: Any) -> Any:
    """Return peft's `LoraConfig`."""
    from peft import LoraConfig

    targets = peft.target_modules
    family = model.config.get_text_config().model_type
    names = [*peft.exclude_modules]
    names += _NOT_ADAPTED.get(family, ()) if targets == ALL_LINEAR else ()
    excluded: list[str] | str | None = names or None
    if towers := other_towers(model):  # peft takes names, or one pattern of whole paths
        ends = [rf"(?:.*\.)?{re.escape(name)}" for name in names]
        excluded = "|".join([*ends, *(rf"{re.escape(tower)}(?:\..*)?" for tower in towers)])
    return LoraConfig(
        r=peft.rank,
        lora_alpha=peft.alpha,
        lora_dropout=peft.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=excluded,
        use_rslora=peft.use_rslora,
        use_dora=peft.use_dora,
        rank_pattern=dict(peft.rank_pattern or {}),
        alpha_pattern=dict(peft.alpha_pattern or {}),
        modules_to_save=list(peft.modules_to_save) or None,
        init_lora_weights="gaussian" if peft.init == "gaussian" else True,
        task_type=TASKS[head],
    )
