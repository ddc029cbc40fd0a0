"""Find the tokenizer of a delivery, and decide what its configuration files contain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from tasks.core.errors import ConfigError
from tasks.delivery.plan.work import Work
from tasks.delivery.recognise import CONFIG
from tasks.evaluation.serving_config import ServingConfig, served_config
from tasks.evaluation.trained_artifact import GENERATION_CONFIG, write_json
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import DTYPE_NAMES
from tasks.weights.files.side_files import PROCESSORS, copy_side_file, side_files
from tasks.weights.plan import Plan
from tasks.weights.tokens.tokenizer import TokenizerFacts, read_tokenizer
from tasks.weights.tokens.vocabulary import vocabulary_of

_ANY_OF = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Tokens:
    """The tokenizer of a delivery, with its generation settings.

    Attributes:
        folder: folder with the tokenizer's files.
        facts: the tokenizer as read; None without a tokenizer.json, then it is only copied.
        generation: generation_config.json; empty if there is none.
        processors: files of the image processors.
    """

    folder: Path
    facts: TokenizerFacts | None
    generation: Mapping[str, Any] = field(default_factory=dict)
    processors: tuple[Path, ...] = ()

    def identity(self) -> list[list[Any]]:
        """Return name and BLAKE3 hash of each file, which are part of a cache key."""
        return [[path.name, blake3(path.read_bytes()).hexdigest()] for path in self.files()]

    def files(self) -> list[Path]:
        """Return the files of the tokenizer and of the processors. Raises ArtifactError."""
        return sorted({*side_files(self.folder), *self.processors})


def find_tokens(folders: Sequence[Path]) -> Tokens:
    """Find the first folder with a tokenizer, and the first with generation settings.

    Args:
        folders: folders to search, SOURCE first, because training may have added tokens.

    Raises:
        ConfigError: there is no tokenizer.
        ArtifactError: the tokenizer cannot be read.
    """
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
    """Return the contents of the served configuration files.

    Args:
        work: the plans, with config.json of the served model.
        tokens: tokenizer and generation settings.
        dtype: torch dtype name of the served model.
    """
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
