"""The router loss of a mixture of experts: transformers' own numbers, over packed rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.config.checks.model import Known
from tasks.config.checks.objective import router_loss
from tasks.training.model.packed_model import accept_packed_rows
from tasks.training.model.router_loss import coefficient
from tasks.training.objectives.forward_passes import Passes
from tasks.training.objectives.sft import Sft
from tasks.training.tokens.order import Counts
from tests.training.datasets import make_examples
from tests.training.model.test_packed_families import make_model

LENGTHS = [23, 9, 40, 1, 31]
TRAIN = {
    "objective": "sft", "router_aux_loss_coef": None, "gradient_checkpointing": True,
    "gradient_checkpointing_reentrant": False,
}  # fmt: skip


def own(model: Any, examples: Any, chosen: list[int]) -> Any:
    """Return transformers' output for a padded batch, with labels and router loss."""
    pieces = [examples.sequence(i, 0) for i in chosen]
    shape = len(pieces), max(len(ids) for ids, _ in pieces)
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, -100)
    for row, (tokens, bears) in enumerate(pieces):
        ids[row, : len(tokens)] = torch.from_numpy(tokens).long()
        mask[row, : len(tokens)] = 1
        marked = torch.from_numpy(bears).bool().nonzero()[:, 0]
        labels[row, marked] = ids[row, marked]
    return model(input_ids=ids, attention_mask=mask, labels=labels, output_router_logits=True,
                 use_cache=False)  # fmt: skip


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "checkpointed"), [("mixtral", True), ("qwen2_moe", False)])
def test_loss_and_gradients_are_those_of_transformers(family: str, checkpointed: bool) -> None:
    """One row is a whole step: its loss is the one that transformers returns for the batch."""
    examples = make_examples(LENGTHS, vocabulary=88)
    examples.bears[examples.bounds[:-1]] = 0  # nothing predicts a first token
    model = make_model(family, "sdpa")
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.7
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    chosen = list(range(len(LENGTHS)))
    expected = own(model, examples, chosen)
    theirs = gradients(model, expected.loss)
    accept_packed_rows(model)
    assert coefficient(model.config.to_dict(), None) == 0.7
    passes = Passes(model, SimpleNamespace(device=torch.device("cpu")), Sft(), 0.7)
    loss = passes.loss(examples, chosen, counts=Counts.of(examples), baseline=None)
    mine = gradients(model, loss.value)
    assert float(loss.measures["router_loss"]) == pytest.approx(expected.aux_loss.item(), rel=1e-6)
    assert loss.value.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert mine.keys() == theirs.keys()
    routers = [name for name in mine if "mlp.gate.weight" in name]
    assert len(routers) == 2
    for name, gradient in theirs.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-5 * max(scale, 0.1))


def test_rows_weigh_as_their_tokens() -> None:
    """A step of two rows has the mean of their router losses over its tokens; none is evaluated."""
    examples, rows = make_examples(LENGTHS, vocabulary=88), ([0, 2], [1, 3, 4])
    model = make_model("mixtral", "sdpa")
    each = [float(own(model, examples, chosen).aux_loss) for chosen in rows]
    accept_packed_rows(model)
    counts, device = Counts.of(examples), SimpleNamespace(device=torch.device("cpu"))
    passes, plain = Passes(model, device, Sft(), 0.7), Passes(model, device, Sft())
    losses = [passes.loss(examples, chosen, counts=counts, baseline=None) for chosen in rows]
    without = [plain.loss(examples, chosen, counts=counts, baseline=None) for chosen in rows]
    mean = (63 * each[0] + 41 * each[1]) / 104
    added = sum(float(a.value - b.value) for a, b in zip(losses, without, strict=True))
    assert added == pytest.approx(0.7 * mean, rel=1e-5)
    assert sum(float(x.measures["router_loss"]) for x in losses) == pytest.approx(mean, rel=1e-6)
    with torch.no_grad():
        evaluated = passes.loss(examples, rows[0], counts=counts, baseline=None)
    assert float(evaluated.value) == pytest.approx(float(without[0].value), rel=1e-6)
    assert "router_loss" not in evaluated.measures


def test_settings_and_families_without_a_router_loss_are_refused() -> None:
    mixtral = {"model_type": "mixtral", "num_local_experts": 8, "router_aux_loss_coef": 0.02}
    for config, train, named in (
        (mixtral, {}, []),
        (mixtral, {"objective": "dpo"}, []),
        (mixtral, {"objective": "grpo", "router_aux_loss_coef": 0.0}, []),
        (
            mixtral,
            # Reentrant checkpointing records the routers' outputs without a graph.
            {"objective": "kto", "gradient_checkpointing_reentrant": True},
            ["train.objective=kto", "train.gradient_checkpointing_reentrant=false"],
        ),
        (
            {**mixtral, "model_type": "llama", "num_local_experts": 0},
            {"router_aux_loss_coef": 0.1},
            ["llama"],
        ),
        ({**mixtral, "model_type": "llama4_text"}, {}, ["llama4_text"]),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, {}, []),  # it has a bias instead
    ):
        problems = router_loss({**TRAIN, **train}, Known(config=config))
        assert len(problems) == len(named), (config, train)
        assert all(n in f"{p} {p.allowed}" for n, p in zip(named, problems, strict=True))
