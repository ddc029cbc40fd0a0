"""Train several models in turn: the steps (SFT, reward model, PPO) of setting `steps`.

    steps:
      sft: [train=sft]
      reward: [train=reward, data.train_size=12000]
      ppo: [train=ppo, reward=model]

Every step has a whole configuration: the overrides of the run, then those of the step. On the
command line, `steps.ppo.train.lr=1e-5` sets a value for the step `ppo` alone, and
`steps.ppo.peft=lora` an option; they are applied last. A step starts from the model that the step
before it serves. A reward model is not trained further; it scores the responses of later steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flows.cli.composed import Composed
from flows.cli.config import compose_config, split
from flows.cli.vocabulary import in_step, nearest
from tasks.config.checks import findings
from tasks.core.errors import ConfigError, Finding


@dataclass(frozen=True)
class Step:
    """One step of a run: one model that is trained and served."""

    name: str  # empty if the run has a single step
    composed: Composed
    rewarded: bool = False  # an earlier step trains a reward model
    # section `peft` of the earlier step whose model this step starts from; None for `model.path`
    begins_with: Mapping[str, Any] | None = None

    @cached_property
    def findings(self) -> list[Finding]:
        """Problems of the step on this machine; rows of the user are read only once for them."""
        return findings(self.composed.settings, self.composed.runs, rewarded=self.rewarded)

    @property
    def objective(self) -> str:
        """Training objective of the step, such as "sft"."""
        return str(self.composed.settings["train"]["objective"])


def compose(overrides: Sequence[str]) -> Composed:
    """Compose the configuration of the run, without overrides of single steps."""
    return compose_config(split(overrides)[0])


def chain_steps(composed: Composed, overrides: Sequence[str]) -> list[Step]:
    """Return the steps of a run, in order, given all overrides of the command line.

    Raises ConfigError if an override names no step, or the overrides of a step are wrong.
    """
    chain: dict[str, list[str]] = composed.settings["steps"]
    plain, by_step = split(overrides)
    unknown = sorted(set(by_step) - set(chain))
    if unknown:
        raise _no_step(unknown[0], by_step[unknown[0]][0], list(chain))
    if not chain:
        return [Step("", composed)]
    steps: list[Step] = []
    for number, (name, own) in enumerate(chain.items(), 1):
        models = [step for step in steps if step.objective != "reward"]
        # The next step starts from 16 bits, so only the last model is quantised.
        last = [] if number == len(chain) else ["convert.quantize=none"]
        config = _composed(name, [*plain, *last, *own, *by_step.get(name, ())])
        if last:  # only the last model is registered
            config.settings["gate"]["conditions"] = None
        step = Step(name, config, rewarded=len(models) < len(steps))
        if models:
            _require_same_adapter(models[-1], step)
            step = replace(step, begins_with=models[-1].composed.settings["peft"])
        steps.append(step)
    return steps


def continues(before: Mapping[str, Any], peft: Mapping[str, Any]) -> bool:
    """Return True if a step trains the adapter of the step before: both are QLoRA.

    Merged weights would be quantised again and lose most of what the step before learned.
    """
    return before["kind"] == peft["kind"] == "qlora"


def _require_same_adapter(before: Step, step: Step) -> None:
    """Raise ConfigError if a QLoRA step cannot train the adapter of the QLoRA step before it."""
    there, here = before.composed.settings["peft"], step.composed.settings["peft"]
    if not continues(there, here):
        return
    differs = [key for key in here if key not in _MAY_DIFFER and here[key] != there[key]]
    if differs:
        key = f"peft.{differs[0]}"
        raise ConfigError(
            f"step {step.name}: {key}={here[differs[0]]}, and step {before.name} has "
            f"{there[differs[0]]}; a QLoRA step goes on with the adapter of the step before, whose "
            "merged weights would lose in 4 bits most of what it learned",
            details=[f"peft.{name}" for name in differs],
            hint=f"the same section peft for both, or steps.{step.name}.peft=lora",
        )


_MAY_DIFFER = ("dropout",)
"""Keys of section `peft` in which two steps that train the same adapter may differ."""


def _no_step(name: str, override: str, steps: Sequence[str]) -> ConfigError:
    """Return the error for an override of a step that the chain does not have."""
    near = " or ".join(f"steps.{step}.{override}" for step in nearest(name, steps, n=1))
    known = f"its steps are {', '.join(steps)}" if steps else "+exp=qlora has one"
    return ConfigError(
        f"steps.{name}.{override}: the chain has no step {name}; {known}",
        hint=near or f"+exp=qlora steps.ppo.{override}",
    )


def _composed(name: str, overrides: Sequence[str]) -> Composed:
    """Compose the configuration of one step; an error names the step."""
    try:
        return compose_config(overrides)
    except ConfigError as error:
        pairs = (detail.partition(" -> ") for detail in error.details)
        details = [f"{text}{arrow}{in_step(name, hint)}" for text, arrow, hint in pairs]
        message, hint = f"step {name}: {error.message}", in_step(name, error.hint)
        raise ConfigError(message, details=details, hint=hint) from error
