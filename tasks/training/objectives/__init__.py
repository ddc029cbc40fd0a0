"""Objectives by name: one file each, imported when asked for.

    sft.py                       negative log-likelihood of the supervised tokens
    reward.py                    pairwise ranking of a score head
    dpo.py orpo.py simpo.py      preference pairs
    kto.py                       answers marked as desirable or not

An objective is a frozen dataclass: its fields are the knobs of section `train.loss` that it knows,
its `loss` turns what the model said of one row into a number. That number is this row's part of
the whole step's loss: sums are divided by counts of the whole global batch, so that the result does
not depend on how examples are dealt to rows, ranks and accumulation steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from tasks.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from tasks.training.tokens.order import Counts
    from tasks.training.tokens.packing import Row

_MODULES = {
    "sft": "sft:Sft",
    "reward": "reward:Reward",
    "dpo": "dpo:Dpo",
    "kto": "kto:Kto",
    "orpo": "orpo:Orpo",
    "simpo": "simpo:Simpo",
}


@dataclass(frozen=True)
class Said:
    """What the model says of a row; all float32.

    Attributes:
        logprobs: (N,) of the supervised tokens, in nats; of a causal model.
        scores: (S,) one a sequence; of a model with a score head.
        reference: (S,) sums of log-probabilities under the reference model, where one is needed.
        baseline: what `Kto` compares with, a mean over the whole step.
    """

    logprobs: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    baseline: torch.Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """One row's part of the step's loss, and of its measures.

    Attributes:
        value: scalar with gradient; the step's loss is the sum over all rows and ranks.
        measures: scalars without gradient that add up over rows and ranks likewise.
    """

    value: torch.Tensor
    measures: Mapping[str, torch.Tensor]


class Objective(Protocol):
    """What every objective has.

    Attributes:
        roles: sequences of an example, by name.
        head: `tokens` (a causal model) or `score` (a model with a score head of one label).
        needs_reference: whether `Said.reference` is wanted.
        baseline_role: the role whose sequences `Said.baseline` is taken on, before the step;
            they are not trained on.
    """

    roles: ClassVar[tuple[str, ...]]
    head: ClassVar[str]
    needs_reference: ClassVar[bool]
    baseline_role: ClassVar[str | None]

    def loss(self, said: Said, row: Row, counts: Counts) -> Loss:
        """This row's part of the loss."""
        ...


def kind_of(name: str) -> type[Any]:
    """The class of the objective of that name.

    Raises:
        ConfigError: when there is none.
    """
    if name not in _MODULES:
        raise ConfigError(
            f"train.objective={name} is not an objective",
            hint=f"train.objective={'|'.join(sorted(_MODULES))}",
        )
    module, _, kind = _MODULES[name].partition(":")
    found: type[Any] = getattr(importlib.import_module(f"{__name__}.{module}"), kind)
    return found


def objective(name: str, knobs: Mapping[str, Any]) -> Objective:
    """The objective of that name with its knobs; a knob that is None keeps its default.

    Raises:
        ConfigError: for an unknown name, or knobs that the objective does not have.
    """
    kind = kind_of(name)
    given = {key: value for key, value in knobs.items() if value is not None}
    known = [f.name for f in fields(kind)]
    foreign = sorted(set(given) - set(known))
    if foreign:
        raise ConfigError(
            f"train.loss.{foreign[0]} is not a knob of train.objective={name}",
            details=[f"train.loss.{key}={given[key]}" for key in foreign],
            hint=f"{name} has: {', '.join(known) or 'none'}; null leaves a knob alone",
        )
    made: Objective = kind(**given)
    return made
