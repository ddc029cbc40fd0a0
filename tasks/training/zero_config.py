"""DeepSpeed's configuration, from settings. Pure; knows no torch, so that a plan can print it."""

from __future__ import annotations

from typing import Any

from tasks.training.job import Optim, Settings, Zero

CPU_DEVICE = {"device": "cpu", "pin_memory": False}


def deepspeed_config(settings: Settings, world_size: int) -> dict[str, Any]:
    """The whole DeepSpeed configuration for `world_size` ranks.

    The schedule is not in it: the loop sets the learning rate itself, before each step.

    Raises:
        ConfigError: when the batch sizes do not divide.
    """
    batch = settings.batch
    config: dict[str, Any] = {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation(world_size),
        "gradient_clipping": settings.optim.max_grad_norm,
        "steps_per_print": 2**31 - 1,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "zero_optimization": _zero(settings.zero),
    }
    if settings.dtype == "float16":
        # loss_scale 0: halved at every overflow, doubled after a thousand steps without one.
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    if settings.optim.optimizer == "adamw":
        config["optimizer"] = _adamw(settings.optim, settings.zero)
    else:  # made by `engine.py`; DeepSpeed knows none of its name
        config["zero_allow_untested_optimizer"] = True
    return config


def _adamw(optim: Optim, zero: Zero) -> dict[str, Any]:
    # torch's own AdamW needs nothing compiled; an offloaded optimizer is DeepSpeed's CPUAdam,
    # which is compiled at first use.
    offloaded = zero.offload_optimizer == "cpu"
    return {
        "type": "AdamW",
        "params": {
            "lr": optim.lr,
            "betas": [optim.beta1, optim.beta2],
            "eps": optim.eps,
            "weight_decay": optim.weight_decay,
            "torch_adam": not offloaded,
        },
    }


def _zero(zero: Zero) -> dict[str, Any]:
    config: dict[str, Any] = {
        "stage": zero.stage,
        "overlap_comm": zero.overlap_comm,
        "contiguous_gradients": True,
        "reduce_bucket_size": zero.bucket_size,
        "allgather_bucket_size": zero.bucket_size,
    }
    if zero.offload_optimizer == "cpu":
        config["offload_optimizer"] = dict(CPU_DEVICE)
    if zero.stage == 3:
        config["stage3_prefetch_bucket_size"] = zero.bucket_size
        config["stage3_param_persistence_threshold"] = zero.persistence_threshold
        config["stage3_gather_16bit_weights_on_model_save"] = False
        # Plain torch linears: DeepSpeed's own one computes product and bias in two steps, and what
        # is trained should be computed as what is served. No difference was measured on the toy.
        config["memory_efficient_linear"] = False
        if zero.offload_param == "cpu":
            config["offload_param"] = dict(CPU_DEVICE)
    return config
