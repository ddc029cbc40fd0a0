"""The words of a delivery's planning: what is asked, what will be done. Plain data and sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ConfigError
from tasks.delivery.plan.adapters import Weighted
from tasks.delivery.recognise import Given
from tasks.weights.execute.worker import Perform
from tasks.weights.files.reader import DTYPE_NAMES, WEIGHTS, Checkpoint, read_json
from tasks.weights.files.source import Source
from tasks.weights.heads.detect import Found
from tasks.weights.plan.contracts import ModelFacts
from tasks.weights.plan.layout import with_output
from tasks.weights.plan.operations import Plan
from tasks.weights.quantized.config_fields import is_packed, stored, without_quantization
from tasks.weights.quantized.plans import decoding
from tasks.weights.quantized.source import PackedCheckpoint

BASE, ADAPTER, TRAINED, MODEL = "base", "adapter", "trained", WEIGHTS
"""Names of inputs in the plans."""


@dataclass(frozen=True)
class Target:
    """What is to come out: dtype (torch name) and bytes of tensor data in one file."""

    dtype: str
    max_shard_bytes: int

    @property
    def short(self) -> str:
        """safetensors name of the dtype."""
        return DTYPE_NAMES[self.dtype]


@dataclass(frozen=True)
class Request:
    """What planning needs to know.

    Attributes:
        given: SOURCE.
        base: folder of the base; None where there is none.
        target: what is to come out.
        quantization: 4 bits that the base goes through, as `Op.quantization`; None for none.
        adapter_config: of an adapter whose tensors lie in shards or in a DeepSpeed checkpoint.
        perform: who knows the model classes.
        adapters: the adapters, where SOURCE is one or there are several.
    """

    given: Given
    base: Path | None
    target: Target
    quantization: Mapping[str, Any] | None
    adapter_config: Path | None
    perform: Perform
    adapters: tuple[Weighted, ...] = ()


@dataclass(frozen=True)
class Work:
    """The plans of the stages that apply; None for a stage that does not.

    Attributes:
        model: the plan that makes the served tensors: that of gather, merge or convert.
        facts: of the served model.
        opened: inputs by name: of `gather`, or of `model` where convert runs it.
        config: config.json of the served model, dtype aside.
        gather: trained slices -> an adapter, or a full model; inputs "trained", "base".
        merge: base and adapter -> a full model; inputs "base", "adapter".
        head: a value head that is kept apart.
    """

    model: Plan
    facts: ModelFacts
    opened: Mapping[str, Source]
    config: Mapping[str, Any]
    gather: Plan | None = None
    merge: Plan | None = None
    head: Found | None = None

    @property
    def converts(self) -> bool:
        """Whether it is convert that makes the served tensors, right from SOURCE."""
        return self.gather is None and self.merge is None

    @property
    def is_causal(self) -> bool:
        """Whether the served model continues texts."""
        return self._is("ForCausalLM", "LMHeadModel")

    @property
    def is_reward(self) -> bool:
        """Whether the served model gives texts one number."""
        return self._is("ForSequenceClassification")

    def _is(self, *endings: str) -> bool:
        names = self.config.get("architectures") or ()
        return any(str(name).endswith(endings) for name in names)


def in_files(plan: Plan, target: Target, source: Source, *, cast: bool = True) -> Plan:
    """The plan in the dtype and the files that are to come out; the input's files where they fit.

    Args:
        plan: operations in the order of the input's files.
        target: what is to come out.
        source: the input whose files may be kept.
        cast: whether dtypes are still to be set.
    """
    files = source.files if isinstance(source, Checkpoint | PackedCheckpoint) else {}
    dtype = target.short if cast else None
    plan = decoding(plan, {BASE: source, MODEL: source})
    return with_output(plan, dtype=dtype, max_shard_bytes=target.max_shard_bytes, files=files)


def require_plain(folder: Path, key: str) -> dict[str, Any]:
    """config.json of a model as it is once decoded.

    Raises:
        ConfigError: it is stored quantised in another way than bitsandbytes' 4 bits.
    """
    config = read_json(folder / "config.json")
    if is_packed(config):
        return without_quantization(config)
    how = stored(config)
    if how is not None:
        raise ConfigError(
            f"{key}={folder}: its weights are stored quantised ({how})",
            hint=f"{key}=<the same model in bf16, fp16 or fp32>; merge.base=dequantized takes it "
            "through 4 bits as training did",
        )
    return config


def describe_plan(plan: Plan) -> Iterator[str]:
    """Operations by kind, bytes, and what is left out with its reason."""
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
