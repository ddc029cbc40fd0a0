"""The model as it is trained: base, quantiser, adapter, checkpointing.

peft's `prepare_model_for_kbit_training` is not used: it turns every norm and embedding into fp32,
which is then not the model that is served.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tasks.training.engine import Ranks
from tasks.training.job import Peft, TrainJob

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


CHAT_TEMPLATE = "chat_template.jinja"
"""Of a dataset that was given a template of its own (`data.chat_template`)."""


def load_tokenizer(job: TrainJob) -> Any:
    """The base's tokenizer, with the data's own chat template where it brings one.

    Where it has no pad token, its EOS token pads (and is masked out).
    """
    from transformers import AutoTokenizer

    trust = job.settings.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(job.base, trust_remote_code=trust)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    template = job.data / CHAT_TEMPLATE
    if template.is_file():
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def load_model(job: TrainJob, ranks: Ranks, deepspeed_config: dict[str, Any]) -> nn.Module:
    """Base with adapter, ready for DeepSpeed: only what is to be trained needs gradients."""
    settings = job.settings
    # Adapters are initialised at random and have to be the same on every rank.
    torch.manual_seed(settings.seed)
    model = _load_base(job, ranks, deepspeed_config)
    if settings.gradient_checkpointing:
        reentrant = settings.gradient_checkpointing_reentrant
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if settings.peft.kind != "none":
        # A frozen embedding gives activations without gradient, and a checkpointed block whose
        # inputs need none has no backward pass.
        model.enable_input_require_grads()
        model = _add_adapter(model, settings.peft, DTYPES[settings.dtype])
    torch.manual_seed(settings.seed * 65_537 + ranks.rank)  # dropout differs by rank
    return model


def _load_base(job: TrainJob, ranks: Ranks, deepspeed_config: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    settings = job.settings
    # transformers looks for a living HfDeepSpeedConfig and then loads partitioned (zero.Init).
    sharded = HfDeepSpeedConfig(deepspeed_config) if settings.zero.stage == 3 else None
    extra: dict[str, Any] = {}
    if settings.peft.kind == "qlora":
        extra["quantization_config"] = _quantization(settings.peft)
        extra["device_map"] = {"": str(ranks.device)}
    model = AutoModelForCausalLM.from_pretrained(
        job.base,
        dtype=DTYPES[settings.dtype],
        attn_implementation=settings.attn_implementation,
        trust_remote_code=settings.trust_remote_code,
        **extra,
    )
    del sharded
    if settings.zero.stage == 3:
        _restore_buffers(model, job)
    return model


def _restore_buffers(model: Any, job: TrainJob) -> None:
    """Give a model made under `zero.Init` the buffers that it would have without.

    `zero.Init` casts every float tensor that a constructor makes, rotary frequencies included; in
    bf16 those turn positions by up to 0.4 % and train another model than the one that is served.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    settings = job.settings
    with init_empty_weights(include_buffers=False):
        twin = AutoModelForCausalLM.from_config(
            model.config,
            dtype=DTYPES[settings.dtype],
            attn_implementation=settings.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
        )
    stored = set(twin.state_dict())
    for name, buffer in twin.named_buffers():
        if name not in stored:
            owner, _, leaf = name.rpartition(".")
            mine = model.get_submodule(owner)._buffers
            mine[leaf] = buffer.to(mine[leaf].device)


def _quantization(peft: Peft) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=peft.quant_type,
        bnb_4bit_use_double_quant=peft.double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def _add_adapter(model: Any, peft: Peft, dtype: torch.dtype) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = peft.target_modules
    config = LoraConfig(
        r=peft.rank,
        lora_alpha=peft.alpha,
        lora_dropout=peft.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        use_rslora=peft.use_rslora,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    # Over a 4-bit layer peft leaves the adapter in fp32, having no float dtype to follow.
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted
