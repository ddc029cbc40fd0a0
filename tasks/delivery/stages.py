"""gather, merge and convert of a delivery: run the plans of `plan` with the chain's code.

The plans were validated before, so keys, shapes and dtypes fit. The tokenizer of a delivery is
found here, and what its configuration files contain is decided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from tasks.convert import write_served
from tasks.core.contract import Check
from tasks.core.errors import ConfigError
from tasks.delivery.plan import TRAINED, Work
from tasks.delivery.source import CONFIG
from tasks.evaluation.measuring import Measuring
from tasks.evaluation.model_folder import GENERATION_CONFIG, write_json
from tasks.evaluation.serving_config import ServingConfig, served_config
from tasks.gather import write_gathered
from tasks.merge import ADAPTER, write_merged
from tasks.pipeline.report import StageReport
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import DTYPE_NAMES
from tasks.weights.files.folder import PROCESSORS, copy_side_file, side_files
from tasks.weights.files.reader import WEIGHTS
from tasks.weights.heads import read_folder, write_value_head
from tasks.weights.lora import read_adapter
from tasks.weights.plan import Plan, as_is, with_output
from tasks.weights.quantized.source import open_model
from tasks.weights.tokens.tokenizer import TokenizerFacts, read_tokenizer
from tasks.weights.tokens.vocabulary import vocabulary_of

_ANY_OF = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Tokens:
    """The tokenizer of a delivery, with its generation settings."""

    folder: Path  # folder with the tokenizer's files
    # the tokenizer as read; None without a tokenizer.json, then it is only copied
    facts: TokenizerFacts | None
    # generation_config.json; empty if there is none
    generation: Mapping[str, Any] = field(default_factory=dict)
    processors: tuple[Path, ...] = ()  # files of the image processors

    def identity(self) -> list[list[Any]]:
        """Return name and BLAKE3 hash of each file, which are part of a cache key."""
        return [[path.name, blake3(path.read_bytes()).hexdigest()] for path in self.files()]

    def files(self) -> list[Path]:
        """Return the files of the tokenizer and of the processors. Raises ArtifactError."""
        return sorted({*side_files(self.folder), *self.processors})


def find_tokens(folders: Sequence[Path]) -> Tokens:
    """Find the first folder with a tokenizer, and the first with generation settings."""
    with_tokenizer = [
        folder for folder in folders if any((folder / name).is_file() for name in _ANY_OF)
    ]
    if not with_tokenizer:
        raise ConfigError(
            f"no tokenizer in {', '.join(map(str, folders))}",
            details=[f"looked for {', '.join(_ANY_OF)}"],
            hint="base=<folder with the model's tokenizer>",
        )
    folder = with_tokenizer[0]
    settings = [place / GENERATION_CONFIG for place in (folder, *folders)]
    generation = next((read_json(path) for path in settings if path.is_file()), {})
    readable = (folder / "tokenizer.json").is_file() and (
        folder / "tokenizer_config.json"
    ).is_file()
    facts = read_tokenizer(folder) if readable else None
    # Training may have saved the tokenizer without the processors of a multimodal model.
    beside = (side_files(place, PROCESSORS) for place in folders)
    processors = next((tuple(paths) for paths in beside if paths), ())
    side_files(folder)  # links that lead elsewhere are refused before anything starts
    return Tokens(folder, facts, generation, processors)


def serving_config(work: Work, tokens: Tokens, dtype: str) -> ServingConfig:
    """Return the contents of the served configuration files."""
    pad = _pad(work.config, tokens)
    wanted = ServingConfig(
        config=work.config,
        generation=tokens.generation,
        dtype=dtype,
        pad=pad,
        tokenizer=tokens.facts,
        template=False,
    )
    # A reward is the score at the last token that is not padding, and EOS must count.
    return replace(wanted, pad=None) if work.is_reward and pad in wanted.stops else wanted


def _pad(config: Mapping[str, Any], tokens: Tokens) -> int | None:
    """Return the padding id of the tokenizer, else of the configuration files, else the EOS id."""
    if tokens.facts is not None and tokens.facts.pad is not None:
        return tokens.facts.pad
    for pad in (tokens.generation.get("pad_token_id"), config.get("pad_token_id")):
        if isinstance(pad, int):
            return pad
    return tokens.facts.eos if tokens.facts is not None else None


def write_weights_files(out: Path, work: Work, base: Path) -> None:
    """Write config.json and generation settings, so that transformers can load the tensors."""
    dtype = next(name for name, short in DTYPE_NAMES.items() if short == _dtype_of(work.model))
    write_json(out / CONFIG, served_config(work.config, dtype=dtype))
    if (base / GENERATION_CONFIG).is_file():
        copy_side_file(base / GENERATION_CONFIG, out / GENERATION_CONFIG)


def _dtype_of(plan: Plan) -> str:
    floats = [op.dtype for op in plan.ops if op.dtype in DTYPE_NAMES.values()]
    return floats[0] if floats else "BF16"


def side_findings(work: Work, tokens: Tokens) -> Iterator[str]:
    """Yield the reasons why the tokenizer does not fit the planned embedding."""
    if tokens.facts is not None and work.facts.embedding:
        shapes = {op.name: op.shape for op in work.model.ops}
        yield from vocabulary_of(shapes, work.facts, tokens.facts, work.config).findings()


def gather(
    out: Path, *, trained: Path, work: Work, log: Any, base: Path | None = None, **_: Any
) -> StageReport:
    """Gather the partitions of all ranks into an adapter folder or a full model."""
    assert work.gather is not None
    names = {op.input for op in work.gather.ops}
    names |= {source.partition(":")[0] for source in work.gather.dropped}
    is_adapter = work.merge is not None
    if not is_adapter:
        write_weights_files(out, work, base or trained)
    return write_gathered(
        out,
        work.gather,
        {name: work.opened[name] for name in names},
        adapter_config=work.adapter_config,
        log=log,
    )


def merge(
    out: Path,
    *,
    adapter: Path,
    base: Path,
    work: Work,
    log: Any,
    weights: Mapping[str, float] | None = None,
    merge_base: Mapping[str, str] | None = None,
    measuring: Measuring | None = None,
    **_: Any,
) -> StageReport:
    """Merge adapters into their base, in the dtype and files that are served.

    Args:
        adapter: adapter folder: SOURCE, or the output of gather; the first of several.
        weights: weights of the adapters by role; None for one adapter with weight 1.
        measuring: settings of the drift measurement; None measures nothing.
    """
    assert work.merge is not None
    sources = {name: source for name, source in work.opened.items() if name != TRAINED}
    if work.gather is not None:
        sources[ADAPTER] = read_adapter(adapter, beside=read_folder(adapter).beside).tensors
    write_weights_files(out, work, base)
    notes = {"merge_base": merge_base, "adapters": weights}
    return write_merged(
        out,
        work.merge,
        sources,
        notes={name: dict(value) for name, value in notes.items() if value},
        measuring=measuring,
        log=log,
    )


def convert(
    out: Path,
    *,
    weights: Path,
    work: Work,
    tokens: Tokens,
    dtype: str,
    max_shard_bytes: int,
    log: Any,
    merge_base: Mapping[str, str] | None = None,
    measuring: Measuring | None = None,
    **_: Any,
) -> StageReport:
    """Make the folder to serve; files that do not change are linked or copied.

    Args:
        tokens: tokenizer and generation settings.
        dtype: torch dtype name of the served model.
        max_shard_bytes: maximum tensor data of one file, in bytes.
        measuring: settings of the drift measurement; None measures nothing.
    """
    plan, sources = work.model, work.opened
    if not work.converts:
        source = open_model(weights)
        sources = {WEIGHTS: source}
        limit = max_shard_bytes
        plan = with_output(as_is(source), source, dtype=DTYPE_NAMES[dtype], max_shard_bytes=limit)
    return write_served(
        out,
        plan,
        sources,
        notes={"merge_base": dict(merge_base)} if merge_base else {},
        measuring=measuring,
        weights=weights,
        facts=work.facts,
        serving=serving_config(work, tokens, dtype),
        tokenizer=tokens.files(),
        log=log,
    )


def value_head(out: Path, *, source: Path, work: Work, log: Any, **_: Any) -> StageReport:
    """Write the value head of a policy into its own artifact, away from the served folder."""
    assert work.head is not None
    names = write_value_head(work.head, out)
    log.info("value head: %d tensors kept apart", len(names))
    checks = tuple(Check(name, "finite", "finite", ok=True) for name in names)
    return StageReport("value_head", checks)
