"""Settings of online learning, its servers and its environments that cannot work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tasks.config.checks import model, online
from tasks.core.finding import Finding
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


def test_all_problems_are_reported_at_once() -> None:
    several = findings_of(
        reward={"function": "judge", "url": "htp://host"},
        rl={"num_generations": 1, "rollout_batch_size": 30, "overlong_buffer": 100,
            "overlong_penalty": 1.0},
        rollout={"max_prompt_len": 600, "tensor_parallel": 3, "top_p": 0.9, "temperature": 0.7},
    )  # fmt: skip
    assert [finding.what for finding in several] == [
        "reward.function", "reward.url", "rl.num_generations",
        "rl.rollout_batch_size and rl.num_generations", "rollout.max_prompt_len",
        "rl.overlong_buffer", "rollout.temperature", "rollout.tensor_parallel",
    ]  # fmt: skip
    assert all(finding.override and finding.severity == "error" for finding in several)


def test_a_reward_source_is_required() -> None:
    (finding,) = findings_of(reward={"function": None})
    assert finding.what == "reward"
    assert findings_of(reward={"function": None}, rewarded=True) == []
    mute = {"function": None, "model_weight": 0.0}
    (finding,) = findings_of(reward=mute, rewarded=True)
    assert finding.override == "reward.model_weight=1"
    assert findings_of(reward={"function_weight": 0.0}, rewarded=True) == [], "one is only recorded"
    (finding,) = findings_of(reward={"function_weight": math.nan})
    assert finding.found == "nan"


def test_addresses_of_rewards() -> None:
    for url in ("http://localhost:5000/get_reward", "https://[::1]/rewards?model=a",
                "http://name:word@host/?token=x"):  # fmt: skip
        assert findings_of(reward={"url": url}) == []
    for url in ("localhost:5000", "ftp://host/rewards", "http:///rewards", "http://host:port/",
                "http://[::1/", "http://name:word@[host/"):  # fmt: skip
        (finding,) = findings_of(reward={"url": url})
        assert finding.what == "reward.url"
        assert "word" not in str(finding)


@given(SIZES, SIZES, SIZES)
def test_responses_fill_whole_steps_or_the_offered_sizes_do(p: int, s: int, size: int) -> None:
    several = list(online.steps(p, s, size))
    assert bool(several) == (p * s % size != 0)
    for finding in several:
        for offer in finding.override.split(" or "):
            key, number = offer.split("=")
            offered = {"rl.rollout_batch_size": p, "train.global_batch_size": size}
            offered[key] = int(number)
            sizes = offered["rl.rollout_batch_size"], s, offered["train.global_batch_size"]
            assert list(online.steps(*sizes)) == []


PPO: dict[str, Any] = {"num_generations": 1, "rollout_batch_size": 64}


def test_groups_lengths_and_limits_of_vllm() -> None:
    """Each with the nearest settings that work."""
    context = model.TOY.context
    assert context is not None
    cut = {"top_k": 50, "temperature": 0.7}
    overlong = {"overlong_penalty": 1.0}
    for valid in (
        {},
        {"objective": "sft", "reward": {"function": None}, "rl": {"num_generations": 1}},
        {"objective": "ppo", "rl": PPO},
        {"rollout": {"max_prompt_len": context - 64}},
        {"rl": {"overlong_buffer": 64, **overlong}},
        {"rollout": {"offload_trainer": True}},
        {"rollout": {**cut, "engine": "transformers", "tensor_parallel": 3}},
        {"objective": "ppo", "rl": {**PPO, "critic_warmup": 3, "iterations": 4}},
    ):
        assert findings_of(**valid) == [], valid
    refused: list[tuple[dict[str, Any], str]] = [
        ({"rl": PPO}, "rl.num_generations"),
        ({"rollout": {"max_prompt_len": context - 63}}, f"rollout.max_prompt_len={context - 64}"),
        ({"rollout": {"max_new_tokens": context}}, f"rollout.max_new_tokens={context // 2}"),
        ({"rl": {"overlong_buffer": 65, **overlong}}, "rl.overlong_buffer=16"),
        ({"rollout": {"offload_trainer": True}, "zero": {"stage": 0}}, "rollout.offload_trainer"),
        (
            {"rollout": {"offload_trainer": True}, "zero": {"offload_optimizer": "cpu"}},
            "rollout.offload_trainer",
        ),
        ({"rollout": {"tensor_parallel": 3}, "nproc": 4}, "rollout.tensor_parallel=2"),
        ({"rollout": cut}, "rollout.temperature"),
        (
            {"objective": "ppo", "rl": {**PPO, "critic_warmup": 3, "iterations": 3}},
            "rl.iterations=4",
        ),
    ]
    for changes, named in refused:
        (finding,) = findings_of(**changes)
        assert named in (finding.what, *finding.override.split(" or ")), finding
    config = {**model.TOY.config, "num_attention_heads": 16}
    small = replace(model.TOY, config=config)
    (finding,) = online.online(settings(), small)
    assert finding.override == "rollout=transformers"
    assert online.online(settings(), small, on_cpu=False) == []


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
    assert str(path) in missing.found
    assert missing.override == "rl.environment=<path.py>:<name of a class in it>"
    assert unusable.what == "data.chat_template"
    assert "rl.observation_role=tool" in unusable.override
    path.write_text(f"raise SystemExit('it was run')\n{GAME}")
    assert findings_with(f"{path}:Game") == []
    template.write_text("{% for m in messages %}{{ raise_exception('no tools') }}{% endfor %}")
    (finding,) = findings_with(f"{path}:Game", chat_template=str(template))
    assert "no tools" in finding.found
    path.write_text(GAME.replace("Game", "Other"))
    (finding,) = findings_with(f"{path}:Game")
    assert finding.what == "rl.environment"
