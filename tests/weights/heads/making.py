"""Reward models and policies with value heads, as each tool writes them, and their scores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tasks.core.contract import require
from tasks.weights.execute.execute import execute
from tasks.weights.execute.verdicts import finite
from tasks.weights.files.reader import ADAPTER, WEIGHTS
from tasks.weights.heads.detect import Found
from tasks.weights.heads.separate import separate
from tasks.weights.plan.validate import validate
from tests.tiny import SIZES, tiny
from tests.weights.adapters.making import quiet
from tests.weights.making import save_tokenizer

HIDDEN, ROWS, PAD = SIZES["hidden_size"], 300, 3
IDS = torch.randint(4, ROWS, (3, 9), generator=torch.Generator().manual_seed(5))
LENGTHS = (9, 6, 4)


def config_of(family: str, heads: int = 4) -> Any:
    """A tiny configuration of a real class: Qwen2 tied, Llama and GPT-NeoX not."""
    sizes = {"vocab_size": ROWS, "num_attention_heads": heads, "pad_token_id": PAD}
    if family == "neox":
        return tiny("GPTNeoX", **sizes, tie_word_embeddings=False)
    name, tied = ("Qwen2", True) if family == "qwen" else ("Llama", False)
    return tiny(name, **sizes, num_key_value_heads=min(2, heads), tie_word_embeddings=tied)


def causal(family: str, seed: int = 0, heads: int = 4) -> Any:
    """A language model in fp32 without flat tensors."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with quiet():
        model = AutoModelForCausalLM.from_config(config_of(family, heads), dtype=torch.float32)
    return _stirred(model)


def _stirred(model: Any) -> Any:
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.05)
    return model.eval()


def head_tensors(*, bias: bool = True, hidden: int = HIDDEN) -> dict[str, torch.Tensor]:
    """A value head as TRL names it."""
    generator = torch.Generator().manual_seed(11)
    found = {"v_head.summary.weight": torch.randn(1, hidden, generator=generator)}
    if bias:
        found["v_head.summary.bias"] = torch.tensor([0.375])
    return found


def save_trl(folder: Path, family: str, *, prefix: str = "") -> Any:
    """A policy with the head among its weights, as TRL's wrapper saves it. Returns the policy."""
    model = causal(family)
    with quiet():
        model.save_pretrained(folder)
    tensors = {prefix + key: one for key, one in load_file(folder / "model.safetensors").items()}
    tensors |= head_tensors()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    return model


def save_llamafactory(folder: Path, family: str, *, pickled: bool = False, heads: int = 4) -> Any:
    """A model with `value_head.safetensors|bin` beside it. Returns the model."""
    model = causal(family, heads=heads)
    with quiet():
        model.save_pretrained(folder)
    if pickled:
        torch.save(head_tensors(), folder / "value_head.bin")
    else:
        save_file(head_tensors(), folder / "value_head.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    return model


def openrlhf_model(family: str, *, prefix: str = "score", name: str = "RewardModel") -> Any:
    """A regression model built as OpenRLHF builds it: the family's base class, a backbone, a head.

    As of `get_llm_for_sequence_regression` of OpenRLHF 0.11 (Apache-2.0), from its description.
    """
    from transformers import AutoModel

    config = config_of(family)
    backbone = AutoModel._model_mapping[type(config)]

    def init(self: Any, config: Any) -> None:
        backbone.__base__.__init__(self, config)
        setattr(self, self.base_model_prefix, backbone(config))
        setattr(self, prefix, nn.Linear(config.hidden_size, 1, bias=False))
        self.post_init()

    torch.manual_seed(3)
    with quiet():
        return _stirred(type(name, (backbone.__base__,), {"__init__": init})(config))


def save_openrlhf(
    folder: Path, family: str, *, prefix: str = "score", name: str = "RewardModel", **config: Any
) -> Any:
    """Such a model saved as `save_model` does. Returns it."""
    model = openrlhf_model(family, prefix=prefix, name=name)
    with quiet():
        model.save_pretrained(folder)
    change_config(folder, value_head_prefix=prefix, **config)
    save_tokenizer(folder)
    return model


def change_config(folder: Path, **changes: Any) -> None:
    """Change config.json; None removes a key."""
    path = folder / "config.json"
    said = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in said.items() if value is not None}))


def hidden_states(model: Any) -> list[torch.Tensor]:
    """Last hidden states of each text, (1, tokens, hidden), one text at a time."""
    backbone = getattr(model, model.base_model_prefix)
    with torch.no_grad():
        return [
            backbone(ids[None, :length]).last_hidden_state
            for ids, length in zip(IDS, LENGTHS, strict=True)
        ]


def rewards(model: Any, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear head at the last token of each text."""
    found = [nn.functional.linear(h, weight, bias)[0, -1, 0] for h in hidden_states(model)]
    return torch.stack(found)


def scores(folder: Path) -> torch.Tensor:
    """What transformers says of a converted folder, normalised as its config.json says."""
    from transformers import AutoModelForSequenceClassification

    with quiet():
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_labels == 1
    assert tuple(model.score.weight.shape) == (1, HIDDEN)
    found = []
    with torch.no_grad():
        for ids, length in zip(IDS, LENGTHS, strict=True):
            found.append(model.eval()(ids[None, :length]).logits[0, 0])
    said = json.loads((folder / "config.json").read_text())
    mean, std = (torch.tensor(said.get(key, plain)) for key, plain in (("mean", 0.0), ("std", 1.0)))
    return (torch.stack(found) - mean) / std


def batch_scores(folder: Path) -> torch.Tensor:
    """The same from one batch, padded on the right."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    for row, length in enumerate(LENGTHS):
        ids[row, length:], mask[row, length:] = PAD, 0
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits[:, 0]


def serve(found: Found, out: Path, *, reward: bool | None = None) -> None:
    """Plan, validate and run what is served of a folder; judge and complete it as convert does."""
    said = found.folder.config
    parted = separate(found, dtype=str(said.get("dtype", "float32")), reward=reward)
    validate(parted.plan, parted.sources, out=out)
    stem = WEIGHTS if found.folder.adapter_config is None else ADAPTER
    done = execute(parted.plan, parted.sources, out, stem=stem)
    require([finite(name, one) for name, one in done.outcomes.items()], stage="convert")
    for name in ("tokenizer.json", "tokenizer_config.json", "adapter_config.json"):
        if (found.folder.root / name).is_file():
            shutil.copyfile(found.folder.root / name, out / name)
    if parted.config:
        (out / "config.json").write_text(json.dumps(parted.config))
