"""Plan a merge of an adapter into a base: one operation per tensor on disk.

    plan = plan_merge(base, model, changes(adapter, model))
    planned = plan_adapter(adapter, base, config, ...)    of folders; also reward models

Keys, shapes and order of the output are those of the base checkpoint. `Slot`s carry the changes of
tensors in memory to the tensors on disk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from tasks.core.contract import describe
from tasks.core.errors import ContractError, first_and_more
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import is_float
from tasks.weights.files.tensors import Tensors
from tasks.weights.heads import (
    NO_LM_HEAD,
    OUTPUT_EMBEDDINGS,
    SCORE,
    Normalisation,
    normalisation_from,
    reward_base,
    reward_config,
)
from tasks.weights.lora import INPUT, Adapter, Changes, changes, require_values
from tasks.weights.mapping import Slot
from tasks.weights.model import CONV1D, Model, Perform, model_facts, perform
from tasks.weights.plan import LowRank, Op, Plan, Planned, Shape, Term, plain_op, with_output
from tasks.weights.quantized.packed import open_model
from tasks.weights.rounding import Rounding
from tasks.weights.tokens.tokenizer import resized_config

_SHOWN = 100
BASE = "base"
"""Name of the base among the inputs of a plan."""


def plan_merge(
    base: Tensors,
    model: Model,
    changes: Changes,
    *,
    quantization: Mapping[str, Any] | None = None,
    rounding: Rounding = "unbiased",
) -> Plan:
    """Plan a merge from headers alone.

    `quantization` is that of training, as in `Op.quantization`, for the tensors that training
    stored in 4 bits; with "base": "dequantized" also for those that the adapter does not change.
    `rounding` is that of what the adapter changes. Raises ContractError with every finding.
    """
    merging = _Merging(base, model, changes, quantization)
    # Changes with findings must not be used: their own findings are reported instead.
    ops = [] if changes.findings else list(merging.ops())
    if findings := [*model.findings, *changes.findings, *merging.findings]:
        raise ContractError(
            f"merge: adapter and base do not fit: {first_and_more(findings)}",
            details=findings[:_SHOWN],
        )
    if rounding == "unbiased":
        ops = [replace(op, unbiased=bool(op.terms) or op.input != BASE) for op in ops]
    used = {op.source for op in ops}
    replaced = {of: f"replaced by {by}" for of, by in merging.replaced.items() if of not in used}
    return Plan(
        tuple(ops),
        {**changes.dropped, **replaced},
        untied=tuple(model.aliases[alias] for alias in changes.unties),
        copied=tuple(merging.copied),
        rows=max(merging.rows, default=None),
    )


@dataclass(frozen=True)
class Reward:
    """Facts of a reward model that its adapter does not have."""

    endings: Sequence[int] = ()  # ids that end its texts
    # mean and std of its scores; None for those of a config.json beside the adapter (OpenRLHF), or
    # else of the base
    normalisation: Normalisation | None = None


def plan_adapter(
    adapter: Adapter,
    base: Path,
    config: Mapping[str, Any],
    *,
    model_dtype: str,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    quantization: Mapping[str, Any] | None = None,
    rounding: Rounding = "unbiased",
    reward: Reward | None = None,
    values: bool = True,
    scanned: bool = False,
    perform: Perform = perform,
) -> Planned:
    """Plan the merge of an adapter into the base, in the dtype and files of the output.

    `config` is that of the base, decoded. `max_shard_bytes` None leaves files and dtype open.
    `reward` is None for a language model; a base that is a reward model itself keeps its head, with
    another the adapter has the full head (`modules_to_save`). Reads the adapter's values, of one
    that was `scanned` by an audit only copies, without `values` none. Raises ContractError with all
    findings: the adapter does not fit the base, or no head exists.
    """
    opened, tensors, name = open_model(base), None, ""
    if reward is not None:
        tensors, name, facts = reward_base(opened, config, model_dtype, perform)
    else:
        disk = {key: tuple(info.shape) for key, info in opened.items()}
        facts = perform(model_facts, base, model_dtype, disk)
    total = changes(adapter, facts)
    live = next((slot.live for slot in facts.slots if slot.key == SCORE), SCORE)
    if reward is not None and SCORE not in opened and live not in total.replacements:
        why = "LoRA was trained on a random head: " if live in total.terms else ""
        raise ContractError(
            f"reward: {why}neither the adapter nor the base has a reward head, {SCORE}. One that "
            "was never saved cannot be recovered: train again with modules_to_save=[score]",
            details=total.findings,
        )
    plan = plan_merge(tensors or opened, facts, total, quantization=quantization, rounding=rounding)
    if values:
        require_values(adapter, total.copies, scanned=scanned)
    if reward is None:
        merged = merged_config(config, plan)
    else:
        # The LM head is left out; a placeholder for the head was never in the base.
        absent = "" if SCORE in opened else f"{BASE}:{SCORE}"
        dropped = {name: why for name, why in plan.dropped.items() if name != absent}
        dropped |= {f"{BASE}:{k}": NO_LM_HEAD for k in OUTPUT_EMBEDDINGS if k in opened}
        plan = replace(plan, dropped=dropped)
        beside = adapter.root / "config.json"
        stated = read_json(beside) if beside.is_file() else config
        how = reward.normalisation or normalisation_from(stated, "reward: config.json")
        merged = reward_config(config, name, how, reward.endings)
    if max_shard_bytes is not None:
        limit = max_shard_bytes
        plan = with_output(plan, opened, dtype=dtype, max_shard_bytes=limit, wide=facts.wide)
    return Planned(plan, {BASE: opened, INPUT: adapter.tensors}, merged, facts)


def merged_config(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return config.json of the base, with the vocabulary size and ties of the merged model."""
    merged = dict(config) if plan.rows is None else resized_config(config, plan.rows)
    return {**merged, "tie_word_embeddings": False} if plan.untied else merged


