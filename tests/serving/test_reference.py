"""The reference child measures, samples and reports its errors like the live model."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.core.errors import ArtifactError
from tasks.drift.fingerprint import Fingerprint, drift
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.serving.prompts import stop_ids
from tasks.serving.reference import child
from tasks.serving.reference.load import load_model
from tests.serving.models import CONVERSATIONS, END, load

NF4 = {"type": "nf4", "double_quant": True, "compute_dtype": "bfloat16"}


def test_fingerprint_equals_the_live_one_bit_for_bit(
    scorer: ReferenceScorer, served: Path, trained: Path, tmp_path: Path
) -> None:
    live = Fingerprint.load(trained / "fingerprint.fp")
    new = scorer.fingerprint(ModelRef(served), trained / "fingerprint.fp", tmp_path / "new.fp")
    assert new.engine == "transformers"
    assert np.array_equal(new.logprobs, live.logprobs)
    assert np.array_equal(new.top1, live.top1)
    assert drift(live, Fingerprint.load(tmp_path / "new.fp")).mean_kl == 0.0


def test_greedy_equals_generate(scorer: ReferenceScorer, served: Path) -> None:
    import torch

    prompts = scorer.encode(served, [{"messages": m} for m in CONVERSATIONS[:3]])
    assert prompts.eos == [END]
    generated = scorer.generate(ModelRef(served), prompts.tokens, 6, prompts.eos)
    model = load(served)
    for prompt, tokens, steps in zip(
        prompts.tokens, generated.tokens, generated.candidates, strict=True
    ):
        out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=6)
        assert tokens == out[0, len(prompt) :].tolist()
        assert [max(step, key=lambda pair: pair[1])[1] for step in steps] == [
            dict(step)[token] for step, token in zip(steps, tokens, strict=True)
        ]


def test_an_id_that_only_config_json_names_ends_responses(tmp_path: Path) -> None:
    """Rollouts, reward models, rendering and smoke tests all stop where a server does."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert stop_ids(tmp_path, 2) == [2, 5, 7, 9]


def test_a_missing_tensor_is_refused_and_not_made_up(
    scorer: ReferenceScorer, served: Path, trained: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(served, tmp_path / "gap"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"model\.layers\.1\.self_attn\.q_proj"):
        scorer.fingerprint(ModelRef(folder), trained / "fingerprint.fp", tmp_path / "x.fp")


def test_an_unexpected_error_is_reported_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "arguments.pickle").write_bytes(pickle.dumps((1, 0)))
    reply = child.answer({"function": "operator:truediv", "folder": str(tmp_path)})
    assert reply["crash"] == 1
    assert reply["tail"][-1] == "ZeroDivisionError: division by zero"


def linears(model: Any) -> dict[str, Any]:
    from bitsandbytes.nn import Linear4bit

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear4bit)}


def values(model: Any) -> dict[str, Any]:
    from bitsandbytes.functional import dequantize_4bit

    return {
        name: dequantize_4bit(layer.weight.data, layer.weight.quant_state).clone()
        for name, layer in linears(model).items()
    }


def evaluate(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(torch.arange(24)[None]).logits


def test_an_evaluation_changes_no_weight_and_stops_no_gradient(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)  # it repacks
    model = load_model(ModelRef(served, quantization=NF4))
    before, stored = values(model), {k: v.clone() for k, v in model.state_dict().items()}
    logits = evaluate(model)
    assert [n for n, now in values(model).items() if not torch.equal(now, before[n])] == []
    assert [n for n, v in model.state_dict().items() if not torch.equal(v, stored[n])] == []
    embedded = model.get_input_embeddings()(torch.arange(24)[None]).detach().requires_grad_()
    again = model.train()(inputs_embeds=embedded).logits
    assert torch.equal(again, logits), "there is no dropout: training computes the same"
    (gradient,) = torch.autograd.grad(again.float().square().sum(), embedded)
    assert gradient.abs().amax(-1).gt(0).all()
