"""Plan the gathering of partitions: our shards, a DeepSpeed checkpoint, or one of FSDP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tasks.core.errors import ConfigError
from tasks.delivery.plan.work import ADAPTER, BASE, TRAINED, Request, Work
from tasks.delivery.recognise import ADAPTER_CONFIG, CONFIG
from tasks.weights.deepspeed.checkpoint import ZeroCheckpoint
from tasks.weights.distributed import DistributedCheckpoint
from tasks.weights.files.documents import read_json
from tasks.weights.files.names import parse_peft, rename_all, unwrap
from tasks.weights.files.source import Renamed, Source
from tasks.weights.gather import plan_full
from tasks.weights.lora import Adapter
from tasks.weights.lora_config import parse_config
from tasks.weights.model import model_facts
from tasks.weights.plan import Dropped, Op, Plan
from tasks.weights.quantized.source import open_model
from tasks.weights.shards import Partitions
from tasks.weights.validate import validate

Trained = Partitions | ZeroCheckpoint | DistributedCheckpoint


def gathered_adapter(
    request: Request, trained: Trained, names: Sequence[str]
) -> tuple[Plan, Adapter, Path]:
    """Plan an adapter file. Return the plan, the future adapter, and its adapter_config.json.

    Args:
        request: the request of the delivery.
        trained: partitions of all ranks.
        names: names of the trained parameters.

    Raises:
        ConfigError: there is no adapter_config.json.
        ContractError: a trained parameter is not a LoRA weight.
    """
    path = request.adapter_config or _above(request, trained, ADAPTER_CONFIG)
    if path is None or not path.is_file():
        raise ConfigError(
            f"source={request.given.root}: an adapter was trained, and there is no "
            f"{ADAPTER_CONFIG} with its alpha",
            hint=f"adapter_config=<the {ADAPTER_CONFIG} of that training>",
        )
    if any(parse_peft(unwrap(name)) for name in names):  # saved by peft's own names
        keys = {unwrap(name): name for name in names}
    else:
        keys = {key: name for name, key in rename_all(names, adapter=True).items()}
    view = Renamed(trained, keys)
    config, findings = parse_config(read_json(path))
    if isinstance(trained, DistributedCheckpoint) and config.bias != "none":
        raise ConfigError(
            f"source={request.given.root}: bias={config.bias}: a distributed checkpoint has all "
            "parameters and does not tell which biases were trained",
            hint="save the adapter with model.save_pretrained and deliver that",
        )
    ops = tuple(
        Op(key, tuple(info.shape), info.dtype, f"{TRAINED}:{keys[key]}", info.dtype)
        for key, info in view.tensors.items()
    )
    known = set(names)
    left = [name for name in trained.tensors if name not in known]
    dropped = tuple(Dropped(f"{TRAINED}:{name}", "frozen: belongs to the base") for name in left)
    plan = Plan(ops, dropped)
    validate(plan, {TRAINED: trained})
    return plan, Adapter(request.given.root, ADAPTER, config, view, tuple(findings)), path


def gathered_model(request: Request, trained: Trained) -> Work:
    """Plan a full model, in its final dtype and files.

    Raises:
        ConfigError: no config.json describes the model.
        ContractError: tensors do not belong to the model, or are missing.
    """
    config = _above(request, trained, CONFIG)
    folder = request.base if config is None else config.parent
    if folder is None:
        raise ConfigError(
            f"source={request.given.root}: there is no {CONFIG} that describes the model",
            hint="base=<folder of the model that was trained>",
        )
    base = open_model(request.base) if request.base is not None else None
    facts = request.perform(model_facts, request.base or folder, request.target.dtype)
    live = {unwrap(name): name for name in trained.tensors}
    known = {*facts.parameters, *(slot.live for slot in facts.slots)}
    foreign = {unwrap(name) for name in getattr(trained, "buffers", ())} - known
    source = Renamed(trained, live)
    tensors = {name: info for name, info in source.tensors.items() if name not in foreign}
    plan = plan_full(
        tensors,
        facts,
        base=None if base is None else base.tensors,
        frozen=base is not None,
        dtype=request.target.short,
        max_shard_bytes=request.target.max_shard_bytes,
    )
    sources: dict[str, Source] = {TRAINED: source}
    if base is not None and any(op.input == BASE for op in plan.ops):
        sources[BASE] = base
    used = {op.key for op in plan.ops if op.input == TRAINED}
    reasons = {
        name: "a buffer that the model's class does not have"
        if name in foreign
        else f"the same as {facts.ties[name]}"
        for name in tensors.keys() | foreign
        if name not in used and (name in foreign or name in facts.ties)
    }
    dropped = [entry for entry in plan.dropped if entry.source.partition(":")[0] in sources]
    dropped += [Dropped(f"{TRAINED}:{name}", why) for name, why in sorted(reasons.items())]
    plan = replace(plan, dropped=tuple(dropped))
    validate(plan, sources)
    return Work(plan, facts, sources, read_json(folder / CONFIG), gather=plan)


def _above(request: Request, trained: Trained, name: str) -> Path | None:
    """Return the path of a file of the trainer: beside the partitions, or one folder above."""
    folders = dict.fromkeys([trained.root, request.given.root, trained.root.parent])
    return next((place / name for place in folders if (place / name).is_file()), None)
