"""Training and measuring on a second device: the CPU's numbers, and nothing mixed.

The device is `tests/elsewhere.py`. On a GPU each of these would end in "expected all tensors to be
on the same device", or in a numpy array that a CUDA tensor does not give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tasks.drift.fingerprint import drift
from tasks.rl import advantages
from tasks.rl.algorithms import ALGORITHMS
from tasks.rl.experience import pack_experience
from tasks.rl.losses import Totals, policy_loss, value_loss
from tasks.rl.measure import measure_tokens
from tasks.rl.responses import Prompt, Response, ScoredResponse
from tasks.serving.reference import measure
from tasks.serving.vllm.colocation import Generated
from tasks.training.job import Batch
from tasks.training.losses import objective
from tasks.training.model import probe
from tasks.training.model.packed_model import TokenOutputs, accept_packed_rows, require_same
from tasks.training.passes import Passes, Sums
from tasks.training.tokens.order import Counts
from tasks.training.tokens.packing import trial_row
from tests.elsewhere import DEVICE, Elsewhere
from tests.settings import Loop
from tests.tiny import tiny
from tests.training.tokens.test_packing import make_examples

HERE = torch.device("cpu")
PROBES = [[5, 9, 40, 3, 77], [8, 8, 60], [1, 2, 3, 4, 5, 6, 7]]


@pytest.fixture
def elsewhere() -> Iterator[None]:
    with Elsewhere():
        yield


def causal(device: torch.device, *, frozen_head: bool = False) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny("Llama"), attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.lm_head.requires_grad_(not frozen_head)
    return model.to(device)


class Engine:
    """Stand-in for the parts of DeepSpeed's engine that passes use."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.eval, self.train, self.parameters = module.eval, module.train, module.parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def ranks(device: torch.device) -> Any:
    def total(value: torch.Tensor) -> torch.Tensor:
        assert value.device == device, "NCCL reduces nothing on a CPU"
        return value

    return SimpleNamespace(
        device=device, rank=0, world_size=1, replica=0, replicas=1, leads=True, total=total,
        all_objects=lambda value: [value],
    )  # fmt: skip


def on_both(compute: Callable[[torch.device], Any]) -> tuple[Any, Any]:
    return compute(HERE), compute(DEVICE)


@pytest.mark.parametrize(("name", "frozen"), [("sft", True), ("dpo", False)])
def test_losses_and_gradients(name: str, frozen: bool, elsewhere: None) -> None:
    chosen = objective(name, {})

    def compute(device: torch.device) -> tuple[float, list[float], dict[str, float]]:
        model = causal(device, frozen_head=frozen)
        accept_packed_rows(model)
        lengths = [9, 4, 12, 6] if len(chosen.roles) == 1 else [9, 4, 12, 6, 5, 3, 8, 8]
        examples = make_examples(lengths, roles=len(chosen.roles))
        wanted = {"reference": np.zeros((4, len(chosen.roles)), np.float32)}
        examples = replace(examples, roles=chosen.roles, values={**examples.values, **wanted})
        engine = Engine(model)
        require_same(engine, trial_row(examples).to(device))
        passes, counts = Passes(engine, ranks(device), chosen), Counts.of(examples)
        baseline = passes.baseline(examples, passes.heldout(examples, Batch(2, 4, max_len=64)))
        sums = Sums(ranks(device))
        loss = passes.loss(examples, range(4), counts=counts, baseline=baseline)
        loss.value.backward()
        sums.add({"loss": loss.value, **loss.measures})
        gradients = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
        return float(loss.value), gradients, sums.total()

    here, there = on_both(compute)
    assert here[0] == pytest.approx(there[0], abs=1e-5)
    assert here[1] == pytest.approx(there[1], rel=1e-3, abs=1e-6)
    assert here[2] == pytest.approx(there[2], abs=1e-5)
    assert len(here[1]) == (20 if frozen else 21)


def test_responses_are_measured_and_learned_from(elsewhere: None) -> None:
    prompts = [Prompt({"id": str(ids)}, np.array(ids, np.int32)) for ids in ([3, 4], [7, 8, 9])]
    scored = [
        ScoredResponse(
            Response(
                p, Generated(np.array(ids, np.int32), np.full(len(ids), -4.0, np.float32), True), ""
            ),
            group, reward, {},
        )
        for group, p in enumerate(prompts)
        for ids, reward in (([11, 12, 13], 1.0), ([21, 22], 0.0))
    ]  # fmt: skip

    def compute(device: torch.device) -> Any:
        model = causal(device)
        accept_packed_rows(model)
        got = measure_tokens(
            pack_experience(scored), ranks(device), size=2,
            measure=lambda row: {"old": model(row=row)},
        )  # fmt: skip
        scores = advantages.group_normalized(got.rewards, got.groups)
        estimated = advantages.spread(scores, got.lengths)
        outputs = TokenOutputs(0.7, entropy=True)
        logprobs, entropies = model(row=got.row([0, 3]).to(device), outputs=outputs)
        got = replace(got, advantages=estimated, returns=estimated, values=got.old)
        row, totals = got.part([0, 3], device), Totals(5, 2, 8)
        corrected = {"correction_high": 9.0, "correction_low": 0.0}
        loop = Loop(entropy_coef=0.1, correction="sequence_mask", **corrected)
        loss = policy_loss(logprobs, row, totals, ALGORITHMS["gspo"], loop, entropies)
        loss.value.backward()
        values = value_loss(logprobs.detach(), row, totals, 0.2)
        gradients = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
        return got.old.tolist(), float(loss.value), gradients, float(values.value)

    here, there = on_both(compute)
    for mine, theirs in zip(here, there, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def test_fingerprints_of_the_trainer_and_of_the_scorer(elsewhere: None) -> None:
    live = probe.fingerprint_of(Engine(causal(HERE)), PROBES, HERE)
    there = probe.fingerprint_of(Engine(causal(DEVICE)), PROBES, DEVICE)
    assert drift(live, there).mean_kl < 1e-6
    assert (live.measured_on["device"], there.measured_on["device"]) == ("cpu", "meta")
    scorer = measure.fingerprint(causal(DEVICE).eval(), there)
    assert drift(there, scorer).mean_kl == 0.0
    elsewhere_measured = measure.fingerprint(causal(DEVICE).eval(), live)
    assert drift(live, elsewhere_measured).mean_kl < 1e-6
    first = measure.reference(causal(DEVICE).eval(), PROBES)
    assert drift(first, measure.fingerprint(causal(HERE).eval(), first)).mean_kl < 1e-6
