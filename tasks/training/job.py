"""A training run's settings, and where its files lie.

Written as `job.json` by the parent and read by every rank. Knows no torch. Defaults are those of
`tasks/config`; a field without one has a default that depends on the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from tasks.config import inputs, learning
from tasks.config.online import Reward, Rollout
from tasks.core.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Peft:
    """Section `peft`. `kind` is none (full fine-tuning), lora or qlora."""

    kind: str = learning.Peft.kind.name
    rank: int = learning.Peft.rank
    alpha: float = learning.Peft.alpha
    dropout: float = learning.Peft.dropout
    target_modules: tuple[str, ...] | str = learning.Peft.target_modules
    exclude_modules: tuple[str, ...] | str = ()
    use_rslora: bool = learning.Peft.use_rslora
    use_dora: bool = learning.Peft.use_dora
    init: str = learning.Peft.init.name
    pissa_niter: int | None = learning.Peft.pissa_niter
    rank_pattern: Mapping[str, int] | None = learning.Peft.rank_pattern
    alpha_pattern: Mapping[str, float] | None = learning.Peft.alpha_pattern
    modules_to_save: tuple[str, ...] = ()
    quant_type: str = learning.Peft.quant_type.name
    double_quant: bool = learning.Peft.double_quant

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
    """Section `zero`. `bucket_size` and `persistence_threshold` count elements."""

    stage: int = learning.Zero.stage
    offload_optimizer: str = learning.Zero.offload_optimizer.name
    offload_param: str = learning.Zero.offload_param.name
    overlap_comm: bool | None = learning.Zero.overlap_comm
    bucket_size: int = learning.Zero.bucket_size
    persistence_threshold: int = learning.Zero.persistence_threshold


@dataclass(frozen=True)
class Optim:
    """AdamW and its schedule; the knobs of schedules are those of `schedule.Shape`."""

    lr: float
    optimizer: str = learning.Train.optimizer.name
    scheduler: str = learning.Train.scheduler.name
    warmup_ratio: float = learning.Train.warmup_ratio
    min_lr_ratio: float = learning.Train.min_lr_ratio
    decay_ratio: float = learning.Train.decay_ratio
    power: float = learning.Train.power
    num_cycles: int = learning.Train.num_cycles
    weight_decay: float = learning.Train.weight_decay
    beta1: float = learning.Train.beta1
    beta2: float = learning.Train.beta2
    eps: float = learning.Train.eps
    max_grad_norm: float = learning.Train.max_grad_norm


@dataclass(frozen=True)
class Batch:
    """What one optimizer step sees. Batch sizes count samples, `max_len` counts tokens."""

    micro_batch_size: int
    global_batch_size: int
    max_len: int
    epochs: float = learning.Train.epochs
    max_steps: int | None = learning.Train.max_steps
    on_overlong: str = learning.Train.on_overlong.name

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

    nproc: int
    device: str = learning.Train.device.name
    nodes: int = learning.Train.nodes
    threads: int | None = learning.Train.threads
    timeout_s: float | None = learning.Train.timeout_s
    collective_timeout_s: float = learning.Train.collective_timeout_s


@dataclass(frozen=True)
class Evaluate:
    """Evaluations in the course of training, and what follows from them.

    Attributes:
        eval_steps: steps between them; 0 evaluates before the first step and after the last.
        best_metric: what the best checkpoint is best in.
        early_stop_patience: evaluations without improvement after which training ends; 0: never.
        keep: `last` or `best`: which state the artifact holds.
    """

    eval_steps: int = learning.Train.eval_steps
    best_metric: str = learning.Train.best_metric
    early_stop_patience: int = learning.Train.early_stop_patience
    keep: str = learning.Train.keep.name


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is trained, and nothing about where it lies.

    `online` holds the sections `rl`, `rollout` and `reward` of objectives that learn from their own
    replies, see `tasks/rl/settings.py`; it is empty for all others.
    """

    optim: Optim
    batch: Batch
    launch: Launch
    gradient_checkpointing: bool
    objective: str = learning.Train.objective.name
    seed: int = 0
    dtype: str = inputs.Model.dtype.name
    attn_implementation: str = inputs.Model.attn_implementation.name
    trust_remote_code: bool = inputs.Model.trust_remote_code
    new_tokens: tuple[str, ...] = ()
    gradient_checkpointing_reentrant: bool = learning.Train.gradient_checkpointing_reentrant
    log_every: int = learning.Train.log_every
    save_steps: int = learning.Train.save_steps
    max_ckpt_num: int = learning.Train.max_ckpt_num
    max_ckpt_gb: float | None = learning.Train.max_ckpt_gb
    probes: int = learning.Train.probes
    mask: str = learning.Train.mask.name
    loss: Mapping[str, Any] = field(default_factory=dict)
    online: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    peft: Peft = field(default_factory=Peft)
    zero: Zero = field(default_factory=Zero)
    evaluate: Evaluate = field(default_factory=Evaluate)

    @property
    def world_size(self) -> int:
        """Ranks of all nodes together."""
        return self.launch.nproc * self.launch.nodes

    @property
    def runs_vllm(self) -> bool:
        """Return True if ranks hold a vLLM engine, which samples responses or scores them."""
        rollout, reward = self.online.get("rollout", {}), self.online.get("reward", {})
        sampling = rollout.get("engine", Rollout.engine.name)
        return bool(self.online) and "vllm" in (sampling, reward.get("engine", Reward.engine.name))

    @classmethod
    def from_sections(
        cls,
        *,
        train: Mapping[str, Any],
        peft: Mapping[str, Any],
        zero: Mapping[str, Any],
        model: Mapping[str, Any],
        seed: int,
        online: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Settings:
        """Build from the configuration's sections of the same names.

        Of `model` only dtype, attention, trust_remote_code and new_tokens are read, of `train` not
        what is in `HOW`; a key of the other sections that nothing here knows is an error.
        """
        flat = {name: value for name, value in train.items() if name not in HOW}
        parts: dict[str, Any] = {
            name: kind(**{f.name: flat.pop(f.name) for f in fields(kind) if f.name in flat})
            for name, kind in _OF_TRAIN.items()
        }
        shared = ("dtype", "attn_implementation", "trust_remote_code")
        flat.update({name: model[name] for name in shared if name in model})
        flat["new_tokens"] = tuple(model.get("new_tokens") or ())
        _refuse_unknown(cls, flat, "train")
        return cls(
            seed=seed,
            online=dict(online or {}),
            peft=read_section(Peft, peft, "peft"),
            zero=read_section(Zero, zero, "zero"),
            **parts,
            **flat,
        )


HOW = ("resume", "keep_ckpts")
"""Keys of section `train` that change how a result is come by and not what it is."""

_OF_TRAIN: dict[str, type[Any]] = {
    "optim": Optim,
    "batch": Batch,
    "launch": Launch,
    "evaluate": Evaluate,
}


@dataclass(frozen=True)
class TrainJob:
    """One training run: settings and paths. All paths are absolute.

    Attributes:
        settings: what to train and how.
        base: HF folder of the base model.
        base_digest: digest of the base.
        data: dataset artifact.
        out: folder of the `shards` artifact.
        checkpoints: folder of this run's checkpoints.
        resume: the checkpoint to go on from.
        universal: that checkpoint's engine in DeepSpeed's universal form, where the number of ranks
            has changed.
        identity: what a checkpoint has to agree with, by dotted name.
        tokens: folder of tokenised data that runs share.
        rollout_base: HF folder that the rollout engine loads; None: the base itself.
        reward: folder of the reward model that came before in a chain.
        adapter: PEFT folder, with a tokenizer, that training goes on with; None: a new adapter.
        max_truncated: share of the training rows that may be cut.
    """

    settings: Settings
    base: Path
    base_digest: str
    data: Path
    out: Path
    checkpoints: Path
    resume: Path | None = None
    universal: Path | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    tokens: Path | None = None
    rollout_base: Path | None = None
    reward: Path | None = None
    adapter: Path | None = None
    max_truncated: float = 0.2

    @property
    def side_files(self) -> Path:
        """Where the tokenizer and the generation config are read."""
        return self.base if self.adapter is None else self.adapter

    @property
    def token_folder(self) -> Path:
        """Where tokenised data are kept: a place that runs share, or beside the checkpoints."""
        return self.tokens if self.tokens is not None else self.checkpoints / "tokens"

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
        raw["new_tokens"] = tuple(raw["new_tokens"])
        kinds: dict[str, type[Any]] = {"peft": Peft, "zero": Zero, **_OF_TRAIN}
        parts: dict[str, Any] = {
            name: read_section(kind, raw.pop(name), name) for name, kind in kinds.items()
        }
        return cls(
            settings=Settings(**raw, **parts),
            base_digest=document["base_digest"],
            identity=document["identity"],
            max_truncated=document["max_truncated"],
            **{name: Path(document[name]) for name in ("base", "data", "out", "checkpoints")},
            **{n: Path(document[n]) for n in _MAYBE if document[n]},
        )


_MAYBE = ("resume", "universal", "tokens", "rollout_base", "reward", "adapter")


def read_section(kind: type[T], values: Mapping[str, Any], name: str) -> T:
    """A section of the configuration as its dataclass; lists become tuples.

    Raises:
        ConfigError: a key that the section does not have.
    """
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
