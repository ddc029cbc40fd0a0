"""Settings of online learning, its servers and its environments that cannot work."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.config.checks import model, online, servers
from tasks.core.finding import Finding
from tasks.rl.settings import Reward
from tests.machines import with_gpus
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
    assert finding.what == "reward"
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
    assert str(path) in finding.found
    path.write_text("raise SystemExit('it was run')\ndef scores(): ...")
    (finding,) = findings_of(reward={"function": f"{path}:score"})
    assert "scores" in finding.found
    assert findings_of(reward={"function": f"{path}:scores"}) == []


def test_addresses_of_rewards() -> None:
    for url in ("http://localhost:5000/get_reward", "https://[::1]/rewards?model=a",
                "http://name:word@host/?token=x"):  # fmt: skip
        assert findings_of(reward={"url": url}) == []
    for url in ("localhost:5000", "ftp://host/rewards", "http:///rewards", "http://host:port/",
                "http://[::1/", "http://name:word@[host/"):  # fmt: skip
        (finding,) = findings_of(reward={"url": url})
        assert finding.what == "reward.url"
        assert "word" not in str(finding)


def test_a_reward_model_is_a_folder_with_a_context_for_prompt_and_response(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"},
        "max_position_embeddings": 320, "mean": 0.5, "std": 2.0,
    }  # fmt: skip
    (finding,) = findings_of(reward={"model": str(tmp_path)})
    assert str(tmp_path) in finding.found
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert findings_of(reward={"model": str(tmp_path)}) == []
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 319}))
    (finding,) = findings_of(reward={"model": str(tmp_path)})
    assert "320" in finding.found


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


PPO: dict[str, Any] = {"num_generations": 1, "rollout_batch_size": 64}


def test_groups_lengths_and_limits_of_vllm() -> None:
    """Each with the nearest settings that work."""
    context = model.TOY.context
    assert context is not None
    cut = {"top_k": 50, "temperature": 0.7}
    overlong = {"overlong_penalty": 1.0}
    for valid in (
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
    path.write_text("class Game:\n    def reset(self): ...")
    (finding,) = findings_with(f"{path}:Game")
    assert finding.override == "def step(self, ...)"


URL = "http://10.0.0.7:8000"


def of(rl: Any = None, **rollout: Any) -> dict[str, Any]:
    whole = settings(rollout={"engine": "server", **rollout}, rl=rl)
    usual = {"save_steps": 0, "eval_steps": 0, "keep": "last"}
    return {**whole, "train": {**usual, **whole["train"]}}


def checked(*, on_cpu: bool = True, rl: Any = None, **rollout: Any) -> list[Finding]:
    return servers.servers(of(rl, **rollout), model.TOY, on_cpu=on_cpu)


def test_servers_are_started_or_named(tmp_path: Path) -> None:
    assert checked(servers=2) == []
    assert checked(urls=["http://127.0.0.1:8000", "http://localhost:8001/"]) == []
    assert checked(urls=[URL], sync_dir=str(tmp_path / "made" / "later")) == []
    for wrong in ({"servers": 0}, {"servers": 2, "urls": [URL]}):
        (finding,) = checked(**wrong)
        assert finding.what == "rollout.servers"
    (remote,) = checked(urls=[URL, "http://127.0.0.1:8000"])
    (relative,) = checked(urls=[URL], sync_dir="policies")
    (file,) = checked(urls=[URL], sync_dir="/proc/version/policies")
    assert {remote.what, relative.what, file.what} == {"rollout.sync_dir"}
    assert "/proc/version" in file.allowed
    (parallel,) = checked(servers=1, tensor_parallel=2)  # on a CPU
    assert parallel.override == "rollout.tensor_parallel=1"


def test_addresses_of_servers() -> None:
    for url in ("10.0.0.7:8000", "http://[::1:8000", "http://127.0.0.1:8000/v1",
                "http://me:secret@127.0.0.1:8000"):  # fmt: skip
        (finding,) = servers.addresses([url])
        assert "secret" not in str(finding)
    (twice,) = servers.addresses([URL, URL])
    assert URL in twice.found


def test_started_servers_get_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 4)
    assert checked(servers=2, on_cpu=False) == []
    (finding,) = checked(servers=2, tensor_parallel=2, on_cpu=False)
    assert finding.what == "rollout.servers"
    assert "4" in finding.allowed


def test_staleness_needs_servers_and_importance_weights() -> None:
    assert checked(servers=2, rl={"staleness": 1}) == []
    (finding,) = servers.staleness({**of({"staleness": 1}), "rollout": {"engine": "vllm"}})
    assert "rollout.engine=vllm" in finding.found
    (finding,) = checked(servers=2, rl={"staleness": 1, "correction": "none"})
    assert "rl.correction=none" in finding.found


def test_staleness_needs_room_between_checkpoints() -> None:
    whole = of({"staleness": 1}, servers=2)
    whole["train"] |= {"save_steps": 1, "eval_steps": 1}
    values = [finding.found for finding in servers.staleness(whole)]
    assert values == ["1 with train.save_steps=1", "1 with train.eval_steps=1"]
    whole["train"] |= {"save_steps": 0}
    assert list(servers.staleness(whole)) == [], "nothing is saved"


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, Any]]]:
    """Address of a server, and its answers by path; a path without one is not found."""
    answers: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status = 200 if self.path in answers else 404
            content = json.dumps(answers.get(self.path, {"detail": "Not Found"})).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}", answers
        running.shutdown()


def answers_of(url: str) -> list[Finding]:
    whole = of(urls=[url])
    whole["model"] = {**whole["model"], "path": "/models/base"}
    return list(servers.able(whole))


def test_a_server_that_does_not_run_is_answered_with_the_command_to_type() -> None:
    (finding,) = answers_of("http://127.0.0.1:9")
    assert "http://127.0.0.1:9" in finding.found
    command = finding.override
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve /models/base" in command
    assert "--enable-lora --max-lora-rank 64" in command
    assert "--logprobs-mode processed_logprobs" in command


def test_everything_that_a_server_lacks_is_named(server: Any) -> None:
    url, answers = server
    (other,) = answers_of(url)
    assert "vLLM" in other.found
    card = {"id": "base", "parent": None, "max_model_len": 64}
    choice = {"token_ids": None, "text": "a", "logprobs": None}
    answers |= {
        "/version": {"version": "0.9.1"},
        "/v1/models": {"data": [card]},
        "/v1/completions": {"model": "base", "choices": [choice]},
    }
    length, adapters, tokens = [finding.found for finding in answers_of(url)]
    rollout = of()["rollout"]
    needed = rollout["max_prompt_len"] + rollout["max_new_tokens"]
    assert f"{needed}" in length
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in adapters
    assert "vLLM 0.9.1" in tokens
    card["max_model_len"] = needed
    choice |= {"token_ids": [5], "logprobs": {"token_logprobs": [-1.5]}, "finish_reason": "length"}
    answers["/v1/load_lora_adapter"] = {}
    assert answers_of(url) == []
