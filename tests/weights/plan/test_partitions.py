"""Shards of all ranks are joined to full tensors, or refused by the name of what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tasks.core.errors import ArtifactError
from tasks.weights.files.file_ranges import Reader
from tasks.weights.plan.partitions import Slice, coverage, rank_file, read_partitions
from tests.weights.making import Spread, write_shards

NAMES = ("w", "tiny", "matrix")


def _parameters(sizes: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    values = torch.arange(sum(sizes) + 1, dtype=torch.float32).to(torch.bfloat16)
    shapes = {"w": (sizes[0],), "tiny": (sizes[1],), "matrix": (sizes[2], 3)}
    return {n: values[: torch.Size(s).numel()].reshape(s).clone() for n, s in shapes.items()}


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    world=st.integers(1, 9),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 3), st.integers(1, 20)),
)
def test_any_world_size_gives_the_full_tensors(tmp_path: Path, world: int, sizes: tuple) -> None:
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    parameters = _parameters((sizes[0], sizes[1], min(sizes)))
    write_shards(tmp_path / "run", parameters, Spread(world_size=world))
    parts = read_partitions(tmp_path / "run")
    assert parts.world_size == world
    for name, tensor in parameters.items():
        assert parts.shapes[name] == tuple(tensor.shape)
        assert parts.tensors[name].shape == tuple(tensor.shape)
        with Reader(parts.extents(name)) as reader:
            stitched = bytearray(reader.nbytes)
            reader.into(stitched, 0)
        assert stitched == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@given(slices=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted), max_size=5))
def test_coverage_agrees_with_counting_every_element(slices: list[list[int]]) -> None:
    counts = [sum(a <= i < b for a, b in slices) for i in range(12)]
    findings = coverage("w", 12, [Slice(a, b, "f") for a, b in slices])
    assert (findings == []) == (counts == [1] * 12)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_shards(tmp_path / "run", _parameters((10, 2, 4)), Spread(world_size=2))
    return tmp_path / "run"


def _rewrite(run: Path, rank: int, change) -> None:
    from safetensors import safe_open

    path = run / "shards" / rank_file(rank, 2)
    with safe_open(path, framework="pt") as file:
        table = json.loads(file.metadata()["partitions"])
    tensors = load_file(path)
    change(tensors, table)
    save_file(tensors, path, metadata={"partitions": json.dumps(table)})


def _message(run: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        read_partitions(run)
    return caught.value.report()


def test_all_findings_come_at_once(run: Path) -> None:
    def shrink(tensors: dict, table: dict) -> None:
        tensors["w"], table["w"]["end"] = tensors["w"][:3].clone(), 3

    def spoil(tensors: dict, table: dict) -> None:
        tensors["w"] = tensors["w"].float()
        table["tiny"]["shape"] = [3]
        tensors["unknown"], table["unknown"] = torch.zeros(1), {"shape": [1], "start": 0, "end": 1}
        del table["matrix"]

    _rewrite(run, 0, shrink)
    assert "elements 3 to 5" in _message(run)
    _rewrite(run, 1, lambda tensors, table: table["w"].update(start=2, end=7))
    assert rank_file(1, 2) in _message(run)
    _rewrite(run, 0, spoil)
    (run / "shards" / "rank-00007-of-00002.safetensors").write_bytes(b"")
    text = _message(run)
    for thing in ("w is F32", "tiny is [3]", "unknown", "matrix", "rank-00007-of-00002"):
        assert thing in text
    (run / "shards" / rank_file(1, 2)).unlink()
    assert rank_file(1, 2) in _message(run)


def test_a_table_of_another_kind_is_refused(run: Path) -> None:
    path = run / "partitions.json"
    document = json.loads(path.read_text())
    for change, thing in (
        ({"format": 2}, "format"),
        ({"mode": "half"}, "half"),
        ({"dtype": "BF16,F32"}, "BF16,F32"),
        ({"world_size": 10**12}, "1000000000000"),
        ({"world_size": "2"}, "world_size"),
        ({"world_size": 0}, "world_size"),
        ({"parameters": {}}, "trained"),
        ({"parameters": [1]}, "parameters"),
        ({"parameters": {"w": {"shape": "x"}}}, "parameters"),
        ({"parameters": {"w": {}}}, "parameters"),
    ):
        path.write_text(json.dumps({**document, **change}))
        assert thing in _message(run)
