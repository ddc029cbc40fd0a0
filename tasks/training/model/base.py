"""Loading of the base model: partitioned under ZeRO-3, in 4 bits for QLoRA, without gaps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tasks.serving.reference.load import quantization_config, refuse_gaps
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import TrainJob
from tasks.training.model.score_head import WEIGHT, config_of_head, fill_head
from tasks.weights.model_class import language_class, other_towers
from tasks.weights.quantized.nf4 import keep_as_loaded

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_HINT = "give a complete checkpoint of a causal language model"


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

    Args:
        job: settings and paths of the run.
        ranks: the process group.
        config: DeepSpeed's configuration.
        head: `tokens` or `score`, as in `Objective.head`.
        pad: padding id of a model with a score head; None for none.

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
    gaps = {WEIGHT} if head == "score" else set()
    gaps |= _language_head(info, head)
    refuse_gaps(Path(job.base), info, gaps, hint=_HINT)
    if settings.zero.stage == 3:
        _restore_buffers(model, job, head)
    if WEIGHT in absent:
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
