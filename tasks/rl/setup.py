"""The models of an online run as this rank holds them, and its rollout engine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tasks.rl.algorithms.registry import Recipe, recipe
from tasks.rl.experience.critic import CRITIC, Critic, start_critic
from tasks.rl.experience.reference import Reference, open_reference
from tasks.rl.rollout.engines import Engine
from tasks.rl.rollout.policy_sync import Policy
from tasks.rl.settings import Loop, Online, Rollout
from tasks.training.engine.checkpoint import Progress
from tasks.training.engine.deepspeed_engine import Ranks, start_engine
from tasks.training.engine.saving import Others, restore
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import TrainJob
from tasks.training.model.build import load_model
from tasks.training.model.packed_model import require_same
from tasks.training.tokens.packing import Row

LOG = logging.getLogger("plumbline.rl")


@dataclass(frozen=True)
class Setup:
    """Models and settings of one online run on this rank.

    Attributes:
        engine: the DeepSpeed engine of the policy.
        critic: None if the algorithm has no critic.
        reference: None if no setting needs the KL to the reference.
        ranks: this process and its peers.
        job: the training job.
        online: sections `rl`, `rollout` and `reward`.
        recipe: the algorithm.
    """

    engine: Any
    critic: Critic | None
    reference: Reference | None
    ranks: Ranks
    job: TrainJob
    online: Online
    recipe: Recipe

    @property
    def loop(self) -> Loop:
        """Section `rl`."""
        return self.online.loop

    @property
    def rollout(self) -> Rollout:
        """Section `rollout`."""
        return self.online.rollout

    @property
    def others(self) -> Others:
        """Engines besides the policy's whose state is in a checkpoint."""
        return {} if self.critic is None else {CRITIC: self.critic.active}


@contextlib.contextmanager
def open_engine(
    job: TrainJob,
    rollout: Rollout,
    ranks: Ranks,
    *,
    engine: Any,
    ends: Sequence[int],
    probes: Sequence[Sequence[int]] = (),
) -> Iterator[Engine]:
    """Yield the rollout engine of section `rollout`, and close it afterwards. All ranks take part.

    Raises:
        ConfigError: vLLM cannot sample from this policy; names every reason.
        TrainingError: the engine does not start.
    """
    policy = Policy(engine, job, ranks)
    rollout_engine: Engine
    if rollout.engine == "server":
        from tasks.rl.rollout.server_engine import ServerEngine

        rollout_engine = ServerEngine(policy, rollout, ends=tuple(ends), probes=probes)
    else:
        from tasks.rl.rollout.vllm_engine import VllmEngine

        rollout_engine = VllmEngine(policy, rollout, ends=tuple(ends))
    try:
        yield rollout_engine
    finally:
        rollout_engine.close()


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

    Raises:
        ConfigError: section `rl` is invalid for the algorithm.
        TrainingError: the policy does not keep packed sequences apart.
    """
    loop, algorithm = online.loop, recipe(job.settings.objective, online.loop)
    universal = job.universal is not None
    config = deepspeed_config(job.settings, ranks.world_size, gpu=ranks.gpu, universal=universal)
    model = load_model(job, ranks, config, tokenizer=tokenizer)
    engine = start_engine(model, config, job.settings.optim)
    critic = None
    if algorithm.critic:
        critic = start_critic(
            job, loop, ranks, policy=engine.module, config=config, tokenizer=tokenizer
        )
    critics = [] if critic is None else [critic.engine.module]
    if disable_dropout(engine.module, *critics) and ranks.first:
        LOG.warning("dropout is off: its noise would be in every ratio of new to old policy")
    setup = Setup(engine, critic, None, ranks, job, online, algorithm)
    progress = restore(engine, job, ranks, setup.others)
    require_same(engine, trial.to(ranks.device))
    if loop.kl_coef > 0 or loop.kl_limit is not None:
        reference = open_reference(job, ranks, engine=engine, config=config, tokenizer=tokenizer)
        setup = replace(setup, reference=reference)
    return setup, progress
