"""Plan all operations of a hand-off from headers and configuration, before a byte is written.

    work = prepare(Request(source=..., base=...))             of a source made elsewhere
    work = plan_trained(trained, gathered, base, ...)         of a model that was trained here

One pass writes the weights in their final dtype and files: gather of a full model, or merge.
Convert then links the files. For a SOURCE that is a full model, convert is the only pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.audit.source import ADAPTER_CONFIG, CONFIG, Source, recognise
from tasks.core.contract import judge
from tasks.core.errors import ConfigError, ContractError, first_and_more
from tasks.core.terminal import in_words
from tasks.delivery.base import BaseChoice, base_missing, choose_base, undecided
from tasks.delivery.tokens import Tokens, find_tokens
from tasks.evaluation.model_folder import Trained
from tasks.weights.distributed import DistributedCheckpoint
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import DTYPE_NAMES, is_float
from tasks.weights.files.reader import WEIGHTS
from tasks.weights.files.tensors import Tensors
from tasks.weights.gather import (
    TRAINED,
    Ranks,
    plan_adapter_file,
    plan_full,
    read_ranks,
    renamed,
    trained_names,
)
from tasks.weights.heads import (
    Normalisation,
    detect,
    endings,
    read_folder,
    reward_config,
    separate,
)
from tasks.weights.lora import Adapter
from tasks.weights.lora_config import parse_config
from tasks.weights.merge import BASE, Reward, plan_adapter
from tasks.weights.model import Model, Perform, model_facts, perform
from tasks.weights.plan import Plan, Planned, as_is, validate, with_output
from tasks.weights.quantized.config_fields import (
    is_decodable,
    refusal,
    remedy,
    without_quantization,
)
from tasks.weights.quantized.nf4 import check_quantization
from tasks.weights.quantized.packed import open_model
from tasks.weights.rounding import Rounding
from tasks.weights.tokens.tokenizer import read_tokenizer

_SHOWN = 100


@dataclass(frozen=True, kw_only=True)
class Request:
    """Input of the planning."""

    source: Source
    base: Path | None  # folder of the base; None if there is none
    tokens: Tokens
    dtype: str  # torch name of the output's dtype
    max_shard_bytes: int  # limit of tensor data in one output file
    # the base that an adapter is merged into
    choice: BaseChoice = field(default_factory=BaseChoice)
    # path of adapter_config.json, for an adapter in shards or in a DeepSpeed checkpoint
    adapter_config: Path | None = None
    perform: Perform = perform  # sends requests about model classes to the process that has torch
    rounding: Rounding = "unbiased"
    config: Mapping[str, Any] | None = None  # config.json of the model; None for the base's
    reward: Reward | None = None  # of a reward model that was trained here
    scanned: bool = False  # True if an audit has read the values of the adapter in SOURCE


@dataclass(frozen=True, kw_only=True)
class Work(Planned):
    """A planned hand-off: `plan` makes the served tensors, by gather, merge or convert."""

    tokens: Tokens
    choice: BaseChoice = field(default_factory=BaseChoice)
    merges: bool = False  # `plan` is that of merge; inputs "base", "adapter"
    # plan of gather: of an adapter from `trained`, or of a full model, and then `plan`
    gather: Plan | None = None
    trained: Tensors | None = None  # the ranks' tensors, for an adapter that is gathered
    adapter_config: Path | None = None  # adapter_config.json of an adapter that is gathered
    is_ours: bool = False  # True for a model that was trained here: each tensor is its class's

    @property
    def converts(self) -> bool:
        """Return True if convert makes the served tensors directly from SOURCE."""
        return self.gather is None and not self.merges

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


def plan_trained(
    trained: Path,
    gathered: Path,
    base: Path,
    merge: Mapping[str, Any],  # section `merge` of the settings
    *,
    dtype: str,
    max_shard_bytes: int,
    perform: Perform,
) -> Work:
    """Plan the hand-off of a model that was trained here, from its gathered adapter or weights."""
    side = Trained.read(trained)
    source = recognise(gathered)
    source.manifest = {"notes": {"quantization": side.quantization}}
    is_adapter = source.is_adapter
    choice = BaseChoice()
    if is_adapter:
        choice = choose_base(source, base, merge, gathered.parents[1])
    if choice.quantization is not None:
        check_quantization(choice.quantization)
    reward = None
    if side.is_reward:
        stops = read_tokenizer(trained / "tokenizer").stops
        reward = Reward(stops, side.normalisation or Normalisation())
    request = Request(
        source=source,
        base=base if is_adapter else None,
        tokens=find_tokens([trained / "tokenizer", gathered]),
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        choice=choice,
        perform=perform,
        rounding=merge["rounding"],
        config=side.config,
        reward=reward,
    )
    return replace(prepare(request), is_ours=True)


def prepare(request: Request) -> Work:
    """Plan and validate a hand-off."""
    source = request.source
    if source.is_model:
        work = _model(request)
    elif source.is_adapter:
        work = _adapter(request)
    else:
        ranks = read_ranks(source.kind, source.root)
        is_adapter = any(".lora_" in name for name in trained_names(ranks))
        work = (_gathered_adapter if is_adapter else _gathered_model)(request, ranks)
    validate(work.plan, work.sources)
    return work


def require_plain(folder: Path, key: str) -> dict[str, Any]:
    """Return the config.json of a model; for 4 bits and fp8, that of the decoded model."""
    config = read_json(folder / CONFIG)
    if refused := refusal(config):
        hint = f"{key}={remedy(folder).removeprefix('base=')}"
        raise ConfigError(f"{key}={folder}: {refused}", hint=hint)
    return without_quantization(config) if is_decodable(config) else config


def describe_plan(plan: Plan) -> str:
    """Return the number and size of a plan's operations by kind, and its dropped tensors."""
    sizes: dict[str, list[int]] = {}
    for op in plan.ops:
        sizes.setdefault("fold" if op.terms else op.kind, []).append(op.nbytes)
    lines = [f"{kind} {len(of)} tensors, {in_words(sum(of))}" for kind, of in sizes.items()]
    reasons: dict[str, list[str]] = {}
    for source, reason in plan.dropped.items():
        reasons.setdefault(reason, []).append(source)
    for reason, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"drop {names[0]}{more}: {reason}")
    return "; ".join(lines)


