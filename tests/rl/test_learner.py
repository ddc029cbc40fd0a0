"""Optimizer steps of the online update: a gradient that is not finite moves no weight."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.core.errors import TrainingError
from tasks.rl import learner, setup, update
from tasks.training.loop import MAX_SKIPPED
from tests.commands import run_ranks
from tests.settings import Batch, Loop, Optim, Settings

REFUSED = "step 2: the test's gradient is not finite; last good checkpoint: none yet"


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_every_rank_before_a_weight_moves(
    tmp_path: Path,
) -> None:
    """With fp32 weights below ZeRO-3, DeepSpeed itself would take the step."""
    run_ranks("tests.rl.learner_program", str(tmp_path), log_path=tmp_path / "log")
    cases = itertools.product(("bfloat16", "float32"), range(4))
    expected = [f"{dtype} {stage}: False {REFUSED}" for dtype, stage in cases]
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text().splitlines() == expected


def test_the_policys_schedule_begins_after_the_critics_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of five iterations warm the critic up, with two steps each, without a clip."""
    rates: list[tuple[str, int, int]] = []
    clips: list[float | None] = []

    def set_lr(engine: str, optim: Any, *, step: int, steps: int) -> float:
        rates.append((engine, step, steps))
        return 0.0

    def step_critic(*arguments: Any) -> dict[str, float]:
        clips.append(arguments[-1])
        return {}

    monkeypatch.setattr(update, "set_lr", set_lr)
    monkeypatch.setattr(update, "minibatches", lambda *_: [None, None])
    monkeypatch.setattr(update.Updater, "_step_critic", step_critic)
    monkeypatch.setattr(update.Updater, "_step_policy", lambda *_: {})
    run: Any = SimpleNamespace(
        job=SimpleNamespace(settings=Settings(batch=Batch(global_batch_size=8))),
        critic=SimpleNamespace(engine="critic", optim=Optim()),
        engine="policy",
        loop=Loop(rollout_batch_size=16, num_generations=1, critic_warmup=2),
        ranks=SimpleNamespace(rank=0),
    )
    inputs: Any = SimpleNamespace(experience=None)
    for iteration in range(1, 6):
        update.Updater(run).update(iteration, inputs, lambda _: {}, of=5)
    assert [r for r in rates if r[0] == "policy"] == [("policy", n, 6) for n in range(1, 7)]
    assert [r for r in rates if r[0] == "critic"] == [("critic", n, 10) for n in range(1, 11)]
    assert clips == [None] * 4 + [0.2] * 6


def test_fp16_steps_that_overflow_are_counted_and_end_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    applied: list[bool] = []
    accumulator = SimpleNamespace(passes=lambda rows, loss_of: ({"loss": 1.0}, False))
    monkeypatch.setattr(learner, "Accumulator", lambda *_: accumulator)
    engine = SimpleNamespace(
        step=lambda: None,
        was_step_applied=lambda: applied[-1],
        get_global_grad_norm=lambda: 2.0 if applied[-1] else math.inf,
    )
    job: Any = SimpleNamespace(settings=Settings(dtype="float16"), checkpoints=tmp_path)
    ranks: Any = None
    learns = learner.Learner(engine, ranks, job, whose="the test's", hint="")

    def step(applies: bool) -> dict[str, float]:
        applied.append(applies)
        return learns.step(len(applied), [], lambda _: None)  # type: ignore[arg-type,return-value]

    assert step(False) == {"loss": 1.0, "skipped": 1.0}
    assert step(True) == {"loss": 1.0, "skipped": 0.0, "grad_norm": 2.0}
    for _ in range(MAX_SKIPPED - 1):
        step(False)
    with pytest.raises(TrainingError):
        step(False)


def test_dropout_is_switched_off() -> None:
    """`old` is measured without dropout, so a pass in training mode has to give the same."""
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=32, attention_dropout=0.5,
    )  # fmt: skip
    lora = LoraConfig(target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(config), lora)
    ids = torch.arange(8)[None]

    def differs() -> bool:
        measured, trained = model.eval()(ids).logits, model.train()(ids).logits
        return not torch.equal(measured, trained)

    assert differs()
    assert setup.disable_dropout(model)
    assert not differs()
    assert not setup.disable_dropout(model)
