"""Everything a delivery will do, from headers and configuration: before a byte of data is written.

    work = prepare(request)

The weights go from SOURCE to their final dtype and files in one pass (gather of a full model, or
merge); convert then links what it need not write. A full model has convert alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tasks.core.contract import judge
from tasks.core.errors import ContractError, first_and_more
from tasks.delivery.plan.adapters import read_weighted, weights_of
from tasks.delivery.plan.gathering import gathered_adapter, gathered_model
from tasks.delivery.plan.work import BASE, MODEL, Request, Work, in_files, require_plain
from tasks.weights.adapters.changes import changes
from tasks.weights.adapters.read import Adapter, read_adapter
from tasks.weights.adapters.values import require_values
from tasks.weights.deepspeed.checkpoint import read_zero
from tasks.weights.execute.worker import ask_facts
from tasks.weights.families.merging import MergeSettings, merged_config, plan_merge
from tasks.weights.files.opening import open_model
from tasks.weights.files.tokenizer import read_tokenizer
from tasks.weights.heads.detect import Found, detect
from tasks.weights.heads.folder import HEAD, read_folder
from tasks.weights.heads.merging import is_reward_adapter, merged_reward
from tasks.weights.heads.separate import separate
from tasks.weights.plan.contracts import ModelFacts
from tasks.weights.plan.layout import as_is
from tasks.weights.plan.operations import Plan
from tasks.weights.plan.partitions import read_partitions
from tasks.weights.plan.validate import validate

_SHOWN = 100


def prepare(request: Request) -> Work:
    """Plan and validate a delivery.

    Raises:
        ConfigError, ContractError, ArtifactError: with every finding of the step that found any.
    """
    given = request.given
    if given.kind == "model":
        return _model(request)
    if given.kind == "adapter":
        return _adapter(request)
    trained = read_partitions(given.root) if given.kind == "shards" else read_zero(given.root)
    names = [*getattr(trained, "trained", trained.tensors)]
    if any(".lora_" in name for name in names):
        gather, adapter = gathered_adapter(request, trained, names)
        return _merge(request, [(adapter, 1.0)], gather=gather, opened={"trained": trained})
    return gathered_model(request, trained)


def _model(request: Request) -> Work:
    """A full model, as it is; one with a head becomes what can be served."""
    root, target = request.given.root, request.target
    config: Any = require_plain(root, "source")
    found = detect(read_folder(root))
    _refuse(f"{root}: the head cannot be used", found.findings)
    if found.head is not None:
        parted = separate(found, dtype=target.dtype, perform=request.perform)
        assert parted.facts is not None
        plan, sources, facts, config = (
            parted.plan,
            dict(parted.sources),
            parted.facts,
            parted.config,
        )
        head = found if parted.value_head else None
    else:
        source = open_model(root)
        plan, sources, head = as_is(source, MODEL), {MODEL: source}, None
        facts = ask_facts(request.perform, root, target.dtype)
        _refuse(f"{root}: not what its config.json says", [*facts.findings, *_misfits(plan, facts)])
    plan = in_files(plan, target, sources[MODEL])
    validate(plan, sources)
    return Work(plan, facts, sources, config, head=head)


def _misfits(plan: Plan, facts: ModelFacts) -> Iterator[str]:
    """Names and shapes that are not the model's; dtypes are what `target` makes of them."""
    found = {op.name: op for op in plan.ops if op.name not in facts.tied}
    wanted = {one.name: one for one in facts.tensors}
    for check in judge(facts.tensors, found):
        have, want = found.get(check.name), wanted.get(check.name)
        if not check.ok and not (have and want and have.shape == want.shape):
            yield f"{check.name}: expected {check.expected}, found {check.found}"


def _adapter(request: Request) -> Work:
    if weights_of(request.adapters):
        return _merge(request, read_weighted(request.adapters))
    root = request.given.root
    folder = read_folder(root)
    adapter = read_adapter(root, beside=folder.beside)
    if is_reward_adapter(folder):
        return _reward(request, adapter)
    found = detect(folder) if HEAD in folder.sources else None
    _refuse(f"{root}: the value head cannot be used", found.findings if found else ())
    return _merge(request, [(adapter, 1.0)], head=found)


def _merge(
    request: Request,
    adapters: Sequence[tuple[Adapter, float]],
    *,
    gather: Plan | None = None,
    opened: Any = None,
    head: Found | None = None,
) -> Work:
    base_folder = _base(request)
    config = require_plain(base_folder, "base")
    base = open_model(base_folder)
    facts = ask_facts(request.perform, base_folder, request.target.dtype)
    found = changes(adapters, facts.live)
    held = {
        f"{one.name}:{key}": info
        for one, _ in adapters
        for key, info in one.tensors.tensors.items()
    }
    plan = plan_merge(base.tensors, facts, found, held, _settings(request, facts))
    plan = in_files(plan, request.target, base, cast=False)
    sources = {BASE: base, **{one.name: one.tensors for one, _ in adapters}}
    validate(plan, sources)
    require_values([one for one, _ in adapters], found.copies)
    inputs = {**sources, **(opened or {})}
    return Work(plan, facts, inputs, merged_config(config, plan), gather, plan, head)


def _reward(request: Request, adapter: Adapter) -> Work:
    """The adapter of a reward model: base and adapter become `*ForSequenceClassification`."""
    base_folder = _base(request)
    config = require_plain(base_folder, "base")
    base = open_model(base_folder)
    facts = ask_facts(request.perform, base_folder, request.target.dtype)
    parted = merged_reward(
        adapter,
        base,
        config,
        _settings(request, facts),
        dtype=request.target.dtype,
        endings=_endings([request.given.root, base_folder]),
        perform=request.perform,
    )
    assert parted.facts is not None
    plan = in_files(parted.plan, request.target, base, cast=False)
    validate(plan, parted.sources)
    require_values([adapter])
    return Work(plan, parted.facts, parted.sources, parted.config, merge=plan)


def _endings(folders: list[Path]) -> list[int]:
    """Ids that end a text, by the first of the folders that has a tokenizer."""
    found = next((one for one in folders if (one / "tokenizer.json").is_file()), None)
    return read_tokenizer(found).stops if found is not None else []


def _base(request: Request) -> Path:
    from tasks.delivery.plan.identity import base_missing

    if request.base is None:
        raise base_missing(request.given)
    return request.base


def _settings(request: Request, facts: ModelFacts) -> MergeSettings:
    quantized = frozenset(facts.quantized) if request.quantization is not None else frozenset()
    return MergeSettings(
        dtype=request.target.short, quantization=request.quantization, quantized=quantized
    )


def _refuse(what: str, findings: Sequence[str]) -> None:
    if findings:
        raise ContractError(f"{what}: {first_and_more(findings)}", details=findings[:_SHOWN])
