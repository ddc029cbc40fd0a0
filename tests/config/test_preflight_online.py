"""Checks of sections `rl`, `rollout` and `reward`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.config.checks import environment, model, online
from tasks.core.finding import Finding
from tasks.rl.algorithms import algorithm_options
from tasks.rl.algorithms.registry import ALGORITHMS
from tasks.rl.settings import Reward
from tests.settings import Loop, Rollout

SIZES = st.integers(1, 40)
REWARD: dict[str, Any] = vars(Reward())
ROLLOUT: dict[str, Any] = vars(Rollout())
LOOP: dict[str, Any] = vars(Loop())


def settings(
    *,
    objective: str = "grpo",
    reward: Mapping[str, Any] | None = None,
    rollout: Mapping[str, Any] | None = None,
    rl: Mapping[str, Any] | None = None,
    zero: Mapping[str, Any] | None = None,
    **train: Any,
) -> dict[str, Any]:
    """Return a configuration without problems, with some settings changed."""
    usual = {
        "objective": objective, "global_batch_size": 64, "nproc": 2, "nodes": 1, "lr": 1e-3,
        "micro_batch_size": 4, "max_len": 256, "gradient_checkpointing": False, "device": "auto",
    }  # fmt: skip
    return {
        "train": {**usual, **train},
        "rl": {**LOOP, **(rl or {})},
        "rollout": {**ROLLOUT, **(rollout or {})},
        "reward": {**REWARD, "function": "exact_match", **(reward or {})},
        "peft": {"kind": "lora"},
        "zero": {"stage": 2, **(zero or {})},
        "model": {},
        "seed": 0,
    }


def findings_of(*, rewarded: bool = False, **changes: Any) -> list[Finding]:
    return online.online(settings(**changes), model.TOY, rewarded=rewarded)


def test_a_valid_configuration_passes() -> None:
    assert findings_of() == []
    assert findings_of(objective="sft", reward={"function": None}, rl={"num_generations": 1}) == []


def test_every_algorithm_has_its_options() -> None:
    assert set(algorithm_options.TERMS) == set(ALGORITHMS)
    assert set(algorithm_options.GROUPED) == {
        name for name, finding in ALGORITHMS.items() if finding.groups
    }


def test_all_problems_are_reported_at_once() -> None:
    several = findings_of(
        reward={"function": "judge", "url": "htp://host", "engine": "vllm"},
        rl={
            "num_generations": 1,
            "rollout_batch_size": 30,
            "overlong_buffer": 100,
            "overlong_penalty": 1.0,
        },
        rollout={"max_prompt_len": 600, "tensor_parallel": 3, "top_p": 0.9, "temperature": 0.7},
    )
    assert [finding.what for finding in several] == [
        "reward.function",
        "reward.url",
        "rl.num_generations",
        "rl.rollout_batch_size and rl.num_generations",
        "rollout.max_prompt_len",
        "rl.overlong_buffer",
        "reward.engine",
        "rollout.temperature",
        "rollout.tensor_parallel",
    ]
    assert all(finding.override and finding.severity == "error" for finding in several)


def test_a_reward_source_is_required() -> None:
    (finding,) = findings_of(reward={"function": None})
    assert (finding.what, finding.found) == ("reward", "no source")
    assert findings_of(reward={"function": None}, rewarded=True) == []
    mute = {"function": None, "model_weight": 0.0}
    (finding,) = findings_of(reward=mute, rewarded=True)
    assert finding.override == "reward.model_weight=1"
    assert findings_of(reward={"function_weight": 0.0}, rewarded=True) == [], "one is only recorded"
    (finding,) = findings_of(reward={"function_weight": math.nan})
    assert finding.found == "nan"


def test_a_function_that_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "judge.py"
    (finding,) = findings_of(reward={"function": f"{path}:score"})
    assert finding.found == f"{path}:score: No such file or directory: {path}"
    path.write_text("raise SystemExit('it was run')\ndef scores(): ...")
    (finding,) = findings_of(reward={"function": f"{path}:score"})
    assert finding.found.endswith("no 'score' in the file, which has scores")
    assert findings_of(reward={"function": f"{path}:scores"}) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://localhost:5000/get_reward", None),
        ("https://[::1]/rewards?model=a", None),
        ("localhost:5000", "http or https, and a host"),
        ("ftp://host/rewards", "http or https, and a host"),
        ("http:///rewards", "http or https, and a host"),
        ("http://host:port/", "http or https, and a host"),
        ("http://[::1/", "http or https, and a host"),
        ("http://name:word@host/?token=x", None),
        ("http://name:word@[host/", "http or https, and a host"),
    ],
)
def test_an_address(url: str, message: str | None) -> None:
    several = findings_of(reward={"url": url})
    assert len(several) == (message is not None)
    for finding in several:
        assert message is not None
        assert message in finding.allowed
        assert "word" not in str(finding)


def test_a_reward_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (finding,) = findings_of(reward={"model": str(folder)})
    assert finding.found == f"{folder} is not a model folder: no config.json"
    folder.mkdir()
    config = {
        "architectures": ["Qwen2ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "max_position_embeddings": 320,
        "mean": 0.5,
        "std": 2.0,
    }

    def looked_at(**changes: Any) -> list[Finding]:
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return findings_of(reward={"model": str(folder)})

    assert looked_at() == []
    (finding,) = looked_at(architectures=["Qwen2ForCausalLM"])
    assert "its config.json says Qwen2ForCausalLM" in finding.found
    (finding,) = looked_at(std=None)
    assert "mean is there, the other of mean and std is not" in finding.found
    (finding,) = looked_at(max_position_embeddings=319)
    assert finding.found.startswith("texts of up to 320 tokens")
    (folder / "config.json").write_text("{")
    (finding,) = findings_of(reward={"model": str(folder)})
    assert "config.json" in finding.found


@given(SIZES, SIZES, SIZES)
def test_responses_fill_whole_steps_or_the_offered_sizes_do(p: int, s: int, size: int) -> None:
    several = list(online.steps(p, s, size))
    assert bool(several) == (p * s % size != 0)
    for finding in several:
        for offer in finding.override.split(" or "):
            key, number = offer.split("=")
            offered = {
                "rl.rollout_batch_size": p,
                "train.global_batch_size": size,
                key: int(number),
            }
            sizes = offered["rl.rollout_batch_size"], s, offered["train.global_batch_size"]
            assert list(online.steps(*sizes)) == []


def test_a_group_of_one() -> None:
    (finding,) = findings_of(rl={"num_generations": 1, "rollout_batch_size": 64})
    assert "grpo compares the responses to a prompt" in finding.allowed
    assert findings_of(objective="ppo", rl={"num_generations": 1, "rollout_batch_size": 64}) == []


def test_lengths() -> None:
    context = model.TOY.context
    assert context is not None
    assert findings_of(rollout={"max_prompt_len": context - 64}) == []
    (finding,) = findings_of(rollout={"max_prompt_len": context - 63})
    assert finding.override == f"rollout.max_prompt_len={context - 64}"
    (finding,) = findings_of(rollout={"max_new_tokens": context})
    assert finding.override == f"rollout.max_new_tokens={context // 2}"
    assert findings_of(rl={"overlong_buffer": 64, "overlong_penalty": 1.0}) == []
    (finding,) = findings_of(rl={"overlong_buffer": 65, "overlong_penalty": 1.0})
    assert finding.override == "rl.overlong_buffer=16"


def test_states_that_cannot_be_offloaded() -> None:
    moved: dict[str, Any] = {"rollout": {"offload_trainer": True}}
    assert findings_of(**moved) == []
    without, twice = (
        findings_of(**moved, zero={"stage": 0}),
        findings_of(**moved, zero={"offload_optimizer": "cpu"}),
    )
    assert [finding.found for finding in without] == ["true with ZeRO-0"]
    assert [finding.found for finding in twice] == ["true with zero.offload_optimizer=cpu"]
    assert {finding.what for finding in (*without, *twice)} == {"rollout.offload_trainer"}


def test_limits_of_vllm() -> None:
    (finding,) = findings_of(rollout={"tensor_parallel": 3}, nproc=4)
    assert finding.override == "rollout.tensor_parallel=2"
    cut = {"top_k": 50, "temperature": 0.7}
    (finding,) = findings_of(rollout=cut)
    assert finding.what == "rollout.temperature"
    assert findings_of(rollout={**cut, "engine": "transformers", "tensor_parallel": 3}) == []
    config = {**model.TOY.config, "num_attention_heads": 16}
    small = replace(model.TOY, config=config)
    (finding,) = online.online(settings(), small)
    assert (finding.what, finding.override) == ("rollout.engine", "rollout=transformers")
    assert online.online(settings(), small, on_cpu=False) == []


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_critic_that_warms_up_in_all_iterations_is_refused(critic: str) -> None:
    how = {"critic": critic, "critic_warmup": 3, "num_generations": 1, "rollout_batch_size": 64}
    (finding,) = findings_of(objective="ppo", rl={**how, "iterations": 3})
    assert (finding.what, finding.found) == ("rl.critic_warmup", "3 with rl.iterations=3")
    assert finding.override == "rl.iterations=4 or more"
    assert findings_of(objective="ppo", rl={**how, "iterations": 4}) == []


GAME = "class Game:\n    def reset(self): ...\n    def step(self, text): ..."
DROPS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template that leaves out earlier reasoning."""


