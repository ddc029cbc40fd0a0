"""Faults of real models are told apart: the numbers of "What each fault looks like"."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from tasks.verify.answers import Answers
from tasks.verify.check import Check
from tasks.verify.checks.adapters import applied, base_name
from tasks.verify.checks.distribution import distribution
from tests.verify import tiny_models
from tests.verify.tiny_models import Model, TorchServer, Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["Qwen2", "Llama"])
def lora(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Training:
    torch.set_num_threads(1)
    return tiny_models.train(tmp_path_factory.mktemp("lora"), request.param)


@pytest.fixture(scope="module")
def qlora(tmp_path_factory: pytest.TempPathFactory) -> Training:
    torch.set_num_threads(1)
    return tiny_models.train(tmp_path_factory.mktemp("qlora"), quantize=True)


def checks(training: Training, tuned: Model, base: Model | None = None) -> dict[str, Check]:
    """Return the checks of a server, and print what a table needs."""
    reference = training.reference()
    server = TorchServer(tuned=tuned, base=base or training.base)
    answers = Answers(server, reference)
    moved, dose = answers.distance("tuned"), answers.dose("tuned")
    assert dose is not None
    below = answers.from_base("base")
    assert below is not None
    print(
        f"| {moved.mean_kl:.1e} | {dose.text} | {dose.remainder:.2f} | {moved.growth:.1f} | "
        f"{moved.first_kl:.0e} | {below.mean_kl:.0e} |"
    )
    return {
        "distribution": distribution(answers, "tuned", "base"),
        "adapter": applied(answers, "tuned", "base"),
        "base": base_name(answers, "tuned", "base"),
    }


def test_the_same_model_in_another_precision_raises_no_alarm(lora: Training) -> None:
    for convert in (copy.deepcopy, tiny_models.in_bf16):
        made = checks(lora, convert(lora.tuned), convert(lora.base))
        assert [check.verdict for check in made.values()] == ["ok"] * 3, made


def rounded(training: Training, rounding: Callable[[torch.Tensor], torch.Tensor]) -> list[Model]:
    """Return both models of a server that rounds its linear weights."""
    both = (training.tuned, training.base)
    return [tiny_models.round_layers(copy.deepcopy(model), rounding) for model in both]


def test_eight_bits_are_within_the_limits(lora: Training) -> None:
    """Rounding to fp8 moves these models by 1e-4 to 3e-4 nats: `standard` allows 1e-3."""
    made = checks(lora, *rounded(lora, tiny_models.fp8))
    assert made["distribution"].verdict == "ok"
    assert 1e-5 < float(made["distribution"].measured["mean_kl"]) < 1e-3


def test_four_bits_are_named(lora: Training) -> None:
    check = checks(lora, *rounded(lora, tiny_models.nf4))["distribution"]
    assert check.verdict == "fault", check.text
    assert check.causes[0].code == "quantised"


FAULTS: dict[str, tuple[Callable[[Training], Model], str]] = {
    "base": (lambda t: t.base, "base-served"),
    "half": (lambda t: tiny_models.scaled(t.tuned, 0.5), "adapter-scaled"),
    "double": (lambda t: tiny_models.scaled(t.tuned, 2.0), "adapter-scaled"),
    "step before": (lambda t: t.at(30), "other-checkpoint"),
    "earlier": (lambda t: t.at(20), "other-checkpoint"),
    "rope": (lambda t: tiny_models.with_theta(t.tuned, 100.0), "rope"),
    "layer of an earlier step": (
        lambda t: tiny_models.with_layer_of(t.tuned, t.at(20), 1),
        "partly-other-weights",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(name: str, lora: Training) -> None:
    plant, code = FAULTS[name]
    made = checks(lora, plant(lora))
    check = made["distribution"]
    assert check.verdict == "fault", check.text
    assert code in [cause.code for cause in check.causes], check.causes


def test_an_adapter_of_4_bits_on_16(qlora: Training) -> None:
    clean = checks(qlora, qlora.tuned, tiny_models.scaled(qlora.tuned, 0.0))
    assert [check.verdict for check in clean.values()] == ["ok"] * 3
    made = checks(qlora, tiny_models.on_16_bits(qlora), qlora.base)
    for name in ("distribution", "base"):
        assert made[name].verdict == "fault"
        assert made[name].causes[0].code == "nf4-on-16-bit"
