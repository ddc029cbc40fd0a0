"""One adapter against one model: its pieces, what is left out, and everything that is wrong."""

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
    """An adapter with its weight, as it goes into a sum.

    Attributes:
        adapter: what was checked.
        weight: that it is added with.
        pieces: by live name; a piece of what is a part in memory, by its key on disk.
        dropped: tensors of it that go nowhere.
        copies: those of them that have to have the bytes of another one, and of which.
        findings: everything that is wrong; use nothing else while there are any.
    """

    adapter: Adapter
    weight: float
    pieces: tuple[Piece, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    findings: tuple[str, ...] = ()


def check(adapter: Adapter, weight: float, live: LiveModel) -> Checked:
    """Compare what an adapter holds with what its configuration asks of the model."""
    where = f"{adapter.root.name}: " if adapter.name != "adapter" else ""
    if adapter.findings:
        told = tuple(f"{where}adapter_config.json: {one}" for one in adapter.findings)
        return Checked(adapter, weight, findings=told)
    contract = contract_by_names(Contract(adapter.config, live, adapter.tensors.tensors))
    findings = [*contract.findings, *misfits(contract)]
    dropped: list[Dropped] = []
    copies: list[tuple[str, str]] = []
    findings += _leftovers(adapter, contract, dropped, copies)
    if not math.isfinite(weight) or weight == 0:
        findings.append(f"weight {weight} of the adapter: it has to be a number other than 0")
    return Checked(
        adapter,
        weight,
        tuple(replace(one, target=in_memory(live, one.target)) for one in contract.pieces),
        tuple(dropped),
        tuple(copies),
        tuple(where + one for one in findings),
    )


def _leftovers(
    adapter: Adapter,
    contract: Contract,
    dropped: list[Dropped],
    copies: list[tuple[str, str]],
) -> Iterator[str]:
    """Copies are dropped with a reason; anything else is a finding."""
    wanted = contract.wanted()
    absent = sorted(set(wanted) - set(contract.held))
    for key in sorted(set(contract.held) - set(wanted)):
        copy = copy_of(key, contract, wanted)
        if copy is not None:
            dropped.append(Dropped(f"{adapter.name}:{key}", copy.reason))
            if copy.of:
                copies.append((f"{adapter.name}:{key}", f"{adapter.name}:{copy.of}"))
            continue
        hint = hint_on(key, absent, contract.live)
        absent = []  # a near match is looked for once: it takes long, and one tells enough
        yield f"{key}: unexpected" + (f": {hint}" if hint else "")
