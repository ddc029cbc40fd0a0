"""Checks of a configuration: everything that would cost a run minutes, or be wrong in silence.

    settings    settings that contradict each other, whatever the model
    inputs      the user's files: an audit of the base, the first rows as prepare_data reads them
    model       the base model's folder, and what objective and adapter need of it
    online      sections `rl`, `rollout` and `reward`, and servers of rollouts
    machine     GPUs, number formats, libraries, disk
    memory      memory of ranks and engines
    release     conditions of the gate, lm-evaluation-harness
    quantized   models that cannot be quantised
    servers     servers that have to answer, names on their pages

Most modules have a function `problems`; none imports torch. `findings` calls all of them. What
pydantic or a library refuses within seconds is not checked here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tasks.config.defaults import ONLINE
from tasks.core.errors import Finding
from tasks.core.machine import has_gpu
from tasks.weights.model_class import only_bf16


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

    @property
    def only_bf16(self) -> bool:
        """True if vLLM computes the model in bfloat16 alone on a CPU."""
        return only_bf16(self.config)


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
        return has_gpu(self.settings["train"]["device"])


def findings(values: dict[str, Any], runs: Path, *, rewarded: bool = False) -> list[Finding]:
    """Return every problem of a run on this machine; arguments are those of `Context`."""
    # Loads most of the product: a delivery calls single checks.
    from tasks.config.checks import inputs, machine, memory, model, online, release, settings

    checks = (settings, inputs, model, online, machine, memory, release)
    known, problems = model.look_at(values["model"])
    context = Context(values, known, runs, rewarded=rewarded)
    return [*problems, *(finding for check in checks for finding in check.problems(context))]
