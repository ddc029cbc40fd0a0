"""Objectives by name (`objective`), one file each. Each is a dataclass of its `train.loss` options.

sft                 negative log-likelihood of the supervised tokens
reward              pairwise ranking of a score head
dpo, orpo, simpo    preference pairs
kto                 answers marked as desirable or not
forward_passes      the forward passes of an objective, `Passes`
reference_logprobs  log-probs of the reference, computed before full fine-tuning
heldout_scores      mean and standard deviation of a reward model's scores
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

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
class ModelOutput:
    """Input of a loss: output of the model on one row, float32. S sequences, N supervised tokens.

    Attributes:
        logprobs: (N,) log-probabilities of the supervised tokens, in nats; causal models.
        scores: (S,) scores of the sequences; models with a score head.
        reference: (S,) sums of log-probabilities under the reference model, if needed.
        baseline: scalar, mean log-ratio of KTO's mismatched answers over the whole step.
    """

    logprobs: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    baseline: torch.Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """One row's part of the step's loss and metrics.

    Sums over the row are divided by counts of the whole global batch. So the loss of a step does
    not depend on the assignment of examples to rows, ranks and accumulation steps.

    Attributes:
        value: scalar with gradient; the step's loss is the sum over all rows and ranks.
        measures: metrics by name, scalars without gradient; added up in the same way.
    """

    value: torch.Tensor
    measures: Mapping[str, torch.Tensor]


class Objective:
    """Base of the objectives.

    Attributes:
        roles: names of an example's sequences.
        head: `tokens` (a causal model) or `score` (a model with a score head of one label).
        needs_reference: True if `loss` reads `ModelOutput.reference`.
        baseline_role: role whose sequences give `ModelOutput.baseline`, or None; they are not
            trained on.
    """

    roles: ClassVar[tuple[str, ...]] = ("text",)
    head: ClassVar[str] = "tokens"
    needs_reference: ClassVar[bool] = False
    baseline_role: ClassVar[str | None] = None

    def loss(self, output: ModelOutput, row: Row, counts: Counts) -> Loss:
        """Return this row's part of the loss.

        Args:
            output: output of the model on the row.
            row: the packed row.
            counts: totals of the whole step, to divide by.
        """
        raise NotImplementedError

    def means(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a step from their sums over all rows and ranks."""
        return totals


def kind_of(name: str) -> type[Any]:
    """Return the class of an objective.

    Raises:
        ConfigError: unknown name.
    """
    if name not in _MODULES:
        raise ConfigError(
            f"train.objective={name} is not an objective",
            hint=f"train.objective={'|'.join(sorted(_MODULES))}",
        )
    module, _, kind = _MODULES[name].partition(":")
    objective_class: type[Any] = getattr(importlib.import_module(f"{__name__}.{module}"), kind)
    return objective_class


def objective(name: str, knobs: Mapping[str, Any]) -> Objective:
    """Return an objective with its options.

    Args:
        name: `train.objective`.
        knobs: section `train.loss`; an option that is None keeps its default.

    Raises:
        ConfigError: unknown name, or an option that the objective does not have.
    """
    kind = kind_of(name)
    options = {key: value for key, value in knobs.items() if value is not None}
    known = [f.name for f in fields(kind)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"train.loss.{unknown[0]} is not an option of train.objective={name}",
            details=[f"train.loss.{key}={options[key]}" for key in unknown],
            hint=f"{name} has: {', '.join(known) or 'none'}; null keeps the default",
        )
    made: Objective = kind(**options)
    return made
