"""The adapter on the base: what peft makes of section `peft`, and what it leaves to us.

A new adapter changes nothing, so that the model before the first step is the base. In a chain of
QLoRA steps each one goes on with the adapter of the step before, on the same base in 4 bits:
quantising merged weights again would round most of what was learned away
(docs/decisions/0018-a-qlora-step-goes-on-with-the-adapter.md).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.core.errors import ArtifactError
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import Peft
from tasks.training.model.pissa import ADAPTER, start_in_principal_components
from tasks.training.model.score_head import gathered
from tasks.weights.files.names import live_to_peft

TASKS = {"tokens": "CAUSAL_LM", "score": "SEQ_CLS"}
"""peft's task by an objective's head. SEQ_CLS trains the score head in full, saves it with the
adapter (`modules_to_save`) and keeps "all-linear" off it."""


def add_adapter(
    model: Any,
    peft: Peft,
    *,
    head: str,
    dtype: torch.dtype,
    ranks: Ranks,
    new_ids: Sequence[int] = (),
) -> nn.Module:
    """A LoRA adapter on `model`; alone it needs gradients.

    Args:
        model: a transformers model.
        peft: what kind of adapter.
        head: `tokens` or `score`.
        dtype: of everything that is trained.
        ranks: which share the work of an initialisation from the base's weights.
        new_ids: tokens whose rows in the embeddings are trained beside it.
    """
    from peft import get_peft_model

    config = lora_config(peft, head=head)
    if new_ids:
        config.trainable_token_indices = {name: list(new_ids) for name in _tables(model)}
    with _rows_read_on_any_device():
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    _let_others_see_their_base(adapted)
    if peft.init == "pissa":
        start_in_principal_components(adapted, niter=peft.pissa_niter, ranks=ranks)
    # Over a 4-bit layer peft leaves the adapter in fp32, having no float dtype to follow.
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def go_on_with(adapted: nn.Module, folder: Path) -> None:
    """Initialise the model's adapter from a PEFT folder, and keep a copy for `as_it_began`.

    Raises:
        ArtifactError: as `load_into`.
    """
    loaded = load_into(adapted, folder, ADAPTER)
    adapted.initial = [(parameter, parameter.data.clone()) for parameter in loaded]


def load_into(adapted: Any, folder: Path, adapter: str) -> list[nn.Parameter]:
    """Load the tensors of a PEFT folder into an adapter of the model.

    Args:
        adapted: peft's model.
        folder: adapter_config.json and adapter_model.safetensors.
        adapter: name of the adapter in the model. It may have tensors that the folder lacks, those
            of `modules_to_save`, and only those.

    Returns:
        the parameters that were loaded.

    Raises:
        ArtifactError: the adapter in the folder has another scale, or other tensors.
    """
    from peft import LoraConfig
    from safetensors.torch import load_file

    there, here = LoraConfig.from_pretrained(str(folder)), adapted.peft_config[adapter]
    tensors = load_file(folder / "adapter_model.safetensors")
    names = [n for n, _ in adapted.named_parameters() if adapter in n.split(".")]
    keys = {live_to_peft(name, adapter): name for name in names}
    differs = [key for key in _SAME if getattr(there, key) != getattr(here, key)]
    differs += sorted(set(tensors) - set(keys))
    differs += sorted(k for k in set(keys) - set(tensors) if ".modules_to_save." not in keys[k])
    if differs:
        raise ArtifactError(
            f"{folder}: training cannot go on with this adapter: {differs[0]} differs",
            details=differs[:20],
            hint="the same section peft as in the step before",
        )
    parameters = {key: adapted.get_parameter(keys[key]) for key in tensors}
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(tensors[key])
    return list(parameters.values())


_SAME = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
"""Settings of an adapter that its tensors' names and shapes do not always tell."""


@contextlib.contextmanager
def as_it_began(adapted: Any) -> Iterator[None]:
    """Compute as before the first step: without the adapter, or with what `go_on_with` loaded."""
    initial: list[tuple[nn.Parameter, torch.Tensor]] | None = getattr(adapted, "initial", None)
    if initial is None:
        with adapted.disable_adapter():
            yield
        return
    # DeepSpeed may have moved the model since; the copy follows it once.
    adapted.initial = initial = [(p, tensor.to(p.device)) for p, tensor in initial]
    trained = [parameter.data for parameter, _ in initial]
    try:
        for parameter, tensor in initial:
            parameter.data = tensor
        yield
    finally:
        for (parameter, _), tensor in zip(initial, trained, strict=True):
            parameter.data = tensor


@contextlib.contextmanager
def _rows_read_on_any_device() -> Iterator[None]:
    """Let peft read the rows that it is to train from an embedding that ZeRO-3 has split.

    peft 0.21 broadcasts them from rank 0 through a tensor that it makes on the current CUDA device,
    which a CPU does not have. A gathered weight is whole on every rank: each reads its own.
    """
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

    def read(self: Any, weight: torch.Tensor, rows: Sequence[int], embed_dim: int) -> torch.Tensor:
        with gathered([weight]):
            return weight.detach()[list(rows)].clone()

    own = TrainableTokensLayer._collect_token_weights
    TrainableTokensLayer._collect_token_weights = read
    try:
        yield
    finally:
        TrainableTokensLayer._collect_token_weights = own


def _let_others_see_their_base(adapted: nn.Module) -> None:
    """Under ZeRO-3, have a base weight gathered again where another module computes with it.

    DoRA's magnitude normalises by it, and trained rows are put into it.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

    for layer in adapted.modules():
        readers: list[Any] = []
        if isinstance(layer, LoraLayer):
            readers = list(layer.lora_magnitude_vector.values())
        elif isinstance(layer, TrainableTokensLayer):
            readers = [layer]
        weight = layer.get_base_layer().weight if readers else None
        if hasattr(weight, "ds_id"):
            import deepspeed

            for reader in readers:
                deepspeed.zero.register_external_parameter(reader, weight)


def _tables(model: Any) -> list[str]:
    """Modules with a row for each token: the input embedding, and a head that is not tied to it."""
    ends, begins = model.get_output_embeddings(), model.get_input_embeddings()
    wanted = [begins] if ends is None or ends.weight is begins.weight else [begins, ends]
    return [name for name, module in model.named_modules() if any(module is one for one in wanted)]


def lora_config(peft: Peft, *, head: str) -> Any:
    """peft's `LoraConfig`. For PiSSA of twice the rank, and of the same scale; see `pissa.py`."""
    from peft import LoraConfig

    double = 2 if peft.init == "pissa" else 1
    scale = math.sqrt(double) if peft.use_rslora else double
    targets, excluded = peft.target_modules, peft.exclude_modules
    return LoraConfig(
        r=double * peft.rank,
        lora_alpha=scale * peft.alpha,
        lora_dropout=peft.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=(excluded if isinstance(excluded, str) else list(excluded)) or None,
        use_rslora=peft.use_rslora,
        use_dora=peft.use_dora,
        rank_pattern={name: double * rank for name, rank in (peft.rank_pattern or {}).items()},
        alpha_pattern={name: scale * alpha for name, alpha in (peft.alpha_pattern or {}).items()},
        modules_to_save=list(peft.modules_to_save) or None,
        init_lora_weights="gaussian" if peft.init == "gaussian" else True,
        task_type=TASKS[head],
    )
