"""Rounding of merged weights: unbiased or to nearest, the same bytes on every CPU."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tasks.weights import compute as folding
from tasks.weights.compute import _kernel_term
from tasks.weights.expected import random_parts, round_with, small
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.native import MAX_RANK, Library, library
from tasks.weights.plan import Executed, LowRank, Op, Plan
from tasks.weights.proof import recompute
from tasks.weights.rounding import row_keys, unbiased
from tasks.weights.write import write
from tests.conftest import PROJECT
from tests.weights.making import rounded_alike, state_of

ROWS, COLUMNS, RANK = 96, 1031, 4
NAMES = ("model.a.weight", "model.b.weight", "model.c.weight")
SHORT = {torch.bfloat16: "BF16", torch.float16: "F16"}

KERNELS = library()
NEEDS_KERNELS = pytest.mark.skipif(
    KERNELS is None or not KERNELS.folds, reason="no C compiler, or no kernel for this CPU"
)
SCALE = 1.7
NAN = 0x7FC0
KEYS = [14464725406630232864, 11170297964893948034]
PARTS = [[57511, 47686, 58323], [35117, 7573, 51189]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three matrices in bf16, and an adapter whose updates are a few hundredths of a step."""
    root, random = tmp_path_factory.mktemp("light adapter"), torch.Generator().manual_seed(0)
    base, adapter = {}, {}
    for name in NAMES:
        base[name] = (torch.randn(ROWS, COLUMNS, generator=random) * 0.05).bfloat16()
        adapter[f"{name}.A"] = torch.randn(RANK, COLUMNS, generator=random) * 4e-3
        adapter[f"{name}.B"] = torch.randn(ROWS, RANK, generator=random) * 1e-3
    base["untouched"] = torch.randn(8, 8, generator=random).bfloat16()
    for folder, tensors in (("base", base), ("adapter", adapter)):
        (root / folder).mkdir()
        save_file(tensors, root / folder / "model.safetensors")
    return root


def _plan(*, unbiased: bool = True) -> Plan:
    ops = [
        Op(
            name, (ROWS, COLUMNS), "BF16", f"base:{name}", "BF16",
            terms=(LowRank(f"adapter:{name}.A", f"adapter:{name}.B", 1.0),), unbiased=unbiased,
        )
        for name in NAMES
    ]  # fmt: skip
    return Plan((*ops, Op("untouched", (8, 8), "BF16", "base:untouched", "BF16")))


def _sources(inputs: Path) -> dict:
    return {name: read_checkpoint(inputs / name) for name in ("base", "adapter")}


def _merge(inputs: Path, out: Path, plan: Plan) -> Executed:
    out.mkdir()
    return write(plan, _sources(inputs), out, workers=1)


