"""How vLLM gets a policy, and what it cannot sample, by the settings alone. Imports no torch.

Conditions on the model, the number of ranks and the machine are checked by the preflight.
"""

from __future__ import annotations

from collections.abc import Iterator

from tasks.core.errors import ConfigError
from tasks.core.finding import Finding
from tasks.rl.settings import Rollout
from tasks.serving.vllm.colocation import RANKS_OF_ADAPTERS, Sampling
from tasks.training.job import Settings

_EMBEDDINGS = ("embed_tokens", "wte", "embed_in")
_TABLES = (*_EMBEDDINGS, "lm_head", "embed_out")


def goes_as_adapter(settings: Settings) -> bool:
    """Return True if vLLM gets the policy as an adapter, False if as merged weights.

    vLLM serves adapters of linear layers up to a rank, without whole modules or new rows.
    """
    peft = settings.peft
    if peft.kind == "none" or peft.use_dora or peft.modules_to_save or settings.new_tokens:
        return False
    return served_rank(settings) <= RANKS_OF_ADAPTERS[-1] and not _targets(settings, _TABLES)


def served_rank(settings: Settings) -> int:
    """Return the largest rank of the adapter."""
    peft = settings.peft
    return max([peft.rank, *(peft.rank_pattern or {}).values()])


def unservable(settings: Settings, rollout: Rollout) -> Iterator[Finding]:
    """Yield every reason why vLLM cannot sample from this policy."""
    if not Sampling(rollout.temperature, rollout.top_p, rollout.top_k).has_logprobs:
        yield Finding(
            "rollout.temperature",
            f"{rollout.temperature:g} with rollout.top_p={rollout.top_p:g} and "
            f"rollout.top_k={rollout.top_k}",
            "vLLM does not report log-probabilities at a temperature before top-p and top-k",
            "rollout.top_p=1 rollout.top_k=0, or rollout.temperature=1",
        )
    if settings.peft.use_dora and (named := _targets(settings, _EMBEDDINGS)):
        yield Finding(
            "peft.target_modules",
            f"{', '.join(named)} with peft.use_dora=true",
            "DoRA of an embedding cannot be merged for vLLM",
            "peft.use_dora=false or peft.target_modules=all-linear",
        )


def require_servable(settings: Settings, rollout: Rollout) -> None:
    """Raise ConfigError with every reason why vLLM cannot sample from this policy, if any."""
    problems = [str(problem) for problem in unservable(settings, rollout)]
    if problems:
        raise ConfigError(f"vLLM cannot sample from this policy: {problems[0]}", details=problems)


def _targets(settings: Settings, names: tuple[str, ...]) -> list[str]:
    """Return the modules of these names that the adapter changes."""
    peft = settings.peft
    if peft.kind == "none" or isinstance(peft.target_modules, str):
        return []
    return [name for name in peft.target_modules if name in names]
