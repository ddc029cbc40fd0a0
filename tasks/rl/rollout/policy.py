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
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tasks.core.contract import Expected, judge, require
from tasks.core.errors import ConfigError, TrainingError
from tasks.rl.settings import goes_as_adapter
from tasks.training.engine.deepspeed_engine import (
    Ranks,
    full_shape,
    own_part,
    trainable,
    whole,
)
from tasks.training.job import TrainJob
from tasks.training.model.build import ADAPTER
from tasks.training.model.packed_model import model_of
from tasks.training.outputs import write_adapter_config
from tasks.weights.files.dtypes import DTYPE_NAMES, short_name
from tasks.weights.files.names import rename_all
from tasks.weights.lora import adapter_contract
from tasks.weights.mapping import Slot
from tasks.weights.model import Model, model_facts
from tasks.weights.rounding import row_keys, unbiased

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
                key: Expected(key, full_shape(each), short_name(each.dtype))
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
        which = {"rank": self.ranks.rank, "world_size": self.ranks.world_size}
        parts = [own_part(parameter, **which)[0] for parameter in self.parameters.values()]
        sums = [part.sum(dtype=torch.float64) for part in parts]
        return tuple(torch.stack(sums).tolist()) if sums else ()


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


_OF_ADAPTERS = ("lora_", "original_module", "trainable_tokens_")


def merged_tensors(module: nn.Module, facts: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the policy as full weights: every tensor of a checkpoint by its key, tied ones too.

    With full fine-tuning these are the trained parameters. Modules and rows that an adapter trains
    in full take the place of the base's. A layer with an adapter gives W' = W + s B A, or with DoRA
    (arXiv:2402.09353, eq. 5) W' = m (W + s B A) / ||W + s B A|| with the norm of each row, computed
    in fp32 and rounded once without bias (`weights/rounding.py`), so that the engine samples from
    all that was trained. A 4-bit weight is dequantised. Experts that disk stores one by one are
    parts of a tensor in memory, which only full fine-tuning trains here.

    The module is a transformers model, or peft's around one; the facts are of its base. Under
    ZeRO-3 all ranks have to iterate together. A tensor is on the model's device, and the caller may
    keep it. Raises ConfigError for a model family whose tensors on disk are not those in memory,
    and ContractError after the last tensor, if they are not those that the model class needs.
    """
    model, yielded = model_of(module), dict[str, Expected]()
    slots = defaultdict[str, list[Slot]](list)
    for slot in facts.slots:
        slots[slot.live].append(slot)
        if not slot.is_renamed and (model is not module or not slot.whole):
            raise _unmatched(slot.key)
    if facts.findings:
        raise _unmatched(facts.findings[0])
    stored = {name: buffer for name, buffer in model.named_buffers() if name in slots}
    for name, parameter in [*model.named_parameters(remove_duplicate=False), *stored.items()]:
        if (plain := _plain(name)) is not None:
            tensor = _merged(model, name, plain, parameter)
            shape = tuple(tensor.shape)
            for slot in slots[plain] or [
                Slot(facts.aliases.get(plain, plain), shape, plain, shape)
            ]:
                part = tensor if slot.is_renamed else _part(tensor, slot)
                yielded[slot.key] = Expected(slot.key, tuple(part.shape), short_name(part.dtype))
                yield slot.key, part
    wanted = {expected.name: expected for expected in facts.tensors}
    wanted |= {alias: replace(wanted[to], name=alias) for alias, to in facts.tied.items()}
    require(judge(wanted.values(), yielded), stage="weight sync")


def _unmatched(key: str) -> ConfigError:
    return ConfigError(
        f"{key}: full weights can be synced to vLLM only for model families whose tensors on disk "
        "are those in memory, or with peft=none parts of them",
        hint="peft=lora, on linear layers alone",
    )


def _part(tensor: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return the tensor on disk that is this part of a tensor in memory."""
    part = tensor.flatten()[slot.start : slot.start + prod(slot.shape)]
    if not slot.transpose:
        return part.view(slot.shape)
    *stack, rows, columns = slot.shape
    return part.view(*stack, columns, rows).transpose(-1, -2).contiguous()


def _plain(name: str) -> str | None:
    """Return a parameter's name in the base model; None for one that is not a tensor of it."""
    parts = name.split(".")
    if any(part.startswith(_OF_ADAPTERS) for part in parts):
        return None
    if "modules_to_save" in parts:  # the trained copy of a module, for each adapter
        at = parts.index("modules_to_save")
        return None if parts[at + 1] != ADAPTER else ".".join(parts[:at] + parts[at + 2 :])
    return ".".join(part for part in parts if part not in ("base_layer", "token_adapter"))


def _merged(model: nn.Module, name: str, plain: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the policy; `name` and `plain` name it in peft's model and in the base."""
    owner, _, leaf = name.rpartition(".")
    layer: Any = model.get_submodule(owner.removesuffix(".base_layer")) if owner else model
    adapted = {*getattr(layer, "lora_A", ()), *getattr(layer, "lora_embedding_A", ())}
    if leaf == "weight" and ADAPTER in adapted:
        return _merged_weight(layer, plain)
    trained = getattr(layer, "trainable_tokens_delta", {})
    rows = [trained[ADAPTER]] if ADAPTER in trained else []
    with whole([parameter, *rows]), torch.no_grad():
        tensor = _dense(parameter).detach().clone()
        for row in rows:
            tensor[layer.token_indices[ADAPTER]] = row.to(tensor)
    return tensor


def _merged_weight(layer: Any, name: str) -> torch.Tensor:
    """Return W' in the base's dtype, rounded as a merge on disk rounds it."""
    weight, scale = layer.get_base_layer().weight, layer.scaling[ADAPTER]
    if ADAPTER in layer.lora_A:
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    else:  # an embedding, whose matrices are transposed
        a, b = layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
    magnitudes = layer.lora_magnitude_vector
    magnitude = magnitudes[ADAPTER].weight if ADAPTER in magnitudes else None
    parts = [weight, a, b] if magnitude is None else [weight, a, b, magnitude]
    with whole(parts), torch.no_grad():
        base = _dense(weight)
        wide = base.float()
        left, right = (b, a) if ADAPTER in layer.lora_A else (a.t(), b.t())
        merged = torch.addmm(wide, left.float(), right.float(), alpha=scale)
        if magnitude is not None:
            merged *= (magnitude.float() / merged.norm(dim=1))[:, None]
        if base.dtype == torch.float32:
            return merged
        return unbiased(merged, wide, base.dtype, row_keys(name, 0, len(merged)))


def _dense(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's values; a 4-bit parameter is dequantised as its layer does."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, state)
