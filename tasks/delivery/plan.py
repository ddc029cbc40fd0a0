"""Plan all operations of a delivery from headers and configuration, before a byte is written.

    work = prepare(request)                                     of a checkpoint made elsewhere
    planned = plan_trained(trained, gathered, base, ...)        of a model that was trained here

One pass writes the weights in their final dtype and files: gather of a full model, or merge.
Convert then links the files. For a SOURCE that is a full model, convert is the only pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.core.contract import judge
from tasks.core.errors import ConfigError, ContractError, first_and_more
from tasks.delivery.base import BaseChoice, base_missing, choose_base
from tasks.delivery.source import (
    ADAPTER_CONFIG,
    CONFIG,
    Checkpoint,
    Weighted,
    read_weighted,
    weights_of,
)
from tasks.delivery.tokens import Tokens, find_tokens
from tasks.evaluation.model_folder import Trained
from tasks.weights.distributed import DistributedCheckpoint, read_distributed
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import DTYPE_NAMES, is_float
from tasks.weights.files.names import parse_peft, rename_all, unwrap
from tasks.weights.files.reader import WEIGHTS
from tasks.weights.files.tensors import Sources, Tensors
from tasks.weights.gather import plan_full
from tasks.weights.heads import (
    HEAD,
    Detected,
    Normalisation,
    detect,
    endings,
    read_folder,
    reward_config,
    separate,
)
from tasks.weights.lora import Adapter, read_adapter
from tasks.weights.lora_config import parse_config
from tasks.weights.merge import BASE, Reward, plan_adapters
from tasks.weights.model import Model, model_facts
from tasks.weights.perform import Perform, perform
from tasks.weights.plan import Plan, as_is, plain_op, with_output
from tasks.weights.quantized.config_fields import (
    is_decodable,
    refusal,
    remedy,
    without_quantization,
)
from tasks.weights.quantized.nf4 import check_quantization
from tasks.weights.quantized.source import open_model
from tasks.weights.rounding import Rounding
from tasks.weights.shards import Partitions, read_partitions
from tasks.weights.tokens.tokenizer import read_tokenizer
from tasks.weights.validate import validate
from tasks.weights.zero import ZeroCheckpoint, read_zero

ADAPTER, TRAINED, MODEL = "adapter", "trained", WEIGHTS
"""Names of the inputs in the plans."""


@dataclass(frozen=True)
class Target:
    """Format of the output: torch dtype name, and maximum bytes of tensor data in one file."""

    dtype: str
    max_shard_bytes: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """Input of the planning."""

    checkpoint: Checkpoint
    base: Path | None  # folder of the base; None if there is none
    target: Target  # format of the output
    # 4 bits that the base goes through, as `Op.quantization`; None for none
    quantization: Mapping[str, Any] | None = None
    # path of adapter_config.json, for an adapter in shards or in a DeepSpeed checkpoint
    adapter_config: Path | None = None
    perform: Perform = perform  # sends requests about model classes to the process that has torch
    adapters: tuple[Weighted, ...] = ()  # the adapters, if SOURCE is one or there are several
    rounding: Rounding = "unbiased"
    config: Mapping[str, Any] | None = None  # config.json of the model; None for the base's
    reward: Reward | None = None  # of a reward model that was trained here


@dataclass(frozen=True)
class Work:
    """The plans of a delivery's stages; None for a stage that is not needed."""

    model: Plan  # plan that makes the served tensors; the plan of gather, merge or convert
    facts: Model
    opened: Sources  # inputs of the plans by name
    config: Mapping[str, Any]  # config.json of the served model, without dtype
    # plan from partitions to an adapter or a full model; inputs "trained", "base"
    gather: Plan | None = None
    # plan from base and adapter to a full model; inputs "base", "adapter"
    merge: Plan | None = None
    head: Detected | None = None  # value head to keep apart; None if there is none
    adapter_config: Path | None = None  # adapter_config.json of an adapter that is gathered

    @property
    def converts(self) -> bool:
        """Return True if convert makes the served tensors directly from SOURCE."""
        return self.gather is None and self.merge is None

    @property
    def is_causal(self) -> bool:
        """Return True if the served model predicts tokens, also one with a vision tower."""
        whole = self._is("ForConditionalGeneration") and "text_config" in self.config
        return whole or self._is("ForCausalLM", "LMHeadModel")

    @property
    def is_reward(self) -> bool:
        """Return True if the served model is a reward model."""
        return self._is("ForSequenceClassification")

    def _is(self, *endings: str) -> bool:
        names = self.config.get("architectures") or ()
        return any(str(name).endswith(endings) for name in names)


