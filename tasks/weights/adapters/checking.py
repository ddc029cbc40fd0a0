"""Check one adapter against one model: its pieces, unused tensors, and findings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tasks.weights.adapters.findings import copy_of, hint_on, misfits
from tasks.weights.adapters.legacy_names import contract_by_names, in_memory
from tasks.weights.adapters.live import LiveModel
from tasks.weights.adapters.piece import Piece
from tasks.weights.adapters.pieces import Contract
from tasks.weights.adapters.read import Adapter
from tasks.weights.plan.operations import Dropped


@dataclass(frozen=True)
class Checked:
    """An adapter that was checked against a model.

    Attributes:
        adapter: the adapter.
        weight: factor of its change in the sum.
        pieces: its changes, by live name; by key on disk if that is a part of a live tensor.
        dropped: its tensors that the merge does not use.
        copies: (dropped tensor, tensor that must have the same bytes).
        findings: everything that is wrong; if not empty, ignore the other attributes.
    """

    adapter: Adapter
    weight: float
    pieces: tuple[Piece, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    findings: tuple[str, ...] = ()


def check(adapter: Adapter, weight: float, live: LiveModel) -> Checked:
    """Compare the tensors of an adapter with its configuration and the model.

    Args:
        adapter: the adapter.
        weight: factor of its change; a finite number other than 0.
        live: the model that it was trained on.
    """
    where = f"{adapter.root.name}: " if adapter.name != "adapter" else ""
    if adapter.findings:
        texts = tuple(f"{where}adapter_config.json: {finding}" for finding in adapter.findings)
        return Checked(adapter, weight, findings=texts)
    contract = contract_by_names(Contract(adapter.config, live, adapter.tensors.tensors))
    findings = [*contract.findings, *misfits(contract)]
    dropped: list[Dropped] = []
    copies: list[tuple[str, str]] = []
    findings += _leftovers(adapter, contract, dropped, copies)
    if not math.isfinite(weight) or weight == 0:
        findings.append(f"weight {weight} of the adapter is not a finite number other than 0")
    return Checked(
        adapter,
        weight,
        tuple(replace(piece, target=in_memory(live, piece.target)) for piece in contract.pieces),
        tuple(dropped),
        tuple(copies),
        tuple(where + finding for finding in findings),
    )


def _leftovers(
    adapter: Adapter,
    contract: Contract,
    dropped: list[Dropped],
    copies: list[tuple[str, str]],
) -> Iterator[str]:
    """Drop known copies with a reason; any other tensor that is not expected is a finding."""
    wanted = contract.wanted()
    absent = sorted(set(wanted) - set(contract.file_tensors))
    for key in sorted(set(contract.file_tensors) - set(wanted)):
        copy = copy_of(key, contract, wanted)
        if copy is not None:
            dropped.append(Dropped(f"{adapter.name}:{key}", copy.reason))
            if copy.of:
                copies.append((f"{adapter.name}:{key}", f"{adapter.name}:{copy.of}"))
            continue
        hint = hint_on(key, absent, contract.live)
        absent = []  # search for a near match once: it is slow, and one hint is enough
        yield f"{key}: unexpected" + (f": {hint}" if hint else "")
