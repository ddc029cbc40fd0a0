"""Make tiny models of real classes and adapters with peft, and merge them in memory."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tasks.core.errors import ContractError, first_and_more
from tasks.weights.adapters.changes import Changes, changes
from tasks.weights.adapters.live import LiveModel, live_model
from tasks.weights.adapters.read import Adapter, read_adapter
from tasks.weights.execute.kernels import apply
from tasks.weights.plan.adapter_ops import needs_all_rows
from tests.tiny import SIZES
from tests.weights.rounding import rounded_alike

ROWS_A_BLOCK = 23

Tensors = dict[str, torch.Tensor]


def config_of(family: str) -> Any:
    """Return a tiny configuration of a real class."""
    import transformers as tf

    if family == "gpt2":
        return tf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    if family == "mixtral":
        return tf.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)
    if family == "llama4":
        sizes = {**SIZES, "intermediate_size_mlp": 48, "num_local_experts": 2, "head_dim": 8}
        return tf.Llama4TextConfig(**sizes, pad_token_id=0)
    if family == "qwen2":
        return tf.Qwen2Config(**SIZES, tie_word_embeddings=True)
    return tf.LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=family == "biased")


def base_model(family: str, *, head: str = "CausalLM", seed: int = 0) -> Any:
    """Return a model in fp32 whose weights are exact in bf16, without constant tensors."""
    import transformers as tf

    torch.manual_seed(seed)
    extra = {"num_labels": 1} if head == "SequenceClassification" else {}
    config = config_of(family)
    for key, value in extra.items():
        setattr(config, key, value)
    with quiet():
        model = getattr(tf, f"AutoModelFor{head}").from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.05)
            tensor.copy_(tensor.bfloat16().float())
    return model.eval()


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


def peft_merge(
    model: Any, *folders: Path, weights: Sequence[float] = ()
) -> dict[str, torch.Tensor]:
    """Merge adapters with peft in fp32, one after another, and cast once to bf16."""
    from peft import PeftModel

    merged = copy.deepcopy(model)
    for at, folder in enumerate(folders):
        with quiet():
            wrapped = PeftModel.from_pretrained(merged, folder)
            for module in wrapped.modules():
                if weights and hasattr(module, "set_scale"):
                    module.set_scale("default", weights[at])
            merged = wrapped.merge_and_unload()
    return {name: tensor.to(torch.bfloat16) for name, tensor in merged.state_dict().items()}


def our_merge(
    model: Any, adapters: Sequence[tuple[Adapter, float]], live: LiveModel | None = None
) -> dict[str, torch.Tensor]:
    """Merge adapters with our changes and kernels, in blocks of rows."""
    live = live or live_model(model)
    total = changes(adapters, live)
    if total.findings:
        raise ContractError(first_and_more(total.findings), details=total.findings)
    operands = {
        f"{adapter.name}:{k}": v for adapter, _ in adapters for k, v in tensors_of(adapter).items()
    }
    state = model.state_dict()
    merged: dict[str, torch.Tensor] = {}
    for name in state:
        if name in live.tied and name not in total.unties:
            continue
        stored = total.replacements.get(name)
        start = operands[stored] if stored else state[name]
        merged[name] = merge_one(start, name, total, operands)
    for name, holder in live.tied.items():
        merged.setdefault(name, merged[holder])
    return merged


def merge_one(
    start: torch.Tensor, name: str, total: Changes, operands: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Merge one tensor block by block, as the engine does, and cast once to bf16."""
    flat = start.float().reshape(-1, start.shape[-1]) if start.ndim > 1 else start.float()
    terms = total.terms.get(name, ())
    step = len(flat) if any(map(needs_all_rows, terms)) else ROWS_A_BLOCK
    blocks = []
    for at in range(0, len(flat), step):
        block = flat[at : at + step].clone()
        for term in terms:
            block = apply(term, block, start=at, operand=operands.__getitem__)
        blocks.append(block)
    return torch.cat(blocks).reshape(start.shape).to(torch.bfloat16)


def tensors_of(adapter: Adapter) -> dict[str, torch.Tensor]:
    """Read an adapter's tensors with safetensors or torch."""
    from safetensors.torch import load_file

    path = adapter.root / "adapter_model.safetensors"
    if path.is_file():
        return dict(load_file(path))
    return dict(torch.load(adapter.root / "adapter_model.bin", weights_only=True))


def opened(folder: Path, name: str = "adapter", weight: float = 1.0) -> list[tuple[Adapter, float]]:
    """Open one adapter as the argument of `changes`."""
    return [(read_adapter(folder, name), weight)]


def compare(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], base: dict[str, torch.Tensor]
) -> None:
    """Assert equality up to the order of sums, and that something changed."""
    assert set(ours) == set(theirs)
    wrong = {
        n: int((ours[n] != theirs[n]).sum()) for n in ours if not rounded_alike(ours[n], theirs[n])
    }
    assert not wrong
    assert any(not torch.equal(ours[n], base[n].to(torch.bfloat16)) for n in ours)


def altered(
    good: Path, to: Path, edit: Callable[[Tensors], Any] = id, config: dict[str, Any] | None = None
) -> Path:
    """Copy an adapter with edited tensors and replaced settings."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(good, to)
    tensors = tensors_of(read_adapter(good))
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, to / "adapter_model.safetensors")
    raw = json.loads((to / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps({**raw, **(config or {})}))
    return to
