"""The policy before each weight sync: its version, checks of its tensors, folders for them.

As in delivery, an adapter's contract comes from its configuration on the meta device, never from
the tensors themselves. Values that are not finite are never synced. Each sync has a version number,
and sampling from an older version is an error.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tasks.core.contract import Expected, judge, require
from tasks.core.errors import TrainingError
from tasks.rl.rollout.merged import TensorSpec, merged_tensors
from tasks.rl.settings import goes_as_adapter
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.engine.partitions import SAFETENSORS_DTYPES, full_shape, trainable, whole
from tasks.training.job import TrainJob
from tasks.training.model.adapter import ADAPTER
from tasks.training.outputs import write_adapter_config
from tasks.weights.files.dtypes import DTYPE_NAMES
from tasks.weights.files.names import rename_all
from tasks.weights.lora import adapter_contract
from tasks.weights.model import Model, model_facts

MEMORY = Path("/dev/shm")
PREFIX = "plumbline-policy-"
_HEADROOM = 1 << 20
"""Bytes for a safetensors header and a configuration."""
_SHARD = 2 << 30
"""Bytes after which another file of full weights begins."""


@dataclass
class Policy:
    """The policy being trained, as it is synced to a rollout engine."""

    engine: Any  # the DeepSpeed engine around a causal model
    job: TrainJob  # the training job
    ranks: Ranks  # this process and its peers
    version: int = 0  # of the last sync; 0: none yet
    _sums: tuple[float, ...] = field(default=(), repr=False)

    @property
    def as_adapter(self) -> bool:
        """True if vLLM gets the policy as an adapter, False if as full weights."""
        return goes_as_adapter(self.job.settings)

    @cached_property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by live name, without a critic's adapter on the same trunk."""
        full, named = self.job.settings.peft.kind == "none", trainable(self.engine.module)
        return {name: each for name, each in named.items() if full or ADAPTER in name.split(".")}

    @cached_property
    def keys(self) -> dict[str, str]:
        """PEFT's key of every adapter parameter, by live name. Raises ContractError."""
        return rename_all(self.parameters, adapter=True)

    @cached_property
    def contract(self) -> list[Expected]:
        """Tensors that the adapter must contain, from its configuration and the base's."""
        with tempfile.TemporaryDirectory() as folder:
            write_adapter_config(self.engine.module, Path(folder))
            config = Path(folder) / "adapter_config.json"
            return adapter_contract(self.job.base, config, DTYPE_NAMES[self.job.settings.dtype])

    @cached_property
    def facts(self) -> Model:
        """Facts about the base."""
        return model_facts(self.job.base, self.job.settings.dtype)

    def advance(self) -> int:
        """Check the policy's current weights and return their new version. All ranks take part.

        Raises ContractError if names, shapes or dtypes differ from the adapter's configuration, and
        TrainingError on every rank for NaN or infinity on any.
        """
        if self.as_adapter:
            specs = {
                key: TensorSpec(full_shape(each), SAFETENSORS_DTYPES[each.dtype])
                for key, each in ((key, self.parameters[name]) for name, key in self.keys.items())
            }
            require(judge(self.contract, specs), stage="weight sync")
        self._sums = self._sum_up()
        totals = zip(self.parameters, self._sums, strict=True)
        mine = [name for name, total in totals if not math.isfinite(total)]
        broken = sorted({name for names in self.ranks.all_objects(mine) for name in names})
        if broken:
            raise TrainingError(
                f"the policy cannot be synced to the rollout engine: {len(broken)} tensors are "
                f"not finite, first {broken[0]}",
                details=broken[:20],
                hint=f"train.lr={self.job.settings.optim.lr / 10:g}",
            )
        self.version += 1
        return self.version

    def require_current(self, version: int) -> None:
        """Raise TrainingError unless an engine with this version has the current weights."""
        if self.version == 0 or version != self.version or self._sum_up() != self._sums:
            raise TrainingError(
                f"the rollout engine has version {version} of the policy (0: none), the last sync "
                f"was version {self.version} (0: none), or the policy has changed since: it has to "
                "be synced first"
            )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the policy as full weights, see `merged_tensors`."""
        return merged_tensors(self.engine.module, self.facts)

    def write(self, folder: Path | None) -> None:
        """Write the adapter as a PEFT folder, or full weights with the base's config.json.

        All ranks take part; those without a folder write nothing. After an error, which may come
        after the last tensor, nothing must be loaded from the folder.
        """
        shard: dict[str, torch.Tensor] = {}
        if self.as_adapter:
            for name, parameter in self.parameters.items():
                with whole([parameter]):
                    if folder is not None:
                        shard[self.keys[name]] = _on_cpu(parameter.detach())
            if folder is not None:
                save_file(shard, folder / "adapter_model.safetensors")
                write_adapter_config(self.engine.module, folder)
            return
        files = size = 0
        for key, tensor in self.tensors():
            if folder is None:
                continue
            shard[key], size = _on_cpu(tensor), size + tensor.nbytes
            if size > _SHARD:
                save_file(shard, folder / f"model-{files:05d}.safetensors")
                files, size, shard = files + 1, 0, {}
        if folder is not None:
            save_file(shard, folder / f"model-{files:05d}.safetensors")
            shutil.copy(self.job.base / "config.json", folder)

    @property
    def nbytes(self) -> int:
        """Bytes of a folder by `write`."""
        if self.as_adapter:
            trained = self.parameters.values()
            return sum(math.prod(full_shape(each)) * each.element_size() for each in trained)
        item = 4 if self.job.settings.dtype == "float32" else 2
        return sum(math.prod(expected.shape) * item for expected in self.facts.tensors)

    def _sum_up(self) -> tuple[float, ...]:
        """Return the sum of this rank's part of every tensor: shows NaN, infinity and changes."""
        with torch.no_grad():
            sums = [
                self._share(parameter).sum(dtype=torch.float64)
                for parameter in self.parameters.values()
            ]
        return tuple(torch.stack(sums).tolist()) if sums else ()

    def _share(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return this rank's elements, uncopied: its partition, or an equal part of its replica."""
        partition = getattr(parameter, "ds_tensor", None)
        if partition is not None:
            return partition.detach().reshape(-1)
        flat = parameter.detach().reshape(-1)
        size = -(-len(flat) // self.ranks.world_size)
        return flat[self.ranks.rank * size : (self.ranks.rank + 1) * size]


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().clone().contiguous()


def leads_node() -> bool:
    """Return True on one rank of each node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextlib.contextmanager
def memory_folder(ranks: Ranks, nbytes: int, *, root: str | None = None) -> Iterator[Path]:
    """Yield a new folder, the same for all ranks of a node, and delete it afterwards.

    All ranks enter and leave together. The folder is in memory (/dev/shm) if `nbytes` fit, or in
    `root`, which other machines can read, too. A folder left by a killed run is deleted when the
    next one begins: its name has the process id.
    """
    mine = None
    if leads_node():
        parent, owner = Path(tempfile.gettempdir()), f"{os.getpid()}"
        if root is not None:  # a process of another machine may have the same id
            parent, owner = Path(root).expanduser(), f"{socket.gethostname()}.{owner}"
            parent.mkdir(parents=True, exist_ok=True)
        else:
            sweep(MEMORY)
            sweep(parent)
            free = shutil.disk_usage(MEMORY).free if os.access(MEMORY, os.W_OK | os.X_OK) else 0
            parent = MEMORY if free > nbytes + _HEADROOM else parent
        mine = tempfile.mkdtemp(prefix=f"{PREFIX}{owner}-", dir=parent)
        if root is not None:
            os.chmod(mine, 0o755)  # the servers may belong to another user
    try:
        node = os.environ.get("GROUP_RANK", "0")
        by_node = {name: path for name, path in ranks.all_objects((node, mine)) if path is not None}
        yield Path(by_node[node])
    finally:
        if mine is not None:
            shutil.rmtree(mine, ignore_errors=True)


def sweep(root: Path) -> None:
    """Delete folders whose process no longer exists."""
    for path in root.glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)
