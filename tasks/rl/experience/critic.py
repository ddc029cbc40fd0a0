"""The critic: what a reply is still worth, from the state before each of its tokens.

    shared      an adapter and a value head of its own on the policy's trunk: no second model
    separate    a model of its own, with the policy's kind of adapter or trained whole

Either is a module of its own to DeepSpeed, with its own optimizer: the policy's gradient norm, its
moments and its learning rate do not know that there is a critic, and neither does anything that
reads the policy's trained tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tasks.core.errors import ConfigError
from tasks.rl.settings import Loop
from tasks.training.engine.deepspeed_engine import Ranks, start_engine
from tasks.training.job import Optim, TrainJob
from tasks.training.model.adapter import load_into, lora_config
from tasks.training.model.base import DTYPES, partitioned
from tasks.training.model.build import load_model
from tasks.training.model.fused_lora import ADAPTER
from tasks.training.model.packed_model import Asked, model_of
from tasks.training.tokens.packing import Row

CRITIC = "critic"
STATES = Asked(states=True)


class ValueModel(nn.Module):
    """A trunk that `take_rows` has taught, and the value head."""

    def __init__(self, trunk: Any, head: nn.Linear) -> None:
        super().__init__()
        self.trunk = trunk
        self.value_head = head

    def forward(self, row: Row) -> torch.Tensor:
        """(N,) float32: the value before each of the row's reply tokens."""
        return _values(self.value_head, self.trunk(row=row, asked=STATES))


class Critic:
    """DeepSpeed's engine around a critic, and the adapter that it computes with.

    Args:
        engine: around a `ValueModel`.
        optim: of its optimizer; the learning rate follows the policy's schedule to its own peak.
        policy: the policy's module where the two share a trunk; None where they do not.
    """

    def __init__(self, engine: Any, optim: Optim, policy: Any | None = None) -> None:
        self.engine = engine
        self.optim = optim
        self._policy = policy

    @contextlib.contextmanager
    def active(self) -> Iterator[Any]:
        """Within it the trunk computes with the critic's adapter; gives the engine.

        Forward and backward passes belong inside: what gradient checkpointing computes again has to
        be what was computed.
        """
        if self._policy is None:
            yield self.engine
            return
        self._policy.set_adapter(CRITIC)
        try:
            yield self.engine
        finally:
            self._policy.set_adapter(ADAPTER)


def start_critic(
    job: TrainJob, loop: Loop, ranks: Ranks, *, policy: Any, config: dict[str, Any], tokenizer: Any
) -> Critic:
    """Make the critic that section `rl` asks for.

    Args:
        job: what is trained.
        loop: section `rl`.
        ranks: this process among its peers.
        policy: the policy's module, whose engine is running.
        config: the policy's DeepSpeed configuration.
        tokenizer: the policy's.

    Raises:
        ConfigError: a shared trunk where there is none to share.
    """
    settings = job.settings
    optim = replace(settings.optim, lr=loop.critic_lr or settings.optim.lr)
    config = _with_lr(config, optim.lr)
    dtype = DTYPES[settings.dtype]
    if loop.critic == "shared":
        _require_shareable(settings.peft.kind, settings.zero.stage)
        _add_adapter(policy, job)
        head = _value_head(model_of(policy), dtype).to(ranks.device)
        policy.set_adapter(CRITIC)
        engine = start_engine(ValueModel(policy, head), config, optim)
        policy.set_adapter(ADAPTER)
        return Critic(engine, optim, policy)
    trunk = load_model(job, ranks, config, tokenizer=tokenizer, head="tokens")
    outputs, inputs = (
        model_of(trunk).get_output_embeddings(),
        model_of(trunk).get_input_embeddings(),
    )
    if outputs is not None and outputs.weight is not inputs.weight:
        outputs.requires_grad_(False)  # the value head takes its place
    with partitioned(config):
        head = _value_head(model_of(trunk), dtype)
    return Critic(start_engine(ValueModel(trunk, head), config, optim), optim)


def _values(head: nn.Linear, states_NH: torch.Tensor) -> torch.Tensor:
    return head(states_NH)[:, 0].float()


def _value_head(model: Any, dtype: torch.dtype) -> nn.Linear:
    """Begins at zero: the first advantages are the rewards themselves, not noise."""
    hidden = model.config.get_text_config().hidden_size
    head = nn.Linear(hidden, 1, bias=True, dtype=dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _add_adapter(policy: Any, job: TrainJob) -> None:
    """peft's adapter of the same settings, beside the policy's."""
    torch.manual_seed(job.settings.seed + 1)
    plain = replace(job.settings.peft, init="default", modules_to_save=())
    if job.adapter is not None:
        plain = replace(plain, init=job.settings.peft.init)  # PiSSA's has twice the rank
    policy.add_adapter(CRITIC, lora_config(plain, head="tokens"), autocast_adapter_dtype=False)
    dtype = DTYPES[job.settings.dtype]
    for name, parameter in policy.named_parameters():
        if f".{CRITIC}." in name:
            parameter.data = parameter.data.to(dtype)
    if job.adapter is not None:
        load_into(policy, job.adapter, CRITIC)
    policy.set_adapter(ADAPTER)


def _with_lr(config: dict[str, Any], lr: float) -> dict[str, Any]:
    if "optimizer" not in config:
        return dict(config)
    optimizer = config["optimizer"]
    return {**config, "optimizer": {**optimizer, "params": {**optimizer["params"], "lr": lr}}}


def _require_shareable(kind: str, stage: int) -> None:
    if kind == "none":
        raise ConfigError(
            "rl.critic=shared, and the policy is trained whole: there is no trunk to share",
            hint="rl.critic=separate, or peft=lora",
        )
    if stage == 3:
        raise ConfigError(
            "rl.critic=shared under ZeRO-3: two engines cannot gather the same parameters",
            hint="rl.critic=separate, or zero=zero2",
        )
