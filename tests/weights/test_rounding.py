"""Unbiased rounding keeps an update that rounding to nearest loses, with the same bytes always."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tasks.weights.execute.execute import Executed, execute
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.adapter_ops import LowRank
from tasks.weights.plan.operations import Op, Plan
from tasks.weights.proof.recheck import recompute
from tasks.weights.proof.unbiased import random_parts, round_with, small
from tasks.weights.rounding import row_keys, unbiased

ROWS, COLUMNS, RANK = 96, 1031, 4
NAMES = ("model.a.weight", "model.b.weight", "model.c.weight")
SHORT = {torch.bfloat16: "BF16", torch.float16: "F16"}

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


def _plan(dtype: str = "BF16", limit: int | None = None) -> Plan:
    ops = [
        Op(
            name, (ROWS, COLUMNS), dtype, f"base:{name}", "BF16",
            terms=(LowRank(f"adapter:{name}.A", f"adapter:{name}.B", 1.0),), unbiased=True,
        )
        for name in NAMES
    ]  # fmt: skip
    return Plan((*ops, Op("untouched", (8, 8), dtype, "base:untouched", "BF16")), (), limit)


def _sources(inputs: Path) -> dict:
    return {name: read_checkpoint(inputs / name) for name in ("base", "adapter")}


def _merge(inputs: Path, out: Path, plan: Plan, workers: int = 1) -> Executed:
    out.mkdir()
    return execute(plan, _sources(inputs), out, workers=workers)


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


def test_values_near_infinity_stay_finite_and_large_updates_are_rounded_to_nearest(
    inputs: Path,
) -> None:
    largest = torch.finfo(torch.bfloat16).max
    base = torch.full((64, 64), largest)
    wide = base * (1 + 2.0**-11)  # nearest is the largest number, above is infinity
    assert bool((unbiased(wide, base, torch.bfloat16, row_keys("x", 0, 64)) == largest).all())
    base = load_file(inputs / "base" / "model.safetensors")[NAMES[0]].float()
    wide = base * 1.1
    written = unbiased(wide, base, torch.bfloat16, row_keys(NAMES[0], 0, ROWS))
    assert torch.equal(written, wide.bfloat16())


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_a_light_adapter_is_kept(inputs: Path, tmp_path: Path, dtype: str) -> None:
    done = _merge(inputs, tmp_path / "out", _plan(dtype))
    assert done.kept == pytest.approx(1.0, abs=0.05)
    assert done.nearest_keeps is not None
    assert done.nearest_keeps < 0.8
    before = load_file(inputs / "base" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    low = load_file(inputs / "adapter" / "model.safetensors")
    gained, update = 0.0, 0.0
    for name in NAMES:
        change = low[f"{name}.B"].double() @ low[f"{name}.A"].double()
        gained += float(((after[name].double() - before[name].double()) * change).sum())
        update += float((change * change).sum())
    assert done.kept == pytest.approx(gained / update, rel=1e-3)
    assert torch.equal(after["untouched"].float(), before["untouched"].float())


def test_the_same_bytes_for_any_threads_files_and_kernel(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _merge(inputs, tmp_path / "one", _plan()).checksums
    assert _merge(inputs, tmp_path / "threads", _plan(), workers=2).checksums == expected
    assert _merge(inputs, tmp_path / "files", _plan(limit=ROWS * COLUMNS * 2)).checksums == expected
    assert len(list((tmp_path / "files").glob("*.safetensors"))) == 4
    monkeypatch.setattr("tasks.weights.execute.lora_merge.library", lambda: None)
    assert _merge(inputs, tmp_path / "torch", _plan()).checksums == expected


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
