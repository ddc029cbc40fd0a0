"""Mutated checkpoints: audit, plans of deliveries and manifests answer with our errors alone.

A case copies a small checkpoint, damages it in one to three places, and reads it in each way that a
user can. The default suite runs the same 60 cases every time; `make test-all` runs 1,000 new ones.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flows.audit import bounded_memory
from flows.cli.composed import Composed
from flows.cli.config import compose_config
from flows.delivery.run_delivery import plan
from tasks.audit.run import audit
from tasks.core.errors import PlumblineError
from tasks.delivery.folders import require_intact
from tasks.pipeline.artifact import Origin, open_artifact, publish, verify
from tests.audit.making import (
    WRONG_VALUES,
    make_adapter,
    make_model,
    make_shards,
    tensors,
    with_tokenizer,
)

VALUE = st.sampled_from(
    [
        *WRONG_VALUES, -(1 << 63), 10**400, 1e308, float("nan"), "\x1b[31m", "a\nb", "../../x",
        "/dev/zero", "\0", "float8_e4m3fn", {"": {}}, {"a": {"b": {"c": [{}]}}},
        [1 << 62, 1 << 62], [-1], [0],
    ]
)  # fmt: skip
PLACE = st.integers(0, 10_000)
"""Number of a node, a tensor, a file or a byte: modulo the number that there are."""

HEADERS: tuple[tuple[str, Any], ...] = (
    ("dtype", "F99"), ("dtype", "F64"), ("dtype", "F4"), ("dtype", 3), ("dtype", ["F32"]),
    ("shape", [1 << 40, 1 << 40]), ("shape", [-1]), ("shape", []), ("shape", [0]), ("shape", "x"),
    ("shape", [1.5]), ("shape", [True]), ("shape", [1] * 3000), ("shape", None),
    ("data_offsets", [0, 1 << 62]), ("data_offsets", [-4, 0]), ("data_offsets", [8, 4]),
    ("data_offsets", [0]), ("data_offsets", [0, "4"]), ("data_offsets", {}), ("", 3), ("", None),
    ("extra", 1)
)  # fmt: skip
"""Key of a tensor in a header, and a value that it must not have."""

LENGTHS = (0, 1, 7, 1 << 26, (1 << 63) - 1, (1 << 64) - 1)
TEXTS: tuple[Callable[[bytes], bytes], ...] = (
    lambda _: b"",
    lambda _: b"[" * 200_000,
    lambda _: b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    lambda _: b"null",
    lambda _: b'"text"',
    lambda _: b"1" * 10_000,
    lambda raw: raw.replace(b":", b": NaN, \"a\":", 1),
    lambda raw: raw.replace(b"{", b'{"eos_token_id": 1e999, "model_type": "x", ', 1),
    lambda raw: raw[:-1] + b"," + raw[1:],  # all keys twice
    lambda raw: raw.decode("utf-8", "replace").encode("utf-16"),
    lambda raw: b"\xef\xbb\xbf" + raw,
    lambda raw: raw.replace(b"a", b"\xff", 3),
    lambda raw: raw[: len(raw) // 2],
    lambda raw: raw + b"\0" * 64
)  # fmt: skip
NAMES = (
    "\x1b[2J.safetensors", "a\nb.json", os.fsdecode(b"\xff.bin"), "x" * 250, "chat_template.jinja",
    "model.safetensors.index.json", "pytorch_model.bin.index.json", "adapter_config.json",
    "tokenizer.json", "manifest.json", "pytorch_model.bin", "model.gguf", "rng_state.pth",
    "zero_to_fp32.py", "special_tokens_map.json", "added_tokens.json", "vocab.json", "latest"
)  # fmt: skip
SHAPES = ("gone", "empty", "folder", "link", "loop")
BYTE = st.integers(0, 255)
ORIGIN = Origin("served", "convert", "artifact")

Mutation = tuple[Any, ...]
MUTATION: st.SearchStrategy[Mutation] = st.one_of(
    st.tuples(st.just("value"), PLACE, PLACE, VALUE),
    st.tuples(st.just("key"), PLACE, PLACE, VALUE),
    st.tuples(st.just("text"), PLACE, st.sampled_from(range(len(TEXTS)))),
    st.tuples(st.just("tensor"), PLACE, PLACE, st.sampled_from(HEADERS)),
    st.tuples(st.just("name"), PLACE, PLACE, st.sampled_from(("\x1b[1m", "", "a\0", "x" * 9000))),
    st.tuples(st.just("twice"), PLACE, PLACE),
    st.tuples(st.just("length"), PLACE, st.sampled_from(LENGTHS)),
    st.tuples(st.just("bytes"), PLACE, st.lists(st.tuples(PLACE, BYTE), min_size=1)),
    st.tuples(st.just("shape"), PLACE, st.sampled_from(SHAPES)),
    st.tuples(st.just("copy"), PLACE, st.sampled_from(NAMES))
)  # fmt: skip


def mutate(root: Path, mutation: Mutation) -> None:
    """Damage one file of a checkpoint."""
    kind, place, *how = mutation
    suffixes = dict.fromkeys(("value", "key", "text"), ".json")
    suffixes |= dict.fromkeys(("tensor", "name", "twice", "length"), ".safetensors")
    files = sorted(path for path in root.iterdir() if path.is_file() and not path.is_symlink())
    files = [path for path in files if path.suffix == suffixes.get(kind, path.suffix)]
    if not files:
        return
    path = files[place % len(files)]
    if kind in ("value", "key"):
        path.write_text(json.dumps(edited(json.loads(path.read_text()), kind, *how)))
    elif kind == "text":
        path.write_bytes(TEXTS[how[0]](path.read_bytes()))
    elif kind in ("tensor", "name", "twice"):
        edit_header(path, kind, *how)
    elif kind == "length":
        path.write_bytes(struct.pack("<Q", how[0]) + path.read_bytes()[8:])
    elif kind == "bytes":
        raw = bytearray(path.read_bytes())
        for at, byte in how[0] if raw else ():
            raw[at % len(raw)] = byte
        path.write_bytes(raw)
    elif kind == "copy":
        raw = path.read_bytes()
        if not (root / how[0]).is_dir():
            (root / how[0]).unlink(missing_ok=True)  # not through a link
            (root / how[0]).write_bytes(raw)
    else:
        path.unlink()
        {"gone": lambda: None, "empty": path.touch, "folder": path.mkdir,
         "link": lambda: path.symlink_to("/proc/self/environ"),
         "loop": lambda: path.symlink_to(path.name)}[how[0]]()  # fmt: skip


def nodes(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container with each of its keys."""
    pairs = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(pairs):
        yield document, key
        if isinstance(value, (dict, list)):
            yield from nodes(value)


