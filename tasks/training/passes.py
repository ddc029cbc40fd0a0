"""Forward passes of an objective over packed rows.

`Passes` computes losses of rows, the reference's log-probabilities and KTO's baseline;
`with_reference` stores the reference's sums of a whole split; `heldout_scores` measures a reward
model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tasks.core.errors import TrainingError
from tasks.core.files import flush_tree
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import Batch, TrainJob
from tasks.training.losses import Loss, Objective, Output
from tasks.training.model.build import initial_weights
from tasks.training.model.packed_model import PLAIN, TokenOutputs, evaluating
from tasks.training.tokens.examples import Examples
from tasks.training.tokens.rows import Dealt, Row, Totals, heldout_rounds, pack

FOLDER = "reference"
"""Folder of the reference's log-probabilities, beside the checkpoints."""


@dataclass(frozen=True)
class Passes:
    """Forward passes over packed rows. Under ZeRO-3 all ranks have to make equally many.

    `router` is the weight of the router loss in training; 0 for none.
    """

    engine: Any
    ranks: Ranks
    objective: Objective
    router: float = 0.0

    def loss(
        self, examples: Examples, dealt: Dealt, totals: Totals, baseline: torch.Tensor | None = None
    ) -> Loss:
        """Return a row's part of the loss of a step or an evaluation; 0 if it is not counted.

        `totals` are those of the whole step or evaluation. The router loss of a mixture of experts
        belongs to training, not to evaluations.
        """
        roles, training = self.objective.trained, torch.is_grad_enabled()
        row = pack(examples, dealt.chosen, roles=roles).to(self.ranks.device)
        reference = None
        if self.objective.needs_reference:
            with evaluating(self.engine):
                reference = self._reference(row, roles)
        routed = bool(self.router) and training
        out = self.engine(row=row, outputs=TokenOutputs(router=True) if routed else PLAIN)
        results = out[:-1] if routed else out
        output = Output(logprobs=results, reference=reference, baseline=baseline)
        if self.objective.head == "score":
            output = Output(scores=results)
        loss = self.objective.loss(output, row, totals)
        if routed:
            balance = out[-1] * (row.ids.shape[1] / totals.tokens)
            measures = {**loss.measures, "router_loss": balance.detach()}
            loss = Loss(loss.value + self.router * balance, measures)
        if dealt.counted:
            return loss
        return Loss(loss.value * 0, {name: value * 0 for name, value in loss.measures.items()})

    def baseline(self, examples: Examples, rows: Sequence[Dealt]) -> torch.Tensor | None:
        """Return the mean log-ratio of the baseline role's sequences, over all rows and ranks."""
        if self.objective.baseline_role is None:
            return None
        roles = [self.objective.roles.index(self.objective.baseline_role)]
        total = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        with evaluating(self.engine):
            for chosen, counted in rows:
                row = pack(examples, chosen, roles=roles).to(self.ranks.device)
                ratios = row.sums(self.engine(row=row)) - self._reference(row, roles)
                if counted:
                    total[0] += ratios.double().sum()
                    total[1] += len(ratios)
        summed, count = self.ranks.total(total)
        return (summed / count).float()

    def heldout(self, examples: Examples, batch: Batch) -> list[Dealt]:
        """Return this rank's rows of a pass over all examples; see `heldout_rounds`.

        Of ranks that share their rows, one counts them.
        """
        ranks = self.ranks
        rounds = heldout_rounds(examples, batch, world_size=ranks.replicas, rank=ranks.replica)
        return rounds if ranks.leads else [Dealt(row.chosen, counted=False) for row in rounds]

    def each(self, examples: Examples, batch: Batch) -> Iterator[tuple[Row, torch.Tensor]]:
        """Yield each row of `heldout` that counts, with all roles, and the model's output.

        Outputs have no gradient. All ranks take part, to the end.
        """
        with evaluating(self.engine):
            for chosen, counted in self.heldout(examples, batch):
                row = pack(examples, chosen).to(self.ranks.device)
                out = self.engine(row=row)
                if counted:
                    yield row, out

    def _reference(self, row: Row, roles: Sequence[int]) -> torch.Tensor:
        """Return (S,) sums of log-probabilities under the reference.

        They are either stored (`with_reference`) or computed now, with the adapter as it was
        before the first step.
        """
        stored = row.values.get("reference")
        if stored is not None:
            of_roles = stored.view(len(row.examples), len(self.objective.roles))
            return of_roles[:, list(roles)].reshape(-1)
        with initial_weights(self.engine.module):
            return row.sums(self.engine(row=row))


def add_up(
    ranks: Ranks, rows: Sequence[Mapping[str, torch.Tensor]], *, counted: bool = True
) -> dict[str, float]:
    """Add up named scalars of this rank's rows and of all ranks, read with one transfer.

    All ranks have rows, with the same names. A rank that does not count adds zeros.
    """
    sums = [sum(row[name].detach().double() for row in rows) for name in rows[0]]
    own = torch.stack(sums)
    own = own if counted else torch.zeros_like(own)
    return dict(zip(rows[0], ranks.total(own).tolist(), strict=True))


def with_reference(
    examples: Examples, split: str, *, passes: Passes, job: TrainJob, begun: int
) -> Examples:
    """Return the examples with `values["reference"]`: (E, R) sums over supervised tokens, in nats.

    Full fine-tuning has no adapter to switch off, and a second copy of the model would double the
    memory; under ZeRO-3 passes with and without an adapter would undo each other's prefetching. So
    a new run computes the sums before its first step and stores them; a resumed run reads them. All
    ranks take part.
    """
    path, ranks = job.checkpoints / FOLDER / f"{split}.npy", passes.ranks
    if begun and job.resume is not None and not path.is_file():  # a checkpoint of another run
        sums = np.load(job.resume.parent / FOLDER / path.name)
    elif begun:
        sums = np.load(path)
    else:
        mine = torch.zeros(len(examples), len(examples.roles), device=ranks.device)
        for row, logprobs in passes.each(examples, job.settings.batch):
            mine[row.examples] = row.sums(logprobs).view(len(row.examples), -1)
        sums = ranks.total(mine).cpu().numpy()
    ranks.barrier()  # nobody looks for the file any more
    if ranks.first and not (begun and path.is_file()):
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, sums)
        flush_tree(path.parent)
    ranks.barrier()
    return replace(examples, values={**examples.values, "reference": sums})


def heldout_scores(passes: Passes, examples: Examples, batch: Batch) -> dict[str, float]:
    """Return `mean`, `std` (population) and `count` of a reward model's raw scores.

    They are of every answer of the evaluation examples, and make scores of different models
    comparable; PPO normalises rewards with them. All ranks take part.
    """
    ranks = passes.ranks
    sums = torch.zeros(3, dtype=torch.float64, device=ranks.device)
    for row, raw in passes.each(examples, batch):
        scores = raw.double()
        sums[0] += scores.sum()
        sums[1] += scores.square().sum()
        sums[2] += row.sequences
    total, squares, count = ranks.total(sums).tolist()
    mean = total / count
    variance = squares / count - mean**2
    if not math.isfinite(variance) or variance <= 0:
        raise TrainingError(
            f"the reward model's scores on {count:.0f} held-out answers have mean {mean:g} and "
            f"variance {variance:g}: it does not distinguish them",
            hint="train longer, with another train.lr, or look at the data",
        )
    return {"mean": mean, "std": math.sqrt(variance), "count": int(count)}
