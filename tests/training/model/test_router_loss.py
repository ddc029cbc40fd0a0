"""The router loss of a mixture of experts: transformers' own numbers, over packed rows."""

from __future__ import annotations

import ast
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.config.checks.model import Known
from tasks.config.checks.objective import families, router_loss
from tasks.training.job import Peft
from tasks.training.memory.estimate import adapter_weights
from tasks.training.memory.sizes import MIXTURES, Sizes
from tasks.training.model.adapter import add_adapter
from tasks.training.model.packed_model import TokenOutputs, accept_packed_rows
from tasks.training.model.router_loss import coefficient, has_router_loss
from tasks.training.objectives.forward_passes import Passes
from tasks.training.objectives.sft import Sft
from tasks.training.tokens.order import Counts
from tasks.training.tokens.packing import pack
from tests.settings import Settings
from tests.training.datasets import make_examples
from tests.training.model.test_packed_families import make_model

LENGTHS = [23, 9, 40, 1, 31]
ROUTED = ("mixtral", "qwen2_moe", "qwen3_moe")
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


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", ROUTED)
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


def test_reentrant_checkpointing_would_lose_the_gradient() -> None:
    """The reason for its refusal: the routers' outputs are recorded without a graph."""
    model = make_model("mixtral", "sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    accept_packed_rows(model)
    out = model(row=pack(make_examples([9, 5], vocabulary=88), (0, 1)), outputs=ROUTER)
    model.zero_grad(set_to_none=True)
    out[-1].backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


ROUTER = TokenOutputs(router=True)


def test_every_family_has_the_same_formula() -> None:
    """Families that are accepted compute what `load_balancing_loss` does."""
    formulas = set()
    for family in families("AutoModelForCausalLM"):
        if not has_router_loss(family):
            continue
        name = family.removesuffix("_text")
        place = f"transformers/models/{name}/modeling_{name}.py"
        source = Path(str(distribution("transformers").locate_file(place))).read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name == "load_balancing_loss_func":
                code = [part for part in node.body if not isinstance(part, ast.Expr)]
                formulas.add("".join(map(ast.unparse, code)))
    assert len(formulas) == 1


@pytest.mark.parametrize(
    ("config", "train", "lines"),
    [
        ({"model_type": "mixtral"}, {}, []),
        ({"model_type": "mixtral"}, {"objective": "dpo"}, []),
        ({"model_type": "mixtral", "router_aux_loss_coef": 0.0}, {"objective": "grpo"}, []),
        (
            {"model_type": "mixtral"},
            {"objective": "kto", "gradient_checkpointing_reentrant": True},
            [
                "0.02, from config.json with mixtral; train.objective=kto has no router loss: sft, "
                "dpo, orpo, simpo do -> train.router_aux_loss_coef=0",
                "0.02, from config.json; reentrant checkpointing loses the gradient of the "
                "routers' outputs -> train.gradient_checkpointing_reentrant=false or "
                "train.router_aux_loss_coef=0",
            ],
        ),
        ({"model_type": "mixtral"}, {"objective": "grpo", "router_aux_loss_coef": 0.0}, []),
        (
            {"model_type": "llama", "num_local_experts": 0},
            {"router_aux_loss_coef": 0.1},
            ["0.1 with llama; only a mixture of experts has routers "
             "-> train.router_aux_loss_coef=null"],
        ),
    ],
)  # fmt: skip
def test_what_has_no_router_loss_is_refused(
    config: dict[str, Any], train: dict[str, Any], lines: list[str]
) -> None:
    usual = {"num_local_experts": 8, "router_aux_loss_coef": 0.02}
    problems = router_loss({**TRAIN, **train}, Known(config={**usual, **config}))
    assert [str(p).removeprefix("train.router_aux_loss_coef: ") for p in problems] == lines


def test_a_family_without_a_router_loss_is_refused_if_its_config_asks_for_it() -> None:
    config = {"model_type": "llama4_text", "num_local_experts": 16, "router_aux_loss_coef": 0.001}
    (problem,) = router_loss(TRAIN, Known(config=config))
    assert "has no such loss for llama4_text" in problem.allowed
    deepseek = {"model_type": "deepseek_v3", "n_routed_experts": 256}  # balanced by a bias instead
    assert router_loss(TRAIN, Known(config=deepseek)) == []


PUBLISHED: dict[str, dict[str, Any]] = {
    "Mixtral": {},
    "Qwen2Moe": {"mlp_only_layers": [0, 3]},
    "Qwen3Moe": {"head_dim": 128, "decoder_sparse_step": 2},
    "Olmoe": {},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_memory_plan_counts_every_expert(name: str) -> None:
    """Against models of published sizes on the meta device, biases and norms of heads left out."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**PUBLISHED[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    left_out = ("bias", "q_norm.weight", "k_norm.weight")
    counted = sum(p.numel() for n, p in model.named_parameters() if not n.endswith(left_out))
    linear = sum(
        module.weight.numel()
        for n, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and n != "lm_head"
    )
    sizes = Sizes.of(config.to_dict())
    assert config.model_type in MIXTURES
    assert (sizes.weights(), sizes.linear_weights()) == (counted, linear)
    assert sizes.expert_weights() > sizes.linear_weights()


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_the_memory_plan_counts_adapters_as_peft_makes_them(family: str) -> None:
    """All-linear has adapters on experts and routers of some families, and not of others."""
    peft = Peft("lora", rank=4)
    model = make_model(family, "sdpa")
    sizes = Sizes.of(model.config.to_dict())
    ranks: Any = None
    adapted = add_adapter(model, peft, head="tokens", dtype=torch.float32, ranks=ranks)
    trained = {n: p.numel() for n, p in adapted.named_parameters() if p.requires_grad}
    assert any(".experts." in name for name in trained) == sizes.adapted
    assert adapter_weights(sizes, Settings(peft=peft)) == sum(trained.values())