class _Merging:
    """The operations of a merge, and everything that is wrong with it."""

    def __init__(
        self,
        base: Tensors,
        model: Model,
        changes: Changes,
        quantization: Mapping[str, Any] | None,
    ) -> None:
        self.base, self.model, self.changes = base, model, changes
        self.quantization, self.quantized = quantization, set(model.quantized)
        self.changed = {*changes.terms, *changes.replacements}
        self.used: set[str] = set()
        self.findings: list[str] = []
        self.replaced: dict[str, str] = {}  # source in the base -> source in the adapter
        self.copied: list[str] = []  # keys that store a replaced tensor twice: they stay tied
        self.rows: set[int] = set()  # numbers of rows of embeddings that grew

    def ops(self) -> Iterator[Op]:
        """Yield an operation for each tensor of the base, then those for untied tensors."""
        model, slots = self.model, defaultdict[str, list[Slot]](list)
        for slot in model.slots:
            slots[slot.key].append(slot)
        for key, info in self.base.items():
            of_key = slots.pop(key, [])
            if any(slot.shape != tuple(info.shape) for slot in of_key):
                self.findings.append(f"{key}: is {list(info.shape)}, the model's facts differ")
                continue
            yield self._op(key, key, of_key)
        self.findings += [f"{key}: not in the base" for key in slots]
        stored = {slot.live: slot for slot in model.slots}
        for alias in self.changes.unties:  # those that have no key in the base yet
            key, holder = model.aliases[alias], stored.get(model.ties[alias])
            if alias not in stored and holder is not None:
                slot = Slot(key, holder.shape, alias, holder.live_shape, transpose=holder.transpose)
                yield self._op(key, holder.key, [slot])
        if len(self.rows) > 1:
            sizes = " and ".join(map(str, sorted(self.rows)))
            self.findings.append(f"input and output embedding need equal rows, but have {sizes}")
        if not model.findings:  # these findings would only repeat them
            self.findings += [
                f"{name}: changed by the adapter, but no tensor of the base contains it unmixed: "
                "merge it with peft's merge_and_unload"
                for name in sorted(self.changed - self.used)
            ]

    def _op(self, name: str, key: str, slots: Sequence[Slot]) -> Op:
        """Return the operation that writes base tensor `key`, with its changes, as `name`."""
        op = plain_op(name, f"{BASE}:{key}", self.base[key])
        is_fused = len(slots) > 1 or any(not slot.whole for slot in slots)
        for slot in slots:
            live, ties = slot.live, self.model.ties
            live = live if live in self.changes.unties else ties.get(live, live)
            if not is_fused:
                if live != slot.live and live in self.changes.replacements:
                    self.copied.append(name)
                op = self._with(op, slot, live)
            elif live in self.changed:
                self.used.add(live)
                self.findings.append(
                    f"{slot.live}: changed by the adapter; stored fused with others in {key}, "
                    "which this merge cannot split: merge it with peft's merge_and_unload"
                )
        if name in self.changed and name not in self.model.parameters:
            # A part of a live tensor is named by its key on disk.
            op = self._with(op, Slot(name, op.shape, name, op.shape), name)
        quantization = self._quantization(op, slots[0]) if slots else None
        if is_fused and quantization is not None and quantization.get("base") == "dequantized":
            self.findings.append(f"{key}: fuses layers that training quantised one by one")
        return op if is_fused else replace(op, quantization=quantization)

    def _with(self, op: Op, slot: Slot, name: str) -> Op:
        """Add the replacement and the terms that are listed under `name`."""
        self.used.add(name)
        source, terms = self.changes.replacements.get(name), list(op.terms)
        if source is not None:
            self.replaced[op.source] = source
            tensor, shape = self.changes.operands[source], op.shape
            if tuple(tensor.shape) != slot.live_shape:  # an embedding that grew
                shape = tuple(tensor.shape)
                self.rows.add(shape[0])
                if not slot.is_renamed:
                    self.findings.append(f"{slot.live}: grew, but the base stores it in parts")
            op = replace(
                op,
                shape=shape,
                source=source,
                source_dtype=tensor.dtype,
                start=slot.start,
                transpose=slot.transpose,
                packed=None,
            )
        for term in self.changes.terms.get(name, ()):
            try:
                terms.append(carry(term, slot))
            except ValueError as error:
                self.findings.append(str(error))
        if terms and not is_float(op.source_dtype):
            text = describe(op.shape, op.source_dtype)
            self.findings.append(f"{op.key}: {text} is not a float tensor, so it cannot change")
        return replace(op, terms=tuple(terms))

    def _quantization(self, op: Op, slot: Slot) -> Mapping[str, Any] | None:
        """Return the 4-bit settings that apply to a tensor; None for none.

        They never apply to a tensor that an adapter replaces, nor to one that is stored in 4 bits:
        these are the bits that training used.
        """
        quantization = self.quantization
        if quantization is None or op.input != BASE or op.packed is not None:
            return None
        # The 4-bit loader also quantises GPT-2's Conv1D layers, transposed.
        module, _, leaf = slot.live.rpartition(".")
        turned = leaf == "weight" and self.model.modules.get(module) == CONV1D
        if op.key not in self.quantized and not turned:
            return None
        quantization = {**quantization, "turned": True} if turned else quantization
        return quantization if op.terms or quantization.get("base") == "dequantized" else None


