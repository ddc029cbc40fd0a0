"""What a training run is told: settings in the words of the configuration, and where things lie.

Written as `job.json` by the parent and read by every rank. Knows no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from tasks.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Peft:
    """Section `peft`. `kind` is none (full fine-tuning), lora or qlora."""

    kind: str = "none"
    rank: int = 64
    alpha: float = 64
    dropout: float = 0.0
    target_modules: tuple[str, ...] | str = "all-linear"
    use_rslora: bool = False
    quant_type: str = "nf4"
    double_quant: bool = True

    def quantization(self) -> dict[str, Any] | None:
        """What `train.json` says of the base's quantisation; None when it is not quantised."""
        if self.kind != "qlora":
            return None
        return {
            "type": self.quant_type,
            "double_quant": self.double_quant,
            "compute_dtype": "bfloat16",
        }


@dataclass(frozen=True)
class Zero:
    """Section `zero`. `bucket_size` counts elements."""

    stage: int = 2
    offload_optimizer: str = "none"
    offload_param: str = "none"
    overlap_comm: bool = False
    bucket_size: int = 50_000_000


@dataclass(frozen=True)
class Optim:
    """AdamW and its schedule."""

    lr: float = 1e-4
    scheduler: str = "cosine"
    warmup_ratio: float = 0.03
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Batch:
    """What one optimizer step sees. Batch sizes count samples, `max_len` counts tokens."""

    micro_batch_size: int = 4
    global_batch_size: int = 64
    epochs: float = 1.0
    max_steps: int | None = None
    max_len: int = 1024
    on_overlong: str = "truncate"

    def accumulation(self, world_size: int) -> int:
        """Micro-batches a rank adds up before it steps.

        Raises:
            ConfigError: when the sizes do not divide.
        """
        together = self.micro_batch_size * world_size
        if together <= 0 or self.global_batch_size % together:
            raise ConfigError(
                f"train.global_batch_size={self.global_batch_size} is not a multiple of "
                f"train.micro_batch_size={self.micro_batch_size} x {world_size} ranks",
                hint=f"train.global_batch_size={max(together, 1)} or a multiple of it",
            )
        return self.global_batch_size // together


@dataclass(frozen=True)
class Launch:
    """How the ranks are started. `threads` a rank; None shares the machine's cores out."""

    nproc: int = 2
    nodes: int = 1
    threads: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is trained, and nothing about where it lies."""

    objective: str = "sft"
    seed: int = 0
    dtype: str = "bfloat16"
    attn_implementation: str = "sdpa"
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    gradient_checkpointing_reentrant: bool = False
    log_every: int = 1
    save_steps: int = 50
    probes: int = 32
    peft: Peft = field(default_factory=Peft)
    zero: Zero = field(default_factory=Zero)
    optim: Optim = field(default_factory=Optim)
    batch: Batch = field(default_factory=Batch)
    launch: Launch = field(default_factory=Launch)

    @property
    def world_size(self) -> int:
        """Ranks of all nodes together."""
        return self.launch.nproc * self.launch.nodes

    @classmethod
    def from_sections(
        cls,
        *,
        train: Mapping[str, Any],
        peft: Mapping[str, Any],
        zero: Mapping[str, Any],
        model: Mapping[str, Any],
        seed: int,
    ) -> Settings:
        """Build from the configuration's sections of the same names.

        Of `model` only dtype, attn_implementation and trust_remote_code are read; a key of the
        other sections that nothing here knows is an error.
        """
        flat = dict(train)
        parts: dict[str, Any] = {
            name: kind(**{f.name: flat.pop(f.name) for f in fields(kind) if f.name in flat})
            for name, kind in (("optim", Optim), ("batch", Batch), ("launch", Launch))
        }
        shared = ("dtype", "attn_implementation", "trust_remote_code")
        flat.update({name: model[name] for name in shared if name in model})
        _refuse_unknown(cls, flat, "train")
        return cls(
            seed=seed,
            peft=_section(Peft, peft, "peft"),
            zero=_section(Zero, zero, "zero"),
            **parts,
            **flat,
        )


@dataclass(frozen=True)
class TrainJob:
    """One training run: settings and paths. All paths are absolute."""

    settings: Settings
    base: Path
    base_digest: str
    data: Path
    out: Path
    checkpoints: Path

    def write(self, path: Path) -> None:
        """Write as JSON."""
        document = asdict(self)
        text = json.dumps(document, indent=1, sort_keys=True, default=str)
        path.write_text(text + "\n")

    @classmethod
    def read(cls, path: Path) -> TrainJob:
        """Read what `write` wrote."""
        document = json.loads(path.read_text())
        raw = document["settings"]
        kinds: dict[str, type[Any]] = {
            "peft": Peft,
            "zero": Zero,
            "optim": Optim,
            "batch": Batch,
            "launch": Launch,
        }
        parts: dict[str, Any] = {
            name: _section(kind, raw.pop(name), name) for name, kind in kinds.items()
        }
        return cls(
            settings=Settings(**raw, **parts),
            base_digest=document["base_digest"],
            **{name: Path(document[name]) for name in ("base", "data", "out", "checkpoints")},
        )


def _section(kind: type[T], values: Mapping[str, Any], name: str) -> T:
    _refuse_unknown(kind, values, name)
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return kind(**plain)


def _refuse_unknown(kind: type[Any], values: Mapping[str, Any], section: str) -> None:
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(
            f"{section}.{unknown[0]} is not a setting of this section",
            details=[f"{section}.{name}" for name in unknown],
            hint=f"{section} knows: {', '.join(sorted(known))}",
        )