def edited(document: Any, kind: str, place: int, value: Any) -> Any:
    """Return a JSON document with another value at one of its nodes, or one more key there."""
    places = list(nodes(document)) if isinstance(document, (dict, list)) else []
    if not places:
        return value
    inside, key = places[place % len(places)]
    if kind == "key" and isinstance(inside, dict):
        inside["\x1b[7m" if place % 2 else "quantization_config"] = value
    else:
        inside[key] = value
    return document


def edit_header(path: Path, kind: str, place: int, change: Any = None) -> None:
    """Alter the entry of one tensor in a safetensors header; the data stays."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = list(json.loads(raw[8 : 8 + length]).items())
    name, entry = entries[place % len(entries)]
    if kind == "tensor":
        key, value = change
        entry = {**entry, key: value} if key and isinstance(entry, dict) else value
    entries[place % len(entries)] = (name + change if kind == "name" else name, entry)
    entries += [(name, entry)] if kind == "twice" else []
    members = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entries)
    head = f"{{{members}}}".encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + raw[8 + length :])


def with_pickle(root: Path) -> Path:
    (root / "model.safetensors").unlink()
    state = {name: torch.from_numpy(array) for name, array in tensors().items()}
    torch.save(state, root / "pytorch_model.bin")
    return root


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Intact checkpoints by name; `base` belongs to all of them."""
    root = tmp_path_factory.mktemp("seeds")
    publish(with_tokenizer(make_model(root / "work")), root / "artifact", ORIGIN)
    return {
        "base": with_tokenizer(make_model(root / "base")),
        "shards": with_tokenizer(make_shards(root / "shards")),
        "adapter": with_tokenizer(make_adapter(root / "adapter")),
        "pickle": with_pickle(with_tokenizer(make_model(root / "pickle"))),
        "artifact": root / "artifact",
    }


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Composed:
    """The configuration of a delivery without a source."""
    root = tmp_path_factory.mktemp("fuzzed")
    return compose_config(
        ["source=s", f"out={root / 'out'}", f"paths.runs={root / 'runs'}", "smoke.engine=none"],
        config_name="deliver",
    )


def read_in_every_way(root: Path, base: Path, values: bool, composed: Composed) -> None:
    """Audit a folder, plan its delivery and read its manifest; all but our errors is a failure."""
    with bounded_memory(str(root)):
        with suppress(PlumblineError):
            report = audit(root, base=base, values=values)
            texts = report.text(), report.markdown(), json.dumps(report.as_json(), indent=1)
            assert not [char for text in texts for char in text if char < " " and char != "\n"]
            crashed = [each.found for each in report.findings if each.code == "CANNOT_JUDGE"]
            assert not crashed
        chosen = {**composed.settings, "source": str(root), "base": str(base)}
        with suppress(PlumblineError):
            plan(replace(composed, settings=chosen)).text()
        with suppress(PlumblineError):
            verify(open_artifact(root))
        with suppress(PlumblineError):
            require_intact([root], composed.runs / "artifacts")


def run_case(
    seeds: dict[str, Path], composed: Composed, seed: str, values: bool, mutations: list[Mutation]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(shutil.copytree(seeds[seed], Path(folder) / seed))
        for mutation in mutations:
            with suppress(ValueError, RecursionError):  # an earlier one left no document to edit
                mutate(root, mutation)
        read_in_every_way(root, seeds["base"], values, composed)


case = given(
    seed=st.sampled_from(("base", "shards", "adapter", "pickle", "artifact")),
    values=st.booleans(),
    mutations=st.lists(MUTATION, min_size=1, max_size=3),
)
shared = settings(database=None, suppress_health_check=list(HealthCheck))


@settings(shared, max_examples=60, derandomize=True)
@case
def test_mutated_checkpoints(seeds: dict[str, Path], composed: Composed, **made: Any) -> None:
    run_case(seeds, composed, **made)


@pytest.mark.slow
@settings(shared, max_examples=1000, print_blob=True)
@case
def test_a_thousand_mutated_checkpoints(
    seeds: dict[str, Path], composed: Composed, **made: Any
) -> None:
    run_case(seeds, composed, **made)