def carry(term: Term, slot: Slot) -> Term:
    """Return the term of a live tensor for the part of it that `slot` describes.

    Raises ValueError if there is no such term, because the arithmetic needs more than the part.
    """
    if slot.is_all and not slot.transpose:
        return term
    if not isinstance(term, LowRank):
        raise ValueError(f"{slot.live}: trained rows of a tensor stored transposed or in parts")
    turned = term.transpose != slot.transpose
    if term.magnitude and turned:
        raise ValueError(f"{slot.live}: DoRA needs the norms of its rows, but {slot.key} is turned")
    if slot.is_all:
        return replace(term, transpose=turned)
    expert, row = _row(slot)
    if term.experts == 1 and expert:
        raise ValueError(f"{slot.live}: a stack of experts, but {term.a} is for one matrix")
    if term.experts > 1:
        term = replace(term, expert=expert)
    if not slot.transpose:
        return replace(term, out_start=term.out_start + row)
    if prod(slot.shape) != prod(slot.live_shape[-2:]):
        raise ValueError(f"{slot.key}: a transposed part of {slot.live} cannot be changed")
    return replace(term, transpose=turned)


def _row(slot: Slot) -> tuple[int, int]:
    """Return the expert whose matrix contains the part, and the part's first row in that matrix."""
    shape: Shape = (1, 1, *slot.live_shape)
    rows, columns = shape[-2:]
    row, column = divmod(slot.start, columns)
    expert, row = divmod(row, rows)
    height, rest = divmod(prod(slot.shape), columns)
    if column or rest or row + height > rows:
        raise ValueError(f"{slot.key}: is not a block of rows of one matrix of {slot.live}")
    return expert, row
