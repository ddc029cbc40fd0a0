"""Check tensor data, of models with `values=true` only; every byte is read once."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.audit.catalogue.values import Values
from tasks.audit.checks.adapters.same_bytes import differ
from tasks.audit.config_fields import of_text, whole
from tasks.audit.finding import Finding, Severity, some
from tasks.audit.scan import Seen, scan
from tasks.audit.source import Source
from tasks.pipeline.artifact import HASHES, hash_of
from tasks.weights.files.documents import manifest_problem
from tasks.weights.files.names import parse_peft

_FP16 = 65504.0
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
_PROJECTION = re.compile(
    r"\.(?:(?:[qkvo]|out|qkv|gate|up|down|gate_up)_proj|c_attn|c_proj|c_fc|fc[12]|w[123]"
    r"|query_key_value|dense|dense_h_to_4h|dense_4h_to_h)(?:\.weight)?$"
    r"|(?:^|\.)(?:lm_head|embed_out|embed_tokens|wte|embed_in|word_embeddings)\.weight$"
)
"""Matrices without which a language model does not work; adapters in them begin at zero."""


def check(source: Source) -> Iterator[Finding]:
    """Check every tensor, then LoRA and tied embeddings, then the hashes of the manifest."""
    if not source.is_read or not source.tensors:
        return
    manifest = source.recognised.manifest
    if manifest_problem(manifest):
        manifest = {}  # not ours, or damaged, which is a finding of `folder_checks`
    recorded = manifest["tensors"].values() if manifest else ()
    hashes = {name: hash_of(entry) for entries in recorded for name, entry in entries.items()}
    seen = scan(source, source.tensors, hashes=hashes)
    yield from _each(source, seen)
    yield from _lora(source, seen)
    yield from _tied(source, seen)
    if manifest:
        yield from _manifest(source, seen, manifest)


def _each(source: Source, seen: Mapping[str, Seen]) -> Iterator[Finding]:
    bad = {name: stats.nonfinite for name, stats in seen.items() if stats.nonfinite}
    count = f"{sum(bad.values())} elements of {len(bad)} tensors"
    yield from Values.NOT_FINITE.of(source, bad, found=count, expected="finite numbers")
    wide = [
        name
        for name, stats in seen.items()
        if stats.dtype != "F16" and _FP16 < stats.magnitude < math.inf
    ]
    if wide:
        top = max(seen[name].magnitude for name in wide)
        yield from Values.DTYPE_RANGE.of(
            source, wide, found=f"up to {top:.3g}", expected=f"up to {_FP16:.0f}"
        )
    identity = _identity_blocks(seen)
    for name, stats in seen.items():
        if len(source.tensors[name].shape) in (2, 3) and not _is_lora(name):
            yield from _matrix(source, name, stats, needed=name not in identity)


def _identity_blocks(seen: Mapping[str, Seen]) -> set[str]:
    """Return the matrices of zeros by which a block passes its input on, as LLaMA-Pro adds them."""
    outputs = [(name, name.replace("self_attn.o_proj.", "mlp.down_proj.")) for name in seen]
    return {
        name
        for attention, mlp in outputs
        if attention != mlp and mlp in seen and seen[attention].is_zero and seen[mlp].is_zero
        for name in (attention, mlp)
    }


def _matrix(source: Source, name: str, stats: Seen, *, needed: bool) -> Iterator[Finding]:
    file, rows = source.tensors[name].file, source.tensors[name].shape[0]
    indices = some(stats.rows)
    padding = {whole(of_text(source.config(), "pad_token_id"))}  # zero by design
    of_model = needed and source.is_model and _PROJECTION.search(name) is not None
    worst = Severity.ERROR if of_model else None
    if stats.is_zero:
        yield Values.ALL_ZERO.at(
            file, name, found="zeros", expected="a trained matrix", severity=worst
        )
    elif of_model and stats.constant_rows + stats.zero_rows == rows > 1:
        yield Values.CONSTANT_ROWS.at(
            file, name, found=f"all {rows} rows", expected="a trained matrix", severity=worst
        )
    elif name.endswith(_EMBEDDINGS) and stats.zero_rows == 1 and padding <= {*stats.rows}:
        return
    elif stats.zero_rows and name.endswith(_EMBEDDINGS):
        yield Values.DEAD_EMBEDDING.at(
            file, name, found=f"{stats.zero_rows} of {rows} rows are zero: {indices}",
            expected="an embedding for every token",
        )  # fmt: skip
    elif stats.zero_rows + stats.constant_rows:
        count = stats.zero_rows + stats.constant_rows
        yield Values.CONSTANT_ROWS.at(
            file, name, found=f"{count} of {rows} rows: {indices}", expected="trained rows"
        )


def _is_lora(name: str) -> bool:
    return ".lora_" in name


def _lora(source: Source, seen: Mapping[str, Seen]) -> Iterator[Finding]:
    keys = {name: parse_peft(name) for name in seen}
    halves = [
        name
        for name, key in keys.items()
        if key is not None and key.half == "B" and source.tensors[name].numel
    ]  # an empty tensor is reported elsewhere
    zero = [name for name in halves if seen[name].is_zero]
    yield from Values.LORA_B_ZERO.of(
        source, zero, found=f"{len(zero)} of {len(halves)} are zero", expected="trained values",
        severity=Severity.ERROR if len(zero) == len(halves) else Severity.WARNING,
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
        yield Values.TIED_HEAD_DIFFERS.at(
            head.file, heads[0], found=f"other values than {inputs[0]}", expected="the same values"
        )


def _manifest(
    source: Source, seen: Mapping[str, Seen], manifest: Mapping[str, Any]
) -> Iterator[Finding]:
    """Compare hashes with the manifest; files that are not tensors are small and hashed here."""
    for file, entries in manifest["tensors"].items():
        recorded = {name: entry[hash_of(entry)] for name, entry in entries.items() if name in seen}
        wrong = [name for name, value in recorded.items() if seen[name].checksum != value]
        if wrong:
            yield Values.SHA256_DIFFERS.at(
                file, wrong, found=f"{len(wrong)} tensors with other bytes",
                expected="the bytes that manifest.json records",
            )  # fmt: skip
    for file, entry in manifest["files"].items():
        if file in manifest["tensors"] or file not in source.folder.files:
            continue
        with (source.folder.root / file).open("rb") as opened:
            actual = hashlib.file_digest(opened, HASHES[hash_of(entry)]).hexdigest()
        expected = str(entry[hash_of(entry)])
        if actual != expected:
            yield Values.SHA256_DIFFERS.at(file, found=actual, expected=expected)
