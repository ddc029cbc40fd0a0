"""The process group of the ranks, the DeepSpeed engine around a model, partitions of its tensors.

Each rank writes its own partition of the trained tensors, and writing gathers nothing. Under ZeRO-3
it is the partition that DeepSpeed gave it (`ds_tensor`, without padding). Below stage 3 every rank
has a full replica and writes an equal part of it. Together the ranks write every element once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from tasks.core.errors import PlumblineError, TrainingError
from tasks.core.files import source_digest
from tasks.core.machine import has_gpu, resident_peak
from tasks.process.multinode import RANKS_FILE
from tasks.training.job import Optim
from tasks.weights.shards import rank_file


class Partition(NamedTuple):
    """A partition: elements [start, end) of a flattened parameter whose full shape is `shape`."""

    data: torch.Tensor
    shape: tuple[int, ...]
    start: int
    end: int


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the full parameter, partitioned by ZeRO-3 or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def own_part(
    parameter: nn.Parameter, *, rank: int, world_size: int
) -> tuple[torch.Tensor, int, int]:
    """Return a rank's elements of a parameter, uncopied, and their range in its flat form."""
    count = math.prod(full_shape(parameter))
    own = getattr(parameter, "ds_tensor", None)  # under ZeRO-3
    size = -(-count // world_size) if own is None else own.numel()
    start, end = min(rank * size, count), min((rank + 1) * size, count)
    if own is not None:
        return own.detach().reshape(-1)[: end - start], start, end
    return parameter.detach().reshape(-1)[start:end], start, end


def own_partitions(model: nn.Module, *, rank: int, world_size: int) -> dict[str, Partition]:
    """Return copies in host memory of this rank's partitions, empty ones left out."""
    partitions = {}
    for name, parameter in trainable(model).items():
        data, start, end = own_part(parameter, rank=rank, world_size=world_size)
        if end > start:
            copied = data.cpu().contiguous().clone()
            partitions[name] = Partition(copied, full_shape(parameter), start, end)
    return partitions


def not_finite(partitions: dict[str, Partition]) -> list[str]:
    """Return the names of parameters whose partition on this rank holds NaN or infinity."""
    return [name for name, part in partitions.items() if not torch.isfinite(part.data).all()]


def write_partitions(
    partitions: dict[str, Partition], folder: Path, *, rank: int, world_size: int
) -> None:
    """Write one rank's file, with shape and range of each partition in its metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    ranges = {
        n: {"shape": list(p.shape), "start": p.start, "end": p.end} for n, p in partitions.items()
    }
    path = folder / rank_file(rank, world_size)
    tensors = {name: part.data for name, part in partitions.items()}
    save_file(tensors, path, metadata={"partitions": json.dumps(ranges, sort_keys=True)})


def whole(
    parameters: Sequence[nn.Parameter], *, writer: int | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Gather parameters that ZeRO-3 may have partitioned; changes to them are lost.

    All ranks enter and leave the context together. Below ZeRO-3 it does nothing. With a `writer`
    changes stay, and every rank has to make the same ones.
    """
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    import deepspeed

    context: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        list(parameters), modifier_rank=writer
    )
    return context


T = TypeVar("T")
_PACKAGES = ("torch", "transformers", "peft", "deepspeed", "accelerate", "bitsandbytes")

COLLECTIVE_TIMEOUT_S = 1800
"""Longest wait within one collective. A dead rank is noticed at once (its socket closes and
torchrun ends the others); this limit is for a rank that hangs."""


