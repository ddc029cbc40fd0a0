"""Models and adapters of any size, made on the spot: Qwen2.5's shapes, random numbers.

    python -m benchmarks.synthetic base FOLDER 1.5

Numbers are drawn once and repeated at shifting offsets: what is measured here is how bytes move and
what arithmetic costs, and neither depends on the values. Nothing is held but one tensor.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

RANK = 64
ALPHA = 128
_POOL = 1 << 24


@dataclass(frozen=True)
class Size:
    """A model's shape, as Qwen2.5 has it; head size as there."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 151_936

    @property
    def kv(self) -> int:
        """Width of keys and values."""
        return self.hidden // self.heads * self.kv_heads


SIZES = {
    "0.5": Size("0.5", 896, 4864, 24, 14, 2),
    "1.5": Size("1.5", 1536, 8960, 28, 12, 2),
    "3": Size("3", 2048, 11008, 36, 16, 2),
    "tiny": Size("tiny", 64, 128, 2, 4, 2, 300),
}


def linears(size: Size) -> dict[str, tuple[int, int]]:
    """(out, in) of every linear layer, by module name, head left out."""
    h, i, kv = size.hidden, size.inner, size.kv
    kinds = {
        "self_attn.q_proj": (h, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, h), "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h),
        "mlp.down_proj": (h, i),
    }  # fmt: skip
    return {
        f"model.layers.{layer}.{kind}": shape
        for layer in range(size.layers)
        for kind, shape in kinds.items()
    }


