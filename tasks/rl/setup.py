"""The models of an online run as this rank holds them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tasks.rl.algorithms import Algorithm, algorithm
from tasks.rl.critic import CRITIC, Critic, start_critic
from tasks.rl.settings import Loop, Online, Rollout
from tasks.training.engine.checkpoint import Progress
from tasks.training.engine.deepspeed_engine import Ranks, partitioned_engine, start_engine
from tasks.training.engine.saving import Others, restore
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import TrainJob
from tasks.training.model.adapter import initial_weights
from tasks.training.model.build import load_model
from tasks.training.model.packed_model import TokenOutputs, require_same
from tasks.training.tokens.packing import Row

LOG = logging.getLogger("plumbline.rl")


@dataclass(frozen=True)
class Setup:
    """Models and settings of one online run on this rank."""

    engine: Any  # the DeepSpeed engine of the policy
    critic: Critic | None  # None if the algorithm has no critic
    copy: Any | None  # frozen copy of a policy that is trained in full, if the KL to it is needed
    ranks: Ranks  # this process and its peers
    job: TrainJob  # the training job
    online: Online  # sections `rl`, `rollout` and `reward`
    algorithm: Algorithm  # one of `ALGORITHMS`

    @property
    def loop(self) -> Loop:
        """Section `rl`."""
        return self.online.loop

    @property
    def rollout(self) -> Rollout:
        """Section `rollout`."""
        return self.online.rollout

    @property
    def has_reference(self) -> bool:
        """True if a setting needs the KL to the reference, the policy before its first step."""
        return self.loop.kl_coef > 0 or self.loop.kl_limit is not None

    def reference_logprobs(self, row: Row, outputs: TokenOutputs) -> torch.Tensor:
        """Return the reference's log-probabilities of the row's supervised tokens, (N,).

        With an adapter it is the policy with the adapter switched off, or as the previous step left
        it; with full fine-tuning a frozen copy, which ZeRO-3 partitions like the policy.
        """
        if self.copy is not None:
            return self.copy(row=row, outputs=outputs)
        with initial_weights(self.engine.module):
            return self.engine(row=row, outputs=outputs)

    @property
    def others(self) -> Others:
        """Engines besides the policy's whose state is in a checkpoint."""
        return {} if self.critic is None else {CRITIC: self.critic.active}


def disable_dropout(*models: nn.Module) -> bool:
    """Set every dropout and router jitter to 0; return True if there was any."""
    changed = False
    for module in (module for model in models for module in model.modules()):
        for name, value in list(vars(module).items()):
            drops = "drop" in name or "jitter" in name or isinstance(module, nn.Dropout)
            if drops and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                changed = True
    return changed


def set_up(
    ranks: Ranks, job: TrainJob, online: Online, *, tokenizer: Any, trial: Row
) -> tuple[Setup, Progress]:
    """Build the models of a run, and load the checkpoint `job.resume` if there is one.

    Raises ConfigError if section `rl` is invalid for the algorithm, TrainingError if the policy
    does not keep packed sequences apart.
    """
    loop, chosen = online.loop, algorithm(job.settings.objective, online.loop)
    universal = job.universal is not None
    config = deepspeed_config(job.settings, ranks.world_size, gpu=ranks.gpu, universal=universal)
    model = load_model(job, ranks, config, tokenizer=tokenizer)
    engine = start_engine(model, config, job.settings.optim)
    critic, models = None, [engine.module]
    if chosen.critic:
        critic = start_critic(
            job, loop, ranks, policy=engine.module, config=config, tokenizer=tokenizer
        )
        models.append(critic.engine.module)
    if disable_dropout(*models) and ranks.first:
        LOG.warning("dropout is off: its noise would be in every ratio of new to old policy")
    setup = Setup(engine, critic, None, ranks, job, online, chosen)
    progress = restore(engine, job, setup.others)
    require_same(engine, trial.to(ranks.device))
    if setup.has_reference and job.settings.peft.kind == "none":
        setup = replace(setup, copy=_frozen_copy(job, ranks, config, tokenizer))
    return setup, progress


def _frozen_copy(job: TrainJob, ranks: Ranks, config: dict[str, Any], tokenizer: Any) -> Any:
    plain = replace(job, settings=replace(job.settings, gradient_checkpointing=False))
    model = load_model(plain, ranks, config, tokenizer=tokenizer, head="tokens")
    model.requires_grad_(False)
    if config["zero_optimization"]["stage"] != 3:
        return model.to(ranks.device).eval()
    return partitioned_engine(model, config)
