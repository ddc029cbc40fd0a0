"""The experiments for real hardware, planned where that hardware is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.config import Composed, compose_config
from flows.links import Link
from flows.plan import forecast, render
from tasks.preflight import findings
from tests.conf.test_plan import CHAIN, program

PAIR = {"prompt": "a question", "chosen": "good", "rejected": "bad"}
CHAT = {"prompt": "a question", "response": "good"}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "dpo_qwen72b_lora": PAIR,
    "qlora_qwen7b": CHAT,
    "sft_llama8b_lora_zero3": CHAT,
    "reward_qwen14b_lora_zero3": PAIR,
}


@pytest.fixture(params=EXPERIMENTS)
def composed(request: pytest.FixtureRequest, tmp_path: Path) -> Composed:
    return compose(tmp_path, request.param)


def compose(tmp_path: Path, experiment: str) -> Composed:
    data = tmp_path / "rows.jsonl"
    data.write_text(f"{json.dumps(EXPERIMENTS[experiment])}\n" * 2)
    given = [f"+exp={experiment}", f"data.path={data}", f"paths.runs={tmp_path / 'runs'}"]
    return compose_config(given)


def deepspeed_of(text: str) -> dict[str, Any]:
    start, end = text.index("deepspeed:\n") + len("deepspeed:\n"), text.index("preflight:")
    document: dict[str, Any] = json.loads(text[start:end])
    return document


def test_the_whole_chain_is_planned_and_flash_attention_is_all_that_is_missing(
    composed: Composed,
) -> None:
    """Of a model on the Hub nothing is known before it is fetched, and nothing is fetched."""
    planned = forecast(Link("", composed))
    assert [name for name, _ in planned] == [*CHAIN, "register"]
    assert all(state.startswith("to run") for _, state in planned)
    text = render([Link("", composed)])
    assert "memory a rank: unknown: no config.json" in text
    found = findings(composed.settings, composed.runs)
    assert [one.override for one in found] == ["model.attn_implementation=sdpa"]
    assert not composed.runs.exists()


def test_dpo_qwen72b_lora_is_the_published_configuration(tmp_path: Path) -> None:
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
            "attn_implementation": "flash_attention_2",
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
    config = deepspeed_of(render([Link("", composed)]))
    assert config["bf16"] == {"enabled": True}
    assert config["train_micro_batch_size_per_gpu"] == 1
    assert config["gradient_accumulation_steps"] == 16  # 128 pairs on eight ranks
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"]) == (3, "cpu")


def test_the_literal_plan_shows_everything_and_says_what_is_missing(tmp_path: Path) -> None:
    compose(tmp_path, "dpo_qwen72b_lora")
    user = tmp_path / "user"
    user.mkdir()
    done = program(user, "+exp=dpo_qwen72b_lora", f"data.path={tmp_path}/rows.jsonl", "plan=true")
    assert done.returncode == 2
    assert done.stdout.startswith(f"runs: {user}/runs\nstages:\n  prepare_data  to run: ")
    assert "-> model.attn_implementation=sdpa\n" in done.stdout
    assert done.stderr == "the preflight found 1 problem; nothing was started\n"
    assert list(user.iterdir()) == []