def _gathered_adapter(request: Request, ranks: Ranks) -> Work:
    """Plan an adapter file, and the merge of the adapter that it will have."""
    root = request.source.root
    path = request.adapter_config or _above(request, ranks, ADAPTER_CONFIG)
    if path is None or not path.is_file():
        raise ConfigError(
            f"source={root}: an adapter was trained, and there is no {ADAPTER_CONFIG} with its "
            "alpha",
            hint=f"adapter_config=<the {ADAPTER_CONFIG} of that training>",
        )
    plan, tensors = plan_adapter_file(ranks)
    config, findings = parse_config(read_json(path))
    if isinstance(ranks, DistributedCheckpoint) and config.bias != "none":
        raise ConfigError(
            f"source={root}: bias={config.bias}: a distributed checkpoint has all parameters and "
            "does not tell which biases were trained",
            hint="save the adapter with model.save_pretrained and deliver that",
        )
    validate(plan, {TRAINED: ranks.tensors})
    work = _merge(request, Adapter(root, config, tensors, tuple(findings)))
    return replace(work, gather=plan, trained=ranks.tensors, adapter_config=path)


def _gathered_model(request: Request, ranks: Ranks) -> Work:
    """Plan a full model, in its final dtype and files."""
    config = _above(request, ranks, CONFIG)
    folder = request.base if config is None else config.parent
    if folder is None:
        raise ConfigError(
            f"source={request.source.root}: there is no {CONFIG} that describes the model",
            hint="base=<folder of the model that was trained>",
        )
    base = open_model(request.base) if request.base is not None else None
    facts = request.perform(model_facts, request.base or folder, request.dtype)
    tensors = renamed(ranks)
    plan = plan_full(
        tensors,
        facts,
        base=base,
        frozen=base is not None,
        buffers=getattr(ranks, "buffers", ()),
        dtype=DTYPE_NAMES[request.dtype],
        max_shard_bytes=request.max_shard_bytes,
    )
    sources = {TRAINED: tensors}
    if base is not None and any(op.input == BASE for op in plan.ops):
        sources[BASE] = base
    planned = Planned(plan, sources, read_json(folder / CONFIG), facts)
    return Work(**vars(planned), tokens=request.tokens, gather=plan)


def _above(request: Request, ranks: Ranks, name: str) -> Path | None:
    """Return the path of a file of the trainer: beside the partitions, or one folder above."""
    folders = dict.fromkeys([ranks.root, request.source.root, ranks.root.parent])
    return next((place / name for place in folders if (place / name).is_file()), None)


def _model(request: Request) -> Work:
    """Plan a full model. A value head is left out; a reward model becomes a class of vLLM."""
    root, dtype = request.source.root, request.dtype
    config: Any = require_plain(root, "source")
    detected = detect(read_folder(root))
    if detected.head is not None or detected.findings:
        planned = separate(detected, dtype=dtype, perform=request.perform)
    else:
        opened, facts = open_model(root), request.perform(model_facts, root, dtype)
        planned = Planned(as_is(opened), {WEIGHTS: opened}, config, facts)
    if request.reward is not None:
        how = request.reward.normalisation or Normalisation()
        config, stops = planned.config, request.reward.endings
        config = reward_config(config, config["architectures"][0], how, stops)
        planned = replace(planned, config=config)
    if findings := [*planned.facts.findings, *_misfits(planned.plan, planned.facts)]:
        raise ContractError(
            f"{root}: not what its config.json says: {first_and_more(findings)}",
            details=findings[:_SHOWN],
        )
    plan = with_output(
        planned.plan,
        planned.sources[WEIGHTS],
        dtype=DTYPE_NAMES[dtype],
        max_shard_bytes=request.max_shard_bytes,
        wide=planned.facts.wide,
    )
    return Work(**{**vars(planned), "plan": plan}, tokens=request.tokens)


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
    """Plan the merge of a PEFT folder."""
    folder, reward = read_folder(request.source.root), request.reward
    assert folder.adapter is not None
    if reward is None and request.base is not None and detect(folder).is_of_reward:
        reward = Reward(endings(folder.root, request.base))
    return _merge(request, folder.adapter, reward)


def _merge(request: Request, adapter: Adapter, reward: Reward | None = None) -> Work:
    """Plan the merge of an adapter into the base, from headers of it and values of the adapter.

    Raises ContractError if they do not fit, with all findings.
    """
    if request.base is None:
        raise base_missing(request.source)
    if not request.choice.mode:
        raise undecided(request.source, request.choice)
    planned = plan_adapter(
        adapter,
        request.base,
        request.config or require_plain(request.base, "base"),
        model_dtype=request.dtype,
        dtype=DTYPE_NAMES[request.dtype],
        max_shard_bytes=request.max_shard_bytes,
        quantization=request.choice.quantization,
        rounding=request.rounding,
        reward=reward,
        scanned=request.scanned and request.source.is_adapter,
        perform=request.perform,
    )
    return Work(**vars(planned), tokens=request.tokens, choice=request.choice, merges=True)
