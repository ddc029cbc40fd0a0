"""Advice on memory: settings that need less, how much less, and which together are enough.

Each setting is tried by repeating the estimate with it. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tasks.config.defaults import ONLINE
from tasks.training.job import Peft, Settings
from tasks.training.memory.estimate import LIBRARIES, estimate

GIB = 2**30
_WORTH = 0.02
"""Smallest share of the memory that a setting has to save to be listed."""
_SMALL_BUCKET = 5_000_000
_SMALL_ENGINE = 0.3
_MOST_KNOBS = 8
Change = tuple[str, str, Any]
"""An override, the field of `Settings` that it sets, and the field's value."""


@dataclass(frozen=True)
class Knob:
    """A setting that needs less memory.

    Attributes:
        override: the override to type.
        saves: bytes that it saves.
        settings: all settings with the override.
    """

    override: str
    saves: int
    settings: Settings

    def __str__(self) -> str:
        return f"{self.override} (saves {self.saves / GIB:.2f} GiB)"


class Rank(Protocol):
    """Memory of a rank in bytes; `mapped` is the part that ranks of a node share."""

    @property
    def total(self) -> int: ...
    @property
    def mapped(self) -> int: ...


def on_node(size: int, mapped: int, ranks: int) -> int:
    """Return the bytes of all ranks of a node, libraries included.

    Args:
        size: bytes of one rank.
        mapped: part of `size` that all ranks share, pages of a mapped file.
        ranks: number of ranks on the node.
    """
    return ranks * (size - mapped + LIBRARIES) + mapped


