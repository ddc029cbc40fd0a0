"""Every family, packed and unpacked: the same losses and gradients; sequences do not mix."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from functools import partial
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
DEFAULT = ("llama", "qwen2", "gemma2", "mixtral", "gpt2")
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


def require_same_gradients(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-5 * max(scale, 1.0))


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
    require_same_gradients(gradients(model, packed), theirs)


@pytest.mark.parametrize("family", EACH)
def test_other_sequences_of_a_row_change_nothing(family: str) -> None:
    examples = make_examples(LENGTHS, vocabulary=88)
    model = make_model(family, "eager" if family in EAGER else "sdpa").eval()
    accept_packed_rows(model)
    row = pack(examples, range(len(LENGTHS)))
    with torch.no_grad():
        before = model(row=row)
        for changed in (0, 1, 3):
            ids = examples.ids.copy()
            start, end = examples.bounds[changed : changed + 2]
            ids[start:end] = (ids[start:end] + 5) % 88
            after = model(row=pack(replace(examples, ids=ids), range(len(LENGTHS))))
            others = row.owner != changed
            assert torch.equal(after[others], before[others])
            assert not torch.equal(after[~others], before[~others])


def test_flash_attention_gets_the_bounds_once_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own path to flash-attn, with a stand-in for its kernel.

    Without the bounds it derives them from the positions in every layer.
    """
    from transformers import modeling_flash_attention_utils as flash

    examples, told = make_examples(LENGTHS, vocabulary=88), []

    def kernel(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **how: Any) -> Any:
        told.append((cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), how["max_seqlen_q"]))
        assert (cu_seqlens_q.dtype, how["max_seqlen_k"]) == (torch.int32, how["max_seqlen_q"])
        cuts = cu_seqlens_q.tolist()
        each = zip(*(x.split([b - a for a, b in itertools.pairwise(cuts)]) for x in (q, k, v)),
                   strict=True)  # fmt: skip
        return torch.cat([_causal(*one, how.get("window_size")) for one in each])

    def nothing_derived(*args: Any) -> Any:
        raise AssertionError("the bounds are derived from the positions")

    takes = dict.fromkeys(("dropout_p", "window_size", "max_seqlen_q", "max_seqlen_k"), True)
    supports = defaultdict(bool, takes)
    process = partial(flash._process_flash_attention_kwargs, supports_mapping=supports)
    functions = ((None, kernel, None, None, None), (process, None))
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda name: functions)
    monkeypatch.setattr(flash, "_is_packed_sequence", nothing_derived)
    own = make_model("mistral", "eager")  # with a window
    expected = alone(own, examples)
    theirs = gradients(own, expected)
    model = make_model("mistral", "sdpa")
    model.config._attn_implementation = "flash_attention_2"  # flash-attn is not installed
    accept_packed_rows(model)
    packed = model(row=pack(examples, range(len(LENGTHS))))
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-5)
    require_same_gradients(gradients(model, packed), theirs)
    bounds = [0, *itertools.accumulate(sorted(LENGTHS))]
    assert told == [(bounds, bounds, max(LENGTHS))] * model.config.num_hidden_layers


def _causal(q: Any, k: Any, v: Any, window: tuple[int, int] | None) -> torch.Tensor:
    """Compute attention of one sequence, (t, heads, d); each token sees `window[0]` before it."""
    place = torch.arange(len(q))
    back = place[:, None] - place[None]
    seen = (back >= 0) & (back <= (window[0] if window else len(q)))
    each = (x.transpose(0, 1) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*each, attn_mask=seen, enable_gqa=True)
    return out.transpose(0, 1)


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


REFUSED = {
    "recurrent": ({"model_type": "mamba"}, "sdpa", "mamba"),
    "convolutions": (
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "sdpa", "conv",
    ),
    "new hybrid": (
        {"model_type": "fresh", "text_config": {"layer_types": ["linear_attention"]}},
        "sdpa", "linear_attention",
    ),
    "alibi": ({"model_type": "falcon", "alibi": True}, "eager", "falcon"),
    "cap": ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "sdpa", "50.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_packed_is_refused_by_name(name: str) -> None:
    config, attention, named = REFUSED[name]
    refused = unpackable(config, attention)
    assert refused is not None
    assert named in refused.problem


def test_refused_before_anything_runs() -> None:
    from transformers import AutoModelForCausalLM, MambaConfig

    config = MambaConfig(vocab_size=90, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ConfigError, match="mamba has recurrent layers"):
        accept_packed_rows(AutoModelForCausalLM.from_config(config))
    assert unpackable(make_model("gemma2", "eager").config.to_dict(), "eager") is None
