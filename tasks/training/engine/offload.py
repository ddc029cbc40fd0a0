"""Optimizer states, fp32 weights and gradients in host memory while a rank does something else.

DeepSpeed 0.19 moves them under ZeRO-1 and 2 whatever the optimizer is. Under ZeRO-3 it asserts its
own FusedAdam (`runtime/zero/stage3.py`, `offload_states`), which has to be compiled and keeps its
states as torch's AdamW does; there its gradients are moved by it, and the rest here. ZeRO-0 cannot,
and ZeRO-Offload has nothing left to move: `tasks/config/checks/online.py` refuses both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FREES = ("optim_states", "hp_params", "lp_grads")
FREES_3 = ("lp_grads", "contiguous_grad_buffer")
"""States that DeepSpeed moves, under ZeRO-1 and 2, and under ZeRO-3."""


@dataclass
class TrainerStates:
    """States of the engines that a run trains.

    Attributes:
        engines: DeepSpeed's.
        movable: whether they are moved at all.
        away: whether they lie in host memory now.
    """

    engines: Sequence[Any]
    movable: bool
    away: bool = False

    def offload(self) -> None:
        """Move them to the host. The weights that forward passes read stay where they are."""
        if self.movable and not self.away:
            for engine in self.engines:
                _offload(engine)
            self.away = True

    def reload(self) -> None:
        """Move them back to the device."""
        if self.away:
            for engine in self.engines:
                _reload(engine)
            self.away = False

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Have them on the device within it, and on the host after it."""
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
    # Last: it gives freed memory back to the device.
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
    """Return a copy in page-locked memory, which a GPU reads several times as fast."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().pin_empty_like(tensor, device="cpu").copy_(tensor)
