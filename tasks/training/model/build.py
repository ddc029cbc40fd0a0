"""Build the model that is trained: base, quantisation, head, adapter, activation checkpointing.

peft's `prepare_model_for_kbit_training` is not used: it casts every norm and embedding to fp32, and
the model that is served is not computed like that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tasks.serving.prompts import stop_ids
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import TrainJob
from tasks.training.model.adapter import add_adapter, continue_adapter
from tasks.training.model.base import DTYPES, load_base, partitioned
from tasks.training.model.head import gather_at_once
from tasks.training.model.packed_model import accept_packed_rows
from tasks.training.model.score_head import padding_id

CHAT_TEMPLATE = "chat_template.jinja"
"""File name of a dataset's own chat template (`data.chat_template`)."""


def load_tokenizer(job: TrainJob) -> Any:
    """Load the model's tokenizer, with the dataset's chat template if it has one.

    A tokenizer without a pad token pads with its EOS token.
    """
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
    job: TrainJob,
    ranks: Ranks,
    deepspeed_config: dict[str, Any],
    *,
    tokenizer: Any,
    head: str = "tokens",
) -> nn.Module:
    """Build the model for DeepSpeed; only the parameters to be trained require gradients.

    Args:
        job: settings and paths of the run.
        ranks: the process group.
        deepspeed_config: result of `zero_config.deepspeed_config`.
        tokenizer: the model's tokenizer.
        head: `tokens` for a causal model, `score` for a reward model.

    Raises:
        ArtifactError: the base's tensors are not those of its class, or the adapter to continue
            does not fit.
    """
    model = _model(job, ranks, deepspeed_config, tokenizer, head)
    # Each rank has its own dropout.
    torch.manual_seed(job.settings.seed * 65_537 + ranks.rank)
    return model


def _model(job: TrainJob, ranks: Ranks, config: dict[str, Any], tokenizer: Any, head: str) -> Any:
    settings = job.settings
    pad = padding_id(tokenizer.pad_token_id, stop_ids(job.side_files, tokenizer.eos_token_id))
    model = load_base(job, ranks, config, head=head, pad=pad)
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
    dtype = DTYPES[settings.dtype]
    new_ids = tokenizer.convert_tokens_to_ids(list(settings.new_tokens))
    with partitioned(config):
        adapted = add_adapter(model, settings.peft, head=head, dtype=dtype, new_ids=new_ids)
    if job.adapter is not None:
        continue_adapter(adapted, job.adapter)
    if head == "tokens":
        gather_at_once(model.get_output_embeddings())
    return adapted
