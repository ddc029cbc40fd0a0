"""Every packed matrix is decoded bit for bit as by bitsandbytes and transformers."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.pipeline.artifact import Artifact
from tasks.weights.quantized.nf4 import as_trained
from tasks.weights.quantized.packed import BLOCKSIZES, LEVELS
from tests.weights.making import (
    state_of,
)
from tests.weights.quantized.making import decode_all, pack, restored, same, write_packed


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"kind": "nf4", "double": True, "max_shard_size": "30KB"}),
        ("qwen", {"kind": "fp4", "double": True}),
        ("qwen", {"kind": "nf4", "double": False}),
        ("llama", {"kind": "fp4", "double": False, "storage": torch.bfloat16}),
        ("llama", {"kind": "nf4", "double": True, "blocksize": 32, "storage": torch.float32}),
    ],
)
def test_every_tensor_equals_transformers_dequantization(
    family: str, options: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base: Artifact = request.getfixturevalue(family)
    expected = pack(base.path, tmp_path / "packed", **options)
    decoded = decode_all(tmp_path / "packed", tmp_path / "out")
    plain = state_of(base.path)
    assert same(decoded, {name: expected[name] for name in plain}) == []
    assert 0 < len(same(decoded, plain)) < len(plain)  # really packed, and not all of it


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.lists(st.integers(1, 30), min_size=1, max_size=3).filter(lambda s: prod(s) % 2 == 0),
    kind=st.sampled_from(["nf4", "fp4"]),
    double=st.booleans(),
    blocksize=st.sampled_from(BLOCKSIZES[:-2]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 99),
)
def test_any_matrix_equals_bitsandbytes_dequantization(
    tmp_path_factory: pytest.TempPathFactory,
    shape: list[int],
    kind: str,
    double: bool,
    blocksize: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Vectors, stacks, rows that no block size divides, and every dtype that bitsandbytes packs.

    bitsandbytes decodes one long row: its AVX-512 kernel errs if rows end within blocks.
    """
    folder = tmp_path_factory.mktemp("matrix")
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    options = {"blocksize": blocksize, "quant_type": kind, "compress_statistics": double}
    write_packed(folder, {"one.weight": matrix}, **options)
    expected = restored(folder)
    assert expected["one.weight"].shape == matrix.shape
    assert same(decode_all(folder, folder / "out"), expected) == []


@pytest.mark.parametrize("shape", [(5, 7), (96, 96), (3, 4304)])
@pytest.mark.parametrize("blocksize", [64, 2048])
def test_rows_that_end_within_blocks_have_the_error_of_4_bits(
    shape: tuple[int, int], blocksize: int, tmp_path: Path
) -> None:
    """Our error is that of 4 bits, 9 to 11 %; bitsandbytes' kernel uses wrong scales here: 25 %."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    write_packed(tmp_path, {"one.weight": matrix}, blocksize=blocksize, quant_type="nf4")
    decoded = decode_all(tmp_path, tmp_path / "out")["one.weight"].float()
    assert float((decoded - matrix.float()).norm() / matrix.float().norm()) < 0.13
    trained = as_trained(matrix, {"type": "nf4", "double_quant": True}).float()
    assert float((trained - matrix.float()).norm() / matrix.float().norm()) < 0.13


def test_values_are_those_built_into_bitsandbytes() -> None:
    from bitsandbytes.functional import get_4bit_type

    for kind, values in LEVELS.items():
        assert torch.equal(torch.tensor(values), get_4bit_type(kind, device="cpu"))
