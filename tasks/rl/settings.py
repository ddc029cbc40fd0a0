"""Settings of an online run beyond those of every training run: loop, rollouts, rewards.

`tasks/config/sections.py` defines the sections. They travel as plain mappings in `Settings.online`,
so that they are part of a stage's key and of a checkpoint's identity. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.config import sections
from tasks.config.sections import Rl as Loop
from tasks.config.sections import Rollout, read_section

__all__ = ["Loop", "Online", "Reward", "Rollout"]


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
