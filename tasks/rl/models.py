"""The models of an online run as this rank has them: policy, reference, critic.

The critic predicts the sum of future rewards before each token of a response:

    shared      an adapter and a value head of its own on the policy's trunk; no second model
    separate    a model of its own, trained in full or with an adapter like the policy's

Either way it is a DeepSpeed engine of its own with its own optimizer. The policy's gradient norm,
optimizer states, learning rate and trained tensors do not include it. Checkpoints have it, the
artifact has not: a value head in a served folder breaks vLLM.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tasks.rl.algorithms import ALGORITHMS, Algorithm
from tasks.rl.settings import Loop, Online, Rollout
from tasks.training.engine.checkpoint import Progress
from tasks.training.engine.deepspeed_engine import Ranks, partitioned_engine, start_engine
from tasks.training.engine.saving import Others, restore
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import Optim, TrainJob
from tasks.training.model.build import (
    ADAPTER,
    initial_weights,
    load_into,
    load_model,
    lora_config,
    partitioned,
)
from tasks.training.model.packed_model import TokenOutputs, model_of, require_same
from tasks.training.tokens.rows import Row

LOG = logging.getLogger("plumbline.rl")
CRITIC = "critic"
STATES = TokenOutputs(states=True)


class ValueModel(nn.Module):
    """A trunk prepared by `accept_packed_rows`, and the value head."""

    def __init__(self, trunk: Any, head: nn.Linear) -> None:
        super().__init__()
        self.trunk = trunk
        self.value_head = head

    def forward(self, row: Row) -> torch.Tensor:
        """Return the value before each response token of the row, (N,) float32."""
        states_NH = self.trunk(row=row, outputs=STATES)
        return self.value_head(states_NH)[:, 0].float()


@dataclass(frozen=True)
class Critic:
    """The DeepSpeed engine of a critic, around a `ValueModel`."""

    engine: Any
    optim: Optim  # its learning rate follows the policy's schedule to its own peak
    policy: Any | None = None  # the policy's module if the two share a trunk

    @contextlib.contextmanager
    def active(self) -> Iterator[Any]:
        """Yield the engine; inside, a shared trunk computes with the critic's adapter.

        Run forward and backward passes inside, since gradient checkpointing recomputes the forward
        pass during backward.
        """
        if self.policy is None:
            yield self.engine
            return
        self.policy.set_adapter(CRITIC)
        try:
            yield self.engine
        finally:
            self.policy.set_adapter(ADAPTER)


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
    def padded(self) -> bool:
        """True if the policy's rows are padded instead of packed."""
        return bool(model_of(self.engine.module).padded_rows)

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

    The preflight has checked section `rl`. TrainingError if the policy does not keep packed
    sequences apart.
    """
    loop, chosen = online.loop, ALGORITHMS[job.settings.objective]
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


def start_critic(
    job: TrainJob, loop: Loop, ranks: Ranks, *, policy: Any, config: dict[str, Any], tokenizer: Any
) -> Critic:
    """Build the critic that section `rl` describes."""
    settings = job.settings
    optim = replace(settings.optim, lr=loop.critic_lr or settings.optim.lr)
    if loop.critic == "shared":
        _add_adapter(policy, job)
        head = _value_head(policy, job).to(ranks.device)
        policy.set_adapter(CRITIC)
        engine = start_engine(ValueModel(policy, head), config, optim)
        policy.set_adapter(ADAPTER)
        return Critic(engine, optim, policy)
    trunk = load_model(job, ranks, config, tokenizer=tokenizer, head="tokens")
    model = model_of(trunk)
    outputs, inputs = model.get_output_embeddings(), model.get_input_embeddings()
    if outputs is not None and outputs.weight is not inputs.weight:
        outputs.requires_grad_(False)  # the value head takes its place
    with partitioned(config):
        head = _value_head(trunk, job)
    return Critic(start_engine(ValueModel(trunk, head), config, optim), optim)


def _value_head(trunk: Any, job: TrainJob) -> nn.Linear:
    """Return a head that starts at zero: the first advantages are then the rewards, not noise."""
    hidden = model_of(trunk).config.get_text_config().hidden_size
    head = nn.Linear(hidden, 1, dtype=getattr(torch, job.settings.dtype))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _add_adapter(policy: Any, job: TrainJob) -> None:
    """Add an adapter with the policy's settings for the critic."""
    torch.manual_seed(job.settings.seed + 1)
    plain = replace(job.settings.peft, init="default", modules_to_save=())
    config = lora_config(plain, head="tokens", model=model_of(policy))
    policy.add_adapter(CRITIC, config, autocast_adapter_dtype=False)
    for name, parameter in policy.named_parameters():
        if f".{CRITIC}." in name:
            parameter.data = parameter.data.to(getattr(torch, job.settings.dtype))
    if job.adapter is not None:
        load_into(policy, job.adapter, CRITIC)
    policy.set_adapter(ADAPTER)
