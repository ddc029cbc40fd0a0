"""The LoRA kernel gives one result on every CPU: product, scale and sum in fp32, rounded once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tasks.weights import native
from tasks.weights.execute import lora_merge as folding
from tasks.weights.execute.copying import Workspace
from tasks.weights.execute.execute import execute
from tasks.weights.execute.journal import Measured
from tasks.weights.execute.lora_merge import fold_term
from tasks.weights.files.opening import SourceRef, open_sources
from tasks.weights.native import Library, binding, library
from tasks.weights.native.binding import MAX_RANK
from tasks.weights.plan.adapter_ops import LowRank
from tasks.weights.plan.operations import Op, Plan
from tests.weights.making import state_of
from tests.weights.rounding import in_order, rounded_alike

KERNELS = library()
pytestmark = pytest.mark.skipif(
    KERNELS is None or not KERNELS.folds, reason="no C compiler, or no kernel for this CPU"
)
SCALE = 1.7
NAN = 0x7FC0


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


@pytest.mark.parametrize("rank", [1, 3, 31, 200, MAX_RANK])
def test_sums_are_in_order_and_equal_torchs(rank: int) -> None:
    random = torch.Generator().manual_seed(rank)
    shapes = [(2, 2), (3, 5), (8, 32), (17, 100), (9, 31)]
    shapes += [(48, 2050), (513, 64)] if rank < 100 else [(9, 2050)]
    for rows, columns in shapes:
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


def _require_rounding(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Require torch's rounding of numbers that may not be finite, and one pattern for NaN."""
    wanted = (w.float() + (b @ a) * SCALE).bfloat16()
    out, changed, nonfinite = _fold(w, a, b)
    nan = torch.isnan(wanted).numpy()
    assert (out[nan] == NAN).all()
    assert (out[~nan] == _words(wanted)[~nan]).all()
    assert nonfinite == int((~torch.isfinite(wanted)).sum())
    assert changed == int((out != _words(w)).sum())


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


SHAPES = {"wide": (33, 1030), "tall": (1031, 24), "square": (64, 64), "odd": (40, 31)}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SourceRef]:
    root, random = tmp_path_factory.mktemp("inputs"), torch.Generator().manual_seed(0)
    base = {n: torch.randn(*shape, generator=random).bfloat16() for n, shape in SHAPES.items()}
    adapter = {}
    for name, (rows, columns) in SHAPES.items():
        adapter[f"{name}.A"] = torch.randn(8, columns, generator=random).bfloat16()
        adapter[f"{name}.B"] = torch.randn(rows + 16, 8, generator=random).half()
    for folder, tensors in (("base", base), ("adapter", adapter)):
        (root / folder).mkdir()
        save_file(tensors, root / folder / "model.safetensors")
    return {name: SourceRef(root / name) for name in ("base", "adapter")}


def _plan(unbiased: bool) -> Plan:
    ops = tuple(
        Op(
            name, shape, "BF16", f"base:{name}", "BF16",
            terms=(LowRank(f"adapter:{name}.A", f"adapter:{name}.B", SCALE, out_start=7),),
            unbiased=unbiased,
        )
        for name, shape in SHAPES.items()
    )  # fmt: skip
    return Plan(ops)


@pytest.mark.parametrize(("slot", "unbiased"), [(0, True), (20_000, True), (1 << 20, False)])
def test_execute_gives_the_same_bytes_with_kernel_and_torch(
    inputs, tmp_path, monkeypatch, slot, unbiased
) -> None:
    monkeypatch.setattr(folding, "SLOT", slot)
    sources = open_sources(inputs)
    assert all(fold_term(op, sources) is not None for op in _plan(unbiased).ops)
    done = {}
    for how in ("kernel", "torch"):
        if how == "torch":
            monkeypatch.setattr(folding, "library", lambda: None)
        (tmp_path / how).mkdir()
        done[how] = execute(_plan(unbiased), sources, tmp_path / how, workers=2)
    kernel, by_torch = done["kernel"], done["torch"]
    assert (kernel.checksums, kernel.changed) == (by_torch.checksums, by_torch.changed)
    assert kernel.kept_by_tensor == pytest.approx(by_torch.kept_by_tensor, rel=1e-5)
    assert kernel.nearest_keeps == pytest.approx(by_torch.nearest_keeps, rel=1e-5)
    merged, wanted = state_of(tmp_path / "kernel"), state_of(tmp_path / "torch")
    assert all(torch.equal(merged[name], wanted[name]) for name in SHAPES)


def test_memory_of_a_tensor_is_bounded_for_any_shape(inputs, monkeypatch) -> None:
    slot = 20_000
    monkeypatch.setattr(folding, "SLOT", slot)
    sources = open_sources(inputs)
    for op in _plan(unbiased=True).ops:
        workspace, (term,) = Workspace(), op.terms
        for _ in folding.fold(op, term, sources, workspace, Measured()):
            pass
        smallest = folding.size_of_a(term, sources) + 2 * 16 * op.shape[1]
        rest = 2 * 15 * op.shape[1]  # rows that the last block takes with it
        assert workspace.out.size <= max(slot, smallest) + rest
        assert workspace.read.size <= 2 * (slot + 2 * 31 * 1030)  # and rows of B


def test_unsupported_operations_are_left_to_torch(inputs) -> None:
    op = _plan(unbiased=True).ops[0]
    (term,) = op.terms
    assert isinstance(term, LowRank)
    others = [
        replace(op, dtype="F32"),
        replace(op, transpose=True),
        replace(op, quantization={}),
        replace(op, shape=(1, 1030)),
        replace(op, terms=(term, term)),
        replace(op, terms=(replace(term, transpose=True),)),
        replace(op, terms=(replace(term, experts=2),)),
        replace(op, terms=(replace(term, a_rows=(0, 4, 1)),)),
    ]
    sources = open_sources(inputs)
    assert [fold_term(unsupported, sources) for unsupported in others] == [None] * len(others)


@pytest.mark.skipif("avx2" not in binding.cpu_flags(), reason="for x86-64 with AVX2")
def test_the_kernels_for_avx2_are_as_exact(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(binding, "_folder", lambda: tmp_path)
    monkeypatch.setattr(binding, "FLAGS", (*binding.FLAGS, "-mno-avx512f"))
    older = native.library.__wrapped__()
    monkeypatch.setattr(f"{__name__}.KERNELS", older)
    test_sums_are_in_order_and_equal_torchs(64)
    test_rounding_infinities_and_nan()


def test_without_a_working_compiler_there_are_no_kernels(monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.setattr(binding, "_folder", lambda: tmp_path / "kept")
    source = tmp_path / "twice.c"
    source.write_text("int twice(int n) { return 2 * n; }")
    kernels = binding.compiled(source)
    assert kernels is not None
    assert kernels.twice(21) == 42
    for text in ("int twice(int n) {", "int missing(void); int twice(int n) { return missing(); }"):
        source.write_text(text)
        assert binding.compiled(source) is None
    assert "undefined symbol: missing" in caplog.text
    monkeypatch.setattr(binding.shutil, "which", lambda name: None)
    assert binding.compiled(source) is None
