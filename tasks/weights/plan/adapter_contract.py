"""The contract of a gathered adapter's file, from configuration on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.contract import Expected
from tasks.core.errors import ArtifactError
from tasks.weights.adapters.config import parse_config
from tasks.weights.adapters.pieces import Contract
from tasks.weights.families.meta import meta_model
from tasks.weights.files.documents import read_json
from tasks.weights.plan.contracts import model_facts


def adapter_contract(base: Path, adapter_config: Path, dtype: str = "BF16") -> list[Expected]:
    """Return the tensors that `adapter_model.safetensors` has to hold.

    Uses our own reading of the configuration, which the tests compare with peft. Settings that we
    do not read are left to peft: an adapter that cannot be merged can still be gathered.

    Args:
        base: folder with the base model's config.json.
        adapter_config: path of the adapter_config.json that peft wrote.
        dtype: safetensors name that every tensor must have.

    Raises:
        ArtifactError: the configuration cannot be read, or does not fit the base.
    """
    # Initialisers such as PiSSA compute with base weights, which the meta device does not have.
    settings = {**read_json(adapter_config), "init_lora_weights": False, "inference_mode": False}
    config, findings = parse_config(settings)
    if not findings:
        contract = Contract(config, model_facts(base).live, {})
        wants = {key: shape for piece in contract.pieces for key, shape in piece.wants.items()}
        if wants and not contract.findings:
            return [Expected(key, shape, dtype) for key, shape in wants.items()]
    return _peft_contract(base, adapter_config, settings, dtype)


def _peft_contract(
    base: Path, adapter_config: Path, settings: Mapping[str, Any], dtype: str
) -> list[Expected]:
    """Return the same contract by wrapping a model on the meta device with peft."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    try:
        config = LoraConfig(**{k: v for k, v in settings.items() if k != "peft_type"})
        with torch.device("meta"):
            wrapped = get_peft_model(meta_model(base, "bfloat16"), config)
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{adapter_config}: does not fit {base}: {error}") from error
    state = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    return [Expected(name, tuple(tensor.shape), dtype) for name, tensor in state.items()]
