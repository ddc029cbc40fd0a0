"""Make reward models and policies with value heads as each tool writes them, and score them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tasks.core.contract import require
from tasks.evaluation.measuring import finite
from tasks.weights.heads import Detected, separate
from tasks.weights.write import write
from tests.audit.making import edit_json
from tests.tiny import SIZES, random_model, save_tokenizer, tiny
from tests.weights.making import load, quiet

HIDDEN, ROWS, PAD = SIZES["hidden_size"], 300, 3
IDS = torch.randint(4, ROWS, (3, 9), generator=torch.Generator().manual_seed(5))
LENGTHS = (9, 6, 4)


def config_of(family: str, heads: int = 4) -> Any:
    """Return a tiny configuration: tied for Qwen2, untied for Llama and GPT-NeoX."""
    sizes = {"vocab_size": ROWS, "num_attention_heads": heads, "pad_token_id": PAD}
    if family == "neox":
        return tiny("GPTNeoX", **sizes, tie_word_embeddings=False)
    name, tied = ("Qwen2", True) if family == "qwen" else ("Llama", False)
    return tiny(name, **sizes, num_key_value_heads=min(2, heads), tie_word_embeddings=tied)


def causal(family: str) -> Any:
    """Make a language model in fp32 with random weights."""
    with quiet():
        return random_model(config_of(family), dtype="float32")


def classifier(base: Path) -> Any:
    """Return the base with a new head of one label in fp32, as training does."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(9)
    with quiet():
        return AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=1, dtype=torch.float32
        ).eval()


def _stirred(model: Any) -> Any:
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.05)
    return model.eval()


def head_tensors() -> dict[str, torch.Tensor]:
    """Return the tensors of a value head under TRL's keys."""
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(1, HIDDEN, generator=generator)
    return {"v_head.summary.weight": weight, "v_head.summary.bias": torch.tensor([0.375])}


def save_trl(folder: Path, family: str, *, prefix: str = "") -> Any:
    """Save a policy with the head among its weights, as TRL does. Return the policy."""
    model = causal(family)
    with quiet():
        model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {prefix + key: tensor for key, tensor in load_file(path).items()}
    save_file({**tensors, **head_tensors()}, path, metadata={"format": "pt"})
    save_tokenizer(folder)
    return model


def save_llamafactory(folder: Path, family: str) -> Any:
    """Save a model with `value_head.safetensors` beside it. Return the model."""
    model = causal(family)
    with quiet():
        model.save_pretrained(folder)
    save_file(head_tensors(), folder / "value_head.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    return model


def save_openrlhf(
    folder: Path, family: str, *, prefix: str = "score", name: str = "RewardModel", **config: Any
) -> Any:
    """Save a regression model as OpenRLHF does: the family's base class, a backbone, a head.

    Follows `get_llm_for_sequence_regression` of OpenRLHF 0.11 (Apache-2.0), from its description.
    """
    from transformers import AutoModel

    settings = config_of(family)
    backbone = AutoModel._model_mapping[type(settings)]

    def init(self: Any, config: Any) -> None:
        backbone.__base__.__init__(self, config)
        setattr(self, self.base_model_prefix, backbone(config))
        setattr(self, prefix, nn.Linear(config.hidden_size, 1, bias=False))
        self.post_init()

    torch.manual_seed(3)
    with quiet():
        model = _stirred(type(name, (backbone.__base__,), {"__init__": init})(settings))
        model.save_pretrained(folder)
    edit_json(folder / "config.json", value_head_prefix=prefix, **config)
    save_tokenizer(folder)
    return model


def rewards(model: Any, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Apply a linear head at the last token of each text, one text at a time."""
    backbone, per_text = getattr(model, model.base_model_prefix), []
    with torch.no_grad():
        for ids, length in zip(IDS, LENGTHS, strict=True):
            hidden = backbone(ids[None, :length]).last_hidden_state
            per_text.append(nn.functional.linear(hidden, weight, bias)[0, -1, 0])
    return torch.stack(per_text)


def scores(folder: Path) -> torch.Tensor:
    """Score a converted folder with transformers, normalised as in its config.json."""
    model = load(folder, torch.float32)
    assert model.config.num_labels == 1
    assert tuple(model.score.weight.shape) == (1, HIDDEN)
    logits = []
    with torch.no_grad():
        for ids, length in zip(IDS, LENGTHS, strict=True):
            logits.append(model.eval()(ids[None, :length]).logits[0, 0])
    document = json.loads((folder / "config.json").read_text())
    mean, std = (
        torch.tensor(document.get(key, plain)) for key, plain in (("mean", 0.0), ("std", 1.0))
    )
    return (torch.stack(logits) - mean) / std


def serve(detected: Detected, out: Path) -> None:
    """Plan, validate and write the model to serve; check and complete it as convert does."""
    config = detected.folder.config
    parted = separate(detected, dtype=str(config.get("dtype", "float32")))
    assert parted.facts.findings == ()
    done = write(parted.plan, parted.sources, out)
    checks = [finite(name, written.nonfinite) for name, written in done.tensors.items()]
    require(checks, stage="convert")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (detected.folder.root / name).is_file():
            shutil.copyfile(detected.folder.root / name, out / name)
    (out / "config.json").write_text(json.dumps(parted.config))
