"""Build the model that is trained: base, quantisation, head, adapter, activation checkpointing.

The base is loaded partitioned under ZeRO-3, in 4 bits for QLoRA, without gaps. peft's
`prepare_model_for_kbit_training` is not used: it casts every norm and embedding to fp32, and the
model that is served is not computed like that.

A score head is trained in full, in the dtype of the model. DeepSpeed keeps a model in one dtype
(beside fp32 master weights), and so does the served class: only in this dtype does the head reach
serving bit for bit.

A new adapter adds zero, so the model before the first step is the base. In a chain of QLoRA steps
each one continues the adapter of the step before, on the same 4-bit base: quantising merged weights
again would round away most of the training (docs/decisions.md, 18).
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.core.errors import ArtifactError
from tasks.serving.prompts import stop_ids
from tasks.serving.reference.load import quantization_config, refuse_gaps
from tasks.training.engine.deepspeed_engine import Ranks, full_shape, whole
from tasks.training.job import Peft, TrainJob
from tasks.training.model.packed_model import accept_packed_rows
from tasks.weights.files.documents import read_json
from tasks.weights.files.folder import CHAT_TEMPLATE, CONFIG
from tasks.weights.files.names import live_to_peft
from tasks.weights.lora_config import ALL_LINEAR
from tasks.weights.model_class import language_class, loadable_attention, other_towers
from tasks.weights.quantized.nf4 import keep_as_loaded

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


SCORE_WEIGHT = "score.weight"
"""Name of the head in every decoder's `*ForSequenceClassification` of transformers."""


def load_tokenizer(job: TrainJob) -> Any:
    """Load the model's tokenizer, with the dataset's chat template if it has one."""
    from transformers import AutoTokenizer

    trust = job.settings.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(job.side_files, trust_remote_code=trust)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    template = job.data / CHAT_TEMPLATE
    if template.is_file():
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def load_model(
    job: TrainJob, ranks: Ranks, config: dict[str, Any], *, tokenizer: Any, head: str = "tokens"
) -> nn.Module:
    """Build the model for DeepSpeed (`config`); only parameters to be trained require gradients.

    ArtifactError if the base's tensors are not those of its class, or the adapter does not fit.
    """
    settings = job.settings
    model = _load_base(job, ranks, config, tokenizer=tokenizer, scored=head == "score")
    accept_packed_rows(model, ranks)
    if settings.gradient_checkpointing:
        reentrant = settings.gradient_checkpointing_reentrant
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if settings.peft.kind == "none":
        return model
    # A checkpointed block has no backward pass unless its inputs require gradients.
    model.enable_input_require_grads()
    # Adapters have to be initialised alike on every rank and under every ZeRO stage.
    torch.manual_seed(settings.seed)
    new_ids = tokenizer.convert_tokens_to_ids(list(settings.new_tokens))
    with partitioned(config):
        dtype = getattr(torch, settings.dtype)
        adapted = add_adapter(model, settings.peft, head=head, dtype=dtype, new_ids=new_ids)
    if job.adapter is not None:
        continue_adapter(adapted, job.adapter)
    return adapted


@contextlib.contextmanager
def partitioned(config: dict[str, Any]) -> Iterator[None]:
    """Make transformers load partitioned weights (`zero.Init`) and peft gather them, under ZeRO-3.

    Both check for a living `HfDeepSpeedConfig`. Below stage 3 this does nothing.
    """
    from transformers.integrations import HfDeepSpeedConfig

    alive = HfDeepSpeedConfig(config) if config["zero_optimization"]["stage"] == 3 else None
    yield
    del alive


def _load_base(
    job: TrainJob, ranks: Ranks, config: dict[str, Any], *, tokenizer: Any, scored: bool
) -> Any:
    """Load the base model of a job, with a language model's head or a score head."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    settings = job.settings
    attention = loadable_attention(read_json(job.base / CONFIG), settings.attn_implementation)
    loading: dict[str, Any] = {
        "dtype": getattr(torch, settings.dtype),
        "attn_implementation": attention,
        "trust_remote_code": settings.trust_remote_code,
    }
    extra: dict[str, Any] = {}
    if scored:
        kind: Any = AutoModelForSequenceClassification
        # transformers scores at the last token that is not the padding id, which must not be an end
        # of texts. Without the id it refuses padded batches; packed rows need no padding.
        pad, ends = tokenizer.pad_token_id, stop_ids(job.side_files, tokenizer.eos_token_id)
        extra = {"num_labels": 1, "problem_type": "regression"}
        extra["pad_token_id"] = None if pad in ends else pad
    else:
        trust = settings.trust_remote_code
        kind = language_class(AutoConfig.from_pretrained(job.base, trust_remote_code=trust))
    quantization = settings.peft.quantization(settings.dtype)
    if quantization is not None:
        extra["quantization_config"] = quantization_config(quantization, job.base)
    if quantization is not None or (ranks.gpu and settings.zero.stage < 3):
        # Load straight to the GPU: no full model per rank in host memory.
        extra["device_map"] = {"": str(ranks.device)}
    with partitioned(config):
        model, info = kind.from_pretrained(job.base, output_loading_info=True, **loading, **extra)
    gaps = set()
    if scored:  # it replaces the head of a language model
        gaps = {k for k in info["unexpected_keys"] if k.split(".")[0] in ("lm_head", "embed_out")}
        gaps.add(SCORE_WEIGHT)
    refuse_gaps(job.base, info, gaps, hint="give a complete checkpoint of a causal language model")
    if settings.zero.stage == 3:
        _restore_buffers(model, kind, loading)
    if SCORE_WEIGHT in info["missing_keys"]:
        _fill_head(model, seed=settings.seed)
    for name in other_towers(model):  # weight decay would change what no text passes
        model.get_submodule(name).requires_grad_(False)
    return keep_as_loaded(model)


def _restore_buffers(model: Any, kind: Any, loading: Mapping[str, Any]) -> None:
    """Restore the buffers of a model that was built under `zero.Init`.

    `zero.Init` casts every float tensor of a constructor, rotary frequencies included. In bf16
    these are off by up to 0.4 %, and training would see another model than the one served.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        twin = kind.from_config(model.config, **loading)
    stored = set(twin.state_dict())
    for name, buffer in twin.named_buffers():
        if name not in stored:
            owner, _, leaf = name.rpartition(".")
            mine = model.get_submodule(owner)._buffers
            mine[leaf] = buffer.to(mine[leaf].device)


def _fill_head(model: Any, *, seed: int) -> None:
    """Initialise the head, equally on every rank and under every ZeRO stage.

    Weights are normal with variance 1 / (hidden + 1), so that scores begin at about unit size
    (Stiennon et al. 2020, arXiv:2009.01325, app. B.1).
    """
    weight, generator = model.score.weight, torch.Generator().manual_seed(seed)
    shape = full_shape(weight)
    values = torch.randn(shape, generator=generator) / math.sqrt(shape[-1] + 1)
    with whole([weight], writer=0), torch.no_grad():
        weight.copy_(values)
