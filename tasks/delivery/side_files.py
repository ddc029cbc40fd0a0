"""Tokenizer, generation settings and config.json of a served folder, made to say the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.core.errors import ConfigError
from tasks.delivery.plan.work import Work
from tasks.delivery.recognise import CONFIG
from tasks.evaluation.serving_config import ServingConfig, agreement, served_config, write_configs
from tasks.evaluation.trained_artifact import GENERATION_CONFIG, write_json
from tasks.weights.files.reader import DTYPE_NAMES, read_json
from tasks.weights.files.tokenizer import TokenizerFacts, read_tokenizer
from tasks.weights.files.vocabulary import vocabulary_of
from tasks.weights.plan.operations import Plan

_NAMES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template.*", "*.model", "*.tiktoken",
)  # fmt: skip
_PROCESSORS = "*processor_config.json"
"""What a multimodal model makes of its images; beside the base, also where training saved a
tokenizer alone."""
_ANY_OF = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Tokens:
    """Where the tokenizer comes from, and what ends and pads a text.

    Attributes:
        folder: holds its files.
        facts: what the files say; None without a tokenizer.json: then it is copied as it is.
        generation: generation_config.json that goes with it; empty when there is none.
        processors: files of the first folder that has them.
    """

    folder: Path
    facts: TokenizerFacts | None
    generation: Mapping[str, Any] = field(default_factory=dict)
    processors: tuple[Path, ...] = ()

    def identity(self) -> list[list[Any]]:
        """Names, sizes and times of the files: part of the key of what they end up in."""
        files = [path.stat() for path in self.files()]
        names = [path.name for path in self.files()]
        return [
            [name, one.st_size, one.st_mtime_ns] for name, one in zip(names, files, strict=True)
        ]

    def files(self) -> list[Path]:
        """The tokenizer's files and the processors'."""
        found = {path for name in _NAMES for path in self.folder.glob(name) if path.is_file()}
        return sorted({*found, *self.processors})


def find_tokens(folders: Sequence[Path]) -> Tokens:
    """The first folder with a tokenizer, and the first with generation settings.

    Args:
        folders: SOURCE first: a tokenizer that training saved may hold tokens that it added.

    Raises:
        ConfigError: there is no tokenizer.
        ArtifactError: it cannot be read.
    """
    holding = [one for one in folders if any((one / name).is_file() for name in _ANY_OF)]
    if not holding:
        raise ConfigError(
            f"no tokenizer in {', '.join(map(str, folders))}",
            details=[f"looked for {', '.join(_ANY_OF)}"],
            hint="base=<folder with the model's tokenizer>",
        )
    folder = holding[0]
    settings = [one / GENERATION_CONFIG for one in (folder, *folders)]
    generation = next((read_json(path) for path in settings if path.is_file()), {})
    readable = (folder / "tokenizer.json").is_file() and (
        folder / "tokenizer_config.json"
    ).is_file()
    facts = read_tokenizer(folder) if readable else None
    beside = (sorted(one.glob(_PROCESSORS)) for one in folders)
    processors = next((tuple(found) for found in beside if found), ())
    return Tokens(folder, facts, generation, processors)


def write_served_files(
    out: Path,
    work: Work,
    tokens: Tokens,
    *,
    dtype: str,
    plan: Plan,
    quantized: Mapping[str, Any] | None = None,
) -> list[Check]:
    """Write them, and check that what was written agrees.

    Args:
        out: staging directory.
        work: says what model it is.
        tokens: tokenizer and generation settings.
        dtype: torch name.
        plan: of the served tensors.
        quantized: `quantization_config` of what is served; None for plain weights.
    """
    for path in tokens.files():
        shutil.copyfile(path, out / path.name)
    stops = _stops(work.config, tokens)
    pad = _pad(work.config, tokens)
    said = ServingConfig(
        config=work.config,
        generation=tokens.generation,
        dtype=dtype,
        stops=stops,
        # A reward is the score of the last token that is no padding: an end must not pass for one.
        pad=None if work.is_reward and pad in stops else pad,
        tokenizer=tokens.facts,
        template=False,
        quantized=quantized,
    )
    write_configs(out, said)
    return agreement(out, said, work.facts, plan)


def _stops(config: Mapping[str, Any], tokens: Tokens) -> list[int]:
    """Every id that ends a text, by anyone who says so; the tokenizer's own first."""
    found = list(tokens.facts.stops) if tokens.facts is not None else []
    for said in (tokens.generation.get("eos_token_id"), config.get("eos_token_id")):
        found += said if isinstance(said, list) else [] if said is None else [said]
    return list(dict.fromkeys(found))


def _pad(config: Mapping[str, Any], tokens: Tokens) -> int | None:
    """The id that pads: the tokenizer's, else what is configured, else the end of a text."""
    if tokens.facts is not None and tokens.facts.pad is not None:
        return tokens.facts.pad
    for said in (tokens.generation.get("pad_token_id"), config.get("pad_token_id")):
        if isinstance(said, int):
            return said
    return tokens.facts.eos if tokens.facts is not None else None


def write_weights_files(out: Path, work: Work, base: Path) -> None:
    """config.json and generation settings beside the tensors: what transformers needs to load."""
    dtype = next(name for name, short in DTYPE_NAMES.items() if short == _dtype_of(work.model))
    write_json(out / CONFIG, served_config(work.config, dtype=dtype))
    if (base / GENERATION_CONFIG).is_file():
        shutil.copyfile(base / GENERATION_CONFIG, out / GENERATION_CONFIG)


def _dtype_of(plan: Plan) -> str:
    floats = [op.dtype for op in plan.ops if op.dtype in DTYPE_NAMES.values()]
    return floats[0] if floats else "BF16"


def side_findings(work: Work, tokens: Tokens) -> Iterator[str]:
    """Whether the tokenizer fits the embedding, before anything is written."""
    if tokens.facts is not None and work.facts.embedding:
        shapes = {op.name: op.shape for op in work.model.ops}
        yield from vocabulary_of(shapes, work.facts, tokens.facts, work.config).findings()
