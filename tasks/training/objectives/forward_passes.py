"""What an objective asks of the model: losses of rows, the reference's word, a baseline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import Batch
from tasks.training.model.adapter import as_it_began
from tasks.training.objectives import Loss, Objective, Said
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.order import Counts, HeldOut, heldout_rounds
from tasks.training.tokens.packing import Row, pack


@dataclass(frozen=True)
class Passes:
    """Forward passes over packed rows; under ZeRO-3 all ranks have to make equally many."""

    engine: Any
    ranks: Ranks
    objective: Objective

    def loss(
        self,
        examples: Examples,
        chosen: Sequence[int],
        *,
        counts: Counts,
        baseline: torch.Tensor | None,
    ) -> Loss:
        """The part of the chosen examples in the loss of everything that `counts` counts."""
        row = pack(examples, chosen, roles=self._trained_roles()).to(self.ranks.device)
        reference = self._reference(row) if self.objective.needs_reference else None
        out = self.engine(row=row)
        if self.objective.head == "score":
            said = Said(scores=out)
        else:
            said = Said(logprobs=out, reference=reference, baseline=baseline)
        return self.objective.loss(said, row, counts)

    def baseline(self, examples: Examples, rows: Sequence[HeldOut]) -> torch.Tensor | None:
        """Mean log-ratio of the baseline role's sequences over all rows and ranks, a scalar; None
        where the objective has no such role.
        """
        role = self.objective.baseline_role
        if role is None:
            return None
        number = self.objective.roles.index(role)
        total = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        with torch.no_grad(), self.evaluating():
            for one in rows:
                row = pack(examples, one.chosen, roles=(number,)).to(self.ranks.device)
                ratios = row.sums(self.engine(row=row)) - self._sums_of_reference(row, [number])
                if one.counted:
                    total[0] += ratios.double().sum()
                    total[1] += len(ratios)
        summed, count = self.ranks.total(total)
        return (summed / count).float()

    def heldout(self, examples: Examples, batch: Batch) -> list[HeldOut]:
        """This rank's rows of a pass over all examples, as many for each rank."""
        ranks = self.ranks
        return heldout_rounds(examples, batch, world_size=ranks.world_size, rank=ranks.rank)

    def each(self, examples: Examples, batch: Batch) -> Iterator[tuple[Row, torch.Tensor, bool]]:
        """Every row of such a pass with all of its roles, what the model says of it, without
        gradient, and whether it counts. All ranks take part, to the end.
        """
        with torch.no_grad(), self.evaluating():
            for one in self.heldout(examples, batch):
                row = pack(examples, one.chosen).to(self.ranks.device)
                yield row, self.engine(row=row), one.counted

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without dropout and without recomputation; as it was afterwards."""
        was = self.engine.module.training
        self.engine.eval()
        try:
            yield
        finally:
            self.engine.train(was)

    def _trained_roles(self) -> list[int]:
        roles = self.objective.roles
        return [i for i, role in enumerate(roles) if role != self.objective.baseline_role]

    def _reference(self, row: Row) -> torch.Tensor:
        with torch.no_grad(), self.evaluating():
            return self._sums_of_reference(row, self._trained_roles())

    def _sums_of_reference(self, row: Row, roles: Sequence[int]) -> torch.Tensor:
        """(S,) sums of log-probabilities under the reference: what was written down before the
        first step, or what the model says with its adapter as it began.
        """
        written = row.values.get("reference")
        if written is not None:
            every = written.view(len(row.examples), len(self.objective.roles))
            return every[:, list(roles)].reshape(-1)
        with as_it_began(self.engine.module):
            return row.sums(self.engine(row=row))


class Sums:
    """Named scalars added up on the device, over rows and ranks; read with one transfer."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, values: Mapping[str, torch.Tensor], *, counted: bool = True) -> None:
        """Add to each name. Every rank has to name the same, so that one that does not count only
        says its names.
        """
        for name, value in values.items():
            more = value.detach().double() if counted else value.new_zeros((), dtype=torch.float64)
            self._sums[name] = self._sums[name] + more if name in self._sums else more

    def total(self) -> dict[str, float]:
        """Over all ranks, which have to call it together."""
        together = self._ranks.total(torch.stack(list(self._sums.values())))
        return dict(zip(self._sums, together.tolist(), strict=True))
