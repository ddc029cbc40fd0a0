"""Every family, packed and unpacked: the same losses and gradients; sequences do not mix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tasks.core.errors import ConfigError, TrainingError
from tasks.training.model.packable import unpackable
from tasks.training.model.packed_model import accept_packed_rows, require_same
from tasks.training.tokens.packing import pack, trial_row
from tasks.weights.families.meta import auto_class
from tests.training.datasets import alone, make_examples
from tests.weights.families.making import FAMILIES

LENGTHS = [23, 9, 5, 40, 22, 1, 31]
WINDOW = {"sliding_window": 8}
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": WINDOW,
    "mixtral": WINDOW,
    "phi3": WINDOW,
    "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {**WINDOW, "use_sliding_window": True},  # its window is in its mask alone
    "gemma2": {**WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"logits_scaling": 4.0},
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
}
EAGER = {"gemma2"}  # sdpa leaves its attention cap out
DEFAULT = ("qwen2", "gemma2", "gpt2")
EACH = [
    family if family in DEFAULT else pytest.param(family, marks=pytest.mark.slow)
    for family in FAMILIES
]


def make_model(family: str, attention: str) -> Any:
    """Make a tiny real model in fp32 with varied weights."""
    torch.manual_seed(0)
    config = FAMILIES[family].config(**CHANGES.get(family, {}))
    kind = auto_class(config)
    model = kind.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.train()


def gradients(model: Any, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 1, len(logprobs))
    (logprobs @ weights).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", EACH)
def test_packed_sequences_have_the_losses_and_gradients_of_unpacked_ones(family: str) -> None:
    examples = make_examples(LENGTHS, vocabulary=88)
    own = make_model(family, "eager")
    expected = alone(own, examples)
    theirs = gradients(own, expected)
    model = make_model(family, "eager" if family in EAGER else "sdpa")
    accept_packed_rows(model)
    require_same(model, trial_row(examples))
    packed = model(row=pack(examples, range(len(LENGTHS))))
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-5)
    mine = gradients(model, packed)
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-5 * max(scale, 1.0))
    row = pack(examples, range(len(LENGTHS)))
    with torch.no_grad():
        before = model.eval()(row=row)
        for changed in (0, 3):
            ids = examples.ids.copy()
            start, end = examples.bounds[changed : changed + 2]
            ids[start:end] = (ids[start:end] + 5) % 88
            after = model(row=pack(replace(examples, ids=ids), range(len(LENGTHS))))
            others = row.owner != changed
            assert torch.equal(after[others], before[others]), "sequences do not mix"
            assert not torch.equal(after[~others], before[~others])


def test_scores_equal_those_of_unpacked_sequences() -> None:
    from transformers import AutoModelForSequenceClassification

    config = FAMILIES["qwen2"].config(num_labels=1)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")
    examples = make_examples([8, 30, 12, 31], roles=2, vocabulary=88)
    with torch.no_grad():
        expected = torch.cat(
            [
                model(input_ids=torch.tensor(examples.sequence(i, role)[0])[None].long()).logits[0]
                for i in (1, 0)
                for role in (0, 1)
            ]
        )
    accept_packed_rows(model)
    require_same(model, trial_row(examples))
    torch.testing.assert_close(model(row=pack(examples, [1, 0])), expected, rtol=0, atol=1e-5)


def test_a_wrong_packed_pass_is_noticed() -> None:
    """The self-check notices mixed sequences and changed logits."""
    examples = make_examples([40, 40], vocabulary=88)
    model = make_model("llama", "sdpa")
    accept_packed_rows(model)
    leaky = replace(trial_row(examples), buckets=())
    one = replace(leaky, buckets=(pack(make_examples([80]), [0]).buckets))
    with pytest.raises(TrainingError, match="forward pass"):
        require_same(model, one)
    assert model.training
    require_same(model, trial_row(examples))
    head = model.get_output_embeddings()
    model.set_output_embeddings(Doubling(head))
    with pytest.raises(TrainingError, match="rounding"):
        require_same(model, trial_row(examples))


class Doubling(torch.nn.Module):
    """A head with other results for whole sequences."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden) * (2.0 if hidden.dim() == 3 else 1.0)


def test_families_that_cannot_be_packed_are_refused_by_name() -> None:
    from transformers import AutoModelForCausalLM, MambaConfig

    hybrid = {"model_type": "fresh", "text_config": {"layer_types": ["linear_attention"]}}
    for config, attention, named in (
        ({"model_type": "mamba"}, "sdpa", "mamba"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "sdpa", "conv"),
        (hybrid, "sdpa", "linear_attention"),
        ({"model_type": "falcon", "alibi": True}, "eager", "falcon"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "sdpa", "50.0"),
    ):
        refused = unpackable(config, attention)
        assert refused is not None, config
        assert named in refused.problem
    config = MambaConfig(vocab_size=90, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ConfigError, match="mamba"):
        accept_packed_rows(AutoModelForCausalLM.from_config(config))
    assert unpackable(make_model("gemma2", "eager").config.to_dict(), "eager") is None
