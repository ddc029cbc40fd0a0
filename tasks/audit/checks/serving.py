"""Settings and exports that a server reads otherwise than training wrote them.

Layout of GGUF headers: `docs/gguf.md` of ggml, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.audit.check import (
    ADAPTER,
    ERROR,
    INFO,
    MODEL,
    WARNING,
    WHOLE,
    Fault,
    check,
    either,
    some,
)
from tasks.audit.checks.config import rope
from tasks.audit.checks.templates import template_places
from tasks.audit.checks.tokens import GENERATION, tokens_of
from tasks.audit.checks.witness import FILE, has_record
from tasks.audit.known import content, of_text, texts, token_ids, whole
from tasks.audit.repair import SETTINGS, TOKENIZER
from tasks.audit.source import ADAPTER_CONFIG, CONFIG, Source, setting
from tasks.core.errors import ArtifactError
from tasks.weights.quantized.config_fields import QUANTIZATION

_ALLOWED: Mapping[str, tuple[str, float, float]] = {
    # setting: (words, least, most) of vLLM 0.32 and transformers 5
    "temperature": ("0 to 2", 0.0, 2.0),
    "top_p": ("above 0, at most 1", math.nextafter(0.0, 1.0), 1.0),
    "min_p": ("0 to 1", 0.0, 1.0),
    "top_k": ("-1, 0 or more", -1.0, math.inf),
    "repetition_penalty": ("above 0", math.nextafter(0.0, 1.0), math.inf),
}
_COLD, _PENALTY = 0.05, 1.5
"""A temperature below which sampling is greedy in practice, and a penalty from which on answers
avoid the words of the question."""
_PER_WORD = 8
"""4-bit weights in a packed integer."""
_NO_LIMIT = 10**9
"""`model_max_length` from which on it stands for "not set"."""
_MODELFILE = "Modelfile"
_GO_TEMPLATE = re.compile(r'^TEMPLATE\s+(?:"""(.*?)"""|"([^"\n]*)"|(\S[^\n]*))', re.M | re.S)


@check(
    "GENERATION_SETTINGS", WARNING, needs=(MODEL,),
    why="vLLM takes its sampling defaults from generation_config.json: it refuses each request "
    "with a value out of range, and answers by the others although nobody asked for them",
    fix="write the settings of the base, or remove them",
    issues="vLLM #15241, lm-evaluation-harness PR #3160",
)  # fmt: skip
def generation_settings(source: Source) -> Iterator[Fault]:
    """Sampling defaults that servers refuse, or that decide every answer."""
    settings = source.config(GENERATION)
    for name, (words, least, most) in _ALLOWED.items():
        value = settings.get(name)
        if isinstance(value, int | float) and not least <= value <= most:
            yield Fault(f"{name} {value}", words, file=GENERATION, severity=ERROR)
    base = source.base.config(GENERATION) if source.base is not None else {}
    temperature, penalty = settings.get("temperature"), settings.get("repetition_penalty")
    odd = []
    if isinstance(temperature, int | float) and 0 < temperature < _COLD:
        odd.append(("temperature", temperature, f"0, or {_COLD} or more"))
    if isinstance(penalty, int | float) and penalty > _PENALTY:
        odd.append(("repetition_penalty", penalty, f"1 to {_PENALTY}"))
    for name, value, words in odd:
        if base.get(name) != value:
            yield Fault(f"{name} {value}", words, file=GENERATION)


@check(
    "TOKENIZER_CUTS", WARNING, needs=(either,),
    why="a trainer that called tokenizer(..., truncation=True) or padding=True has left it in the "
    "file: programs that read tokenizer.json directly (text-embeddings-inference, candle, "
    "transformers.js, servers in Rust) cut or pad every prompt",
    fix=setting(TOKENIZER, truncation=None, padding=None),
    issues="djl PR #2741",
)  # fmt: skip
def tokenizer_cuts(source: Source) -> Iterator[Fault]:
    """Truncation or padding in tokenizer.json."""
    document = source.config(TOKENIZER)
    left = [name for name in ("truncation", "padding") if isinstance(document.get(name), Mapping)]
    if left:
        limit = document.get("truncation")
        length = limit.get("max_length") if isinstance(limit, Mapping) else None
        text = f"{' and '.join(left)}{f', max_length {length}' if length is not None else ''}"
        yield Fault(text, "null", file=TOKENIZER)


@check(
    "LENGTH_BELOW_ROWS", WARNING, needs=(has_record,),
    why="loaders warn or cut at model_max_length, and vLLM refuses requests beyond "
    "max_position_embeddings: conversations as long as those of the training do not get through",
    fix="write the base's value",
    issues="ms-swift #861",
)  # fmt: skip
def length_below_rows(source: Source) -> Iterator[Fault]:
    """A context that is shorter than a row of the training."""
    longest = whole(source.folder.json(FILE).get("longest_row")) or 0
    limits = (
        (SETTINGS, "model_max_length", source.config(SETTINGS).get("model_max_length")),
        (CONFIG, "max_position_embeddings", of_text(source.config(), "max_position_embeddings")),
    )
    for file, name, limit in limits:
        if isinstance(limit, int | float) and 0 < limit < min(longest, _NO_LIMIT):
            yield Fault(f"{name} {limit}", f"{longest} or more, the longest row", file=file)


@check(
    "DTYPE_NAME", INFO, needs=(MODEL,),
    why="transformers 4 before 4.56 reads torch_dtype alone: it loads the model in float32, with "
    "twice the memory",
    fix="add torch_dtype with the same value for such readers",
    issues="unsloth-zoo PR #286",
)  # fmt: skip
def dtype_name(source: Source) -> Iterator[Fault]:
    """The dtype under the name of transformers 5 alone."""
    config = source.config()
    dtype = of_text(config, "dtype")
    if isinstance(dtype, str) and dtype != "float32" and not of_text(config, "torch_dtype"):
        yield Fault(f"dtype {dtype}, and no torch_dtype", f"torch_dtype {dtype}", file=CONFIG)


@check(
    "TARGET_PARAMETERS", WARNING, needs=(ADAPTER,),
    why="for some families vLLM and SGLang drop the experts' part of such an adapter without a "
    "word, or fail on its shapes; merged weights have it in every server",
    fix="serve it merged: {merge}; or ask the server whether it applies the adapter: verify",
    issues="vLLM PR #41384, vLLM PR #52198, sglang PR #25528",
)  # fmt: skip
def target_parameters(source: Source) -> Iterator[Fault]:
    """An adapter of parameters (`target_parameters`), which servers may leave out."""
    targets = texts(source.config(ADAPTER_CONFIG).get("target_parameters"))
    if targets:
        expected = "target_modules, or a server that applies them"
        yield Fault(some(targets), expected, file=ADAPTER_CONFIG)


@check(
    "QUANT_SHAPES", ERROR, needs=(MODEL, WHOLE),
    why="a layer that is named as left in 16 bits and does not exist means that its real name is "
    "packed; a group that does not divide a row has no scale for its end: loaders fail, or read "
    "other scales",
    fix="quantise again with the names and the group size of this model",
    issues="llm-compressor #1983, sglang PR #24929, imp PR #1970",
)  # fmt: skip
def quantised_shapes(source: Source) -> Iterator[Fault]:
    """Names or group sizes in quantization_config that do not fit the tensors."""
    settings = source.config().get(QUANTIZATION)
    if not isinstance(settings, Mapping):
        return
    modules = {key.rpartition(".")[0] for key in source.tensors}
    for name in ("ignore", "modules_to_not_convert"):
        listed = texts(settings.get(name))
        # A list may name towers that this model lacks, beside what it has.
        if listed and not any(_is_there(each, modules) for each in listed):
            text = f"{name}: {some(listed)}"
            yield Fault(text, "modules of this model", file=CONFIG, severity=WARNING)
    size, wrong = _group_size(settings), list[str]()
    for key, packed in source.tensors.items():
        scale = source.tensors.get(key.replace("_packed", "_scale"))
        if size and key.endswith(".weight_packed") and scale is not None:
            columns = packed.shape[-1] * _PER_WORD
            if scale.shape[-1] * size != columns:
                wrong.append(key)
    if wrong:
        yield Fault(f"{len(wrong)} matrices", f"a scale for {size} columns each", tensors=wrong)


def _is_there(name: str, modules: set[str]) -> bool:
    """Return True if a name, or a pattern `re:...`, of an ignore list fits a module."""
    if name.startswith("re:"):
        try:
            pattern = re.compile(name.removeprefix("re:"))
        except re.error:
            return False
        return any(pattern.match(module) for module in modules)
    name = name.removesuffix(".linear")  # as llm-compressor names wrapped layers
    return name.endswith("lm_head") or any(name in module for module in modules)  # may be tied


def _group_size(settings: Mapping[str, Any]) -> int:
    """Return the group size of compressed-tensors' 4-bit weights; 0 for none."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("num_bits") == 4:
            return whole(weights.get("group_size")) or 0
    return 0