class Ranks:
    """The process group: this process's rank and device, and a few collectives."""

    def __init__(
        self,
        *,
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
        device: str = "auto",
        sequence_parallel: int = 1,
    ) -> None:
        """Join the process group that torchrun, or `RANKS_FILE`, describes in the environment.

        `sequence_parallel` is the number of neighbouring ranks that share each row.
        """
        self.device = choose_device(device, int(os.environ["LOCAL_RANK"]))
        self.gpu = self.device.type == "cuda"
        if self.gpu:
            torch.cuda.set_device(self.device)
        else:
            # DeepSpeed would choose the same after probing every kind of accelerator.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # Without ops to compile, DeepSpeed does not spend 20 s of g++ on an all-reduce that only
        # its inference engine calls.
        deepspeed.ops.__compatible_ops__ = {}
        meeting_point = os.environ.get(RANKS_FILE)
        deepspeed.init_distributed(
            dist_backend="nccl" if self.gpu else "gloo",
            timeout=timedelta(seconds=timeout_s),
            verbose=False,
            init_method=f"file://{meeting_point}" if meeting_point else None,
            rank=int(os.environ["RANK"]) if meeting_point else -1,
            world_size=int(os.environ["WORLD_SIZE"]) if meeting_point else -1,
        )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.first = self.rank == 0
        self.sequence_parallel = sequence_parallel
        # Groups of ranks with rows of their own, this rank's among them, and its first rank, whose
        # metrics count.
        self.replicas = self.world_size // sequence_parallel
        self.replica, place = divmod(self.rank, sequence_parallel)
        self.leads = place == 0
        self.sequence_group: dist.ProcessGroup | None = None
        if sequence_parallel > 1:
            self.sequence_group, _ = dist.new_subgroups(
                sequence_parallel, timeout=timedelta(seconds=timeout_s)
            )

    def peak_memory(self, *, awake: int = 0, asleep: int = 0) -> int:
        """Return the most memory that a rank has used so far, in bytes; a collective.

        On GPUs, what torch's allocator has reserved: `awake` while a rollout engine was awake,
        less the bytes `asleep` that it gave back in its sleep. On CPUs the resident memory of the
        process, libraries and memory that ranks share included.
        """
        mine = resident_peak()
        if self.gpu:
            mine = max(torch.cuda.max_memory_reserved(self.device) - asleep, awake)
        most = torch.tensor(mine, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place; return it."""
        dist.all_reduce(value)
        return value

    def all_objects(self, value: T) -> list[T]:
        """Return the values of all ranks, in order of rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def on_first(self, work: Callable[[], T]) -> T:
        """Run a function on rank 0; return its result, or raise its PlumblineError, everywhere."""
        result: T | PlumblineError | None = None
        if self.first:
            try:
                result = work()
            except PlumblineError as error:
                result = error
        result = self.all_objects(result)[0]
        if isinstance(result, PlumblineError):
            raise result
        return cast(T, result)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def leave(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


class SingleRank(Ranks):
    """A single rank without a process group."""

    def __init__(self) -> None:
        """Set what shared work asks for; there is no device."""
        self.rank, self.world_size, self.first = 0, 1, True

    def all_objects(self, value: T) -> list[T]:
        """Return the only value."""
        return [value]

    def barrier(self) -> None:
        """Wait for nobody."""


def require_same_versions(ranks: Ranks) -> None:
    """Compare versions of libraries and this project's code over all ranks.

    A node with other versions would train another model without an error.
    """
    own = [*(f"{name} {version(name)}" for name in _PACKAGES), f"tasks {source_digest()[:12]}"]
    ours, *others = ranks.all_objects(own)
    for rank, theirs in enumerate(others, 1):
        if theirs != ours:
            here, there = (", ".join(set(a) - set(b)) for a, b in ((ours, theirs), (theirs, ours)))
            raise TrainingError(
                f"the nodes do not run the same program: rank 0 has {here}, rank {rank} {there}",
                hint="install the same lock on every node: make setup",
            )


def choose_device(setting: str, local: int) -> torch.device:
    """Return the device of a rank: a GPU of its own, or the CPU if the machine has none.

    Torch refuses GPUs that it cannot compute on, and a rank without one.
    """
    usable = setting != "cpu" and torch.cuda.is_available()
    gpu = setting == "cuda" or usable or has_gpu(setting)
    return torch.device("cuda", local) if gpu else torch.device("cpu")


def start_engine(model: nn.Module, config: dict[str, Any], optim: Optim) -> Any:
    """Return a DeepSpeed engine that trains the parameters of `model` that require gradients.

    Weights decay, norms and biases do not.
    """
    import deepspeed

    parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
    vectors = [p for p in parameters if len(full_shape(p)) < 2]
    matrices = [p for p in parameters if len(full_shape(p)) > 1]
    if optim.weight_decay and vectors and matrices:  # torch >= 2.10 fails on empty groups
        parameters = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer | None = None
    if "optimizer" not in config:
        from bitsandbytes.optim import AdamW8bit

        betas, decay = (optim.beta1, optim.beta2), optim.weight_decay
        optimizer = AdamW8bit(
            parameters, lr=optim.lr, betas=betas, eps=optim.eps, weight_decay=decay
        )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameters,
        optimizer=optimizer,
        config=config,
        dist_init_required=False,
    )
    inner: Any = getattr(engine.optimizer, "optimizer", None)
    if config["zero_optimization"]["stage"] == 0 and inner is None:
        _tell_norms(engine)
    elif config["zero_optimization"]["stage"] == 0:
        # DeepSpeed's 16-bit wrapper takes and counts a step on zeros, which Adam's bias correction
        # would turn into a first update of 0.74 of its size. Adam makes new states by itself.
        inner.state.clear()
    # transformers loads models in eval mode, without dropout and activation checkpointing.
    engine.train()
    return engine


def partitioned_engine(model: nn.Module, config: dict[str, Any]) -> Any:
    """Return a DeepSpeed engine around a frozen model whose parameters ZeRO-3 partitions."""
    import deepspeed

    trained = ("optimizer", "zero_allow_untested_optimizer")
    without = {key: value for key, value in config.items() if key not in trained}
    engine, *_ = deepspeed.initialize(model=model, config=without, dist_init_required=False)
    engine.eval()
    return engine


def _tell_norms(engine: Any) -> None:
    """Record the norm of fp32 gradients before clipping, for engines without ZeRO.

    Their optimizer is torch's own, and `get_global_grad_norm` of DeepSpeed 0.19 returns None.
    """
    take = engine._take_model_step

    def noted(*args: Any, **kwargs: Any) -> None:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        engine._global_grad_norm = float(nn.utils.get_total_norm(gradients))
        take(*args, **kwargs)

    engine._take_model_step = noted


@dataclass
class TrainerStates:
    """Optimizer states, fp32 weights and gradients of a run's engines, on the device or the host.

    Under ZeRO-1 and 2 DeepSpeed 0.19 moves all of them. Under ZeRO-3 it asserts its own FusedAdam
    (`runtime/zero/stage3.py`, `offload_states`), which has to be compiled. There DeepSpeed moves
    only the gradients, and this class the rest. `tasks/config/checks/online.py` refuses ZeRO-0 and
    ZeRO-Offload, which have nothing to move.
    """

    engines: Sequence[Any]
    movable: bool  # False if the states stay on the device; `offload` then does nothing
    away: bool = False  # True while the states are in host memory

    def offload(self) -> None:
        """Move the states to the host. The weights that forward passes read stay on the device."""
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
        from deepspeed.runtime.zero.offload_states import offload_optimizer_states

        if not self.movable or self.away:
            return
        for engine in self.engines:
            moved = ["optim_states", "hp_params", "lp_grads"]
            if engine.zero_optimization_stage() == 3:
                moved = ["lp_grads", "contiguous_grad_buffer"]
                offload_optimizer_states(engine.optimizer.optimizer, "cpu", pin_memory=True)
                for weights in engine.optimizer.fp32_partitioned_groups_flat:
                    # A GPU reads page-locked memory several times faster.
                    host = get_accelerator().pin_empty_like(weights.data, device="cpu")
                    weights.data = host.copy_(weights.data)
            # Last, because it empties the device's memory cache.
            engine.offload_states(include=[OffloadStateTypeEnum(name) for name in moved])
        self.away = True

    def reload(self) -> None:
        """Move the states back to the device."""
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.zero.offload_states import reload_optimizer_states

        if not self.away:
            return
        device = get_accelerator().current_device_name()
        for engine in self.engines:
            engine.reload_states()
            if engine.zero_optimization_stage() == 3:
                reload_optimizer_states(engine.optimizer.optimizer, device)
                for weights in engine.optimizer.fp32_partitioned_groups_flat:
                    weights.data = weights.data.to(device)
        self.away = False

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the states on the device within the context, and offload them after it."""
        self.reload()
        yield
        self.offload()
