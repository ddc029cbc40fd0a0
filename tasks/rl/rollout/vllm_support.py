"""Policies that vLLM cannot sample from, by their settings alone. Imports no torch.

Conditions on the model, the number of ranks and the machine are checked by the preflight.
"""

from __future__ import annotations

from collections.abc import Iterator

from tasks.core.errors import ConfigError
from tasks.core.finding import Finding
from tasks.rl.settings import Rollout
from tasks.serving.vllm.colocation import RANKS_OF_ADAPTERS, Sampling
from tasks.training.job import Settings

NATIVE = "rollout=transformers"
_TABLES = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")


def goes_as_adapter(settings: Settings) -> bool:
    """Return True if vLLM gets the policy as an adapter, False if as full weights."""
    peft = settings.peft
    return peft.kind != "none" and not peft.use_dora


def served_rank(settings: Settings) -> int:
    """Return the largest rank of the adapter."""
    peft = settings.peft
    return max([peft.rank, *(peft.rank_pattern or {}).values()])


def unservable(settings: Settings, rollout: Rollout) -> list[Finding]:
    """Return every reason why `rollout.engine=vllm` cannot sample from this policy."""
    return [*_adapter_findings(settings), *_sampling_findings(rollout)]


def require_servable(settings: Settings, rollout: Rollout) -> None:
    """Raise ConfigError with every reason why vLLM cannot sample from this policy, if any."""
    problems = unservable(settings, rollout)
    if problems:
        raise ConfigError(
            f"vLLM cannot sample from this policy: {problems[0]}",
            details=[str(problem) for problem in problems],
        )


def _adapter_findings(settings: Settings) -> Iterator[Finding]:
    peft = settings.peft
    if peft.kind == "none":
        return
    rank = served_rank(settings)
    most = RANKS_OF_ADAPTERS[-1]
    if goes_as_adapter(settings) and rank > most:
        yield Finding(
            "peft.rank",
            str(rank),
            f"vLLM serves adapters up to rank {most}",
            f"peft.rank={most}, or {NATIVE}",
        )
    if peft.modules_to_save:
        yield Finding(
            "peft.modules_to_save",
            str(list(peft.modules_to_save)),
            "vLLM serves no adapters with whole modules",
            f"peft.modules_to_save=[], or {NATIVE}",
        )
    if settings.new_tokens:
        yield Finding(
            "model.new_tokens",
            str(list(settings.new_tokens)),
            "vLLM serves no adapters with rows of an embedding",
            f"add them in an earlier step (objective sft), or {NATIVE}",
        )
    targets = peft.target_modules
    tables = [] if isinstance(targets, str) else [name for name in targets if name in _TABLES]
    if tables:
        yield Finding(
            "peft.target_modules",
            str(list(targets)),
            f"{', '.join(tables)}: rollouts by vLLM support adapters of linear layers only",
            f"peft.target_modules=all-linear, or {NATIVE}",
        )


def _sampling_findings(rollout: Rollout) -> Iterator[Finding]:
    if not Sampling(rollout.temperature, rollout.top_p, rollout.top_k).has_logprobs:
        yield Finding(
            "rollout.temperature",
            f"{rollout.temperature:g} with rollout.top_p={rollout.top_p:g} and "
            f"rollout.top_k={rollout.top_k}",
            "vLLM does not report log-probabilities at a temperature before top-p and top-k",
            f"rollout.top_p=1 rollout.top_k=0, or rollout.temperature=1, or {NATIVE}",
        )