@check(
    "EXPORT_DIFFERS", ERROR,
    why="llama.cpp and Ollama read template, end of turn and positions from the exported file "
    "alone: another template or EOS gives answers that repeat or never end, another rope base "
    "garbage after a few hundred tokens",
    fix="convert the trained folder again; in a Modelfile, write the TEMPLATE of the trained model",
    issues="unsloth #468, unsloth #3899, ollama #6823",
)  # fmt: skip
def export_differs(source: Source) -> Iterator[Fault]:
    """A GGUF file or a Modelfile that is not what the folder, or the base, says."""
    trained = source.base if source.has_base and source.base is not None else source
    files = [name for name in source.folder.here() if name.endswith(".gguf")]
    for name in files[:4]:
        try:
            header = read_gguf(source.folder.root / name)
        except ArtifactError as error:
            yield Fault(error.message.rpartition(": ")[2], "a GGUF header", file=name)
            continue
        for what, ours, theirs in _differences(header, trained):
            yield Fault(f"{what} {ours}", f"{theirs}, as trained", file=name)
    if _MODELFILE in source.folder.files:
        yield from _modelfile(source.folder.text(_MODELFILE), trained)


def _differences(
    header: Mapping[str, Any], trained: Source
) -> Iterator[tuple[str, object, object]]:
    """Yield what a GGUF header and a trained folder state differently."""
    config = trained.config()
    template = next(iter(trained.once(template_places).values()), "")
    ours = header.get("tokenizer.chat_template")
    if template and isinstance(ours, str) and ours.strip() != template.strip():
        yield "chat template of", f"{len(ours)} characters", f"another one of {len(template)}"
    end, ends = whole(header.get("tokenizer.ggml.eos_token_id")), _ends(trained)
    if end is not None and ends and end not in ends:
        yield "EOS id", end, some(sorted(ends))
    theta = rope(config).get("theta") if config else None
    base = header.get(f"{header.get('general.architecture')}.rope.freq_base")
    if (
        isinstance(theta, int | float)
        and isinstance(base, float)
        and not math.isclose(theta, base, rel_tol=1e-4)
    ):
        yield "rope base", base, theta
    begins = trained.config(SETTINGS).get("add_bos_token")
    added = header.get("tokenizer.ggml.add_bos_token")
    if isinstance(begins, bool) and isinstance(added, bool) and begins != added:
        yield "add_bos_token", added, begins
    tokens, rows = header.get("tokenizer.ggml.tokens"), trained.once(tokens_of).rows
    if isinstance(tokens, int) and tokens < rows:
        yield "vocabulary of", f"{tokens} tokens", rows


