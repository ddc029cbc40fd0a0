"""Build the model that is trained: base, quantisation, head, adapter, activation checkpointing.

The base is loaded partitioned under ZeRO-3, in 4 bits for QLoRA, without gaps. peft's
`prepare_model_for_kbit_training` is not used: it casts every norm and embedding to fp32, and the
model that is served is not computed like that.

A score head is trained in full, in the dtype of the model. DeepSpeed keeps a model in one dtype
(beside fp32 master weights), and so does the served class: only in this dtype does the head reach
serving bit for bit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tasks.serving.prompts import stop_ids
from tasks.serving.reference.load import quantization_config, refuse_gaps
from tasks.training.engine.deepspeed_engine import Ranks, full_shape, whole
from tasks.training.job import TrainJob
from tasks.training.model.adapter import add_adapter, continue_adapter
from tasks.training.model.packed_model import accept_packed_rows
from tasks.weights.files.documents import read_json
from tasks.weights.files.folder import CHAT_TEMPLATE, CONFIG
from tasks.weights.model_class import language_class, loadable_attention, other_towers
from tasks.weights.quantized.nf4 import keep_as_loaded

SCORE_WEIGHT = "score.weight"
"""Name of the head in every decoder's `*ForSequenceClassification` of transformers."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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
        dtype = DTYPES[settings.dtype]
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
        "dtype": DTYPES[settings.dtype],
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
