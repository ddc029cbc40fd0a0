"""Sections `train`, `peft` and `zero`: what is trained, and how.

The ranks' settings (`tasks/training/job.py`) are made of the groups of section `train`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tasks.config.choices import (
    AdapterInit,
    Count,
    Decay,
    Device,
    Keep,
    LessThanHalf,
    Mask,
    Natural,
    NonNegative,
    Objective,
    Offload,
    OnOverlong,
    Optimizer,
    PeftKind,
    Positive,
    PositiveShare,
    QuantType,
    Rate,
    Scheduler,
    Share,
    ZeroStage,
)
from tasks.config.defaults import COMPUTED
from tasks.config.section import Section
from tasks.core.errors import ConfigError


@dataclass(frozen=True)
class Loss(Section):
    """Options of the objectives; null: the objective's default. An option that the objective does
    not have is refused, see `tasks/training/losses.py`.
    """

    kind: Literal["sigmoid", "ipo"] | None = None  # dpo
    beta: float | None = None  # dpo, kto, orpo, simpo
    gamma: float | None = None  # simpo: margin of the rewards
    margin: float | None = None  # reward: added to the pairs' own margins
    center: float | None = None  # reward: weight of the squared sum of scores
    label_smoothing: LessThanHalf | None = None  # dpo: share of wrong labels (cDPO)
    nll: float | None = None  # dpo, simpo: weight of the chosen response's cross-entropy
    desirable_weight: float | None = None  # kto: weight of desirable responses
    undesirable_weight: float | None = None  # kto: weight of undesirable responses


@dataclass(frozen=True)
class Goal(Section):
    """The objective and its options."""

    objective: Objective = "sft"  # what training optimises
    loss: Loss = field(default_factory=Loss)
    router_aux_loss_coef: NonNegative | None = None  # load balance of experts; null: config.json's


@dataclass(frozen=True)
class Ranks(Section):
    """Number of ranks, and where they compute."""

    device: Device = "auto"  # auto: GPUs if there are any; cpu: leaves them alone
    nproc: Count = COMPUTED  # ranks per node; default: number of visible GPUs, 2 without
    nodes: Count = 1  # machines
    threads: Count | None = None  # CPU threads per rank; null: cores / nproc
    sequence_parallel: Count = 1  # ranks that share each row's tokens, for long samples (Ulysses)


@dataclass(frozen=True)
class BatchSize(Section):
    """Samples of an optimizer step, and number of steps."""

    micro_batch_size: Count = COMPUTED  # samples in one forward pass of a rank
    global_batch_size: Count = COMPUTED  # samples per optimizer step, over all ranks
    epochs: Positive = 1.0  # passes over the training rows
    max_steps: Count | None = None  # optimizer steps; wins over epochs


@dataclass(frozen=True)
class Optim(Section):
    """AdamW and its learning-rate schedule."""

    optimizer: Optimizer = "adamw"  # AdamW; moments in fp32, or in 8-bit blocks (arXiv:2110.02861)
    lr: Rate = COMPUTED  # peak learning rate; default by objective, adapter and model size
    scheduler: Scheduler = "cosine"  # learning rate after the warm-up
    warmup_ratio: Share = 0.03  # share of the steps
    min_lr_ratio: Share = 0.0  # last lr over lr; *_min_lr, polynomial, warmup_stable_decay
    decay_ratio: PositiveShare = 0.1  # share of the steps that lr falls in; warmup_stable_decay
    power: Positive = 1.0  # exponent of the decay; polynomial
    num_cycles: Count = 1  # decays from the peak; cosine_with_restarts
    weight_decay: NonNegative = 0.0  # of AdamW
    beta1: Decay = 0.9  # of AdamW: decay of the first moment
    beta2: Decay = 0.999  # of AdamW: decay of the second moment
    eps: PositiveShare = 1e-8  # of AdamW: added to the denominator
    max_grad_norm: NonNegative = 1.0  # gradients are clipped to this norm


@dataclass(frozen=True)
class Lengths(Section):
    """Length of a sample."""

    max_len: Count = COMPUTED  # tokens per sample; default 2048, or the model's context
    on_overlong: OnOverlong = "truncate"  # what happens to longer samples; split: raw texts


@dataclass(frozen=True)
class Steps(Section):
    """Forward and backward pass, and how often a step is logged."""

    mask: Mask = "every_answer"  # objective sft: tokens that bear loss
    gradient_checkpointing: bool = COMPUTED  # recompute activations; true for real models
    gradient_checkpointing_reentrant: bool = False  # torch's older variant of it
    log_every: Count = 1  # steps


@dataclass(frozen=True)
class Evaluate(Section):
    """Evaluations during training, and what follows from them."""

    eval_steps: Natural = 0  # steps between evaluations; 0: only before and after training
    best_metric: str = "loss"  # metric of the best checkpoint: loss, accuracy, margin, ...
    early_stop_patience: Natural = 0  # evaluations without improvement that end it; 0: never
    keep: Keep = "last"  # checkpoint that is delivered


@dataclass(frozen=True)
class Checkpoints(Section):
    """Checkpoints that a run can resume from."""

    save_steps: Natural = 50  # steps between checkpoints; 0: none
    max_ckpt_num: Natural = 3  # checkpoints that are kept, beside best and last; 0: all


@dataclass(frozen=True)
class Resume(Section):
    """Saving and resuming, which do not change the result of a run."""

    keep_ckpts: bool = False  # keep checkpoints after training has succeeded
    resume: str = "auto"  # auto: newest checkpoint of this run; never; or a checkpoint's folder


@dataclass(frozen=True)
class Timeouts(Section):
    """Limits in seconds."""

    timeout_s: Positive | None = None  # seconds for the whole stage; null: no limit
    collective_timeout_s: Positive = 1800.0  # seconds that ranks wait for each other


@dataclass(frozen=True)
class Probes(Section):
    """The fingerprint."""

    probes: Count = 32  # conversations that the fingerprint is taken on


@dataclass(frozen=True)
class Batch(Lengths, BatchSize):
    """The samples of an optimizer step."""

    def accumulation(self, world_size: int) -> int:
        """Return the number of micro-batches that a rank accumulates before a step.

        Raises:
            ConfigError: the sizes do not divide.
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
class Launch(Timeouts, Ranks):
    """The ranks, and their time limits."""


