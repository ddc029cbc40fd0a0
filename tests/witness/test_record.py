"""The record that a trainer leaves is what its saved files compute: trainers, engines."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tasks.verify.reference import read_reference
from tasks.witness.plumbline_witness.callback import WitnessCallback
from tasks.witness.plumbline_witness.probes import first_rows, ids_of_row
from tasks.witness.plumbline_witness.record import witness
from tests.witness.conftest import PACKAGE, Trained, load, of_files, train


def test_the_noise_of_16_bits_is_that_of_another_engine(base: Path, tmp_path: Path) -> None:
    """Limits that are too narrow call a right server a fault, too wide ones miss quantisation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    exact = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        witness(model, tokenizer, tmp_path)
        trained = read_reference(tmp_path).trained
        (name,) = trained.formats
        assert name == "bfloat16"
        if dtype == torch.bfloat16:  # float32 computes the same model with errors that are none
            apart = of_files(exact, trained).mean_kl
            assert 0.2 * apart < trained.formats[name].mean_kl < 5 * apart


def test_a_second_training_leaves_nothing_of_the_first_record(tmp_path: Path) -> None:
    for folder, name in ((".", "base.fp"), ("checkpoint-2", "scores.json")):
        (tmp_path / folder / "plumbline.witness").mkdir(parents=True)
        (tmp_path / folder / "plumbline.witness" / name).touch()
    callback = WitnessCallback()
    callback._last = 2
    state = SimpleNamespace(global_step=2, best_model_checkpoint=None, is_world_process_zero=True)
    callback.on_train_end(SimpleNamespace(output_dir=tmp_path), state, None)
    assert [path.name for path in (tmp_path / "plumbline.witness").iterdir()] == ["scores.json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sharding", "ranks"),
    [
        ("full", "ddp", 2),
        ("lora", "zero3", 2),
        ("sft", "", 1),
        ("grpo", "", 1),
    ],
)
def test_trainers_and_engines(
    base: Path, tmp_path: Path, kind: str, sharding: str, ranks: int
) -> None:
    trained = train(base, tmp_path / "out", kind, sharding, ranks=ranks)
    moved = of_files(load(base, trained.out), trained.fingerprint())
    assert moved.mean_kl < 1e-6
    assert moved.top1_agreement == 1.0


@pytest.mark.slow
def test_training_goes_on_as_without_it(base: Path, tmp_path: Path) -> None:
    """In 4 bits, where evaluation on a CPU repacks weights."""
    from safetensors.numpy import load_file

    weights = []
    for name, witnessed in (("with", True), ("without", False)):
        trained = train(base, tmp_path / name, "qlora", witnessed=witnessed)
        weights.append(load_file(trained.out / "adapter_model.safetensors"))
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.slow
def test_a_model_that_fsdp_has_sharded(base: Path, tmp_path: Path) -> None:
    from tests.commands import run_ranks

    words = (str(base), str(tmp_path), "witness")
    run_ranks("tests.delivery.save_distributed", *words, log_path=tmp_path / "log")
    trained = Trained(tmp_path)
    assert of_files(load(base, base), trained.fingerprint()).mean_kl < 1e-6


def saved(out: Path, **kwargs: Any) -> None:
    args = SimpleNamespace(output_dir=str(out))
    WitnessCallback().on_save(args, SimpleNamespace(global_step=1), None, **kwargs)


def test_a_record_that_fails_does_not_end_a_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "plumbline.witness"):
        saved(tmp_path, model=None, processing_class=object())
        saved(tmp_path, model=None)
    assert len(caplog.messages) == 2
    assert not list(tmp_path.iterdir())


def test_the_users_own_prompts_and_rows(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of the training's environment. No text of a training row is recorded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "prompts").write_text("3 plus 4?\n\n12 plus 9?\n")
    monkeypatch.setenv("PLUMBLINE_WITNESS_PROMPTS", str(tmp_path / "prompts"))
    model, tokenizer = (
        kind.from_pretrained(base) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    loader = SimpleNamespace(dataset=[{"input_ids": [5, 6, 7]}] * 3)
    for rows in (0, 2):
        monkeypatch.setenv("PLUMBLINE_WITNESS_ROWS", str(rows))
        saved(tmp_path, model=model, processing_class=tokenizer, train_dataloader=loader)
        probes = Trained(tmp_path).facts("checkpoint-1")["probes"]
        own = [(p["kind"], p["text"]) for p in probes if p["kind"] in ("prompt", "row")]
        texts = [("prompt", "3 plus 4?"), ("prompt", "12 plus 9?")]
        assert own == [*texts, *[("row", None)] * rows]


def test_rows_of_several_trainers() -> None:
    rows: list[tuple[Any, tuple[int, ...]]] = [
        ({"input_ids": [1, 2]}, (1, 2)),
        ({"input_ids": np.array([4, 5])}, (4, 5)),
        ({"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4]}, (1, 2, 3)),
        ({"chosen_input_ids": [7, 8]}, (7, 8)),
        ({"input_ids": [[1, 2], [3]]}, ()),
        ({"text": "x"}, ()),
        ([1, 2], ()),
    ]
    for row, ids in rows:
        assert ids_of_row(row) == ids
    assert first_rows([{"text": "x"}, {"text": "y"}], 1) == [{"text": "x"}]
    assert first_rows(iter([{"text": "x"}]), 1) == []


def test_the_command_of_a_trainer_is_run_as_it_is(tmp_path: Path) -> None:
    """The environment's own `sitecustomize` runs, arguments and status are the command's."""
    (tmp_path / "sitecustomize.py").write_text("print('own sitecustomize')\n")
    run = [sys.executable, "-m", "plumbline_witness"]
    program = "import sys; print(sys.argv[1:]); sys.exit(5)"
    env = {"PYTHONPATH": f"{PACKAGE}:{tmp_path}", "PATH": "/usr/bin:/bin"}

    def output(*words: str) -> tuple[int, str]:
        done = subprocess.run([*run, *words], env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    status, text = output("--", sys.executable, "-c", program, "--flag", "a b")
    assert status == 5
    assert text.splitlines() == ["own sitecustomize", "['--flag', 'a b']"]
    assert output()[0] == 2
    status, text = output("--", "no-such-command")
    assert (status, "no-such-command" in text) == (127, True)
