"""The critic: predicts the sum of future rewards before each token of a response.

    shared      an adapter and a value head of its own on the policy's trunk; no second model
    separate    a model of its own, trained in full or with an adapter like the policy's

Either way the critic is a DeepSpeed engine of its own with its own optimizer. The policy's
gradient norm, optimizer states, learning rate and trained tensors do not include it. Checkpoints
have it, the artifact has not: a value head in a served folder breaks vLLM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tasks.rl.settings import Loop
from tasks.training.engine.deepspeed_engine import Ranks, start_engine
from tasks.training.job import Optim, TrainJob
from tasks.training.model.adapter import ADAPTER, load_into, lora_config
from tasks.training.model.build import DTYPES, load_model, partitioned
from tasks.training.model.packed_model import TokenOutputs, model_of
from tasks.training.tokens.packing import Row

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
    head = nn.Linear(hidden, 1, dtype=DTYPES[job.settings.dtype])
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
            parameter.data = parameter.data.to(DTYPES[job.settings.dtype])
    if job.adapter is not None:
        load_into(policy, job.adapter, CRITIC)
    policy.set_adapter(ADAPTER)
