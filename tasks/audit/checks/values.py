"""Tensor data: what no header tells. Only with `values=true`; every byte is read once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.audit.catalogue import values as say
from tasks.audit.checks.adapters.same_bytes import differ
from tasks.audit.finding import Finding, Severity, some
from tasks.audit.scan import Seen, scan
from tasks.audit.source import Source
from tasks.weights.files.names import parse_peft

_FP16 = 65504.0
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")


def check(source: Source) -> Iterator[Finding]:
    """Every tensor once, then what several of them say together, then the manifest."""
    if not source.values or not source.tensors:
        return
    manifest = source.recognised.manifest
    seen = scan(source, source.tensors, hashed=bool(manifest))
    yield from _each(source, seen)
    yield from _lora(source, seen)
    yield from _tied(source, seen)
    if manifest:
        yield from _manifest(source, seen, manifest)


def _each(source: Source, seen: Mapping[str, Seen]) -> Iterator[Finding]:
    bad = {name: one.nonfinite for name, one in seen.items() if one.nonfinite}
    if bad:
        yield say.NOT_FINITE.at(
            source.tensors[next(iter(bad))].file, list(bad),
            found=f"{sum(bad.values())} elements of {len(bad)} tensors", expected="numbers",
        )  # fmt: skip
    wide = [n for n, one in seen.items() if one.dtype != "F16" and _FP16 < one.magnitude < math.inf]
    if wide:
        top = max(seen[name].magnitude for name in wide)
        yield say.DTYPE_RANGE.at(
            source.tensors[wide[0]].file,
            wide,
            found=f"up to {top:.3g}",
            expected=f"up to {_FP16:.0f}",
        )
    for name, one in seen.items():
        if len(source.tensors[name].shape) == 2 and not _is_lora(name):
            yield from _matrix(source, name, one)


def _matrix(source: Source, name: str, one: Seen) -> Iterator[Finding]:
    file, rows = source.tensors[name].file, source.tensors[name].shape[0]
    which = some(one.rows)
    if one.is_zero:
        yield say.ALL_ZERO.at(file, name, found="zeros", expected="a matrix that was trained")
    elif one.zero_rows and name.endswith(_EMBEDDINGS):
        yield say.DEAD_EMBEDDING.at(
            file, name, found=f"{one.zero_rows} of {rows} rows are zero: {which}",
            expected="an embedding for every token",
        )  # fmt: skip
    elif one.zero_rows + one.constant_rows:
        count = one.zero_rows + one.constant_rows
        yield say.CONSTANT_ROWS.at(
            file, name, found=f"{count} of {rows} rows: {which}", expected="rows that were trained"
        )


def _is_lora(name: str) -> bool:
    return ".lora_" in name


def _lora(source: Source, seen: Mapping[str, Seen]) -> Iterator[Finding]:
    keys = {name: parse_peft(name) for name in seen}
    halves = [
        name
        for name, key in keys.items()
        if key is not None and key.half == "B" and source.tensors[name].numel
    ]  # an empty tensor has a finding of its own
    zero = [name for name in halves if seen[name].is_zero]
    if zero:
        every = len(zero) == len(halves)
        yield say.LORA_B_ZERO.at(
            source.tensors[zero[0]].file, zero, found=f"{len(zero)} of {len(halves)} are zero",
            expected="values that training put there",
            severity=Severity.ERROR if every else Severity.WARNING,
        )  # fmt: skip


def _tied(source: Source, seen: Mapping[str, Seen]) -> Iterator[Finding]:
    if source.config().get("tie_word_embeddings") is not True:
        return
    heads = [name for name in seen if name.endswith(_HEADS) and not _is_lora(name)]
    inputs = [name for name in seen if name.endswith(_EMBEDDINGS) and not _is_lora(name)]
    if len(heads) != 1 or len(inputs) != 1:
        return
    head, embedding = source.tensors[heads[0]], source.tensors[inputs[0]]
    same = head.dtype == embedding.dtype and head.shape == embedding.shape
    if not same or differ((source, heads[0]), (source, inputs[0])):
        yield say.TIED_HEAD_DIFFERS.at(
            head.file, heads[0], found=f"other values than {inputs[0]}", expected="the same values"
        )


def _manifest(
    source: Source, seen: Mapping[str, Seen], manifest: Mapping[str, Any]
) -> Iterator[Finding]:
    """Tensors by the hashes that were taken on the way; other files are small, and read here."""
    for file, entries in manifest["tensors"].items():
        told = {name: entry["sha256"] for name, entry in entries.items() if name in seen}
        wrong = [name for name, sha256 in told.items() if seen[name].sha256 != sha256]
        if wrong:
            yield say.SHA256_DIFFERS.at(
                file, wrong, found=f"{len(wrong)} tensors with other bytes",
                expected="those of manifest.json",
            )  # fmt: skip
    for file, entry in manifest["files"].items():
        if file in manifest["tensors"] or file not in source.folder.files:
            continue
        with (source.folder.root / file).open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != entry["sha256"]:
            yield say.SHA256_DIFFERS.at(file, found=found, expected=str(entry["sha256"]))
