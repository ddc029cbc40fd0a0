"""DeepSpeed's configuration, from the settings. Knows no torch, so that a plan can print it."""

from __future__ import annotations

from typing import Any

from tasks.training.job import Settings


def deepspeed_config(
    settings: Settings, world_size: int, *, gpu: bool = False, universal: bool = False
) -> dict[str, Any]:
    """Return the DeepSpeed configuration for `world_size` ranks.

    It has no learning-rate schedule: `loop.set_lr` sets the rate before each step. ConfigError if
    the batch does not divide.
    """
    batch, sharing = settings.batch, settings.launch.sequence_parallel
    config: dict[str, Any] = {
        # DeepSpeed counts the rows of every rank, and ranks that share a row count it each.
        "train_batch_size": batch.global_batch_size * sharing,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation(world_size // sharing),
        "gradient_clipping": settings.optim.max_grad_norm,
        "steps_per_print": 2**31 - 1,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "zero_optimization": _zero(settings, gpu=gpu),
    }
    if accumulates_in_fp32(settings, world_size):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if universal:
        config["checkpoint"] = {"load_universal": True}
    if settings.dtype == "float16":
        # loss_scale 0 is dynamic: halved at an overflow, doubled after 1000 steps without one.
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    if settings.optim.optimizer == "adamw":
        # torch's AdamW needs no compiler; an offloaded optimizer is DeepSpeed's CPUAdam.
        optim, offloaded = settings.optim, settings.zero.offload_optimizer == "cpu"
        parameters = {
            "lr": optim.lr,
            "betas": [optim.beta1, optim.beta2],
            "eps": optim.eps,
            "weight_decay": optim.weight_decay,
            "torch_adam": not offloaded,
        }
        if gpu and not offloaded:
            parameters["fused"] = True
        config["optimizer"] = {"type": "AdamW", "params": parameters}
    else:  # `start_engine` makes it; DeepSpeed has none of this name
        config["zero_allow_untested_optimizer"] = True
    return config


def accumulates_in_fp32(settings: Settings, world_size: int) -> bool:
    """Return True if gradients of several micro-batches are added up in fp32.

    DeepSpeed's default is bf16. ZeRO-0 refuses the mix, and ZeRO-1 would take another optimizer.
    """
    batch, zero = settings.batch, settings.zero
    together = batch.micro_batch_size * (world_size // settings.launch.sequence_parallel)
    return (
        settings.dtype == "bfloat16"
        and batch.global_batch_size > together
        and zero.stage >= 2
        and zero.offload_optimizer == "none"
    )


def _zero(settings: Settings, *, gpu: bool) -> dict[str, Any]:
    zero = settings.zero
    # DeepSpeed's default overlaps under ZeRO-3; on a CPU the same cores compute and communicate.
    overlap = zero.overlap_comm if gpu else bool(zero.overlap_comm)
    # Page-locked memory lets copies to and from a GPU overlap with its arithmetic.
    in_host_memory = {"device": "cpu", "pin_memory": gpu}
    config: dict[str, Any] = {
        "stage": zero.stage,
        "contiguous_gradients": True,
        "reduce_bucket_size": zero.bucket_size,
        "allgather_bucket_size": zero.bucket_size,
    }
    if overlap is not None:
        config["overlap_comm"] = overlap
    if zero.offload_optimizer == "cpu":
        config["offload_optimizer"] = dict(in_host_memory)
    if zero.stage == 3:
        config["stage3_prefetch_bucket_size"] = zero.bucket_size
        persistent = zero.persistence_threshold
        if persistent is None:  # the factors of a LoRA are small, and many
            persistent = 100_000 if settings.peft.kind == "none" else 1_000_000
        config["stage3_param_persistence_threshold"] = persistent
        config["stage3_gather_16bit_weights_on_model_save"] = False
        # DeepSpeed's own linear adds the bias in a second step; a served model does not.
        config["memory_efficient_linear"] = False
        if zero.offload_param == "cpu":
            config["offload_param"] = dict(in_host_memory)
    return config