@dataclass(frozen=True)
class HandOffPlan:
    """Work, tokenizer and choice of the base: what gather, merge and convert need."""

    work: Work
    tokens: Tokens
    choice: BaseChoice = field(default_factory=lambda: BaseChoice(""))
    is_ours: bool = False  # True for a model that was trained here: each tensor is its class's


def plan_trained(
    trained: Path,
    gathered: Path,
    base: Path,
    target: Target,
    merge: Mapping[str, Any],  # section `merge` of the settings
    perform: Perform,
) -> HandOffPlan:
    """Plan the hand-off of a model that was trained here, from its gathered adapter or weights."""
    side = Trained.read(trained)
    is_adapter = (gathered / ADAPTER_CONFIG).is_file()
    record = {"notes": {"quantization": side.quantization}}
    checkpoint = Checkpoint("adapter" if is_adapter else "model", gathered, "", record)
    choice = (
        choose_base(checkpoint, base, merge, gathered.parents[1]) if is_adapter else BaseChoice("")
    )
    if choice.quantization is not None:
        check_quantization(choice.quantization)
    reward = None
    if side.is_reward:
        stops = read_tokenizer(trained / "tokenizer").stops
        reward = Reward(stops, side.normalisation or Normalisation())
    request = Request(
        checkpoint=checkpoint,
        base=base if is_adapter else None,
        target=target,
        quantization=choice.quantization,
        perform=perform,
        rounding=merge["rounding"],
        config=side.config,
        reward=reward,
    )
    return HandOffPlan(
        prepare(request), find_tokens([trained / "tokenizer", gathered]), choice, True
    )


def require_plain(folder: Path, key: str) -> dict[str, Any]:
    """Return the config.json of a model; for 4 bits and fp8, that of the decoded model."""
    config = read_json(folder / "config.json")
    if refused := refusal(config):
        hint = f"{key}={remedy(folder).removeprefix('base=')}"
        raise ConfigError(f"{key}={folder}: {refused}", hint=hint)
    return without_quantization(config) if is_decodable(config) else config


def describe_plan(plan: Plan) -> Iterator[str]:
    """Yield lines that describe a plan: number and size of its operations, and dropped tensors."""
    counts: dict[str, list[int]] = {}
    for op in plan.ops:
        kind: str = "fold" if op.terms else op.kind
        counts.setdefault(kind, []).append(op.nbytes)
    for kind, sizes in counts.items():
        yield f"{kind} {len(sizes)} tensors, {megabytes(sum(sizes))}"
    reasons: dict[str, list[str]] = {}
    for source, reason in plan.dropped.items():
        reasons.setdefault(reason, []).append(source)
    for reason, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"drop {names[0]}{more}: {reason}"


