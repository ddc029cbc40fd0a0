"""Settings of an online run beyond those of every training run, and what vLLM can sample of them.

`tasks/config/sections.py` defines the sections. They travel as plain mappings in `Settings.online`,
so that they are part of a stage's key and of a checkpoint's identity. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.config import sections
from tasks.config.sections import Rl as Loop
from tasks.config.sections import Rollout, read_section
from tasks.core.errors import Finding
from tasks.serving.vllm.colocation import RANKS_OF_ADAPTERS
from tasks.training.job import Settings

__all__ = ["Loop", "Online", "Reward", "Rollout"]

_EMBEDDINGS = ("embed_tokens", "wte", "embed_in")
_TABLES = (*_EMBEDDINGS, "lm_head", "embed_out")


@dataclass(frozen=True)
class Reward(sections.Reward):
    """Section `reward`, and what its sources contain."""

    # of the function's file and the model's folder: other rewards lead to another key
    digest: str = ""


@dataclass(frozen=True)
class Online:
    """The sections `rl`, `rollout` and `reward`."""

    loop: Loop
    rollout: Rollout
    reward: Reward

    @classmethod
    def of(cls, sections: Mapping[str, Any]) -> Online:
        """Read the sections of `Settings.online`."""
        return cls(
            loop=read_section(Loop, sections.get("rl", {}), "rl"),
            rollout=read_section(Rollout, sections.get("rollout", {}), "rollout"),
            reward=read_section(Reward, sections.get("reward", {}), "reward"),
        )


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
    return max([settings.peft.rank, *(settings.peft.rank_pattern or {}).values()])


def unservable(settings: Settings, rollout: Rollout) -> Iterator[Finding]:
    """Yield every reason why vLLM cannot sample from this policy, whatever model and machine."""
    if rollout.temperature != 1 and rollout.cut:
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


def _targets(settings: Settings, names: tuple[str, ...]) -> list[str]:
    """Return the modules of these names that the adapter changes."""
    targets = settings.peft.target_modules
    if settings.peft.kind == "none" or isinstance(targets, str):
        return []
    return [name for name in targets if name in names]