# Fields of a dataclass come in the order of its bases from last to first.
@dataclass(frozen=True)
class Train(
    Probes, Timeouts, Resume, Checkpoints, Evaluate, Steps, Lengths, Optim, BatchSize, Ranks, Goal
):
    """Optimisation and how it is started."""


@dataclass(frozen=True)
class Peft(Section):
    """The adapter (Hu et al. 2021, arXiv:2106.09685)."""

    kind: PeftKind = "none"  # none: full fine-tuning; lora; qlora: LoRA on a 4-bit base
    rank: Count = 64  # of the adapter
    alpha: Positive = 64.0  # the update is scaled by alpha / rank, or by alpha / sqrt(rank)
    dropout: Share = 0.0  # on the adapter's input
    target_modules: tuple[str, ...] | str = "all-linear"  # or a list, e.g. [q_proj,v_proj]
    exclude_modules: tuple[str, ...] = ()  # taken out of the targets
    use_rslora: bool = False  # scale by alpha / sqrt(rank), arXiv:2312.03732
    use_dora: bool = False  # train each row's magnitude too, arXiv:2402.09353
    init: AdapterInit = "default"  # A uniform (default) or gaussian, B zero
    rank_pattern: Mapping[str, int] | None = None  # other ranks by module, e.g. {q_proj: 16}
    alpha_pattern: Mapping[str, float] | None = None  # other alphas, likewise
    modules_to_save: tuple[str, ...] = ()  # modules trained in full, saved with the adapter
    quant_type: QuantType = "nf4"  # kind qlora: 4-bit code book (arXiv:2305.14314)
    double_quant: bool = True  # kind qlora: quantise the block scales too

    def quantization(self, dtype: str) -> dict[str, Any] | None:
        """Return the base's quantisation as `train.json` has it; None if it is not quantised.

        Args:
            dtype: `model.dtype`, which 4-bit layers compute in.
        """
        if self.kind != "qlora":
            return None
        return {
            "type": self.quant_type,
            "double_quant": self.double_quant,
            "compute_dtype": dtype,
        }


@dataclass(frozen=True)
class Zero(Section):
    """DeepSpeed's ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054)."""

    stage: ZeroStage = 2  # 0 to 3
    offload_optimizer: Offload = "none"  # stage 1 and up
    offload_param: Offload = "none"  # stage 3
    overlap_comm: bool | None = None  # communicate while computing; null: only ZeRO-3 on GPUs
    bucket_size: Count = 50_000_000  # elements per communication bucket
    persistence_threshold: Natural | None = None  # stage 3: parameters below this are whole
