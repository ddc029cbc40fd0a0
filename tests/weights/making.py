"""Make tiny real models, adapters and training outputs for tests of weights and stages."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import random
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tasks.convert import convert
from tasks.delivery.plan import plan_trained
from tasks.drift.fingerprint import PROFILES, Fingerprint
from tasks.evaluation.measuring import Measuring
from tasks.evaluation.scoring import ModelRef
from tasks.gather import gather
from tasks.merge import merge as merge_stage
from tasks.pipeline.artifact import Artifact, Origin, publish, staging
from tasks.pipeline.stage import StageReport
from tasks.serving.reference import requests
from tasks.serving.reference.load import load_model
from tasks.serving.reference.measure import fingerprint
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.lora import changes, read_adapter, require_values
from tasks.weights.merge import merged_config, plan_adapter, plan_merge
from tasks.weights.model import model_facts, perform
from tasks.weights.model_class import auto_class
from tasks.weights.plan import Executed, Plan, Planned
from tasks.weights.proof import recompute
from tasks.weights.quantized.nf4 import as_trained
from tasks.weights.shards import rank_file
from tasks.weights.write import parse_size, write
from tests.tiny import FAMILIES, random_model, save_tokenizer, tiny

Tensors = dict[str, torch.Tensor]
ROWS = 300
BF16 = torch.bfloat16
NF4 = {"type": "nf4", "double_quant": True, "compute_dtype": "bfloat16"}
PROBES = tuple(tuple(random.Random(p).choices(range(ROWS), k=12)) for p in range(6))


@dataclass(frozen=True)
class Spread:
    """Layout of a training run on disk."""

    world_size: int = 2
    quantization: dict[str, Any] | None = None
    targets: Any = "all-linear"
    parameters: list[str] | None = None
    full: bool = False


def small_config(family: str) -> Any:
    """Return a two-layer Llama (untied), Qwen2 (tied), or Mixtral with three experts (untied)."""
    sizes = {"vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 128}
    names = {"llama": ("Llama", False), "qwen": ("Qwen2", True), "mixtral": ("Mixtral", False)}
    name, tied = names[family]
    if family == "mixtral":
        sizes |= {"num_local_experts": 3, "num_experts_per_tok": 2}
    return tiny(name, **sizes, max_position_embeddings=64, tie_word_embeddings=tied)


def make_base(root: Path, family: str, *, seed: int = 0, max_shard_size: str = "5GB") -> Artifact:
    """Publish a `base` artifact in bf16."""
    with staging(root) as work:
        model = random_model(small_config(family), seed=seed)
        model.save_pretrained(work, max_shard_size=max_shard_size)
        save_tokenizer(work)
        return publish(work, root, Origin("base", "prepare", root.name))


def trained_model(base: Path, spread: Spread, seed: int) -> Any:
    """Return a model as after training, with changed weights."""
    model = load_model(ModelRef(base, quantization=spread.quantization))
    generator = torch.Generator().manual_seed(seed)
    if not spread.full:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=spread.targets,
            target_parameters=spread.parameters,
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if spread.full or "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            old = parameter.data if spread.full else torch.zeros(())
            parameter.data = (old.float() + noise).to(torch.bfloat16)
            parameter.requires_grad_(True)
    return model.eval()


def write_trained(root: Path, base: Artifact, spread: Spread) -> Path:
    """Write a training output in the layout of the `shards` artifact, with its live fingerprint."""
    model = trained_model(base.path, spread, 1)
    root.mkdir(parents=True)
    parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    write_shards(root, parameters, spread)
    if not spread.full:
        model.peft_config["default"].save_pretrained(root)
    document = {"quantization": spread.quantization, "base_digest": base.digest, "loss": [1.0]}
    (root / "train.json").write_text(json.dumps(document))
    model.config.save_pretrained(root)
    model.generation_config.save_pretrained(root)
    save_tokenizer(root / "tokenizer")
    live_fingerprint(model).save(root / "fingerprint.fp")
    return root


def write_shards(root: Path, parameters: dict[str, torch.Tensor], spread: Spread) -> None:
    """Write each rank's equal partition of every parameter, as `tasks/training` does."""
    world = spread.world_size
    (root / "shards").mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        slices, table = {}, {}
        for name, tensor in parameters.items():
            size = -(-tensor.numel() // world)
            start, end = (min(r * size, tensor.numel()) for r in (rank, rank + 1))
            if end > start:
                slices[name] = tensor.reshape(-1)[start:end].clone()
                table[name] = {"shape": list(tensor.shape), "start": start, "end": end}
        path = root / "shards" / rank_file(rank, world)
        save_file(slices, path, metadata={"partitions": json.dumps(table)})
    document = {
        "format": 1,
        "world_size": world,
        "zero_stage": 2,
        "mode": "full" if spread.full else "adapter",
        "dtype": "BF16",
        "parameters": {name: {"shape": list(t.shape)} for name, t in parameters.items()},
    }
    (root / "partitions.json").write_text(json.dumps(document))


def alter_ranks(run: Path, world: int, ranks: Iterable[int], change: Callable[..., object]) -> None:
    """Rewrite ranks' files after `change` has altered their tensors and tables."""
    for rank in ranks:
        path = run / "shards" / rank_file(rank, world)
        with safe_open(path, framework="pt") as file:
            table = json.loads(file.metadata()["partitions"])
        tensors = load_file(path)
        change(tensors, table)
        save_file(tensors, path, metadata={"partitions": json.dumps(table)})


def live_fingerprint(model: Any) -> Fingerprint:
    """Return the trained model's fingerprint with all ids, since the vocabulary is small."""
    positions = sum(len(p) - 1 for p in PROBES)
    ids = np.tile(np.arange(ROWS, dtype=np.int32), (positions, 1))
    empty = np.zeros(ids.shape, np.float32)
    blank = Fingerprint(PROBES, ids, empty, np.zeros(positions, np.int32), "deepspeed")
    measured = fingerprint(model, blank)
    return replace(measured, engine="deepspeed")


class Here:
    """Measure with transformers and peft in this process, by the code of the reference child."""

    def measure(self, model: ModelRef, reference: Path, out: Path) -> Fingerprint:
        requests.fingerprint(model, reference, out)
        return Fingerprint.load(out)

    def reference(
        self, model: ModelRef, out: Path, *, probes: Any = (), **paths: Path | None
    ) -> Fingerprint:
        requests.reference(model, out, probes, *map(paths.get, ("like", "own", "base")))
        return Fingerprint.load(out)


class Copies(Here):
    """Copy the reference's fingerprint, for tests that do not check drift."""

    def measure(self, model: ModelRef, reference: Path, out: Path) -> Fingerprint:
        measured = Fingerprint.load(reference)
        measured.save(out)
        return measured

    def reference(self, model: ModelRef, out: Path, **paths: Any) -> Fingerprint:
        self.measure(model, paths["like"], paths["own"])
        return self.measure(model, paths["like"], out)


measure_here, copy_reference = Here().measure, Copies().measure


def state_of(folder: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint folder with safetensors."""
    state: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(f"{stem}*.safetensors")):
        state.update(load_file(path))
    return state


def failed(checks: Any) -> list[str]:
    """Return the names of the failed checks."""
    return [check.name for check in checks if not check.ok]


def near_nf4(folder: Path, change: float, *, base: str = "nf4") -> Path:
    """Save four layers of two matrices: NF4's own values, plus `change` of their norm, rank 8."""
    made = torch.Generator().manual_seed(7)
    tensors = {"model.embed_tokens.weight": torch.randn(64, 128, generator=made).bfloat16()}
    for layer, name in product(range(4), ("self_attn.q_proj", "mlp.up_proj")):
        weight = (torch.randn(256, 128, generator=made) * 0.02).bfloat16()
        if base == "nf4":
            weight = as_trained(weight, NF4)
        if base == "ternary":  # any 4 bits suit it
            weight = weight.sign() * 0.02
        factors = torch.randn(256, 8, generator=made) @ torch.randn(8, 128, generator=made)
        delta = factors / factors.norm() * weight.float().norm() * change
        changed = weight.float() + (delta if name == "mlp.up_proj" else 0)
        tensors[f"model.layers.{layer}.{name}.weight"] = changed.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def gathered(root: Path, run: Path, base: Artifact) -> Path:
    """Publish the output of the gather stage, whose checks must all be good."""
    with staging(root) as work:
        report = gather(
            work,
            trained=run,
            base=base.path,
            scorer=Here(),
            profile=PROFILES["standard"],
            log=logging.getLogger("tests.weights"),
        )
        assert failed(report.checks) == []
        publish(work, root, Origin(report.kind, "gather", root.name))
    return root


def hand_off(
    trained: Path,
    weights: Path,
    base: Path,
    *,
    base_mode: str = "auto",
    rounding: str = "nearest",
    dtype: str = "bfloat16",
    max_shard_size: str = "5GB",
    perform: Any = perform,
) -> dict[str, Any]:
    """Return the arguments of merge and convert; rounding is to nearest, as peft does."""
    section = {"base": base_mode, "rounding": rounding}
    limit = parse_size(max_shard_size)
    planned = plan_trained(
        trained, weights, base, section, dtype=dtype, max_shard_bytes=limit, perform=perform
    )
    log = logging.getLogger("tests.weights")
    return {"planned": lambda: planned, "perform": perform, "log": log}


def merged(
    out: Path, adapter: Path, base: Path, trained: Path, *, score: Any = None, **options: Any
) -> StageReport:
    """Run the merge stage into an empty folder."""
    measuring = Measuring(score or copy_reference, adapter, PROFILES["standard"])
    arguments = hand_off(trained, adapter, base, **options)
    return merge_stage(out, adapter=adapter, base=base, measuring=measuring, **arguments)


def converted(
    out: Path,
    weights: Path,
    trained: Path,
    score: Any,
    *,
    reference: Path | None = None,
    dtype: str = "bfloat16",
    max_shard_size: str = "5GB",
) -> StageReport:
    """Run the convert stage into an empty folder; full weights have their own fingerprint."""
    target: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size}
    arguments = hand_off(trained, weights, weights, **target)
    measuring = Measuring(score, reference or weights, PROFILES["standard"])
    limit = parse_size(max_shard_size)
    return convert(
        out, weights=weights, dtype=dtype, max_shard_bytes=limit, measuring=measuring, **arguments
    )


def planned(adapter: Path, base: Path, **settings: Any) -> Planned:
    """Plan the merge that `merged` writes."""
    config = json.loads((base / "config.json").read_text())
    options = {"model_dtype": "bfloat16", "dtype": None, "max_shard_bytes": 5 * 10**9}
    options |= {"rounding": "nearest", **settings}
    return plan_adapter(read_adapter(adapter), base, config, **options)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence peft's warnings about settings that these tests use on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train(model: Any, config: Any, *, seed: int = 1) -> Any:
    """Wrap a copy of the model with peft and change every trained weight, as training would."""
    from peft import get_peft_model

    torch.manual_seed(seed)
    with quiet():
        wrapped = get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, tensor in wrapped.named_parameters():
            if "lora_magnitude" in name:
                tensor.mul_(1 + 0.2 * torch.rand_like(tensor))
            elif "lora_" in name:
                tensor.copy_(torch.randn_like(tensor) * 0.1)
            elif tensor.requires_grad:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return wrapped.eval()


def save(wrapped: Any, folder: Path, **options: Any) -> Path:
    """Save an adapter as peft does."""
    with quiet():
        wrapped.save_pretrained(folder, **options)
    return folder


def altered(
    good: Path, to: Path, edit: Callable[[Tensors], Any] = id, config: dict[str, Any] | None = None
) -> Path:
    """Copy an adapter with edited tensors and replaced settings."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(good, to)
    tensors = load_file(good / "adapter_model.safetensors")
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, to / "adapter_model.safetensors")
    raw = json.loads((to / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps({**raw, **(config or {})}))
    return to


def save_base(folder: Path, family: str, *, tied: bool) -> Path:
    """Save the family's model."""
    random_model(FAMILIES[family].config(tie_word_embeddings=tied)).save_pretrained(folder)
    return folder


def load(folder: Path, dtype: Any = torch.bfloat16) -> Any:
    """Load a model with transformers; missing or unexpected keys fail."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    model, info = auto_class(config).from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def save_adapter(folder: Path, base: Path, family: str, **settings: Any) -> Path:
    """Train a LoRA adapter of rank 3 on all linear layers and experts, and save it."""
    from peft import LoraConfig

    entry = FAMILIES[family]
    experts = {"target_parameters": list(entry.experts) or None}
    options = {"r": 3, "lora_alpha": 5, "target_modules": entry.targets, **experts, **settings}
    return save(train(load(base), LoraConfig(**options)), folder)


def merge(base: Path, adapter: Path, out: Path) -> tuple[Plan, Executed]:
    """Merge on disk as the stage does: plan, validate, execute, recompute sampled rows."""
    read, facts = read_adapter(adapter), model_facts(base)
    total = changes(read, facts)
    require_values(read, total.copies)
    sources = {"base": read_checkpoint(base), "adapter": read.tensors}
    plan = plan_merge(sources["base"], facts, total, rounding="nearest")
    out.mkdir()
    done = write(plan, sources, out, workers=1)
    checked = recompute(plan, sources, read_checkpoint(out))
    assert [result for result in checked if result.wrong or result.skipped] == []
    for path in base.glob("*config.json"):
        shutil.copy(path, out)
    config = json.loads((base / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(merged_config(config, plan)))
    return plan, done


def merged_by_peft(base: Path | Any, adapter: Path, dtype: Any = BF16) -> Any:
    """Merge with peft in fp32, and cast once; `base` is a folder or a model in fp32."""
    from peft import PeftModel

    model = load(base, torch.float32) if isinstance(base, Path) else base
    with quiet():
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model.to(dtype).eval()


def merged_as_trained(base: Path, adapter: Path) -> Any:
    """Merge with peft in fp32 into the base that QLoRA dequantizes, and cast once."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=four, dtype=BF16)
    return merged_by_peft(model.dequantize().float(), adapter)


_TERMS = 4e-6
"""Difference of fp32 sums of a few hundred numbers around 1, summed in two orders."""


def near(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return True if fp32 results differ by no more than the order of their sums."""
    return actual.shape == wanted.shape and torch.allclose(actual, wanted, rtol=_TERMS, atol=_TERMS)


def rounded_alike(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return True if 16-bit numbers are equal, except for sums that lay between two of them.

    Those may differ by one unit in the last place (near zero by the error of a sum), at most one
    in a thousand.
    """
    if (actual.dtype, actual.shape) != (wanted.dtype, wanted.shape):
        return False
    differing, step = int((actual != wanted).sum()), torch.finfo(wanted.dtype).eps
    few = differing <= max(1, actual.numel() // 1000)
    return few and torch.allclose(actual.float(), wanted.float(), rtol=step, atol=5 * _TERMS)
