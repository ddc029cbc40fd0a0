"""A tiny model that was really trained, adapters of real training, and faults of its server."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.toy.splits import corpus
from tasks.toy.tokenizer import train_tokenizer
from tasks.verify.reference import Reference, read_reference
from tasks.verify.servers.server import Scores
from tasks.witness.plumbline_witness import witness
from tests.tiny import tiny
from tests.verify.synthetic import ArrayServer

Model = Any
STEPS = (20, 30, 40)
"""Steps with a checkpoint; the last one is what should be served."""


@dataclass(frozen=True)
class Training:
    """Base model and adapter.

    Attributes:
        folder: has `checkpoint-N` with a witness for each of `STEPS`.
        base: the base, without adapter.
        tuned: the base with the adapter of the last step.
        states: adapter tensors by step.
        tokenizer: of transformers.
    """

    folder: Path
    base: Model
    tuned: Model
    states: dict[int, dict[str, torch.Tensor]]
    tokenizer: Any

    def reference(self, step: int = STEPS[-1]) -> Reference:
        """Return the witness of a step."""
        return read_reference(self.folder / f"checkpoint-{step}")

    def at(self, step: int) -> Model:
        """Return a copy of the model with the adapter of a step."""
        model = copy.deepcopy(self.tuned)
        model.load_state_dict(self.states[step], strict=False)
        return model


def train(
    folder: Path, name: str = "Qwen2", *, quantize: bool = False, rate: float = 3e-3
) -> Training:
    """Pretrain a tiny model on the toy's texts, then an adapter on other texts.

    Args:
        folder: gets the checkpoints' records.
        name: class of the model: `<name>Config` of transformers.
        quantize: round the base's layers to 4 bits (NF4) before the adapter is trained.
        rate: learning rate of the adapter.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    texts = [f"{question} {answer}" for question, answer in corpus(300, seed=0)]
    tokenizer = train_tokenizer(texts, context=256)
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96}
    config = tiny(name, vocab_size=len(tokenizer), max_position_embeddings=256, **sizes)
    model = AutoModelForCausalLM.from_config(config).float()
    _fit(model, tokenizer, texts, 120, 3e-3)
    base = copy.deepcopy(model).eval()
    if quantize:
        round_layers(model, nf4)
    more = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **more))
    reversed_texts = [f"{answer} {question}"[::-1] for question, answer in corpus(300, seed=1)]
    states: dict[int, dict[str, torch.Tensor]] = {}

    def save(step: int) -> None:
        if step in STEPS:
            states[step] = {
                key: value.detach().clone()
                for key, value in tuned.state_dict().items()
                if "lora_" in key
            }
            record = witness(tuned, tokenizer, folder / f"checkpoint-{step}", facts={"step": step})
            if quantize:
                facts = json.loads((record / "witness.json").read_text())
                facts["quantization"] = {"method": "nf4", "layers": 28}
                (record / "witness.json").write_text(json.dumps(facts))

    _fit(tuned, tokenizer, reversed_texts, STEPS[-1], rate, save)
    return Training(folder, base, tuned.eval(), states, tokenizer)


def _fit(
    model: Model, tokenizer: Any, texts: Sequence[str], steps: int, rate: float,
    after: Callable[[int], None] = lambda step: None,
) -> None:  # fmt: skip
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    random = np.random.default_rng(0)
    model.train()
    for step in range(1, steps + 1):
        picked = [texts[index] for index in random.integers(0, len(texts), 16)]
        batch = tokenizer(picked, return_tensors="pt", padding=True, truncation=True, max_length=48)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    model.eval()


def answers(model: Model, probes: Sequence[Sequence[int]], top: int = 20) -> list[Scores]:
    """Return what a server of this model says: `top` ids and the next token, by position."""
    scores = []
    for probe in probes:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([list(probe)])).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits, -1)
        best = logprobs.topk(min(top, logprobs.shape[1])).indices
        ids, values = [], []
        for row, chosen, own in zip(logprobs, best.tolist(), probe[1:], strict=True):
            listed = chosen if own in chosen else [*chosen, own]
            ids.append(np.array(listed, np.int32))
            values.append(row[listed].numpy().astype(np.float32))
        scores.append(Scores(tuple(ids), tuple(values)))
    return scores


class TorchServer(ArrayServer):
    """A server of torch models by name, which gives log-probabilities alone."""

    def __init__(self, **models: Model) -> None:
        super().__init__((), models)

    def score(self, model: str, sequences: Any, *, workers: int | None = None) -> list[Scores]:
        """Return the answers of a model."""
        return answers(self._models[model], sequences)


def in_bf16(model: Model) -> Model:
    """Return a copy as vLLM computes it: weights, activations and logits in bf16."""
    return copy.deepcopy(model).to(torch.bfloat16)


def scaled(model: Model, factor: float) -> Model:
    """Return a copy whose adapter has another scale."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):  # attention has one, too
            module.scaling = {name: value * factor for name, value in module.scaling.items()}
    return model


def round_layers(model: Model, rounding: Callable[[torch.Tensor], torch.Tensor]) -> Model:
    """Round the base's linear weights in place, not those of adapters. Returns the model."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lora_" not in name and "lm_head" not in name:
            module.weight.data = rounding(module.weight.data)
    return model


def nf4(weight: torch.Tensor, block: int = 64) -> torch.Tensor:
    """Round to NormalFloat with 16 values and one scale for 64 weights (QLoRA, section 3)."""
    from bitsandbytes.functional import get_4bit_type

    values = get_4bit_type("nf4", device="cpu")
    flat = weight.reshape(-1, block)
    scale = flat.abs().amax(1, keepdim=True)
    nearest = ((flat / scale)[..., None] - values).abs().argmin(-1)
    return (values[nearest] * scale).reshape(weight.shape)


def fp8(weight: torch.Tensor) -> torch.Tensor:
    """Round to e4m3 with one scale per tensor, as vLLM's `--quantization fp8` does."""
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def with_theta(model: Model, factor: float) -> Model:
    """Return a copy with another base of the rotary embedding."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            count = len(module.inv_freq)
            powers = torch.arange(count, dtype=torch.float32) / count
            module.inv_freq = module.inv_freq * factor ** (-powers)
    return model


def on_16_bits(training: Training) -> Model:
    """Return the adapter on the base before it was rounded."""
    model = copy.deepcopy(training.tuned)
    before = dict(training.base.named_parameters())
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            stored = before[f"{name.removeprefix('base_model.model.')}.weight"]
            module.base_layer.weight.data = stored.data.clone()
    return model


def with_layer_of(model: Model, other: Model, layer: int) -> Model:
    """Return a copy with one layer of another model of the same structure."""
    model = copy.deepcopy(model)
    part = f".layers.{layer}."
    state = {name: value for name, value in other.state_dict().items() if part in name}
    model.load_state_dict(state, strict=False)
    return model
