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
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.serving.prompts import stop_ids
from tasks.serving.reference.load import quantization_config, refuse_gaps
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.engine.partitions import gathered
from tasks.training.job import TrainJob
from tasks.training.model.adapter import add_adapter, continue_adapter
from tasks.training.model.packed_model import accept_packed_rows
from tasks.weights.model_class import language_class, other_towers
from tasks.weights.quantized.nf4 import keep_as_loaded

CHAT_TEMPLATE = "chat_template.jinja"
"""File name of a dataset's own chat template (`data.chat_template`)."""
SCORE_WEIGHT = "score.weight"
"""Name of the head in every decoder's `*ForSequenceClassification` of transformers."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_HINT = "give a complete checkpoint of a causal language model"


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


def load_base(
    job: TrainJob, ranks: Ranks, config: dict[str, Any], *, head: str, pad: int | None
) -> Any:
    """Load the base model of a job, with the head that its objective needs.

    Raises:
        ArtifactError: tensors are missing from the base, or do not belong to its class.
    """
    settings = job.settings
    extra: dict[str, Any] = config_of_head(pad) if head == "score" else {}
    quantization = settings.peft.quantization(settings.dtype)
    if quantization is not None:
        extra["quantization_config"] = quantization_config(quantization, Path(job.base))
    if quantization is not None or (ranks.gpu and settings.zero.stage < 3):
        # Load straight to the GPU: no full model per rank in host memory.
        extra["device_map"] = {"": str(ranks.device)}
    with partitioned(config):
        model, info = _class_for(head, job).from_pretrained(
            job.base, output_loading_info=True, **_loading(job), **extra
        )
    absent = set(map(str, info["missing_keys"]))
    gaps = {SCORE_WEIGHT} if head == "score" else set()
    gaps |= _language_head(info, head)
    refuse_gaps(Path(job.base), info, gaps, hint=_HINT)
    if settings.zero.stage == 3:
        _restore_buffers(model, job, head)
    if SCORE_WEIGHT in absent:
        fill_head(model, seed=settings.seed)
    for name in other_towers(model):  # weight decay would change what no text passes
        model.get_submodule(name).requires_grad_(False)
    return keep_as_loaded(model)


def _class_for(head: str, job: TrainJob) -> Any:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    if head == "score":
        return AutoModelForSequenceClassification
    trust = job.settings.trust_remote_code
    return language_class(AutoConfig.from_pretrained(job.base, trust_remote_code=trust))


def _loading(job: TrainJob) -> dict[str, Any]:
    settings = job.settings
    return {
        "dtype": DTYPES[settings.dtype],
        "attn_implementation": settings.attn_implementation,
        "trust_remote_code": settings.trust_remote_code,
    }


def _language_head(info: Mapping[str, Any], head: str) -> set[str]:
    """Return the keys of a language model's head, which a score head replaces."""
    left = set(map(str, info["unexpected_keys"])) if head == "score" else set()
    return {key for key in left if key.split(".")[0] in ("lm_head", "embed_out")}


def _restore_buffers(model: Any, job: TrainJob, head: str) -> None:
    """Restore the buffers of a model that was built under `zero.Init`.

    `zero.Init` casts every float tensor of a constructor, rotary frequencies included. In bf16
    these are off by up to 0.4 %, and training would see another model than the one served.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        twin = _class_for(head, job).from_config(model.config, **_loading(job))
    stored = set(twin.state_dict())
    for name, buffer in twin.named_buffers():
        if name not in stored:
            owner, _, leaf = name.rpartition(".")
            mine = model.get_submodule(owner)._buffers
            mine[leaf] = buffer.to(mine[leaf].device)


def config_of_head(pad: int | None) -> dict[str, Any]:
    """Return the settings of config.json: one label, used as a number."""
    return {"num_labels": 1, "problem_type": "regression", "pad_token_id": pad}


def padding_id(pad: int | None, ends: Collection[int]) -> int | None:
    """Return the padding id of config.json, by which transformers finds the last token.

    It is None if texts end with the same id: transformers would then score one token too early.
    Without the id it refuses padded batches; packed rows need no padding.
    """
    return None if pad in ends else pad


def fill_head(model: Any, *, seed: int) -> None:
    """Initialise the head, equally on every rank and under every ZeRO stage.

    Weights are normal with variance 1 / (hidden + 1), so that scores begin at about unit size
    (Stiennon et al. 2020, arXiv:2009.01325, app. B.1).
    """
    weight = model.score.weight
    shape = tuple(getattr(weight, "ds_shape", weight.shape))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) / math.sqrt(shape[-1] + 1)
    with gathered([weight]), torch.no_grad():
        weight.copy_(values)
