"""Plan all operations of a delivery from headers and configuration, before a byte is written.

    work = prepare(request)

One pass writes the weights in their final dtype and files: gather of a full model, or merge.
Convert then links the files. For a SOURCE that is a full model, convert is the only pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.core.contract import judge
from tasks.core.errors import ContractError, first_and_more
from tasks.delivery.plan.adapters import read_weighted, weights_of
from tasks.delivery.plan.gathering import Trained, gathered_adapter, gathered_model
from tasks.delivery.plan.identity import base_missing
from tasks.delivery.plan.work import BASE, MODEL, Request, Work, in_files, require_plain
from tasks.merge import plan_adapters
from tasks.weights.deepspeed.checkpoint import read_zero
from tasks.weights.distributed import read_distributed
from tasks.weights.files.dtypes import is_float
from tasks.weights.files.source import Source
from tasks.weights.head_plans import endings, merged_reward, separate
from tasks.weights.heads import HEAD, Detected, detect, read_folder
from tasks.weights.lora import Adapter, read_adapter, require_values
from tasks.weights.merge import MergeSettings
from tasks.weights.model import Model, model_facts
from tasks.weights.plan import Plan, as_is
from tasks.weights.quantized.source import open_model
from tasks.weights.shards import read_partitions
from tasks.weights.validate import validate

_SHOWN = 100


def prepare(request: Request) -> Work:
    """Plan and validate a delivery.

    Raises:
        ConfigError, ContractError, ArtifactError: a step failed; with all findings of that step.
    """
    given = request.given
    if given.kind == "model":
        return _model(request)
    if given.kind == "adapter":
        return _adapter(request)
    trained: Trained
    if given.kind == "shards":
        trained = read_partitions(given.root)
    else:
        trained = (read_zero if given.kind == "deepspeed" else read_distributed)(given.root)
    names = [*getattr(trained, "trained", trained.tensors)]
    if any(".lora_" in name for name in names):
        gather, adapter, path = gathered_adapter(request, trained, names)
        work = _merge(request, [(adapter, 1.0)], gather=gather, opened={"trained": trained})
        return replace(work, adapter_config=path)
    return gathered_model(request, trained)


def _model(request: Request) -> Work:
    """Plan a full model. A value head is split off; a reward model becomes a class of vLLM."""
    root, target = request.given.root, request.target
    config: Any = require_plain(root, "source")
    detected = detect(read_folder(root))
    is_policy = detected.head is not None and detected.head.role == "either"
    if detected.head is not None or detected.findings:
        parted = separate(detected, dtype=target.dtype, perform=request.perform)
        plan, sources, config, facts = parted.plan, parted.sources, parted.config, parted.facts
    else:
        source = open_model(root)
        plan, sources = as_is(source, MODEL), {MODEL: source}
        facts = request.perform(model_facts, root, target.dtype)
    _refuse(f"{root}: not what its config.json says", [*facts.findings, *_misfits(plan, facts)])
    plan = in_files(plan, target, sources[MODEL])
    validate(plan, sources)
    return Work(plan, facts, sources, config, head=detected if is_policy else None)


def _misfits(plan: Plan, facts: Model) -> Iterator[str]:
    """Yield tensors that do not fit the model; floats are converted, so any float dtype is fine."""
    planned = {op.name: op for op in plan.ops if op.name not in facts.tied}
    expected = {tensor.name: tensor for tensor in facts.tensors}
    for check in judge(facts.tensors, planned):
        have, want = planned.get(check.name), expected.get(check.name)
        converted = have and want and have.shape == want.shape and is_float(have.dtype)
        if not check.ok and not converted:
            yield f"{check.name}: expected {check.expected}, found {check.found}"


def _adapter(request: Request) -> Work:
    """Plan the merge of adapters from PEFT folders."""
    if weights_of(request.adapters):
        return _merge(request, read_weighted(request.adapters))
    root = request.given.root
    detected = detect(read_folder(root))
    adapter = read_adapter(root, beside=detected.folder.beside)
    if detected.is_of_reward:
        return _reward(request, adapter)
    if HEAD not in detected.folder.sources:
        return _merge(request, [(adapter, 1.0)])
    detected.require()
    return _merge(request, [(adapter, 1.0)], head=detected)


def _merge(
    request: Request,
    adapters: Sequence[tuple[Adapter, float]],
    *,
    gather: Plan | None = None,
    opened: Any = None,
    head: Detected | None = None,
) -> Work:
    """Plan the merge of adapters into the base.

    Args:
        request: the request of the delivery.
        adapters: pairs (adapter, weight).
        gather: plan that makes the adapter from partitions, if there are any.
        opened: further inputs by name, for `gather`.
        head: value head to keep apart.
    """
    _, base, config, facts, settings = _read_base(request)
    plan, config = plan_adapters(adapters, base, facts, config, settings)
    plan = in_files(plan, request.target, base, cast=False)
    sources = {BASE: base, **{adapter.name: adapter.tensors for adapter, _ in adapters}}
    validate(plan, sources)
    return Work(plan, facts, {**sources, **(opened or {})}, config, gather, plan, head)


def _reward(request: Request, adapter: Adapter) -> Work:
    """Plan the merge of a reward model's adapter into a `*ForSequenceClassification`."""
    folder, base, config, _, settings = _read_base(request)
    parted = merged_reward(
        adapter,
        base,
        config,
        settings,
        dtype=request.target.dtype,
        endings=endings(request.given.root, folder),
        perform=request.perform,
    )
    plan = in_files(parted.plan, request.target, base, cast=False)
    validate(plan, parted.sources)
    require_values([adapter])
    return Work(plan, parted.facts, parted.sources, parted.config, merge=plan)


def _read_base(
    request: Request,
) -> tuple[Path, Source, dict[str, Any], Model, MergeSettings]:
    """Open the base. Returns its folder, tensors, config.json, facts, and how to merge into it."""
    if request.base is None:
        raise base_missing(request.given)
    config = require_plain(request.base, "base")
    base, through = open_model(request.base), request.quantization
    facts = request.perform(model_facts, request.base, request.target.dtype)
    quantized = frozenset(facts.quantized) if through is not None else frozenset()
    settings = MergeSettings(
        request.target.short,
        quantization=through,
        quantized=quantized,
        rounding=request.rounding,
    )
    return request.base, base, config, facts, settings


def _refuse(what: str, findings: Sequence[str]) -> None:
    if findings:
        raise ContractError(f"{what}: {first_and_more(findings)}", details=findings[:_SHOWN])
