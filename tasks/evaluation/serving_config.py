"""Write the configuration files of a served folder, and check that all files agree.

config.json, generation_config.json and the tokenizer each record the EOS ids, the padding id and
the vocabulary size. An engine may read any of them, so they have to agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.evaluation.model_folder import CONFIG, GENERATION_CONFIG, write_json
from tasks.weights.files.documents import read_json
from tasks.weights.model import Model
from tasks.weights.plan import Plan
from tasks.weights.tokens.prove_ids import is_leading, misread
from tasks.weights.tokens.tokenizer import TokenizerFacts, read_tokenizer
from tasks.weights.tokens.vocabulary import Vocabulary, vocabulary_of

TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class ServingConfig:
    """Contents of the configuration files of a served folder."""

    config: Mapping[str, Any]  # config.json of the model; the other fields override it
    generation: Mapping[str, Any]  # generation_config.json; the other fields override it
    dtype: str
    pad: int | None  # padding id; None if there is none
    # the tokenizer's files as read; None if they cannot be read and are only copied
    tokenizer: TokenizerFacts | None
    # True if a chat template is required. Otherwise it is required only if `tokenizer` has one
    template: bool

    @property
    def stops(self) -> list[int]:
        """EOS ids of the tokenizer with its template, then the model's own from both files."""
        stops = [] if self.tokenizer is None else self.tokenizer.stops
        for document in (self.generation, self.config):
            stops += _ids(document, "eos_token_id")
        return list(dict.fromkeys(stops))


def write_configs(out: Path, wanted: ServingConfig) -> None:
    """Write config.json and generation_config.json."""
    stops = wanted.stops
    ends = {"eos_token_id": stops[0] if len(stops) == 1 else stops} if stops else {}
    pads = {} if wanted.pad is None else {"pad_token_id": wanted.pad}
    generation = {key: value for key, value in wanted.generation.items() if key != "pad_token_id"}
    write_json(out / GENERATION_CONFIG, {**generation, **ends, **pads})
    # Written even if it is null: some model classes have a padding id by default.
    config = served_config(wanted.config, dtype=wanted.dtype)
    write_json(out / CONFIG, {**config, **ends, "pad_token_id": wanted.pad})
    _drop_code(out / TOKENIZER_CONFIG)


def _drop_code(path: Path) -> None:
    """Remove `auto_map` from a copied tokenizer_config.json; other files stay as they are."""
    if path.is_file() and "auto_map" in (config := read_json(path)):
        write_json(path, {key: value for key, value in config.items() if key != "auto_map"})


def served_config(config: Mapping[str, Any], *, dtype: str) -> dict[str, Any]:
    """Return config.json with this dtype, and without the quantization of its own weights.

    `auto_map` is left out: the hand-offs were checked with transformers' own classes, and an engine
    that trusts the folder would run other code.
    """
    replaced = ("quantization_config", "torch_dtype", "auto_map")
    kept = {key: value for key, value in config.items() if key not in replaced}
    return {**kept, "dtype": dtype}


def agreement(out: Path, wanted: ServingConfig, facts: Model, plan: Plan) -> list[Check]:
    """Read the written files back, and check that they have the wanted contents."""
    config, generation = read_json(out / CONFIG), read_json(out / GENERATION_CONFIG)
    stops = wanted.stops
    checks = [
        _equal("generation_config.json eos_token_id", stops, _ids(generation, "eos_token_id")),
        _equal("config.json eos_token_id", stops, _ids(config, "eos_token_id")),
        _equal("pad_token_id of both", [wanted.pad] * 2, [_pad(config), _pad(generation)]),
        _equal("config.json quantization_config", None, config.get("quantization_config")),
    ]
    shapes = {facts.embedding: (0, 0), **{op.name: op.shape for op in plan.ops}}
    text = config.get("text_config") or config
    checks.append(
        _equal("config.json vocab_size", shapes[facts.embedding][0], text.get("vocab_size"))
    )
    reason = misread(out)
    ids, ok = reason or "the same", not reason or is_leading(reason)
    checks.append(Check("token ids as loaded", "those of tokenizer.json", ids, ok=ok))
    if wanted.tokenizer is not None:
        served = read_tokenizer(out)
        checks += _tokenizer_checks(wanted.tokenizer, served, required=wanted.template)
        checks.append(_fit(vocabulary_of(shapes, facts, served, config)))
    return checks


def _tokenizer_checks(
    trained: TokenizerFacts, served: TokenizerFacts, *, required: bool
) -> Iterator[Check]:
    yield _equal("tokenizer", trained.rows, served.rows)
    expected = "the trained side's" if required or trained.template else "none"
    same = served.template == trained.template
    yield Check(
        "chat template",
        expected,
        "present" if served.template else "absent",
        ok=same and (bool(trained.template) or not required),
    )


def _fit(sizes: Vocabulary) -> Check:
    findings = list(sizes.findings())
    return Check(
        "tokenizer fits the embedding",
        f"a row for each of at most {sizes.rows} ids",
        findings[0] if findings else str(sizes),
        ok=not findings,
    )


def _equal(name: str, expected: object, actual: object) -> Check:
    return Check(name, str(expected), str(actual), ok=expected == actual)


def _ids(document: Mapping[str, Any], key: str) -> list[int]:
    value = document.get(key)
    return value if isinstance(value, list) else [] if value is None else [value]


def _pad(document: Mapping[str, Any]) -> Any:
    return document.get("pad_token_id")