class Adviser:
    """Advice on the memory of one model. Its methods raise KeyError for unknown architectures.

    Args:
        config: contents of the base's `config.json`.
        gpu: True if each rank has a GPU; otherwise all ranks of a node share its memory.
        rank: returns the memory of a rank; None for `estimate`, the memory of training alone.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        gpu: bool,
        rank: Callable[[Settings], Rank] | None = None,
    ) -> None:
        self._gpu = gpu
        self._heads = int((config.get("text_config") or config).get("num_attention_heads") or 0)
        self._rank = rank or (lambda s: estimate(config, s, s.world_size, gpu=gpu))

    def need(self, settings: Settings) -> int:
        """Return the bytes of all ranks that share memory, libraries included."""
        rank = self._rank(settings)
        return on_node(rank.total, rank.mapped, 1 if self._gpu else settings.launch.nproc)

    def knobs(self, settings: Settings) -> list[Knob]:
        """Return single settings that need less memory, those that save most first."""
        now = self.need(settings)
        turned = [
            Knob(override, now - self.need(changed), changed)
            for override, changed in self._turned(settings)
        ]
        worth = [knob for knob in turned if knob.saves > _WORTH * now]
        return sorted(worth, key=lambda knob: -knob.saves)

    def enough(self, settings: Settings, limit: int) -> list[str]:
        """Return overrides that together need at most `limit` bytes, or [] if none do.

        They are chosen greedily, the one that saves most first.
        """
        chosen: list[str] = []
        while self.need(settings) > limit:
            knobs = self.knobs(settings)
            if not knobs or len(chosen) == _MOST_KNOBS:
                return []
            key = knobs[0].override.partition("=")[0]
            chosen = [c for c in chosen if c.partition("=")[0] != key] + [knobs[0].override]
            settings = knobs[0].settings
        return chosen

    def words(self, settings: Settings, limit: int) -> list[str]:
        """Return the advice as lines: savings of each setting, then overrides that are enough."""
        lines = [str(knob) for knob in self.knobs(settings)]
        together = self.enough(settings, limit)
        if len(together) > 1:
            lines.append(f"all of: {' '.join(together)}")
        return lines or ["a smaller model"]

    def _turned(self, settings: Settings) -> Iterator[tuple[str, Settings]]:
        """Yield overrides that may need less memory, with the settings that they lead to."""
        for override, field, value in self._changes(settings):
            group, _, name = field.rpartition(".")
            if group:
                name, value = group, replace(getattr(settings, group), **{name: value})
            yield override, replace(settings, **{name: value})

    def _changes(self, settings: Settings) -> Iterator[Change]:
        batch, zero, ranks = settings.batch, settings.zero, settings.launch.nproc
        if batch.micro_batch_size > 1 and batch.micro_batch_size % 2 == 0:
            half = batch.micro_batch_size // 2
            yield f"train.micro_batch_size={half}", "batch.micro_batch_size", half
        if not settings.gradient_checkpointing:
            yield "train.gradient_checkpointing=true", "gradient_checkpointing", True
        if batch.max_len > 2:
            yield f"train.max_len={batch.max_len // 2}", "batch.max_len", batch.max_len // 2
        sharing = 2 * settings.launch.sequence_parallel
        if self._may_share(settings, sharing):
            yield f"train.sequence_parallel={sharing}", "launch.sequence_parallel", sharing
        yield from _partitioned(settings)
        yield from _other_training(settings)
        if self._gpu:
            yield from _of_engine(settings)
        elif ranks % 2 == 0:
            yield f"train.nproc={ranks // 2}", "launch.nproc", ranks // 2
        if zero.stage and zero.bucket_size > _SMALL_BUCKET and settings.peft.kind == "none":
            yield f"zero.bucket_size={_SMALL_BUCKET}", "zero.bucket_size", _SMALL_BUCKET

    def _may_share(self, settings: Settings, sharing: int) -> bool:
        """Return True if `sharing` ranks could share each row; see `checks/model.shared_rows`."""
        divides = settings.world_size % sharing == 0 and self._heads % sharing == 0
        able = settings.attn_implementation == "sdpa" and settings.objective not in ONLINE
        return divides and able


def _partitioned(settings: Settings) -> Iterator[Change]:
    """Yield settings that partition states over ranks or offload them."""
    zero = settings.zero
    shared = settings.online.get("rl", {}).get("critic") == "shared"
    highest = 2 if settings.peft.kind == "qlora" or shared else 3
    for stage in range(zero.stage + 1, highest + 1):
        yield f"zero=zero{stage}", "zero.stage", stage
    adamw = settings.optim.optimizer == "adamw"
    if zero.stage and adamw and zero.offload_optimizer == "none":
        yield "zero.offload_optimizer=cpu", "zero.offload_optimizer", "cpu"
    if zero.stage == 3 and zero.offload_param == "none":
        yield "zero.offload_param=cpu", "zero.offload_param", "cpu"


def _of_engine(settings: Settings) -> Iterator[Change]:
    """Yield settings that give less GPU memory to vLLM, or to the trainer during rollouts."""
    rollout, zero = settings.online.get("rollout", {}), settings.zero
    if rollout.get("engine") != "vllm":
        return
    changes: dict[str, Any] = {}
    if rollout["gpu_memory"] > _SMALL_ENGINE:
        changes["gpu_memory"] = _SMALL_ENGINE
    offloaded = zero.offload_optimizer != "none" or zero.offload_param != "none"
    if zero.stage and not offloaded and not rollout["offload_trainer"]:
        changes["offload_trainer"] = True
    for name, value in changes.items():
        online = {**settings.online, "rollout": {**rollout, name: value}}
        yield f"rollout.{name}={str(value).lower()}", "online", online


def _other_training(settings: Settings) -> Iterator[Change]:
    """Yield settings that train fewer weights, a quantised base, or with another optimizer."""
    peft, zero = settings.peft, settings.zero
    if peft.kind == "none":
        yield "peft=lora", "peft", Peft("lora")
    if peft.kind == "lora" and peft.rank > 16:
        yield "peft.rank=16", "peft", replace(peft, rank=16, rank_pattern=None)
    if peft.kind != "qlora" and zero.stage < 3 and settings.dtype == "bfloat16":
        quantised = replace(peft, kind="qlora") if peft.kind == "lora" else Peft("qlora")
        yield "peft=qlora", "peft", quantised
    if settings.optim.optimizer == "adamw" and zero.offload_optimizer == "none":
        yield "train.optimizer=adamw_8bit", "optim.optimizer", "adamw_8bit"