def megabytes(count: int) -> str:
    """`12.3 MB`, `4.56 GB`."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


Ranks = Partitions | ZeroCheckpoint | DistributedCheckpoint


def gathered_adapter(
    request: Request, trained: Ranks, names: Sequence[str]
) -> tuple[Plan, Adapter, Path]:
    """Plan an adapter file. Return the plan, the future adapter, and its adapter_config.json."""
    path = request.adapter_config or _above(request, trained, ADAPTER_CONFIG)
    if path is None or not path.is_file():
        raise ConfigError(
            f"source={request.checkpoint.root}: an adapter was trained, and there is no "
            f"{ADAPTER_CONFIG} with its alpha",
            hint=f"adapter_config=<the {ADAPTER_CONFIG} of that training>",
        )
    if any(parse_peft(unwrap(name)) for name in names):  # saved by peft's own names
        keys = {unwrap(name): name for name in names}
    else:
        keys = {key: name for name, key in rename_all(names, adapter=True).items()}
    view = {key: trained.tensors[name] for key, name in keys.items()}
    config, findings = parse_config(read_json(path))
    if isinstance(trained, DistributedCheckpoint) and config.bias != "none":
        raise ConfigError(
            f"source={request.checkpoint.root}: bias={config.bias}: a distributed checkpoint has "
            "all parameters and does not tell which biases were trained",
            hint="save the adapter with model.save_pretrained and deliver that",
        )
    ops = [plain_op(k, f"{TRAINED}:{keys[k]}", info) for k, info in view.items()]
    known = set(names)
    left = [f"{TRAINED}:{name}" for name in trained.tensors if name not in known]
    plan = Plan(tuple(ops), dict.fromkeys(left, "frozen: belongs to the base"))
    validate(plan, {TRAINED: trained.tensors})
    return plan, Adapter(request.checkpoint.root, ADAPTER, config, view, tuple(findings)), path


def gathered_model(request: Request, trained: Ranks) -> Work:
    """Plan a full model, in its final dtype and files."""
    config = _above(request, trained, CONFIG)
    folder = request.base if config is None else config.parent
    if folder is None:
        raise ConfigError(
            f"source={request.checkpoint.root}: there is no {CONFIG} that describes the model",
            hint="base=<folder of the model that was trained>",
        )
    base = open_model(request.base) if request.base is not None else None
    facts = request.perform(model_facts, request.base or folder, request.target.dtype)
    live = {unwrap(name): name for name in trained.tensors}
    known = {*facts.parameters, *(slot.live for slot in facts.slots)}
    foreign = {unwrap(name) for name in getattr(trained, "buffers", ())} - known
    source = {key: trained.tensors[name] for key, name in live.items()}
    tensors = {name: info for name, info in source.items() if name not in foreign}
    plan = plan_full(
        tensors,
        facts,
        base=None if base is None else base,
        frozen=base is not None,
        dtype=DTYPE_NAMES[request.target.dtype],
        max_shard_bytes=request.target.max_shard_bytes,
    )
    sources: dict[str, Tensors] = {TRAINED: source}
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
    dropped = {k: why for k, why in plan.dropped.items() if k.partition(":")[0] in sources}
    dropped |= {f"{TRAINED}:{name}": why for name, why in sorted(reasons.items())}
    plan = replace(plan, dropped=dropped)
    validate(plan, sources)
    return Work(plan, facts, sources, read_json(folder / CONFIG), gather=plan)


def _above(request: Request, trained: Ranks, name: str) -> Path | None:
    """Return the path of a file of the trainer: beside the partitions, or one folder above."""
    folders = dict.fromkeys([trained.root, request.checkpoint.root, trained.root.parent])
    return next((place / name for place in folders if (place / name).is_file()), None)


_SHOWN = 100


def prepare(request: Request) -> Work:
    """Plan and validate a delivery."""
    checkpoint = request.checkpoint
    if checkpoint.kind == "model":
        return _model(request)
    if checkpoint.kind == "adapter":
        return _adapter(request)
    trained: Ranks
    if checkpoint.kind == "shards":
        trained = read_partitions(checkpoint.root)
    else:
        trained = (read_zero if checkpoint.kind == "deepspeed" else read_distributed)(
            checkpoint.root
        )
    names = [*getattr(trained, "trained", trained.tensors)]
    if any(".lora_" in name for name in names):
        gather, adapter, path = gathered_adapter(request, trained, names)
        work = _merge(request, [(adapter, 1.0)], gather=gather, trained=trained.tensors)
        return replace(work, adapter_config=path)
    return gathered_model(request, trained)


def _model(request: Request) -> Work:
    """Plan a full model. A value head is split off; a reward model becomes a class of vLLM."""
    root, target = request.checkpoint.root, request.target
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
    if request.reward is not None:
        how = request.reward.normalisation or Normalisation()
        config = reward_config(config, config["architectures"][0], how, request.reward.endings)
    if findings := [*facts.findings, *_misfits(plan, facts)]:
        raise ContractError(
            f"{root}: not what its config.json says: {first_and_more(findings)}",
            details=findings[:_SHOWN],
        )
    plan = with_output(
        plan,
        sources[MODEL],
        dtype=DTYPE_NAMES[target.dtype],
        max_shard_bytes=target.max_shard_bytes,
        wide=facts.wide,
    )
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
    root = request.checkpoint.root
    detected = detect(read_folder(root))
    adapters = [(read_adapter(root, beside=detected.folder.beside), 1.0)]
    if request.reward is not None:
        return _merge(request, adapters, reward=request.reward)
    if detected.is_of_reward and request.base is not None:
        return _merge(request, adapters, reward=Reward(endings(root, request.base)))
    if HEAD not in detected.folder.sources:
        return _merge(request, adapters)
    detected.require()
    return _merge(request, adapters, head=detected)


def _merge(
    request: Request,
    adapters: Sequence[tuple[Adapter, float]],
    *,
    reward: Reward | None = None,
    gather: Plan | None = None,
    trained: Tensors | None = None,
    head: Detected | None = None,
) -> Work:
    """Plan the merge of adapters into the base, from headers of it and values of the adapters.

    `trained` is the input of `gather`. Raises ContractError if they do not fit, with all findings.
    """
    if request.base is None:
        raise base_missing(request.checkpoint)
    planned = plan_adapters(
        adapters,
        request.base,
        request.config or require_plain(request.base, "base"),
        model_dtype=request.target.dtype,
        dtype=DTYPE_NAMES[request.target.dtype],
        max_shard_bytes=request.target.max_shard_bytes,
        quantization=request.quantization,
        rounding=request.rounding,
        reward=reward,
        perform=request.perform,
    )
    validate(planned.plan, planned.sources)
    inputs = {**planned.sources, **({} if trained is None else {TRAINED: trained})}
    return Work(planned.plan, planned.facts, inputs, planned.config, gather, planned.plan, head)
