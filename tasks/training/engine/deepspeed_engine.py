"""The ranks, and DeepSpeed's engine around a model."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from tasks.core.errors import ConfigError
from tasks.core.machine import driver_too_old, gpu_count, has_gpu
from tasks.training.job import Optim

T = TypeVar("T")
_OF_OPTIMIZER = ("optimizer", "zero_allow_untested_optimizer")

COLLECTIVE_TIMEOUT_S = 1800
"""Longest wait within one collective. A dead peer is noticed at once (its socket closes, and
torchrun ends the others); this bounds what neither sees, a peer that hangs."""


class Ranks:
    """This process among its peers: rank, device, and the few collectives that are needed."""

    def __init__(self, *, timeout_s: float = COLLECTIVE_TIMEOUT_S, device: str = "auto") -> None:
        """Join the process group that torchrun describes in the environment.

        Args:
            timeout_s: longest wait within one collective, in seconds.
            device: `train.device`: auto, cpu or cuda.

        Raises:
            ConfigError: a GPU is there or asked for, and torch cannot compute on it; or none is
                left for this rank.
        """
        self.device = choose_device(device, int(os.environ["LOCAL_RANK"]))
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.device)
        else:
            # DeepSpeed would guess the same, but only after it looked for every accelerator.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # An empty answer to "which ops can be compiled" keeps DeepSpeed from building its
        # shared-memory all-reduce, 20 s of g++ for a call that only its inference engine makes.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(
            dist_backend="nccl" if cuda else "gloo",
            timeout=timedelta(seconds=timeout_s),
            verbose=False,
        )
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    @property
    def gpu(self) -> bool:
        """Return True if this rank computes on a GPU."""
        return self.device.type == "cuda"

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        dist.all_reduce(value)
        return value

    def all_objects(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def leave(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def choose_device(asked: str, local: int) -> torch.device:
    """Return the device of a rank: a GPU of its own, or the CPU where there are none.

    Args:
        asked: `train.device`.
        local: number of the rank on this machine.

    Raises:
        ConfigError: GPUs are there or asked for, and torch cannot compute on them; or there are
            fewer of them than ranks.
    """
    count = gpu_count()
    if asked != "cpu" and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if local < count:
            return torch.device("cuda", local)
        what = f"rank {local} of this machine has no GPU: {count} visible"
        raise ConfigError(what, hint=f"train.nproc={count}")
    if not has_gpu(asked) and asked != "cuda":
        return torch.device("cpu")
    found, needed, override = driver_too_old() or (
        f"{count} GPU{'s' * (count != 1)} visible, and torch.cuda.is_available() is False",
        "ranks would compute on the CPU",
        "a driver that torch can use, or train.device=cpu",
    )
    raise ConfigError(f"train.device={asked}: {found}; {needed}", hint=override)


def start_engine(model: nn.Module, config: dict[str, Any], optim: Optim | None = None) -> Any:
    """DeepSpeed's engine around `model`; it optimizes exactly the parameters that need gradients.

    One parameter group and never an empty one: torch >= 2.10 trips over those under ZeRO.

    Args:
        model: as `load_model` makes it.
        config: as `deepspeed_config` makes it.
        optim: of the optimizer, where `config` leaves it to us.
    """
    import deepspeed

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = None
    if "optimizer" not in config and optim is not None:
        optimizer = _adamw_8bit(parameters, optim)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameters,
        optimizer=optimizer,
        config=config,
        dist_init_required=False,
    )
    without_zero = config["zero_optimization"]["stage"] == 0
    inner = getattr(engine.optimizer, "optimizer", None)
    if without_zero and inner is None:
        _tell_norms(engine)
    elif inner is not None and without_zero:
        # Without ZeRO DeepSpeed's wrapper for 16-bit weights takes a step on zeros to begin with,
        # and leaves it counted: Adam's bias correction would be one step ahead of all other stages,
        # its first update 0.74 of what it should be. Adam makes its states when it finds none.
        inner.state.clear()
    # transformers loads a model to be evaluated: dropout off, and blocks that are to be
    # checkpointed keep everything.
    engine.train()
    return engine


def partitioned_engine(model: nn.Module, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine around a model that is not trained, its parameters split by ZeRO-3."""
    import deepspeed

    without = {key: value for key, value in config.items() if key not in _OF_OPTIMIZER}
    engine, *_ = deepspeed.initialize(model=model, config=without, dist_init_required=False)
    engine.eval()
    return engine


def _tell_norms(engine: Any) -> None:
    """Have the norm of fp32 gradients known without ZeRO too, before they are clipped.

    There the optimizer is torch's own, and `get_global_grad_norm` of DeepSpeed 0.19 answers None.
    """
    take = engine._take_model_step

    def noted(*args: Any, **kwargs: Any) -> None:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        engine._global_grad_norm = float(nn.utils.get_total_norm(gradients))
        take(*args, **kwargs)

    engine._take_model_step = noted


def _adamw_8bit(parameters: list[nn.Parameter], optim: Optim) -> torch.optim.Optimizer:
    """Moments in blocks of 256 numbers of 8 bits, each with a scale of its own."""
    from bitsandbytes.optim import AdamW8bit

    made: torch.optim.Optimizer = AdamW8bit(
        parameters,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    return made
