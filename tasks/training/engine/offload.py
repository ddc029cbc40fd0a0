"""Offload of optimizer states, fp32 weights and gradients to host memory, for example in rollouts.

Under ZeRO-1 and 2 DeepSpeed 0.19 moves all of them. Under ZeRO-3 it asserts its own FusedAdam
(`runtime/zero/stage3.py`, `offload_states`), which has to be compiled. There DeepSpeed moves only
the gradients, and this module the rest. ZeRO-0 cannot offload and ZeRO-Offload has nothing left to
move: `tasks/config/checks/online.py` refuses both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FREES = ("optim_states", "hp_params", "lp_grads")
FREES_3 = ("lp_grads", "contiguous_grad_buffer")
"""States that DeepSpeed moves, under ZeRO-1 and 2 (`FREES`) and under ZeRO-3 (`FREES_3`)."""


@dataclass
class TrainerStates:
    """Training states of a run's engines, on the device or on the host.

    Attributes:
        engines: DeepSpeed engines.
        movable: False if the states stay on the device; `offload` then does nothing.
        away: True while the states are in host memory.
    """

    engines: Sequence[Any]
    movable: bool
    away: bool = False

    def offload(self) -> None:
        """Move the states to the host. The weights that forward passes read stay on the device."""
        if self.movable and not self.away:
            for engine in self.engines:
                _offload(engine)
            self.away = True

    def reload(self) -> None:
        """Move the states back to the device."""
        if self.away:
            for engine in self.engines:
                _reload(engine)
            self.away = False

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the states on the device within the context, and offload them after it."""
        self.reload()
        yield
        self.offload()


def _offload(engine: Any) -> None:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
    from deepspeed.runtime.zero.offload_states import offload_optimizer_states

    split = engine.zero_optimization_stage() == 3
    if split:
        offload_optimizer_states(engine.optimizer.optimizer, "cpu", pin_memory=True)
        for weights in engine.optimizer.fp32_partitioned_groups_flat:
            weights.data = _on_host(weights.data)
    # Last, because it empties the device's memory cache.
    engine.offload_states(include=[OffloadStateTypeEnum(n) for n in (FREES_3 if split else FREES)])


def _reload(engine: Any) -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.offload_states import reload_optimizer_states

    engine.reload_states()
    if engine.zero_optimization_stage() == 3:
        device = get_accelerator().current_device_name()
        reload_optimizer_states(engine.optimizer.optimizer, device)
        for weights in engine.optimizer.fp32_partitioned_groups_flat:
            weights.data = weights.data.to(device)


def _on_host(tensor: Any) -> Any:
    """Return a copy in page-locked memory, which a GPU reads several times faster."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().pin_empty_like(tensor, device="cpu").copy_(tensor)
