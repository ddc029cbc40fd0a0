"""The request and the plans of a delivery, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ConfigError
from tasks.delivery.plan.adapters import Weighted
from tasks.delivery.recognise import Given
from tasks.weights.execute.worker import Perform
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import DTYPE_NAMES
from tasks.weights.files.reader import WEIGHTS, Checkpoint
from tasks.weights.files.source import Source
from tasks.weights.heads import Detected
from tasks.weights.model import Model
from tasks.weights.plan import Plan, with_output
from tasks.weights.quantized.config_fields import is_decodable, refusal, without_quantization
from tasks.weights.quantized.source import PackedCheckpoint, decoding
from tasks.weights.rounding import Rounding

BASE, ADAPTER, TRAINED, MODEL = "base", "adapter", "trained", WEIGHTS
"""Names of the inputs in the plans."""


@dataclass(frozen=True)
class Target:
    """Format of the output: torch dtype name, and maximum bytes of tensor data in one file."""

    dtype: str
    max_shard_bytes: int

    @property
    def short(self) -> str:
        """Return the safetensors name of the dtype."""
        return DTYPE_NAMES[self.dtype]


@dataclass(frozen=True)
class Request:
    """Input of the planning.

    Attributes:
        given: SOURCE.
        base: folder of the base; None if there is none.
        target: format of the output.
        quantization: 4 bits that the base goes through, as `Op.quantization`; None for none.
        adapter_config: path of adapter_config.json, for an adapter in shards or in a DeepSpeed
            checkpoint.
        perform: sends requests about model classes to the process that has torch.
        adapters: the adapters, if SOURCE is one or there are several.
        rounding: `merge.rounding`.
    """

    given: Given
    base: Path | None
    target: Target
    quantization: Mapping[str, Any] | None
    adapter_config: Path | None
    perform: Perform
    adapters: tuple[Weighted, ...] = ()
    rounding: Rounding = "unbiased"


@dataclass(frozen=True)
class Work:
    """The plans of a delivery's stages; None for a stage that is not needed.

    Attributes:
        model: plan that makes the served tensors; the plan of gather, merge or convert.
        facts: facts of the served model.
        opened: inputs of the plans by name.
        config: config.json of the served model, without dtype.
        gather: plan from partitions to an adapter or a full model; inputs "trained", "base".
        merge: plan from base and adapter to a full model; inputs "base", "adapter".
        head: value head to keep apart; None if there is none.
        adapter_config: adapter_config.json of an adapter that is gathered.
    """

    model: Plan
    facts: Model
    opened: Mapping[str, Source]
    config: Mapping[str, Any]
    gather: Plan | None = None
    merge: Plan | None = None
    head: Detected | None = None
    adapter_config: Path | None = None

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


def in_files(plan: Plan, target: Target, source: Source, *, cast: bool = True) -> Plan:
    """Return the plan with output dtype and files; the files of the input are kept if they fit.

    Args:
        plan: operations in the order of the input's files.
        target: format of the output.
        source: input whose files may be kept.
        cast: True to set the dtype; False if the operations have it already.
    """
    files = source.files if isinstance(source, Checkpoint | PackedCheckpoint) else {}
    dtype = target.short if cast else None
    plan = decoding(plan, {BASE: source, MODEL: source})
    return with_output(plan, dtype=dtype, max_shard_bytes=target.max_shard_bytes, files=files)


def require_plain(folder: Path, key: str) -> dict[str, Any]:
    """Return the config.json of a model; for 4 bits and fp8, that of the decoded model.

    Args:
        folder: folder of the model.
        key: setting that names the folder, for the error.

    Raises:
        ConfigError: the model is quantized in a way that cannot be decoded.
    """
    config = read_json(folder / "config.json")
    refused = refusal(config, folder)
    if refused is not None:
        hint = f"{key}={refused.remedy.removeprefix('base=')}"
        raise ConfigError(f"{key}={folder}: {refused.text}", hint=hint)
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
    for entry in plan.dropped:
        reasons.setdefault(entry.reason, []).append(entry.source)
    for reason, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"drop {names[0]}{more}: {reason}"


def megabytes(count: int) -> str:
    """`12.3 MB`, `4.56 GB`."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
