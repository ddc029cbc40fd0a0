"""The files beside the weights of a served folder, and whether all of them say the same.

config.json, generation_config.json and the tokenizer each say what ends a text, what pads one, how
many tokens there are. Engines read one or the other, so all have to agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.contract import Check
from tasks.evaluation.trained_artifact import CONFIG, GENERATION_CONFIG, write_json
from tasks.weights.files.reader import read_json
from tasks.weights.files.tokenizer import TokenizerFacts, read_tokenizer
from tasks.weights.files.vocabulary import Vocabulary, vocabulary_of
from tasks.weights.plan.contracts import ModelFacts
from tasks.weights.plan.operations import Plan


@dataclass(frozen=True)
class Said:
    """What the files of a served folder have to say.

    Attributes:
        config: config.json of the model, as far as the rest does not decide.
        generation: generation_config.json, likewise.
        dtype: torch name.
        stops: ids that end a text.
        pad: id that pads; None where nobody names one.
        tokenizer: what the tokenizer's files say; None where they cannot be read, and are served
            as they are.
        template: the chat template is required; else it is to be there where `tokenizer` has one.
        quantized: `quantization_config`; None for plain weights.
    """

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    dtype: str
    stops: Sequence[int]
    pad: int | None
    tokenizer: TokenizerFacts | None
    template: bool
    quantized: Mapping[str, Any] | None = None


def write_configs(out: Path, said: Said) -> None:
    """Write config.json and generation_config.json."""
    stops = list(said.stops)
    ends = {"eos_token_id": stops[0] if len(stops) == 1 else stops} if stops else {}
    pads = {} if said.pad is None else {"pad_token_id": said.pad}
    generation = {key: one for key, one in said.generation.items() if key != "pad_token_id"}
    write_json(out / GENERATION_CONFIG, {**generation, **ends, **pads})
    # Said outright where there is none: some families have one by default.
    config = served_config(said.config, dtype=said.dtype, quantized=said.quantized)
    write_json(out / CONFIG, {**config, **ends, "pad_token_id": said.pad})


def served_config(
    config: Mapping[str, Any], *, dtype: str, quantized: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """config.json of a model in `dtype`, quantised as `quantized` says and in no other way."""
    gone = ("quantization_config", "torch_dtype")
    said = {key: value for key, value in config.items() if key not in gone}
    return {
        **said,
        "dtype": dtype,
        **({"quantization_config": dict(quantized)} if quantized else {}),
    }


def agreement(out: Path, said: Said, facts: ModelFacts, plan: Plan) -> list[Check]:
    """Whether what was written says it: read back, file against file.

    Args:
        out: the folder, its tokenizer included.
        said: what it has to say.
        facts: of the model.
        plan: of its tensors.
    """
    config, generation = read_json(out / CONFIG), read_json(out / GENERATION_CONFIG)
    stops = sorted(said.stops)
    checks = [
        _equal("generation_config.json eos_token_id", stops, _ids(generation, "eos_token_id")),
        _equal("config.json eos_token_id", stops, _ids(config, "eos_token_id")),
        _equal("pad_token_id of both", [said.pad] * 2, [_pad(config), _pad(generation)]),
        _equal("config.json quantization_config", said.quantized, _quantization(config)),
    ]
    shapes = {facts.embedding: (0, 0), **{op.name: op.shape for op in plan.ops}}
    text = config.get("text_config") or config
    checks.append(
        _equal("config.json vocab_size", shapes[facts.embedding][0], text.get("vocab_size"))
    )
    if said.tokenizer is not None:
        served = read_tokenizer(out)
        checks += _tokenizer_checks(said.tokenizer, served, required=said.template)
        checks.append(_fit(vocabulary_of(shapes, facts, served, config)))
    return checks


def _tokenizer_checks(
    given: TokenizerFacts, served: TokenizerFacts, *, required: bool
) -> Iterator[Check]:
    yield _equal("tokenizer", given.rows, served.rows)
    expected = "the trained side's" if required or given.template else "none"
    same = served.template == given.template
    yield Check(
        "chat template",
        expected,
        "present" if served.template else "absent",
        ok=same and (bool(given.template) or not required),
    )


def _fit(sizes: Vocabulary) -> Check:
    findings = list(sizes.findings())
    return Check(
        "tokenizer fits the embedding",
        f"a row for each of at most {sizes.rows} ids",
        findings[0] if findings else str(sizes),
        ok=not findings,
    )


def _equal(name: str, expected: object, found: object) -> Check:
    return Check(name, str(expected), str(found), ok=expected == found)


def _ids(document: Mapping[str, Any], key: str) -> list[int]:
    value = document.get(key)
    return sorted(value) if isinstance(value, list) else [] if value is None else [value]


def _quantization(config: Mapping[str, Any]) -> Any:
    return config.get("quantization_config")


def _pad(document: Mapping[str, Any]) -> Any:
    return document.get("pad_token_id")
