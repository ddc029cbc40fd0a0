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
from tasks.weights.lora import Adapter, Changes, changes, require_values
from tasks.weights.mapping import Slot
from tasks.weights.model import CONV1D, Model, model_facts
from tasks.weights.pairing import INPUT
from tasks.weights.perform import Perform, perform
from tasks.weights.plan import LowRank, Op, Plan, Planned, Shape, Term, plain_op, with_output
from tasks.weights.quantized.source import open_model
from tasks.weights.rounding import Rounding
from tasks.weights.tokens.vocabulary import resized_config

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

    Args:
        quantization: 4-bit settings of training, as in `Op.quantization`, for the tensors that
            training stored in 4 bits. With "base": "dequantized" they also apply to tensors that
            the adapter does not change.
        rounding: rounding of what the adapter changes; see `rounding.py`.

    Raises:
        ContractError: adapter and base do not fit; has every finding.
    """
    merging = _Merging(base, model, changes, quantization)
    # Changes with findings must not be used: their own findings are reported instead.
    ops = [] if changes.findings else list(merging.ops())
    findings = [*model.findings, *changes.findings, *merging.findings]
    if findings:
        raise ContractError(
            f"merge: adapter and base do not fit: {first_and_more(findings)}",
            details=findings[:_SHOWN],
        )
    if rounding == "unbiased":
        ops = [replace(op, unbiased=bool(op.terms) or op.input != BASE) for op in ops]
    used = {op.source for op in ops}
    replaced = {
        source: f"replaced by {by}" for source, by in merging.replaced.items() if source not in used
    }
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
    perform: Perform = perform,
) -> Planned:
    """Plan the merge of an adapter into the base, in the dtype and files of the output.

    Reads headers of the base, and headers and values of the adapter.

    Args:
        config: config.json of the base, decoded.
        model_dtype: torch name of the dtype in which the model's class is built.
        dtype: safetensors name for all floats; None keeps the dtype of each tensor.
        max_shard_bytes: limit of tensor data in one output file; None leaves files and dtype open.
        quantization: 4 bits that the base goes through, as `Op.quantization`; None for none.
        reward: of a reward model; None for a language model. A base that is a reward model itself
            keeps its head; with another, the adapter has the full head (`modules_to_save`).
        values: False leaves the values of the adapter unread.

    Raises:
        ContractError: the adapter does not fit the base, or no head exists; has all findings.
    """
    opened, tensors, name = open_model(base), None, ""
    if reward is not None:
        tensors, name, facts = reward_base(opened, config, model_dtype, perform)
    else:
        facts = perform(model_facts, base, model_dtype)
    total = changes(adapter, facts)
    if reward is not None:
        _require_head(opened, facts, total)
    plan = plan_merge(tensors or opened, facts, total, quantization=quantization, rounding=rounding)
    if values:
        require_values(adapter, total.copies)
    if reward is None:
        merged = merged_config(config, plan)
    else:
        plan = _without_lm_head(plan, opened)
        beside = adapter.root / "config.json"
        stated = read_json(beside) if beside.is_file() else config
        how = reward.normalisation or normalisation_from(stated, "reward: config.json")
        merged = reward_config(config, name, how, reward.endings)
    if max_shard_bytes is not None:
        limit = max_shard_bytes
        plan = with_output(plan, opened, dtype=dtype, max_shard_bytes=limit, wide=facts.wide)
    return Planned(plan, {BASE: opened, INPUT: adapter.tensors}, merged, facts)


def _require_head(base: Tensors, facts: Model, total: Changes) -> None:
    """Raise ContractError if neither the base nor the adapter has a reward head."""
    live = next((slot.live for slot in facts.slots if slot.key == SCORE), SCORE)
    if SCORE not in base and live not in total.replacements:
        why = "LoRA was trained on a random head: " if live in total.terms else ""
        raise ContractError(
            f"reward: {why}neither the adapter nor the base has a reward head, {SCORE}. One that "
            "was never saved cannot be recovered: train again with modules_to_save=[score]",
            details=total.findings,
        )


def _without_lm_head(plan: Plan, base: Tensors) -> Plan:
    """Return the plan of a reward model, which drops the LM head of the opened base."""
    placeholder = "" if SCORE in base else f"{BASE}:{SCORE}"
    dropped = {name: why for name, why in plan.dropped.items() if name != placeholder}
    left_out = {f"{BASE}:{k}": NO_LM_HEAD for k in OUTPUT_EMBEDDINGS if k in base}
    return replace(plan, dropped={**dropped, **left_out})


def merged_config(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return config.json of the base, with the vocabulary size and ties of the merged model."""
    merged = dict(config) if plan.rows is None else resized_config(config, plan.rows)
    return {**merged, "tie_word_embeddings": False} if plan.untied else merged


