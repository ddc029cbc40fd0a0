"""Values, of weights up to 2 GB; of larger ones with values=true. Every byte is read once."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.audit.check import ADAPTER, ERROR, READ, WARNING, Fault, check
from tasks.audit.finding import some
from tasks.audit.known import of_text, whole
from tasks.audit.scan import Seen, scan
from tasks.audit.source import Source
from tasks.pipeline.artifact import HASHES, hash_of
from tasks.weights.files.documents import manifest_problem
from tasks.weights.files.names import parse_peft

_FP16 = 65504.0
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_PROJECTION = re.compile(
    r"\.(?:(?:[qkvo]|out|qkv|gate|up|down|gate_up)_proj|c_attn|c_proj|c_fc|fc[12]|w[123]"
    r"|query_key_value|dense|dense_h_to_4h|dense_4h_to_h)(?:\.weight)?$"
    r"|(?:^|\.)(?:lm_head|embed_out|embed_tokens|wte|embed_in|word_embeddings)\.weight$"
)
"""Matrices without which a language model does not work; adapters in them begin at zero."""


def _manifest(source: Source) -> Mapping[str, Any]:
    """Return the manifest of an artifact; empty if it is damaged, which `folder` reports."""
    manifest = source.recognised.manifest
    return {} if manifest_problem(manifest) else manifest


def _seen(source: Source) -> Mapping[str, Seen]:
    """Read all tensors."""
    recorded = _manifest(source).get("tensors", {}).values()
    hashes = {name: hash_of(entry) for entries in recorded for name, entry in entries.items()}
    return scan(source, source.tensors, hashes=hashes)


@check(
    "NOT_FINITE", ERROR, needs=(READ,),
    why="a single one is enough: every logit becomes NaN, vLLM samples token 0 and writes `!!!!`",
    fix="use an earlier checkpoint; the run had diverged",
    issues="OpenRLHF #1120",
)  # fmt: skip
def not_finite(source: Source) -> Iterator[Fault]:
    """Elements that are infinite or NaN."""
    bad = {name: seen.nonfinite for name, seen in source.once(_seen).items() if seen.nonfinite}
    if bad:
        text = f"{sum(bad.values())} elements of {len(bad)} tensors"
        yield Fault(text, "finite numbers", tensors=list(bad))


@check(
    "DTYPE_RANGE", WARNING, needs=(READ,),
    why="serving with dtype=float16, or quantisation methods that compute in fp16, turn them into "
    "infinities",
    fix="serve in bfloat16",
)  # fmt: skip
def dtype_range(source: Source) -> Iterator[Fault]:
    """Values beyond the range of fp16."""
    wide = {
        name: seen.magnitude
        for name, seen in source.once(_seen).items()
        if seen.dtype != "F16" and _FP16 < seen.magnitude < math.inf
    }
    if wide:
        yield Fault(f"up to {max(wide.values()):.3g}", f"up to {_FP16:.0f}", tensors=list(wide))


@check(
    "ALL_ZERO", WARNING, needs=(READ,),
    why="the layer outputs nothing: memory was saved before it was filled. An error for the "
    "projections, embeddings and output heads of a model, unless both outputs of a block are zero: "
    "such a block passes its input on (LLaMA-Pro)",
    fix="compare it with the base, and save again; copy a base from its origin again",
    issues="aprender #3971",
)  # fmt: skip
def all_zero(source: Source) -> Iterator[Fault]:
    """A matrix of zeros."""
    for name, seen in _matrices(source):
        if seen.is_zero:
            severity = ERROR if _is_needed(source, name) else None
            yield Fault("zeros", "a trained matrix", tensors=[name], severity=severity)


@check(
    "CONSTANT_ROWS", WARNING, needs=(READ,),
    why="the rows were appended or reset and never trained",
    fix="compare them with the base",
)  # fmt: skip
def constant_rows(source: Source) -> Iterator[Fault]:
    """Rows of a matrix in which all elements are equal."""
    for name, seen in _matrices(source):
        rows, count = source.tensors[name].shape[0], seen.zero_rows + seen.constant_rows
        if count == rows > 1 and _is_needed(source, name) and not seen.is_zero:
            yield Fault(f"all {rows} rows", "a trained matrix", tensors=[name], severity=ERROR)
        elif count and not seen.is_zero and not (name.endswith(_EMBEDDINGS) and seen.zero_rows):
            text = f"{count} of {rows} rows: {some(seen.rows)}"
            yield Fault(text, "trained rows", tensors=[name])


@check(
    "DEAD_EMBEDDING", WARNING, needs=(READ,),
    why="the token was reserved or added and never trained: in a template it tells the model "
    "nothing, and training starts from zero",
    fix="use tokens that the base was trained with, or train the embeddings too (modules_to_save)",
    issues="OpenRLHF #645, OpenRLHF PR #648",
)  # fmt: skip
def dead_embedding(source: Source) -> Iterator[Fault]:
    """Tokens whose embedding is zero."""
    padding = whole(of_text(source.config(), "pad_token_id"))  # zero by design
    for name, seen in _matrices(source):
        rows = source.tensors[name].shape[0]
        if not name.endswith(_EMBEDDINGS) or not 0 < seen.zero_rows < rows:
            continue
        if seen.zero_rows > 1 or padding not in seen.rows:
            text = f"{seen.zero_rows} of {rows} rows are zero: {some(seen.rows)}"
            yield Fault(text, "an embedding for every token", tensors=[name])


@check(
    "LORA_B_ZERO", ERROR, needs=(ADAPTER, READ),
    why="the merged model is the base, bit for bit. Training did not reach it, or ZeRO-3 saved it "
    "before the parameters were gathered",
    fix="use a trained checkpoint; compare its step with this one's",
)  # fmt: skip
def lora_b_zero(source: Source) -> Iterator[Fault]:
    """All lora_B are zero: the adapter is untrained and has no effect."""
    keys = {name: parse_peft(name) for name in source.once(_seen)}
    halves = [
        name
        for name, key in keys.items()
        if key is not None and key.half == "B" and source.tensors[name].numel
    ]  # an empty tensor is reported elsewhere
    zero = [name for name in halves if source.once(_seen)[name].is_zero]
    if zero:
        severity = ERROR if len(zero) == len(halves) else WARNING
        text = f"{len(zero)} of {len(halves)} are zero"
        yield Fault(text, "trained values", tensors=zero, severity=severity)


@check(
    "SHA256_DIFFERS", ERROR, needs=(READ,),
    why="the data is not what was checked and measured",
    fix="make the artifact again, or restore it from its origin",
)  # fmt: skip
def sha256_differs(source: Source) -> Iterator[Fault]:
    """Data that differs from the manifest."""
    manifest = _manifest(source)
    if not manifest:
        return
    seen = source.once(_seen)
    for file, entries in manifest["tensors"].items():
        recorded = {name: entry[hash_of(entry)] for name, entry in entries.items() if name in seen}
        wrong = [name for name, value in recorded.items() if seen[name].checksum != value]
        if wrong:
            text = f"{len(wrong)} tensors with other bytes"
            yield Fault(text, "the bytes that manifest.json records", file, wrong)
    for file, entry in manifest["files"].items():  # files that are not tensors are small
        if file in manifest["tensors"] or file not in source.folder.files:
            continue
        with (source.folder.root / file).open("rb") as opened:
            actual = hashlib.file_digest(opened, HASHES[hash_of(entry)]).hexdigest()
        expected = str(entry[hash_of(entry)])
        if actual != expected:
            yield Fault(actual, expected, file=file)


def _matrices(source: Source) -> Iterator[tuple[str, Seen]]:
    """Yield the matrices of the model itself, without LoRA pairs."""
    for name, seen in source.once(_seen).items():
        if len(source.tensors[name].shape) in (2, 3) and ".lora_" not in name:
            yield name, seen


def _is_needed(source: Source, name: str) -> bool:
    """Return True for a matrix without which the model does not work."""
    of_model = source.is_model and _PROJECTION.search(name) is not None
    return of_model and name not in source.once(_identity_blocks)


def _identity_blocks(source: Source) -> set[str]:
    """Return the matrices of zeros by which a block passes its input on, as LLaMA-Pro adds them."""
    seen = source.once(_seen)
    outputs = [(name, name.replace("self_attn.o_proj.", "mlp.down_proj.")) for name in seen]
    return {
        name
        for attention, mlp in outputs
        if attention != mlp and mlp in seen and seen[attention].is_zero and seen[mlp].is_zero
        for name in (attention, mlp)
    }
