"""The real model of the demo: SmolLM2-135M from a GGUF file, trained, served, verified."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import command
from tests.e2e.conftest import Run, curve
from tests.e2e.test_chain import STAGES, check_chain
from tests.e2e.test_first_screen import OTHER_TEMPLATE
from tests.verify.serving import free_port, serve, started
from tests.witness.conftest import Trained, deliver, train, verify

pytestmark = pytest.mark.timeout(3600)


def test_a_file_that_is_no_gguf_starts_nothing(rlhf: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "my model.gguf").write_bytes(b"GGUF" + bytes(100))
    done = rlhf(tmp_path / "runs", "+exp=sft_qlora", f"model.path={tmp_path}/my model.gguf")
    assert done.code == 2, done.output
    assert "my model.gguf" in done.output
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def trained(rlhf: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A few steps of the demo."""
    runs = tmp_path_factory.mktemp("smol lm") / "runs"
    return rlhf(runs, "+exp=smollm2/sft", "train.max_steps=8", timeout=3000)


@pytest.mark.slow
def test_it_learns_and_what_was_trained_is_served(trained: Run) -> None:
    check_chain(trained, STAGES, limit=2e-2)  # three times the noise of bf16, 2e-3 to 4e-3
    scores = trained.summary["eval"]
    assert scores["loss_after"] < scores["loss_before"]
    assert scores["function_after"] > scores["function_before"]  # valid JSON
    merged = json.loads((trained.artifact("merge") / "manifest.json").read_text())
    assert merged["notes"]["rounding"]["kept"] >= 0.995


@pytest.mark.slow
def test_its_adapter_is_delivered_with_the_same_bytes(trained: Run, tmp_path: Path) -> None:
    base = f"base={trained.artifact('prepare_base')}"
    status, text = deliver(tmp_path, trained.artifact("gather"), base, "smoke.engine=none")
    assert status == 0, text
    served, name = Path(trained.summary["served"]), "model.safetensors"
    assert (tmp_path / "served" / name).read_bytes() == (served / name).read_bytes()


@pytest.mark.slow
def test_its_server_is_verified(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's command, with a compiled graph."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    port, served = free_port(), Path(trained.summary["served"])
    words = command("serve", str(served), "--host", "127.0.0.1", "--port", str(port))
    with started(words, port, tmp_path / "server.log") as server:
        status, text = verify(tmp_path, server.url, served)
    assert status == 0, text


@pytest.mark.slow
def test_a_server_of_the_base_with_another_template_is_not(trained: Run, tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text(OTHER_TEMPLATE)
    base, options = trained.artifact("prepare_base"), ("--chat-template", f"{tmp_path}/other.jinja")
    with serve(base, {}, log=tmp_path / "server.log", options=options) as server:
        status, text = verify(tmp_path, server.url, Path(trained.summary["served"]))
    assert status == 1, text
    for cause in ("[base-served]", "[template]"):
        assert cause in text


@pytest.mark.slow
def test_it_learns_by_rewards(trained: Run, rlhf: Callable[..., Run]) -> None:
    """One iteration of the experiment; its SFT is that of `trained`."""
    done = rlhf(
        trained.runs, "+exp=smollm2/grpo", "rl.iterations=1", "rl.rollout_batch_size=8",
        "rl.eval_prompts=4", timeout=3000,
    )  # fmt: skip
    assert done.code == 0, done.output
    assert done.stage("sft.train")["artifact"] == trained.stage("train")["artifact"]
    assert done.stage("grpo.gather")["drift"]["mean_kl"] == 0.0
    assert done.stage("grpo.smoke_eval")["drift"]["mean_kl"] < 2e-2
    scores = done.summary["eval"]
    assert 0.1 <= scores["reward_before"] <= 1, "valid JSON after SFT"
    assert max(curve(done, "train/mismatch/mean_abs", stage="grpo.train")) < 0.1


@pytest.fixture(scope="module")
def witnessed(trained: Run, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An adapter of plain transformers' Trainer on the same base, with a record."""
    root = tmp_path_factory.mktemp("witnessed")
    return train(trained.artifact("prepare_base"), root / "out", "lora")


@pytest.mark.slow
def test_the_record_of_another_trainer_is_what_its_files_compute(
    trained: Run, witnessed: Trained, tmp_path: Path
) -> None:
    assert witnessed.facts("checkpoint-2")["step"] == 2
    base = f"base={trained.artifact('prepare_base')}"
    status, text = deliver(tmp_path, witnessed.out / "checkpoint-2", base, "smoke.engine=none")
    assert status == 0, text
    assert "witness: " in text


@pytest.mark.slow
def test_a_base_under_the_name_of_an_adapter_is_named(
    trained: Run, witnessed: Trained, tmp_path: Path
) -> None:
    """Not with adapters: vLLM 0.32 on a CPU ends when a Llama's are asked for log-probabilities."""
    base = trained.artifact("prepare_base")
    options = ("--dtype", "float32", "--served-model-name", "base", "zeros")
    with serve(base, {}, log=tmp_path / "server.log", options=options) as server:
        status, text = verify(tmp_path, server.url, witnessed.out / "checkpoint-2", "zeros")
    assert status == 1, text
    assert "[base-served]" in text