def model_shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint; the head is tied to the embedding."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size.vocabulary, size.hidden)
    }
    for module, shape in linears(size).items():
        shapes[f"{module}.weight"] = shape
        if module.endswith(("q_proj", "k_proj", "v_proj")):
            shapes[f"{module}.bias"] = shape[:1]
    for layer in range(size.layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (size.hidden,)
    shapes["model.norm.weight"] = (size.hidden,)
    return shapes


def make_model(folder: Path, size: Size, *, seed: int = 0, shard_bytes: int = 5 * 10**9) -> None:
    """A base in bf16 with config.json and the manifest of an artifact."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_model_config(size), indent=1))
    shapes = model_shapes(size)
    draw = _drawing(seed, 0.02)
    hashes = write_safetensors(folder / "model.safetensors", shapes, "BF16", draw)
    tensors = {
        name: {"shape": list(shape), "dtype": "BF16", "sha256": hashes[name]}
        for name, shape in shapes.items()
    }
    _manifest(folder, "base", {"model.safetensors": tensors})


def _model_config(size: Size) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "bfloat16",
        "hidden_size": size.hidden, "intermediate_size": size.inner, "tie_word_embeddings": True,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "vocab_size": size.vocabulary,
        "max_position_embeddings": 4096,
    }  # fmt: skip


def _adapter_config(size: Size) -> dict[str, Any]:
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA,
        "target_modules": sorted({name.rpartition(".")[2] for name in linears(size)}),
        "bias": "none", "inference_mode": True, "lora_dropout": 0.0, "init_lora_weights": True,
        "base_model_name_or_path": "synthetic", "use_rslora": False, "fan_in_fan_out": False,
    }  # fmt: skip


def make_adapter(folder: Path, size: Size, *, seed: int = 1) -> None:
    """A PEFT adapter of rank 64 on every linear layer."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(_adapter_config(size), indent=1))
    path = folder / "adapter_model.safetensors"
    write_safetensors(path, adapter_shapes(size), "BF16", _drawing(seed, 0.02))


def adapter_shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """Every tensor of the adapter's file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module, (rows, columns) in linears(size).items():
        shapes[f"base_model.model.{module}.lora_A.weight"] = (RANK, columns)
        shapes[f"base_model.model.{module}.lora_B.weight"] = (rows, RANK)
    return shapes


Draw = Callable[[int], Iterator[NDArray[np.uint16]]]


def header(
    shapes: dict[str, tuple[int, ...]], dtype: str, metadata: dict[str, str]
) -> tuple[bytes, int]:
    """Head of a file of 16-bit tensors, and how many bytes of tensors follow."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name, shape in shapes.items():
        nbytes = 2 * prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, at


def write_safetensors(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: str,
    draw: Draw,
    metadata: dict[str, str] | None = None,
) -> dict[str, str]:
    """Write a file of 16-bit tensors piece by piece. Returns the sha256 of each."""
    hashes = {}
    with path.open("wb") as file:
        file.write(header(shapes, dtype, metadata or {})[0])
        for name, shape in shapes.items():
            digest = hashlib.sha256()
            for piece in draw(prod(shape)):
                file.write(piece.data)
                digest.update(piece.data)
            hashes[name] = digest.hexdigest()
    return hashes


def _drawing(seed: int, deviation: float) -> Draw:
    """bf16 numbers of a normal distribution, from one pool at shifting offsets."""
    random = np.random.default_rng(seed)
    wide = random.normal(0.0, deviation, _POOL).astype(np.float32)
    pool = (wide.view(np.uint32) >> 16).astype(np.uint16)
    state = {"at": 0}

    def draw(count: int) -> Iterator[NDArray[np.uint16]]:
        while count:
            state["at"] = (state["at"] * 5 + 12_345) % (_POOL // 2)
            piece = pool[state["at"] : state["at"] + min(count, _POOL // 2)]
            count -= len(piece)
            yield piece

    return draw


def _manifest(folder: Path, kind: str, tensors: dict[str, dict[str, object]]) -> None:
    """A manifest as `tasks.artifact` writes it."""
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = {"size": path.stat().st_size, "sha256": "not taken here"}
    document = {
        "format": 1, "kind": kind, "digest": kind, "tensors": tensors, "files": files,
        "inputs": {}, "notes": {},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(document))


def make_shards(folder: Path, size: Size, *, world: int = 2) -> None:
    """What `world` ranks of ours leave of the adapter after training."""
    (folder / "shards").mkdir(parents=True)
    live = {
        name.replace(".weight", ".default.weight"): shape
        for name, shape in adapter_shapes(size).items()
    }
    for rank in range(world):
        table, slices = {}, {}
        for name, shape in live.items():
            numel = prod(shape)
            step = -(-numel // world)
            start, end = (min(r * step, numel) for r in (rank, rank + 1))
            table[name] = {"shape": list(shape), "start": start, "end": end}
            slices[name] = (end - start,)
        path = folder / "shards" / f"rank-{rank:05d}-of-{world:05d}.safetensors"
        metadata = {"partitions": json.dumps(table)}
        write_safetensors(path, slices, "BF16", _drawing(rank, 0.02), metadata)
    document = {
        "format": 1, "world_size": world, "zero_stage": 2, "mode": "adapter", "dtype": "BF16",
        "parameters": {name: {"shape": list(shape)} for name, shape in live.items()},
    }  # fmt: skip
    (folder / "partitions.json").write_text(json.dumps(document))


HUGE = Size("huge", 12_288, 45_056, 100, 96, 8)
"""About 400 GB in bf16: one file a layer, about 4 GB each."""


def make_sparse(base: Path, adapter: Path) -> None:
    """A checkpoint of 100 shards and its adapter: real headers, and holes for the tensors."""
    base.mkdir(parents=True)
    by_file: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in model_shapes(HUGE).items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        file = f"model-{layer + 1:05d}-of-{HUGE.layers:05d}.safetensors"
        by_file.setdefault(file, {})[name] = shape
    for file, shapes in by_file.items():
        write_hollow(base / file, shapes)
    index = {name: file for file, shapes in by_file.items() for name in shapes}
    path = base / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    adapter.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(_model_config(HUGE)))
    (adapter / "adapter_config.json").write_text(json.dumps(_adapter_config(HUGE)))
    write_hollow(adapter / "adapter_model.safetensors", adapter_shapes(HUGE))


def write_hollow(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file whose tensors are a hole."""
    head, size = header(shapes, "BF16", {})
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + size)


MAKERS: dict[str, Callable[..., None]] = {
    "base": lambda folder, size: make_model(folder, SIZES[size]),
    "adapter": lambda folder, size: make_adapter(folder, SIZES[size]),
    "shards": lambda folder, size: make_shards(folder, SIZES[size]),
    "sparse": lambda folder: make_sparse(folder / "base", folder / "adapter"),
}

if __name__ == "__main__":
    MAKERS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