def findings_with(name: str, *, folder: str | None = None, **data: Any) -> list[Finding]:
    changed = settings(rl={"environment": name}, reward={"function": None})
    section = {"kind": "jsonl", "tasks": "letters", "chat_template": None, **data}
    changed |= {"data": section, "model": {"path": folder}}
    return online.online(changed, model.TOY)


def test_an_environment_and_its_chat_template(tmp_path: Path) -> None:
    """All at once, and nothing of the user's file is run. No other source of rewards is needed."""
    path, template = tmp_path / "game.py", tmp_path / "chat.jinja"
    template.write_text(DROPS)
    missing, unusable = findings_with(f"{path}:Game", chat_template=str(template))
    assert missing.what == "rl.environment"
    assert missing.found == f"{path}:Game: No such file or directory: {path}"
    assert missing.override == "rl.environment=<path.py>:<name of a class in it>"
    assert unusable.what == "data.chat_template"
    assert "it rewrites an earlier response: '<think>" in unusable.found
    assert "rl.observation_role=tool" in unusable.override
    path.write_text(f"raise SystemExit('it was run')\n{GAME}")
    assert findings_with(f"{path}:Game") == []
    template.write_text("{% for m in messages %}{{ raise_exception('no tools') }}{% endfor %}")
    (finding,) = findings_with(f"{path}:Game", chat_template=str(template))
    assert "no tools" in finding.found
    path.write_text("class Game:\n    def reset(self): ...")
    (finding,) = findings_with(f"{path}:Game")
    assert finding.found.endswith("class Game has no method step")
    assert finding.override == "def step(self, ...)"


def test_the_template_of_the_model_is_checked(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    name = f"{tmp_path / 'game.py'}:Game"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (tmp_path / "chat_template.jinja").write_text(DROPS)
    (finding,) = findings_with(name, folder=str(tmp_path))
    assert finding.what == "data.chat_template"
    keeps = DROPS.replace(".split('</think>')[-1]", "")
    (tmp_path / "chat_template.jinja").write_text(keeps)
    assert findings_with(name, folder=str(tmp_path)) == []


def test_the_calculator_needs_its_own_rows() -> None:
    assert findings_with("calculator", kind="toy", tasks="calculator") == []
    (finding,) = findings_with("calculator")
    assert finding.override == "data=toy data.tasks=calculator"
    rows = {"kind": "toy", "tasks": "calculator", "text_key": None, "sources": []}
    assert list(environment.toy_tasks(rows, "sft")) == []
    (finding,) = environment.toy_tasks(rows, "dpo")
    assert finding.found == "calculator with train.objective=dpo"
