"""Mutated checkpoints: audit, plans of deliveries and manifests answer with our errors alone.

A case copies a small checkpoint, damages it in one to three places, and reads it in each way that a
user can. The default suite runs the same 15 cases every time; `make test-all` runs 1,000 new ones.
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
from tests.audit.making import make_adapter, make_model, make_shards, tensors, with_tokenizer

VALUES: tuple[Any, ...] = (
    None, 3, -1, 1 << 70, 1.5, float("inf"), True, "", "x", "\ud800", "a" * 5000, [], [[]], [3],
    ["x"], {}, {"a": 1}, {"0": {}}, [{"a": []}], -(1 << 63), 10**400, float("nan"), "\x1b[31m",
    "a\nb", "../../x", "/dev/zero", "\0", "float8_e4m3fn", {"": {}}, [1 << 62, 1 << 62], [-1], [0],
)  # fmt: skip
"""Values that hardly any key of a configuration may have."""
TEXTS: tuple[Callable[[bytes], bytes], ...] = (
    lambda _: b"",
    lambda _: b"[" * 200_000,
    lambda _: b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    lambda _: b'"text"',
    lambda _: b"1" * 10_000,
    lambda raw: raw.replace(b":", b': NaN, "a":', 1),
    lambda raw: raw[:-1] + b"," + raw[1:],  # all keys twice
    lambda raw: raw.decode("utf-8", "replace").encode("utf-16"),
    lambda raw: raw.replace(b"a", b"\xff", 3),
    lambda raw: raw[: len(raw) // 2],
    lambda raw: struct.pack("<Q", (1 << 63) - 1) + raw[8:],  # the length of a header
)
NAMES = (
    "\x1b[2J.safetensors", "a\nb.json", os.fsdecode(b"\xff.bin"), "x" * 250, "chat_template.jinja",
    "model.safetensors.index.json", "adapter_config.json", "manifest.json", "pytorch_model.bin",
    "model.gguf", "rng_state.pth", "special_tokens_map.json", "added_tokens.json"
)  # fmt: skip
PLACE = st.integers(0, 10_000)
"""Number of a file, a node, a tensor or a byte: modulo the number that there are."""
MUTATION = st.one_of(
    st.tuples(st.just("json"), PLACE, PLACE, st.sampled_from(VALUES)),
    st.tuples(st.just("text"), PLACE, st.sampled_from(range(len(TEXTS)))),
    st.tuples(st.just("bytes"), PLACE, st.lists(st.tuples(PLACE, st.integers(0, 255)), min_size=1)),
    st.tuples(st.just("copy"), PLACE, st.sampled_from(NAMES)),
    st.tuples(st.just("replace"), PLACE, st.sampled_from(("gone", "folder", "link", "loop"))),
)


def mutate(root: Path, mutation: tuple[Any, ...]) -> None:
    """Damage one file of a checkpoint."""
    kind, place, *how = mutation
    suffix = ".json" if kind == "json" else ""
    files = sorted(path for path in root.iterdir() if path.is_file() and not path.is_symlink())
    files = [path for path in files if path.name.endswith(suffix)]
    if not files:
        return
    path = files[place % len(files)]
    raw = path.read_bytes()
    if kind == "json":
        path.write_text(json.dumps(edited(json.loads(raw), *how)))
    elif kind == "text":
        path.write_bytes(TEXTS[how[0]](raw))
    elif kind == "bytes":
        changed = bytearray(raw)
        for at, byte in how[0] if raw else ():
            changed[at % len(raw)] = byte
        path.write_bytes(changed)
    elif kind == "copy":
        with suppress(IsADirectoryError):
            (root / how[0]).unlink(missing_ok=True)  # not through a link
            (root / how[0]).write_bytes(raw)
    else:
        path.unlink()
        {"gone": lambda: None, "folder": path.mkdir,
         "link": lambda: path.symlink_to("/proc/self/environ"),
         "loop": lambda: path.symlink_to(path.name)}[how[0]]()  # fmt: skip


def nodes(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container with each of its keys, and with a new one."""
    is_table = isinstance(document, dict)
    pairs = list(document.items() if is_table else enumerate(document))
    for key, value in pairs:
        yield document, key
        if isinstance(value, (dict, list)):
            yield from nodes(value)
    if is_table:
        yield document, "quantization_config"


def edited(document: Any, place: int, value: Any) -> Any:
    """Return a JSON document with another value at one of its nodes."""
    places = list(nodes(document)) if isinstance(document, (dict, list)) else []
    if not places:
        return value
    inside, key = places[place % len(places)]
    inside[key] = value
    return document


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Intact checkpoints by name; `base` belongs to all of them."""
    root = tmp_path_factory.mktemp("seeds")
    pickle = with_tokenizer(make_model(root / "pickle"))
    (pickle / "model.safetensors").unlink()
    state = {name: torch.from_numpy(array) for name, array in tensors().items()}
    torch.save(state, pickle / "pytorch_model.bin")
    origin = Origin("served", "convert", "artifact")
    publish(with_tokenizer(make_model(root / "work")), root / "artifact", origin)
    return {
        "base": with_tokenizer(make_model(root / "base")),
        "shards": with_tokenizer(make_shards(root / "shards")),
        "adapter": with_tokenizer(make_adapter(root / "adapter")),
        "pickle": pickle,
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
            plan(replace(composed, settings=chosen))
        with suppress(PlumblineError):
            verify(open_artifact(root))
        with suppress(PlumblineError):
            require_intact([root], composed.runs / "artifacts")


def run_case(
    seeds: dict[str, Path], composed: Composed, seed: str, values: bool, mutations: list[Any]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(shutil.copytree(seeds[seed], Path(folder) / seed))
        for mutation in mutations:
            with suppress(ValueError, RecursionError, TypeError, AttributeError):
                mutate(root, mutation)  # an earlier one may have left no document to edit
        read_in_every_way(root, seeds["base"], values, composed)


case = given(
    seed=st.sampled_from(("base", "shards", "adapter", "pickle", "artifact")),
    values=st.booleans(),
    mutations=st.lists(MUTATION, min_size=1, max_size=3),
)
shared = settings(database=None, suppress_health_check=list(HealthCheck))


@settings(shared, max_examples=15, derandomize=True)
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
