"""The tokenizer of a served folder, and the configuration files that have to agree with it.

config.json, generation_config.json and the tokenizer each record the EOS ids, the padding id and
the vocabulary size. An engine may read any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from tasks.audit.source import CONFIG
from tasks.core.contract import Check
from tasks.core.errors import ConfigError
from tasks.evaluation.model_folder import GENERATION_CONFIG
from tasks.weights.files.documents import read_json, write_json
from tasks.weights.files.dtypes import DTYPE_NAMES
from tasks.weights.files.folder import PROCESSORS, copy_side_file, side_files
from tasks.weights.plan import Plan
from tasks.weights.tokens.prove_ids import is_leading, misread
from tasks.weights.tokens.tokenizer import TokenizerFacts, read_tokenizer, vocabulary_findings

if TYPE_CHECKING:
    from tasks.delivery.plan import Work

TOKENIZER_CONFIG = "tokenizer_config.json"
_ANY_OF = ("tokenizer.json", TOKENIZER_CONFIG, "tokenizer.model", "vocab.json")


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

    def findings(self, work: Work) -> Iterator[str]:
        """Yield the reasons why the tokenizer does not fit the planned embedding."""
        if self.facts is not None and work.facts.embedding:
            shapes = {op.name: op.shape for op in work.plan.ops}
            yield from vocabulary_findings(shapes, work.facts, self.facts)

    def stops(self, config: Mapping[str, Any]) -> list[int]:
        """Return the EOS ids of the tokenizer with its template, then the model's own."""
        stops = [] if self.facts is None else self.facts.stops
        for document in (self.generation, config):
            stops = [*stops, *_ids(document)]
        return list(dict.fromkeys(stops))

    def pad(self, work: Work) -> int | None:
        """Return the padding id of the tokenizer, else of the configuration, else the EOS id."""
        known = [] if self.facts is None else [self.facts.pad]
        known += [document.get("pad_token_id") for document in (self.generation, work.config)]
        known += [] if self.facts is None else [self.facts.eos]
        pad = next((pad for pad in known if isinstance(pad, int)), None)
        # A reward is the score at the last token that is not padding, and EOS must count.
        return None if work.is_reward and pad in self.stops(work.config) else pad

    def write(self, out: Path, work: Work, dtype: str) -> None:
        """Copy the tokenizer, and write config.json and generation_config.json."""
        for path in self.files():
            copy_side_file(path, out / path.name)
        stops, pad = self.stops(work.config), self.pad(work)
        ends = {"eos_token_id": stops[0] if len(stops) == 1 else stops} if stops else {}
        pads = {} if pad is None else {"pad_token_id": pad}
        generation = {k: value for k, value in self.generation.items() if k != "pad_token_id"}
        write_json(out / GENERATION_CONFIG, {**generation, **ends, **pads})
        # Written even if it is null: some model classes have a padding id by default.
        config = _served_config(work.config, dtype)
        write_json(out / CONFIG, {**config, **ends, "pad_token_id": pad})
        own = out / TOKENIZER_CONFIG
        if own.is_file() and "auto_map" in (document := read_json(own)):
            write_json(own, {key: value for key, value in document.items() if key != "auto_map"})

    def agreement(self, out: Path, work: Work, plan: Plan) -> Iterator[Check]:
        """Check that tokenizer, template and vocabulary of the written folder agree."""
        config = read_json(out / CONFIG)
        embedding = work.facts.embedding
        shapes = {embedding: (0, 0), **{op.name: op.shape for op in plan.ops}}
        rows, text = shapes[embedding][0], config.get("text_config") or config
        size = text.get("vocab_size")
        yield Check("config.json vocab_size", str(rows), str(size), ok=rows == size)
        reason = misread(out)
        ids, ok = reason or "the same", not reason or is_leading(reason)
        yield Check("token ids as loaded", "those of tokenizer.json", ids, ok=ok)
        if self.facts is None:
            return
        served = read_tokenizer(out)
        same = served.rows == self.facts.rows
        yield Check("tokenizer", str(self.facts.rows), str(served.rows), ok=same)
        expected = "the trained side's" if self.facts.template else "none"
        actual = "present" if served.template else "absent"
        same = served.template == self.facts.template
        yield Check("chat template", expected, actual, ok=same)
        wrong = next(vocabulary_findings(shapes, work.facts, served), "")
        expected, sizes = "a row for each id", f"{served.rows} ids, {rows} rows"
        yield Check("tokenizer fits the embedding", expected, wrong or sizes, ok=not wrong)


def _served_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json with this dtype, and without the quantization of its own weights.

    `auto_map` is left out: the hand-offs were checked with transformers' own classes, and an engine
    that trusts the folder would run other code.
    """
    replaced = ("quantization_config", "torch_dtype", "auto_map")
    kept = {key: value for key, value in config.items() if key not in replaced}
    return {**kept, "dtype": dtype}


def _ids(document: Mapping[str, Any]) -> list[int]:
    value = document.get("eos_token_id")
    return value if isinstance(value, list) else [] if value is None else [value]


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
    readable = all((folder / name).is_file() for name in _ANY_OF[:2])
    facts = read_tokenizer(folder) if readable else None
    # Training may have saved the tokenizer without the processors of a multimodal model.
    beside = (side_files(place, PROCESSORS) for place in folders)
    processors = next((tuple(paths) for paths in beside if paths), ())
    side_files(folder)  # links that lead elsewhere are refused before anything starts
    return Tokens(folder, facts, generation, processors)


def write_weights_files(out: Path, work: Work, base: Path) -> None:
    """Write config.json and generation settings, so that transformers can load the tensors."""
    floats = [op.dtype for op in work.plan.ops if op.dtype in DTYPE_NAMES.values()]
    short = floats[0] if floats else "BF16"
    dtype = next(name for name, each in DTYPE_NAMES.items() if each == short)
    write_json(out / CONFIG, _served_config(work.config, dtype))
    if (base / GENERATION_CONFIG).is_file():
        copy_side_file(base / GENERATION_CONFIG, out / GENERATION_CONFIG)