def _ends(trained: Source) -> set[int]:
    """Return the ids at which generation of the trained model ends."""
    eos = content(trained.config(SETTINGS).get("eos_token"))
    own = trained.once(tokens_of).ids.get(eos)
    return {
        *token_ids(trained.config(GENERATION).get("eos_token_id")),
        *token_ids(of_text(trained.config(), "eos_token_id")),
        *([own] if own is not None else []),
    }


def _modelfile(text: str, trained: Source) -> Iterator[Fault]:
    """Yield a fault if the TEMPLATE of a Modelfile has none of the marks of the trained one."""
    template = next(iter(trained.once(template_places).values()), "")
    marks = [mark for mark in sorted(trained.once(tokens_of).special) if mark in template]
    written = _GO_TEMPLATE.search(text)
    if written is None or not marks:
        return
    ours = next(part for part in written.groups() if part is not None)
    if not any(mark in ours for mark in marks):
        yield Fault("TEMPLATE without them", some(marks), file=_MODELFILE)


MAX_BYTES = 64 << 20
"""The settings of a model with 256k tokens have about 10 MB."""
_FIXED = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""`struct` formats by type of a value."""
_TEXT, _ARRAY = 8, 9


def read_gguf(path: Path) -> dict[str, Any]:
    """Return the settings by name; of an array, the number of its elements.

    Raises:
        ArtifactError: no GGUF file, damaged, or of another version.
    """
    try:
        with path.open("rb") as file:
            return _gguf_settings(file.read(MAX_BYTES))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (struct.error, ValueError, KeyError) as error:
        raise ArtifactError(f"{path}: not a readable GGUF file: {error}") from error


def _gguf_settings(raw: bytes) -> dict[str, Any]:
    magic, version, _, count = struct.unpack_from("<4sIQQ", raw)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"{magic!r}, version {version}")
    settings: dict[str, Any] = {}
    at = 24
    for _ in range(count):
        name, at = _gguf_text(raw, at)
        (kind,) = struct.unpack_from("<I", raw, at)
        settings[name], at = _gguf_value(raw, at + 4, kind)
    return settings


def _gguf_value(raw: bytes, at: int, kind: int) -> tuple[Any, int]:
    """Return a value and the offset behind it."""
    if kind == _TEXT:
        return _gguf_text(raw, at)
    if kind != _ARRAY:
        form = f"<{_FIXED[kind]}"
        return struct.unpack_from(form, raw, at)[0], at + struct.calcsize(form)
    inner, count = struct.unpack_from("<IQ", raw, at)
    at += 12
    if inner in _FIXED:
        return count, at + count * struct.calcsize(f"<{_FIXED[inner]}")
    for _ in range(count):
        _, at = _gguf_value(raw, at, inner)
    return count, at


def _gguf_text(raw: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from("<Q", raw, at)
    start, end = at + 8, at + 8 + size
    if end > len(raw):
        raise ValueError("cut short")
    return raw[start:end].decode("utf-8", "replace"), end
