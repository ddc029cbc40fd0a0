"""The experiments for real hardware, planned on a machine without it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flows.chain import stages as chain_stages
from flows.chain.steps import Step, chain_steps
from flows.chain.steps import compose as compose_run
from flows.cli.config import CONF, Composed, compose_config
from flows.cli.plan import forecast, render
from flows.cli.vocabulary import experiments, short_names
from flows.delivery import stages as delivery_stages
from flows.orchestration import devices
from tasks.config.checks import findings, phases
from tasks.config.checks.engine import engine_memory, shareable
from tasks.config.checks.phases import memory_of, training_settings
from tasks.core import machine
from tasks.pipeline.locks import Needs
from tasks.training.memory.estimate import LIBRARIES, adapter_weights
from tasks.training.memory.sizes import Sizes
from tests.config.test_plan import CHAIN, program
from tests.machines import H100, QWEN_7B, QWEN_14B, QWEN_72B, with_gpus, with_hub

PAIR = {"prompt": "a question", "chosen": "good", "rejected": "bad"}
CHAT = {"prompt": "a question", "response": "good"}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "dpo_qwen72b_lora": PAIR,
    "qlora_qwen7b": CHAT,
    "sft_llama8b_lora_zero3": CHAT,
    "reward_qwen14b_lora_zero3": PAIR,
}


@pytest.fixture(autouse=True)
def whole_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans here show DeepSpeed's configuration."""
    monkeypatch.setenv("PLUMBLINE_LOG_LEVEL", "DEBUG")


@pytest.fixture(params=EXPERIMENTS)
def composed(request: pytest.FixtureRequest, tmp_path: Path) -> Composed:
    return compose(tmp_path, request.param)


def compose(tmp_path: Path, experiment: str, *overrides: str) -> Composed:
    data = tmp_path / "rows.jsonl"
    data.write_text(f"{json.dumps(EXPERIMENTS[experiment])}\n" * 2)
    arguments = [f"+exp={experiment}", f"data.path={data}", f"paths.runs={tmp_path / 'runs'}"]
    return compose_config([*arguments, *overrides])


EVERY = experiments(CONF)


