"""Policies that vLLM cannot sample from, told from settings before anything starts. Knows no torch.

What depends on the model, on the number of ranks or on the machine is found by the preflight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tasks.core.errors import ConfigError
from tasks.rl.settings import Rollout
from tasks.serving.vllm.colocation import RANKS_OF_ADAPTERS, Sampling
from tasks.training.job import Settings

NATIVE = "rollout=transformers"
_TABLES = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")


@dataclass(frozen=True)
class Refusal:
    """A setting that rules vLLM out, what was found there, and what to type instead."""

    key: str
    found: str
    reason: str
    hint: str = NATIVE

    def __str__(self) -> str:
        return f"{self.key}={self.found}: {self.reason}"


def goes_as_adapter(settings: Settings) -> bool:
    """Whether the policy is handed to vLLM as an adapter; if not, as merged weights."""
    peft = settings.peft
    return peft.kind != "none" and not peft.use_dora


def unservable(settings: Settings, rollout: Rollout) -> list[Refusal]:
    """Every reason why `rollout.engine=vllm` cannot sample from this policy."""
    return [*_of_adapter(settings), *_of_sampling(rollout)]


def require_servable(settings: Settings, rollout: Rollout) -> None:
    """Raise ConfigError with every reason, where there is one."""
    found = unservable(settings, rollout)
    if found:
        raise ConfigError(
            f"rollout.engine=vllm cannot sample from this policy: {found[0]}",
            details=list(map(str, found)),
            hint=found[0].hint,
        )


def _of_adapter(settings: Settings) -> Iterator[Refusal]:
    peft = settings.peft
    if peft.kind == "none":
        return
    double = 2 if peft.init == "pissa" else 1
    rank, most = (
        double * max([peft.rank, *(peft.rank_pattern or {}).values()]),
        RANKS_OF_ADAPTERS[-1],
    )
    if goes_as_adapter(settings) and rank > most:
        found = f"{rank // double}" + (" with peft.init=pissa, which doubles it" * (double - 1))
        yield Refusal(
            "peft.rank",
            found,
            f"vLLM serves adapters up to rank {most}",
            f"peft.rank={most // double}, or {NATIVE}",
        )
    if peft.modules_to_save:
        yield Refusal(
            "peft.modules_to_save",
            str(list(peft.modules_to_save)),
            "vLLM serves no adapter that brings whole modules",
            f"peft.modules_to_save=[], or {NATIVE}",
        )
    if settings.new_tokens:
        yield Refusal(
            "model.new_tokens",
            str(list(settings.new_tokens)),
            "vLLM serves no adapter that brings rows of an embedding",
            f"add them in an earlier stage (objective sft), or {NATIVE}",
        )
    targets = peft.target_modules
    tables = [] if isinstance(targets, str) else [name for name in targets if name in _TABLES]
    if tables:
        yield Refusal(
            "peft.target_modules",
            str(list(targets)),
            f"{', '.join(tables)}: rollouts by vLLM take adapters of linear layers alone",
            f"peft.target_modules=all-linear, or {NATIVE}",
        )


def _of_sampling(rollout: Rollout) -> Iterator[Refusal]:
    if not Sampling(rollout.temperature, rollout.top_p, rollout.top_k).has_logprobs:
        yield Refusal(
            "rollout.temperature",
            f"{rollout.temperature:g} with rollout.top_p={rollout.top_p:g} and "
            f"rollout.top_k={rollout.top_k}",
            "vLLM tells no log-probabilities at a temperature before the cut",
            f"rollout.top_p=1 rollout.top_k=0, or rollout.temperature=1, or {NATIVE}",
        )
