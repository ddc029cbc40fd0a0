"""Settings with defaults for tests: of a tiny model, on two ranks.

The configuration computes these defaults from the model; a test that builds its settings by hand
says only what it is about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tasks.config.sections import KlEstimator, KlIn
from tasks.rl import settings as online
from tasks.training import job

if TYPE_CHECKING:
    from tasks.config.sections import Smoke


@dataclass(frozen=True)
class Optim(job.Optim):
    lr: float = 1e-4


@dataclass(frozen=True)
class Batch(job.Batch):
    micro_batch_size: int = 4
    global_batch_size: int = 64
    max_len: int = 1024


@dataclass(frozen=True)
class Launch(job.Launch):
    nproc: int = 2


@dataclass(frozen=True)
class Settings(job.Settings):
    optim: job.Optim = field(default_factory=Optim)
    batch: job.Batch = field(default_factory=Batch)
    launch: job.Launch = field(default_factory=Launch)
    gradient_checkpointing: bool = False


@dataclass(frozen=True)
class Loop(online.Loop):
    rollout_batch_size: int = 32
    num_generations: int = 4
    ppo_epochs: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    kl_in: KlIn = "loss"
    kl_estimator: KlEstimator = "k3"
    whiten: bool = False
    critic_warmup: int = 0
    refill: int = 0
    mask_truncated: bool = False


@dataclass(frozen=True)
class Rollout(online.Rollout):
    max_new_tokens: int = 64
    max_prompt_len: int = 256
    offload_trainer: bool = False


def smoke_settings(**changes: Any) -> Smoke:
    """Return the usual settings of smoke_eval for the embedded model, with some changed."""
    from flows.cli.config import compose_config
    from tasks.config.sections import Smoke

    usual = compose_config([]).settings["smoke"]
    return Smoke(**{**usual, **changes})