@pytest.mark.parametrize("experiment", EVERY)
def test_every_experiment_plans_without_a_finding_on_eight_gpus_of_80_gb(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan prints each term of the memory."""
    with_gpus(monkeypatch, 8)
    with_hub(monkeypatch, tmp_path / "hub")
    arguments = arguments_of(experiment, tmp_path)
    for link in chain_steps(compose_run(arguments), arguments):
        text = render([link])
        assert text.endswith("preflight:\n  nothing to report"), text
        rank = memory_of(link.composed.settings, rewarded=link.rewarded)
        assert rank is not None
        for term in rank.terms:
            line = rf"^  {term.name} +{re.escape(phases.in_words(term.size))}  [a-z ]+$"
            assert re.search(line, text, re.M), term
        assert rank.total <= sum(term.size for term in rank.terms)


@pytest.mark.parametrize(
    ("experiment", "gpus", "gigabytes"),
    [
        ("qlora_qwen7b", 1, 80), ("qlora_qwen7b", 1, 24), ("grpo_qwen7b_qlora", 1, 80),
        ("grpo_qwen7b_qlora", 1, 48), ("reward_qwen14b_lora_zero3", 4, 80),
        ("sft_llama8b_lora_zero3", 4, 40),
    ],
)  # fmt: skip
def test_experiments_fit_the_hardware_that_they_name(
    experiment: str, gpus: int, gigabytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, gpus, gigabytes * 10**9)
    with_hub(monkeypatch, tmp_path / "hub")
    arguments = arguments_of(experiment, tmp_path)
    (link,) = chain_steps(compose_run(arguments), arguments)
    assert link.composed.settings["train"]["nproc"] == gpus
    assert render([link]).endswith("nothing to report")


@pytest.mark.parametrize(
    ("overrides", "needs", "count"),
    [
        (["+exp=sft_full", "train.nproc=4"], Needs.RANKS, 4),
        (["+exp=sft_full", "train.nproc=4"], Needs.DEVICE, 1),
        (["+exp=sft_full", "smoke.tensor_parallel=8"], chain_stages.SMOKE.needs, 8),
        (["+exp=sft_full", "smoke.tensor_parallel=4"], delivery_stages.SMOKE.needs, 4),
        (["+exp=grpo", "train.nproc=2", "rollout=server", "rollout.servers=3",
          "rollout.tensor_parallel=2"], chain_stages.REINFORCE.needs, 8),
        (["+exp=grpo", "train.nproc=2", "rollout.tensor_parallel=2"], Needs.RANKS, 2),
    ],
)  # fmt: skip
def test_a_stage_reserves_every_gpu_that_it_uses(
    overrides: list[str], needs: Needs, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, 8)
    uuids = [f"plumbline-{gpu.uuid}" for gpu in machine.gpus()[:count]]
    assert devices.names(compose_config(overrides), needs) == uuids


def arguments_of(experiment: str, tmp_path: Path) -> list[str]:
    """Return the command line of an experiment, with rows, and rewards if it needs them."""
    arguments = [f"+exp={experiment}", f"paths.runs={tmp_path / 'runs'}"]
    experiment = short_names(CONF).get(experiment, experiment)
    if "/model: hf" not in (CONF / "exp" / f"{experiment}.yaml").read_text():
        return arguments
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps(PAIR | CHAT | {'answer': '4'})}\n" * 3)
    arguments += [f"data.path={rows}"]
    if experiment.endswith("/grpo"):
        arguments += ["reward.function=exact_match"]
    if experiment.endswith("/ppo_lora"):
        reward = tmp_path / "reward"
        reward.mkdir()
        names = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
        (reward / "config.json").write_text(json.dumps(QWEN_14B | names | {"dtype": "bfloat16"}))
        arguments += [f"reward.model={reward}", "reward.normalize=false"]
    return arguments


def test_72b_in_host_memory_and_in_the_engine_that_serves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base takes no memory of a rank: safetensors maps it once for all of them."""
    with_gpus(monkeypatch, 8)
    with_hub(monkeypatch, tmp_path / "hub")
    composed = compose(tmp_path, "dpo_qwen72b_lora", "train.async_save=true")
    settings, rank = composed.settings, memory_of(composed.settings)
    assert rank is not None
    sizes = Sizes.of(QWEN_72B)
    # LoRA of rank 32 on eight ranks: master, moments, updated weights and gradient in host memory,
    # and while a checkpoint is written a copy of all but the gradient, and the weights once more.
    trained = adapter_weights(sizes, training_settings(settings))
    assert rank.host == 18 * trained // 8 + 16 * trained // 8
    monkeypatch.setattr(machine, "available_memory", lambda: 8 * (rank.host + LIBRARIES))
    assert findings(settings, composed.runs, rank) == []
    monkeypatch.setattr(machine, "available_memory", lambda: 8 * (rank.host + LIBRARIES) - 1)
    (finding,) = findings(settings, composed.runs, rank)
    assert finding.what == "memory"
    assert finding.allowed == "needs about 21.3 GiB: 1.7 GiB of states for each of 8 ranks"
    assert finding.override == "train.async_save=false or zero.offload_optimizer=none"
    served = engine_memory(QWEN_72B, settings, gpu_bytes=H100)
    assert (served.weights, served.token) == (2 * sizes.weights() // 8, sizes.kv_cache(1) // 8)
    with_gpus(monkeypatch, 8)
    settings["smoke"]["tensor_parallel"] = 1
    (finding,) = findings(settings, composed.runs, rank)
    assert finding.what == "GPU memory of smoke_eval"
    assert finding.override == "smoke.tensor_parallel=8"


def test_processes_that_share_a_model_need_whole_heads_and_a_gpu_each() -> None:
    key = "smoke.tensor_parallel"
    assert shareable(key, 4, QWEN_7B, gpus=8) == shareable(key, 1, {}) == []
    (finding,) = shareable(key, 8, QWEN_7B, gpus=8)
    assert (finding.found, finding.override) == ("8", f"{key}=4")
    assert shareable(key, 7, QWEN_7B, gpus=8)  # 28 heads, but 4 key heads and a width of 18944
    (finding,) = shareable(key, 8, QWEN_72B, gpus=2)
    assert finding.override == f"{key}=2"


def deepspeed_of(text: str) -> dict[str, Any]:
    start, end = text.index("deepspeed:\n") + len("deepspeed:\n"), text.index("preflight:")
    document: dict[str, Any] = json.loads(text[start:end])
    return document


def test_the_whole_chain_is_planned_without_findings(composed: Composed) -> None:
    """Nothing is known about a model on the Hub before its download, and nothing is downloaded."""
    planned = forecast(Step("", composed))
    assert [name for name, _ in planned] == CHAIN
    assert all(state.startswith("to run") for _, state in planned)
    text = render([Step("", composed)])
    assert "memory a rank: unknown: no config.json" in text
    assert findings(composed.settings, composed.runs) == []
    assert not composed.runs.exists()


def test_dpo_qwen72b_lora_is_the_published_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, 0)
    composed = compose(tmp_path, "dpo_qwen72b_lora")
    settings = composed.settings
    wanted: dict[str, dict[str, Any]] = {
        "train": {
            "objective": "dpo", "save_steps": 50, "max_ckpt_num": 20, "log_every": 10,
            "eval_steps": 0, "global_batch_size": 128, "micro_batch_size": 1, "epochs": 1.0,
            "max_steps": None, "max_len": 4096, "lr": 5e-7, "gradient_checkpointing": True,
        },
        "peft": {"kind": "lora", "rank": 32, "alpha": 64.0, "dropout": 0.05},
        "zero": {"stage": 3, "offload_optimizer": "cpu"},
        "model": {
            "path": "Qwen/Qwen2.5-72B-Instruct", "dtype": "bfloat16",
            "attn_implementation": "sdpa",  # flash-attn is in no lock
        },
        "data": {
            "kind": "jsonl", "chosen_key": "chosen", "rejected_key": "rejected",
            "chat_template": None,  # the tokenizer's own
        },
        "tracking": {"tensorboard": True},
    }  # fmt: skip
    for section, values in wanted.items():
        assert {key: settings[section][key] for key in values} == values
    assert settings["train"]["loss"]["beta"] == 0.1
    config = deepspeed_of(render([Step("", composed)]))
    assert config["bf16"] == {"enabled": True}
    assert config["train_micro_batch_size_per_gpu"] == 1
    assert config["gradient_accumulation_steps"] == 16  # 128 pairs on eight ranks
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"]) == (3, "cpu")


def test_the_printed_plan_is_complete_and_names_missing_libraries(tmp_path: Path) -> None:
    compose(tmp_path, "dpo_qwen72b_lora")
    user = tmp_path / "user"
    user.mkdir()
    half = "model.dtype=bfloat16"
    flash = "model.attn_implementation=flash_attention_2"
    arguments = (
        "+exp=dpo_qwen72b_lora",
        f"data.path={tmp_path}/rows.jsonl",
        flash,
        half,
        "plan=true",
    )
    done = program(user, *arguments)
    assert done.returncode == 2
    assert done.stdout.startswith(f"runs: {user}/runs\nstages:\n  prepare_data  to run: ")
    assert "-> model.attn_implementation=sdpa\n" in done.stdout
    assert done.stderr == "the preflight found 1 problem; nothing was started\n"
    assert list(user.iterdir()) == []