def test_the_bits_are_those_of_the_definition() -> None:
    """Pins version 1: a model that was merged before must get the same bytes again."""
    keys = row_keys("model.layers.0.mlp.up_proj.weight", 3, 2)
    assert [int(key) for key in keys] == KEYS
    parts = random_parts("model.layers.0.mlp.up_proj.weight", 3, 2, 3) * 65536
    assert parts.astype(int).tolist() == PARTS


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 20), st.integers(1, 70)),
    size=st.sampled_from([1e-6, 1e-3, 1.0, 1e4]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_two_implementations_agree_bit_for_bit(seed, shape, size, dtype) -> None:
    random = torch.Generator().manual_seed(seed)
    base = (torch.randn(*shape, generator=random) * 0.1).to(dtype).float()
    base.flatten()[0] = 0.0
    wide = base + torch.randn(*shape, generator=random) * size * 0.1
    written = unbiased(wide, base, dtype, row_keys("x", 5, len(base))).float().numpy()
    parts = random_parts("x", 5, *shape)
    own = round_with(wide.double().numpy(), parts, SHORT[dtype])
    chosen = small((wide - base).numpy(), base.numpy(), SHORT[dtype])
    wanted = np.where(chosen, own, wide.to(dtype).float().numpy())
    assert (written == wanted).all()


def test_wrong_random_bits_are_found(inputs: Path, tmp_path: Path) -> None:
    """A merge whose bits come from another place than the definition is not reproducible."""
    plan, sources = _plan(), _sources(inputs)
    _merge(inputs, tmp_path / "out", plan)
    good = recompute(plan, sources, read_checkpoint(tmp_path / "out"))
    assert [result.wrong for result in good] == [0] * 4
    moved = replace(plan, ops=tuple(replace(op, unbiased=False) for op in plan.ops))
    wrong = recompute(moved, sources, read_checkpoint(tmp_path / "out"))
    assert all(result.wrong for result in wrong[:3])
    path = tmp_path / "out" / "model.safetensors"
    tensors, name = load_file(path), NAMES[0]
    base = load_file(inputs / "base" / "model.safetensors")[name].float()
    low = load_file(inputs / "adapter" / "model.safetensors")
    wide = base + low[f"{name}.B"] @ low[f"{name}.A"]
    tensors[name] = unbiased(wide, base, torch.bfloat16, row_keys("another seed", 0, ROWS))
    save_file(tensors, path)
    results = recompute(plan, sources, read_checkpoint(tmp_path / "out"))
    assert results[0].wrong > 0
    assert results[1].wrong == 0


OPTIMIZED = """
import pickle, sys
from tasks.weights.write import write
plan, sources, out = pickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(pickle.dumps(write(plan, sources, out, workers=1).checksums))
"""


def test_python_without_asserts_writes_the_same_bytes(inputs: Path, tmp_path: Path) -> None:
    """`python -O` and PYTHONOPTIMIZE remove a call inside an assert."""
    wanted = _merge(inputs, tmp_path / "out", _plan()).checksums
    (tmp_path / "again").mkdir()
    job = pickle.dumps((_plan(), _sources(inputs), tmp_path / "again"))
    python = [sys.executable, "-O", "-c", OPTIMIZED]
    done = subprocess.run(python, input=job, cwd=PROJECT, stdout=subprocess.PIPE, check=True)
    assert pickle.loads(done.stdout) == wanted


def in_order(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return `b @ a` in fp32 by its definition: one fused multiply-add after the other.

    A product of two fp32 numbers is exact in fp64. The sum is rounded there first, which shows in
    one of 2^29 sums.
    """
    left, right = b.double(), a.double()
    total = torch.zeros(len(b), a.shape[1])
    for k in range(len(a)):
        total = (left[:, k : k + 1] * right[k] + total).float()
    return total


def _words(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16)


def _kernels() -> Library:
    assert KERNELS is not None
    return KERNELS


def _fold(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[np.ndarray, int, int]:
    numbers = _words(a) if a.dtype == torch.bfloat16 else a.numpy()
    out = np.empty_like(_words(w))
    folded = _kernels().fold(_words(w), out, a=numbers, b=b.float().numpy(), scale=SCALE)
    return out, folded.changed, folded.nonfinite


@NEEDS_KERNELS
@pytest.mark.parametrize("rank", [1, 31, MAX_RANK])
def test_sums_are_in_order_and_equal_torchs(rank: int) -> None:
    random = torch.Generator().manual_seed(rank)
    for rows, columns in [(2, 2), (3, 5), (17, 100), (9, 31), (9, 2050)]:
        w = torch.randn(rows, columns, generator=random).bfloat16()
        a = torch.randn(rank, columns, generator=random)
        b = torch.randn(rows, rank, generator=random)
        for a_, b_ in ((a, b), (a.bfloat16(), b.bfloat16())):
            wanted = (w.float() + in_order(b_, a_) * SCALE).bfloat16()
            out, changed, nonfinite = _fold(w, a_, b_)
            assert (out == _words(wanted)).all(), (rows, columns)
            assert rounded_alike(wanted, (w.float() + (b_.float() @ a_.float()) * SCALE).bfloat16())
            assert changed == int((_words(wanted) != _words(w)).sum())
            assert nonfinite == 0
        for shapes in (b[:1], a), (b, a[:, 1:]), (b, torch.cat((a, a))):  # it would read elsewhere
            with pytest.raises(ValueError, match="times"):
                _fold(w, shapes[1].contiguous(), shapes[0].contiguous())


def _require_rounding(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Require torch's rounding of numbers that may not be finite, and one pattern for NaN."""
    wanted = (w.float() + (b @ a) * SCALE).bfloat16()
    out, changed, nonfinite = _fold(w, a, b)
    nan = torch.isnan(wanted).numpy()
    assert (out[nan] == NAN).all()
    assert (out[~nan] == _words(wanted)[~nan]).all()
    assert nonfinite == int((~torch.isfinite(wanted)).sum())
    assert changed == int((out != _words(w)).sum())


@NEEDS_KERNELS
def test_rounding_infinities_and_nan() -> None:
    """Every pattern of bf16; and values that are not finite at the edges of tiles."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(64, 1024)
    w = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    a, b = torch.full((1, 1024), 2.0**-9), torch.linspace(-3, 3, 64)[:, None].contiguous()
    _require_rounding(w, a, b)
    random = torch.Generator().manual_seed(5)
    w = torch.randn(13, 71, generator=random).bfloat16()
    a = torch.randn(3, 71, generator=random)
    b = torch.randn(13, 3, generator=random)
    w[0, 0], w[12, 70], w[5, 33] = float("nan"), float("inf"), -float("inf")
    w[7, 64] = torch.finfo(torch.bfloat16).max
    b[7] = 1e36  # finite until it is rounded, or scaled
    _require_rounding(w, a, b)


@NEEDS_KERNELS
@pytest.mark.parametrize(("slot", "unbiased"), [(0, True), (20_000, True), (1 << 20, False)])
def test_execute_gives_the_same_bytes_with_kernel_and_torch(
    inputs, tmp_path, monkeypatch, slot, unbiased
) -> None:
    monkeypatch.setattr(folding, "MEMORY", slot)
    sources = _sources(inputs)
    assert all(_kernel_term(op, sources) is not None for op in _plan(unbiased=unbiased).ops[:3])
    done = {}
    for how in ("kernel", "torch"):
        if how == "torch":
            monkeypatch.setattr(folding, "library", lambda: None)
        (tmp_path / how).mkdir()
        done[how] = write(_plan(unbiased=unbiased), sources, tmp_path / how, workers=2)
    kernel, by_torch = done["kernel"], done["torch"]
    assert kernel.checksums == by_torch.checksums
    for name, written in by_torch.changed.items():
        assert kernel.tensors[name].changed == written.changed
        assert kernel.tensors[name].kept == pytest.approx(written.kept, rel=1e-5)
    assert kernel.kept() == pytest.approx(by_torch.kept(), rel=1e-5)
    merged, wanted = state_of(tmp_path / "kernel"), state_of(tmp_path / "torch")
    assert all(torch.equal(merged[name], wanted[name]) for name in NAMES)
