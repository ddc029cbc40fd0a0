"""Sections `train`, `peft` and `zero`: how it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tasks.config.choices import (
    AdapterInit,
    Device,
    Keep,
    Mask,
    Objective,
    Offload,
    OnOverlong,
    Optimizer,
    PeftKind,
    QuantType,
    Scheduler,
)
from tasks.config.defaults import COMPUTED


@dataclass
class Loss:
    """Knobs of the objectives; null leaves one at its default. Which objective has which:
    `tasks/training/objectives/`; one that the objective does not have is refused.
    """

    kind: str | None = None  # reward: sigmoid, log_exp; dpo: sigmoid, ipo
    beta: float | None = None  # dpo, kto, orpo, simpo
    gamma: float | None = None  # simpo: margin of the rewards
    margin: float | None = None  # reward: added to the pairs' own margins
    center: float | None = None  # reward: weight of the squared sum of scores
    label_smoothing: float | None = None  # dpo: share of wrong labels (cDPO)
    nll: float | None = None  # dpo, simpo: weight of the chosen answer's cross-entropy
    desirable_weight: float | None = None  # kto
    undesirable_weight: float | None = None  # kto


@dataclass
class Train:
    """Optimisation and how it is started."""

    objective: Objective = Objective.sft
    loss: Loss = field(default_factory=Loss)
    device: Device = Device.auto  # auto: GPUs where there are any; cpu leaves them alone
    nproc: int = COMPUTED  # ranks a node; the number of visible GPUs, 2 without
    nodes: int = 1  # machines
    threads: int | None = None  # CPU threads a rank; null: cores / nproc
    micro_batch_size: int = COMPUTED  # samples a rank holds at once
    global_batch_size: int = COMPUTED  # samples an optimizer step
    epochs: float = 1.0  # passes over the training rows
    max_steps: int | None = None  # optimizer steps; wins over epochs
    optimizer: Optimizer = Optimizer.adamw
    lr: float = COMPUTED  # peak; by objective, adapter and model size
    scheduler: Scheduler = Scheduler.cosine
    warmup_ratio: float = 0.03  # share of the steps
    min_lr_ratio: float = 0.0  # last lr over lr; *_min_lr, polynomial, warmup_stable_decay
    decay_ratio: float = 0.1  # share of the steps that lr falls in; warmup_stable_decay
    power: float = 1.0  # polynomial
    num_cycles: int = 1  # falls from the peak; cosine_with_restarts
    weight_decay: float = 0.0  # of AdamW
    beta1: float = 0.9  # of AdamW: decay of the first moment
    beta2: float = 0.999  # of AdamW: decay of the second moment
    eps: float = 1e-8  # of AdamW: added to the denominator
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    max_len: int = COMPUTED  # tokens a sample; 2048, or the model's context
    on_overlong: OnOverlong = OnOverlong.truncate
    mask: Mask = Mask.last_answer  # objective sft; the others learn from last answers
    gradient_checkpointing: bool = (
        COMPUTED  # recompute activations; true, but for the embedded model
    )
    gradient_checkpointing_reentrant: bool = False  # torch's older variant of it
    log_every: int = 1  # steps
    eval_steps: int = 0  # steps between evaluations; 0: only before the first and after the last
    best_metric: str = "loss"  # what the best checkpoint is best in: loss, accuracy, margin, ...
    early_stop_patience: int = 0  # evaluations without improvement until training ends; 0: never
    keep: Keep = Keep.last  # which state is delivered
    save_steps: int = 50  # steps between checkpoints to go on from; 0: none
    max_ckpt_num: int = 3  # checkpoints that stay, beside best and last; 0: all
    max_ckpt_gb: float | None = None  # GB (10^9 bytes) of them together; null: any
    keep_ckpts: bool = False  # after training has succeeded, too
    resume: str = "auto"  # auto: from the newest checkpoint of this very run; never; or its folder
    timeout_s: float | None = None  # of the whole stage
    collective_timeout_s: float = 1800.0  # that ranks wait for each other
    probes: int = 32  # conversations that the fingerprint is taken on


@dataclass
class Peft:
    """The adapter (Hu et al. 2021, arXiv:2106.09685)."""

    kind: PeftKind = PeftKind.none
    rank: int = 64  # of the adapter
    alpha: float = 64.0  # the update is scaled by alpha / rank, or by alpha / sqrt(rank)
    dropout: float = 0.0  # on the adapter's input
    target_modules: Any = "all-linear"  # or a list of module names, e.g. [q_proj,v_proj]
    exclude_modules: list[str] = field(default_factory=list)  # taken out of the targets
    use_rslora: bool = False  # scale by alpha / sqrt(rank), arXiv:2312.03732
    use_dora: bool = False  # train each row's magnitude too, arXiv:2402.09353
    init: AdapterInit = AdapterInit.default
    pissa_niter: int | None = None  # init pissa: iterations of a randomised SVD; null: exact
    rank_pattern: Any = None  # other ranks by module name, e.g. {q_proj: 16, layers.0.mlp: 4}
    alpha_pattern: Any = None  # other alphas, likewise
    modules_to_save: list[str] = field(default_factory=list)  # trained whole, saved with it
    quant_type: QuantType = QuantType.nf4
    double_quant: bool = True  # kind qlora: quantise the block scales too


@dataclass
class Zero:
    """DeepSpeed's ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054)."""

    stage: int = 2  # 0 to 3
    offload_optimizer: Offload = Offload.none  # stage 1 and up
    offload_param: Offload = Offload.none  # stage 3
    overlap_comm: bool | None = None  # communicate beside computing; null: ZeRO-3 on GPUs does
    bucket_size: int = 50_000_000  # elements
    persistence_threshold: int = 100_000  # stage 3: elements up to which a parameter stays whole
