"""Exports for llama.cpp and Ollama, against the folder that they were made from.

Layout of GGUF headers: `docs/gguf.md` of ggml, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from io import SEEK_CUR, BytesIO
from pathlib import Path
from typing import Any

from tasks.audit.check import ERROR, Fault, check, some
from tasks.audit.checks.config import rope
from tasks.audit.checks.tokens import GENERATION, tokens_of
from tasks.audit.known import SETTINGS, content, of_text, template_places, token_ids, whole
from tasks.audit.source import Source
from tasks.core.errors import ArtifactError

_MODELFILE = "Modelfile"
_GO_TEMPLATE = re.compile(r'^TEMPLATE\s+(?:"""(.*?)"""|"([^"\n]*)"|(\S[^\n]*))', re.M | re.S)
_STOP = re.compile(r'^PARAMETER\s+stop\s+"?([^"\n]+)"?', re.M)
_MOST = 4


def has_exports(source: Source) -> bool:
    """Return True for a folder with a GGUF file or a Modelfile."""
    return any(name.endswith((".gguf", _MODELFILE)) for name in source.folder.files)


@check(
    "EXPORT_DIFFERS", ERROR, needs=(has_exports,),
    why="llama.cpp and Ollama go by it: responses never end, or are garbage at length",
    fix="convert the trained folder again; write its TEMPLATE into the Modelfile",
    issues="unsloth #468, unsloth #3899, ollama #6823",
)  # fmt: skip
def export_differs(source: Source) -> Iterator[Fault]:
    """A GGUF file or a Modelfile that is not what the folder, or the base, says."""
    trained = source.base if source.has_base and source.base is not None else source
    files = [name for name in source.folder.here() if name.endswith(".gguf")]
    for name in files[:_MOST]:
        try:
            header = read_gguf(source.root / name)
        except ArtifactError as error:
            yield Fault(error.message.rpartition(": ")[2], "a GGUF header", file=name)
            continue
        for what, ours, theirs in _differences(header, trained):
            yield Fault(f"{what} {ours}", f"{theirs}, as trained", file=name)
    # A TEMPLATE of the same family has one of the marks of the trained one.
    written = _GO_TEMPLATE.search(source.folder.text(_MODELFILE))
    template = _template(trained)
    marks = [mark for mark in sorted(trained.once(tokens_of).special) if mark in template]
    if written and marks and not any(mark in written[0] for mark in marks):
        yield Fault("TEMPLATE without them", some(marks), file=_MODELFILE)
    known = trained.once(tokens_of).ids
    stops = [stop.strip() for stop in _STOP.findall(source.folder.text(_MODELFILE))]
    stops = [stop for stop in stops if stop.startswith("<")]
    if known and stops and not any(stop in known or stop in template for stop in stops):
        yield Fault(f"PARAMETER stop {some(stops)}", "tokens of the tokenizer", file=_MODELFILE)


def _template(trained: Source) -> str:
    return next(iter(trained.once(template_places).values()), "")


def _differences(
    header: Mapping[str, Any], trained: Source
) -> Iterator[tuple[str, object, object]]:
    """Yield what a GGUF header and a trained folder state differently."""
    config, template, tokens = trained.config(), _template(trained), trained.once(tokens_of)
    settings = trained.config(SETTINGS)
    ours = header.get("tokenizer.chat_template")
    if template and isinstance(ours, str) and ours.strip() != template.strip():
        yield "chat template of", f"{len(ours)} characters", f"another one of {len(template)}"
    end = whole(header.get("tokenizer.ggml.eos_token_id"))
    ends = {
        *token_ids(trained.config(GENERATION).get("eos_token_id")),
        *token_ids(of_text(config, "eos_token_id")),
        *token_ids(tokens.ids.get(content(settings.get("eos_token")))),
    }
    if end is not None and ends and end not in ends:
        yield "EOS id", end, some(sorted(ends))
    theta = rope(config).get("theta") if config else None
    base = header.get(f"{header.get('general.architecture')}.rope.freq_base")
    if not isinstance(theta, int | float) or not isinstance(base, float):
        theta = base = 0.0  # unknown
    if not math.isclose(theta, base, rel_tol=1e-4):
        yield "rope base", base, theta
    begins, added = settings.get("add_bos_token"), header.get("tokenizer.ggml.add_bos_token")
    if isinstance(begins, bool) and isinstance(added, bool) and begins != added:
        yield "add_bos_token", added, begins
    count = header.get("tokenizer.ggml.tokens")
    if isinstance(count, int) and count < tokens.rows:
        yield "vocabulary of", f"{count} tokens", tokens.rows


MAX_BYTES = 64 << 20
"""The settings of a model with 256k tokens have about 10 MB."""
_FIXED = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
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
            raw = BytesIO(file.read(MAX_BYTES))
        magic, version, _, count = raw.read(4), *(_number(raw, form) for form in ("<I", "<Q", "<Q"))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"{magic!r}, version {version}")
        return {_text(raw): _value(raw, _number(raw, "<I")) for _ in range(count)}
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (struct.error, ValueError, KeyError, OverflowError, RecursionError) as error:
        raise ArtifactError(f"{path}: not a readable GGUF file: {error}") from error


def _number(raw: BytesIO, form: str) -> Any:
    return struct.unpack(form, raw.read(struct.calcsize(form)))[0]


def _text(raw: BytesIO) -> str:
    size = _number(raw, "<Q")
    text = raw.read(min(size, MAX_BYTES))
    if len(text) < size:
        raise ValueError("cut short")
    return text.decode("utf-8", "replace")


def _value(raw: BytesIO, kind: int) -> Any:
    if kind == _TEXT:
        return _text(raw)
    if kind != _ARRAY:
        return _number(raw, _FIXED[kind])
    inner, count = _number(raw, "<I"), _number(raw, "<Q")
    if inner in _FIXED:
        raw.seek(count * struct.calcsize(_FIXED[inner]), SEEK_CUR)
        return count
    for _ in range(count):
        _value(raw, inner)
    return count
