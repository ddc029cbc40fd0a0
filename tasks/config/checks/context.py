"""A configuration, and facts about its model and this machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tasks.config.defaults import ONLINE
from tasks.core import machine


def installed(name: str) -> str:
    """Return the version of a distribution; "0" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "0"


@dataclass(frozen=True)
class Known:
    """Facts about a model that is not loaded."""

    modules: tuple[str, ...] = ()  # dotted names with a 2-D weight; empty if unknown (a Hub id)
    parameters: int | None = None  # number of them; None if unknown
    config: dict[str, Any] = field(default_factory=dict)  # config.json; empty if unknown
    owners: tuple[str, ...] = ()  # dotted names of all modules with a tensor; empty if unknown
    score: tuple[int, ...] | None = None  # shape of a score head's weight; None without one

    @property
    def text(self) -> dict[str, Any]:
        """Contents of config.json about the decoder; a multimodal model nests them."""
        return self.config.get("text_config") or self.config

    @property
    def context(self) -> int | None:
        """Longest sequence in tokens; None if unknown."""
        return self.text.get("max_position_embeddings")


@dataclass(frozen=True)
class Context:
    """A configuration, and facts about its model and this machine."""

    settings: dict[str, Any]  # resolved
    known: Known  # of the base model
    runs: Path  # `paths.runs`, which may not exist yet
    rewarded: bool = False  # True if an earlier step of the chain trains the reward model

    @property
    def objective(self) -> str:
        """`train.objective`."""
        return str(self.settings["train"]["objective"])

    @property
    def online(self) -> bool:
        """True if the objective learns from its own responses."""
        return self.objective in ONLINE

    @cached_property
    def gpu(self) -> bool:
        """True if ranks train on GPUs."""
        return machine.has_gpu(self.settings["train"]["device"])