class _Merging:
    """The operations of a merge, and what is wrong with it.

    Attributes:
        findings: everything that is wrong.
        replaced: source in the base -> source in an adapter that replaces it.
        copied: keys that store a replaced tensor a second time, since they stay tied.
        rows: numbers of rows of embeddings that grew.
    """

    def __init__(
        self,
        base: Tensors,
        model: Model,
        changes: Changes,
        quantization: Mapping[str, Any] | None,
    ) -> None:
        self.base, self.model, self.changes = base, model, changes
        self.quantization = quantization
        self.quantized = set(model.quantized)
        self.changed = {*changes.terms, *changes.replacements}
        self.used: set[str] = set()
        self.findings: list[str] = []
        self.replaced: dict[str, str] = {}
        self.copied: list[str] = []
        self.rows: set[int] = set()

    def ops(self) -> Iterator[Op]:
        """Yield an operation for each tensor of the base, then those for untied tensors."""
        slots: dict[str, list[Slot]] = defaultdict(list)
        for slot in self.model.slots:
            slots[slot.key].append(slot)
        for key, info in self.base.items():
            of_key = slots.pop(key, [])
            if any(slot.shape != tuple(info.shape) for slot in of_key):
                self.findings.append(f"{key}: is {list(info.shape)}, the model's facts differ")
                continue
            yield self._op(key, of_key)
        self.findings += [f"{key}: not in the base" for key in slots]
        yield from self._stored_apart()
        if len(self.rows) > 1:
            sizes = " and ".join(map(str, sorted(self.rows)))
            self.findings.append(f"input and output embedding need equal rows, but have {sizes}")
        if not self.model.findings:  # these findings would only repeat them
            self.findings += [
                f"{name}: changed by the adapter, but no tensor of the base contains it"
                for name in sorted(self.changed - self.used)
            ]

    def _op(self, key: str, slots: Sequence[Slot]) -> Op:
        if len(slots) == 1 and slots[0].whole:
            return self._changed(key, key, slots[0])
        for slot in slots:
            name = self._name(slot.live)
            if name in self.changed:
                self.used.add(name)
                self.findings.append(
                    f"{slot.live}: changed by the adapter; stored fused with others in {key}, "
                    "which this merge cannot split: merge it with peft's merge_and_unload"
                )
        op = self._by_key(plain_op(key, f"{BASE}:{key}", self.base[key]))
        quantization = self._quantization(op, slots[0]) if slots else None
        if quantization is not None and quantization.get("base") == "dequantized":
            self.findings.append(f"{key}: fuses layers that training quantised one by one")
        return op

    def _stored_apart(self) -> Iterator[Op]:
        """Yield the operations of untied tensors that have no key in the base yet."""
        stored = {slot.live: slot for slot in self.model.slots}
        for alias in self.changes.unties:
            key, holder = self.model.aliases[alias], stored.get(self.model.ties[alias])
            if alias not in stored and holder is not None:
                slot = Slot(key, holder.shape, alias, holder.live_shape, transpose=holder.transpose)
                yield self._changed(key, holder.key, slot)

    def _changed(self, name: str, key: str, slot: Slot) -> Op:
        """Return the operation that writes base tensor `key`, changed at `slot`, as `name`."""
        live = self._name(slot.live)
        if live != slot.live and live in self.changes.replacements:
            self.copied.append(name)
        plain = plain_op(name, f"{BASE}:{key}", self.base[key])
        op = self._by_key(self._with(plain, slot, live))
        return replace(op, quantization=self._quantization(op, slot))

    def _name(self, live: str) -> str:
        """Return the name under which `Changes` lists a live tensor."""
        return live if live in self.changes.unties else self.model.ties.get(live, live)

    def _by_key(self, op: Op) -> Op:
        """Add the changes that name a part of a live tensor by its key on disk."""
        if op.name not in self.changed or op.name in self.model.parameters:
            return op
        return self._with(op, Slot(op.name, op.shape, op.name, op.shape), op.name)

    def _with(self, op: Op, slot: Slot, name: str) -> Op:
        """Add the replacement and the terms that are listed under `name`."""
        self.used.add(name)
        source = self.changes.replacements.get(name)
        if source is not None:
            self.replaced[op.source] = source
            replaced, shape = self.changes.operands[source], op.shape
            if tuple(replaced.shape) != slot.live_shape:  # an embedding that grew
                shape = tuple(replaced.shape)
                self.rows.add(shape[0])
                if not slot.is_renamed:
                    self.findings.append(f"{slot.live}: grew, but the base stores it in parts")
            op = replace(
                op,
                shape=shape,
                source=source,
                source_dtype=replaced.dtype,
                start=slot.start,
                transpose=slot.transpose,
                packed=None,
            )
        terms = list(self._terms(slot, self.changes.terms.get(name, ())))
        if terms and not is_float(op.source_dtype):
            tensor = describe(op.shape, op.source_dtype)
            self.findings.append(f"{op.key}: {tensor} is not a float tensor, so it cannot change")
        return replace(op, terms=(*op.terms, *terms))

    def _terms(self, slot: Slot, terms: Sequence[Term]) -> Iterator[Term]:
        for term in terms:
            try:
                yield carry(term, slot)
            except ValueError as error:
                self.findings.append(str(error))

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
