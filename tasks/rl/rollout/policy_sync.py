"""Handing the policy over: what an engine is given each iteration, and the checks before it.

The same contract as delivery's, in small: what an adapter has to hold is told by its configuration
on the meta device, never by the tensors themselves; nothing leaves the trainer that is not finite;
each hand-over has a number of its own, and whoever samples from an older one is stopped.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tasks.core.contract import Expected, judge, require
from tasks.core.errors import TrainingError
from tasks.rl.rollout.memory_folder import memory_folder, writes_here
from tasks.rl.rollout.tensor_spec import Held
from tasks.rl.rollout.vllm_support import goes_as_adapter
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.engine.partitions import SAFETENSORS_DTYPES, full_shape, trainable
from tasks.training.job import TrainJob
from tasks.training.model.fused_lora import ADAPTER
from tasks.training.model.gather_params import whole
from tasks.training.outputs import write_adapter_config
from tasks.weights.files.names import rename_all
from tasks.weights.plan.adapter_contract import adapter_contract

_SHORT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass
class Policy:
    """What is trained, as it is handed over.

    Attributes:
        engine: DeepSpeed's, around a causal model.
        job: what it was made from.
        ranks: this process among its peers.
        version: of the last hand-over; 0: there was none.
    """

    engine: Any
    job: TrainJob
    ranks: Ranks
    version: int = 0
    _sums: tuple[float, ...] = field(default=(), repr=False)

    @property
    def as_adapter(self) -> bool:
        """Whether it is handed to vLLM as an adapter; if not, as merged weights."""
        return goes_as_adapter(self.job.settings)

    @cached_property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Its trained parameters by live name; a critic's adapter on the same trunk is none."""
        found = trainable(self.engine.module)
        if self.job.settings.peft.kind == "none":
            return found
        return {name: one for name, one in found.items() if ADAPTER in name.split(".")}

    @cached_property
    def keys(self) -> dict[str, str]:
        """PEFT's key of every parameter of the adapter, by live name. Raises ContractError."""
        return rename_all(self.parameters, adapter=True)

    @cached_property
    def contract(self) -> list[Expected]:
        """What the adapter has to hold, by its configuration and the base's."""
        with tempfile.TemporaryDirectory() as folder:
            write_adapter_config(self.engine.module, Path(folder))
            config = Path(folder) / "adapter_config.json"
            return adapter_contract(self.job.base, config, _SHORT[self.job.settings.dtype])

    def advance(self) -> int:
        """Check the policy as it is now and give it the next number. All ranks take part.

        Raises:
            ContractError: an adapter with other names, shapes or dtypes than it was made with.
            TrainingError: NaN or infinity in any rank's share; on every rank alike.
        """
        if self.as_adapter:
            held = {
                key: Held(full_shape(self.parameters[name]), _dtype(self.parameters[name]))
                for name, key in self.keys.items()
            }
            require(judge(self.contract, held), stage="policy hand-off")
        sums = self._sum_up()
        self._require_finite(sums)
        self._sums = sums
        self.version += 1
        return self.version

    def require_current(self, version: int) -> None:
        """Refuse to sample from anything but the policy as it is now.

        Args:
            version: that the engine holds.

        Raises:
            TrainingError: it was never handed over, or has changed since.
        """
        if self.version == 0:
            raise TrainingError("rollouts were asked for before the policy was published")
        if version != self.version:
            raise TrainingError(
                f"the rollout engine holds version {version} of the policy (0: none), and "
                f"{self.version} was handed over last: it has to be published again"
            )
        if self._sum_up() != self._sums:
            raise TrainingError(
                f"rollouts would come from version {version} of the policy, which has changed "
                "since: it has to be published first"
            )

    @contextmanager
    def adapter_folder(self) -> Iterator[Path]:
        """The adapter as a PEFT folder in memory, on each node; gone afterwards.

        All ranks take part; one of each node writes.
        """
        with memory_folder(self.ranks, self.nbytes) as folder:
            tensors: dict[str, torch.Tensor] = {}
            for name, parameter in self.parameters.items():
                with whole([parameter]):
                    if writes_here():
                        tensors[self.keys[name]] = parameter.detach().cpu().clone().contiguous()
            if writes_here():
                save_file(tensors, folder / "adapter_model.safetensors")
                write_adapter_config(self.engine.module, folder)
            self.ranks.barrier()
            yield folder
            self.ranks.barrier()

    @property
    def largest_rank(self) -> int:
        """Of its pairs."""
        return max(
            full_shape(one)[0] for name, one in self.parameters.items() if ".lora_A." in name
        )

    @property
    def nbytes(self) -> int:
        """Of its trained parameters."""
        return sum(
            math.prod(full_shape(one)) * one.element_size() for one in self.parameters.values()
        )

    def _require_finite(self, sums: tuple[float, ...]) -> None:
        mine = [
            name
            for (name, one), total in zip(self.parameters.items(), sums, strict=True)
            if not math.isfinite(total) and not torch.isfinite(self._share(one)).all()
        ]
        broken = sorted({name for names in self.ranks.all_objects(mine) for name in names})
        if broken:
            raise TrainingError(
                f"the policy cannot be handed to the rollouts: {len(broken)} tensors are not "
                f"finite, first {broken[0]}",
                details=broken[:20],
                hint=f"train.lr={self.job.settings.optim.lr / 10:g}",
            )

    def _sum_up(self) -> tuple[float, ...]:
        """Sum of this rank's share of every tensor: NaN and infinity show, and so do changes."""
        with torch.no_grad():
            found = [self._share(one).sum(dtype=torch.float64) for one in self.parameters.values()]
        return tuple(torch.stack(found).tolist()) if found else ()

    def _share(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """This rank's elements, no copy: its partition, or an equal share of its replica."""
        partition = getattr(parameter, "ds_tensor", None)
        if partition is not None:
            return partition.detach().reshape(-1)
        flat = parameter.detach().reshape(-1)
        size = -(-len(flat) // self.ranks.world_size)
        return flat[self.ranks.rank * size : (self.ranks.rank + 1) * size]


def _dtype(parameter: torch.nn.Parameter) -> str:
    return SAFETENSORS_DTYPES[parameter.dtype]
