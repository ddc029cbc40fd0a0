"""Inputs and plans for tests of execution: every kind of operation on small tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tasks.pipeline.artifact import Origin, publish, staging
from tasks.weights.files.reader import ADAPTER, read_checkpoint
from tasks.weights.files.tensors import Tensors
from tasks.weights.plan import LowRank, Op, Plan, Rows

WORDS = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.int64: "I64"}
SCALE = 1.7


def tensors(seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a base and an adapter whose widths and heights no block size divides."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    base = {
        "embed": draw(70, 24).bfloat16(),
        "wide": draw(33, 1030).bfloat16(),
        "tall": draw(1031, 24).bfloat16(),
        "conv": draw(24, 72).bfloat16(),
        "bias": draw(33).bfloat16(),
        "norm": draw(24),
        "fused": draw(3, 10, 24).bfloat16(),
        "ids": torch.arange(7),
        "dora": draw(33, 70).bfloat16(),
        "stack": draw(3, 24, 16).bfloat16(),
    }
    adapter = {
        "wide.A": draw(5, 1030).bfloat16(), "wide.B": draw(33, 5).bfloat16(),
        "tall.A": draw(4, 24), "tall.B": draw(1031, 4),
        "conv.A": draw(4, 24), "conv.B": draw(72, 4),
        "rows": draw(2, 24),
        "dora.A": draw(4, 70), "dora.B": draw(33, 4), "dora.m": draw(33).abs(),
        "stack.A": draw(6, 16), "stack.B": draw(24, 6),
    }  # fmt: skip
    return base, adapter


def make_inputs(root: Path, seed: int = 0) -> dict[str, Tensors]:
    """Publish both as artifacts, so that their hashes are known; the base in two files."""
    base, adapter = tensors(seed)
    first = {name: base[name] for name in ("embed", "wide", "tall", "conv")}
    second = {name: base[name] for name in base if name not in first}
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    with staging(root / "base") as work:
        for file, contents in files.items():
            save_file(contents, work / file)
        index = {name: file for file, contents in files.items() for name in contents}
        path = work / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
        publish(work, root / "base", Origin("base", "test", "base"))
    with staging(root / "adapter") as work:
        save_file(adapter, work / "adapter_model.safetensors")
        publish(work, root / "adapter", Origin("adapter", "test", "adapter"))
    return {
        "base": read_checkpoint(root / "base"),
        "adapter": read_checkpoint(root / "adapter", ADAPTER),
    }


def pair(name: str, **settings: object) -> LowRank:
    return LowRank(f"adapter:{name}.A", f"adapter:{name}.B", SCALE, **settings)


def copied(name: str, tensor: torch.Tensor) -> Op:
    word = WORDS[tensor.dtype]
    return Op(name, tuple(tensor.shape), word, f"base:{name}", word)


def make_plan(*, max_shard_bytes: int | None = 40_000) -> Plan:
    """Return a plan with one operation of every kind."""
    base, _ = tensors()
    ops = {name: copied(name, tensor) for name, tensor in base.items()}

    def changed(name: str, *terms: object) -> Op:
        op = ops[name]
        return Op(name, op.shape, op.dtype, op.source, op.source_dtype, terms=terms)

    ops["wide"] = changed("wide", pair("wide"))
    ops["tall"] = changed("tall", pair("tall"))
    ops["conv"] = changed("conv", pair("conv", transpose=True))
    ops["embed"] = changed("embed", Rows("adapter:rows", (0, 69)))
    ops["dora"] = changed("dora", pair("dora", magnitude="adapter:dora.m"))
    ops["stack"] = changed("stack", pair("stack", experts=3))
    ops["norm"] = Op("norm", (24,), "BF16", "base:norm", "F32")
    del ops["fused"]
    for expert in range(3):
        name = f"expert.{expert}"
        turned = expert == 2
        ops[name] = Op(
            name, (24, 10) if turned else (10, 24), "BF16", "base:fused", "BF16",
            start=expert * 240, transpose=turned,
        )  # fmt: skip
    return Plan(tuple(ops.values()), max_shard_bytes=max_shard_bytes)


def expected() -> dict[str, torch.Tensor]:
    """Return the plan's results, computed on full tensors by torch."""
    base, adapter = tensors()
    results = dict(base)
    for name in ("wide", "tall", "conv"):
        change = (adapter[f"{name}.B"].float() @ adapter[f"{name}.A"].float()) * SCALE
        change = change.T if name == "conv" else change
        results[name] = (base[name].float() + change).bfloat16()
    results["embed"] = base["embed"].clone()
    results["embed"][[0, 69]] = adapter["rows"].bfloat16()
    wide = base["dora"].float() + (adapter["dora.B"] @ adapter["dora.A"]) * SCALE
    factor = adapter["dora.m"] / torch.linalg.norm(wide, dim=1)
    results["dora"] = (wide * factor[:, None]).bfloat16()
    # In peft's layout every third column of B belongs to one expert.
    parts = (adapter["stack.B"][:, e::3] @ adapter["stack.A"][2 * e :][:2] for e in range(3))
    change = torch.stack(list(parts)) * SCALE
    results["stack"] = (base["stack"].float() + change).bfloat16()
    results["norm"] = base["norm"].bfloat16()
    fused = results.pop("fused")
    for expert in range(3):
        results[f"expert.{expert}"] = fused[expert].T if expert == 2 else fused[expert]
    return results
