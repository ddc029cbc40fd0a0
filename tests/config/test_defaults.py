"""Computed defaults, and settings that have no effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from flows.chain.plan import check
from flows.chain.steps import chain_steps, compose
from flows.cli.composed import Composed
from flows.cli.config import compose_config
from tasks.config.defaults import ONLINE, RATES, default
from tasks.evaluation.model_folder import computing_dtype_of
from tasks.rl.algorithms import ALGORITHMS
from tests.machines import with_gpus

MINE = ["model.path=owner/name", "data.path=rows.jsonl"]


def kinds(composed: Composed) -> tuple[str, str, str | None]:
    settings = composed.settings
    return settings["model"]["kind"], settings["data"]["kind"], settings["data"]["messages_key"]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["model.path=/models/x", "data.path=c.CSV"], ("hf", "csv", None)),
        (["model.path=x", "data.name=owner/rows"], ("hf", "hub", "messages")),
        (["+exp=recipes/qwen3-8b/sft_qlora", "data.path=c.jsonl"], ("hf", "jsonl", "messages")),
    ],
    ids=str,
)
def test_a_path_selects_the_kind(overrides: list[str], wanted: tuple[str, str, str | None]) -> None:
    exp = [] if "+exp" in str(overrides) else ["+exp=sft_qlora"]
    assert kinds(compose_config([*exp, *overrides])) == wanted


def test_one_of_the_users_and_one_embedded_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    texts = ({"prompt": f"a {number}", "response": "b"} for number in range(40))
    rows.write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    for override, key in ((f"data.path={rows}", "model.kind"), ("model.path=a/b", "data.kind")):
        arguments = ["+exp=sft_full", f"paths.runs={tmp_path / 'runs'}", override]
        check(chain_steps(compose(arguments), arguments))
        assert f"warning: {key}: " in capsys.readouterr().err


def test_a_step_of_a_chain_has_a_model_of_its_own() -> None:
    arguments = [
        "+exp=qlora", "steps.sft.model.path=owner/name", "steps.sft.data.path=c.csv",
        "steps.ppo.data.name=o/n",
    ]  # fmt: skip
    sft, reward, ppo = chain_steps(compose(arguments), arguments)
    assert kinds(sft.composed) == ("hf", "csv", None)
    assert kinds(reward.composed) == ("toy", "toy", "messages")
    assert kinds(ppo.composed) == ("toy", "hub", "messages")
    train = sft.composed.settings["train"]
    assert (train["max_steps"], train["lr"], train["max_len"]) == (None, 1e-4, 2048)
    ours = reward.composed.settings["train"]
    assert (ours["micro_batch_size"], ours["global_batch_size"]) == (32, 64)


@pytest.mark.parametrize(
    "experiment",
    ["qlora", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dpo", "grpo", "ppo_full"))],
)
def test_no_number_of_the_embedded_model_reaches_another(experiment: str) -> None:
    arguments = [f"+exp={experiment}", *MINE]
    for link in chain_steps(compose(arguments), arguments):
        settings = link.composed.settings
        train, objective = settings["train"], settings["train"]["objective"]
        rate = RATES[objective][settings["peft"]["kind"] == "none"]
        assert train["lr"] == (rate.large or rate.value)  # of an id nothing is known yet
        assert (train["max_len"], train["max_steps"]) == (2048, None)
        assert train["global_batch_size"] == (128 if objective in ONLINE else 64)
        assert train["micro_batch_size"] <= 4
        assert train["gradient_checkpointing"]
        assert settings["rollout"]["max_new_tokens"] == 1024
        assert settings["smoke"]["max_new_tokens"] == 512
        assert settings["rl"]["iterations"] is None


def known(**facts: Any) -> Any:
    usual = {"train.nodes": 1, "train.nproc": 8, "train.micro_batch_size": 4, "model.kind": "hf",
             "train.sequence_parallel": 1}  # fmt: skip
    return {**usual, "train.objective": "sft", "peft.kind": "qlora", **facts}.get


DEFAULTS: list[tuple[str, dict[str, Any], float]] = [
    ("train.lr", {"model.parameters": 7.6e9}, 2e-4),  # arXiv:2305.14314, table 9
    ("train.lr", {"model.parameters": 33e9}, 1e-4),
    ("train.lr", {}, 1e-4),  # a model of unknown size
    ("train.lr", {"peft.kind": "none", "model.parameters": 1e9}, 2e-5),
    ("train.lr", {"train.objective": "grpo", "peft.kind": "lora"}, 1e-5),
    ("train.lr", {"model.kind": "toy"}, 2e-3),
    ("train.max_len", {"model.context": 512}, 512),
    ("train.max_len", {"model.context": 32768}, 2048),
    ("rollout.max_new_tokens", {"model.context": 512}, 256),
    ("train.global_batch_size", {"train.nproc": 6}, 72),
    ("train.global_batch_size", {"train.nproc": 128}, 512),
    ("train.global_batch_size", {"train.nproc": 128, "train.sequence_parallel": 8}, 64),
    ("train.global_batch_size", {"model.kind": "toy"}, 32),
]


def test_defaults_follow_the_model_and_the_machine() -> None:
    computed = [(key, facts, default(key, known(**facts)).value) for key, facts, _ in DEFAULTS]
    assert computed == DEFAULTS


PAPERS: dict[str, tuple[Any, ...]] = {  # sources in docs/online-rl.md
    # clip below and above 1; KL: coefficient, place, estimator; whitened; critic warm-up; refill;
    # truncated responses masked
    "ppo": (0.2, 0.2, 0.05, "reward", "k1", True, 2, 0, False),
    "grpo": (0.2, 0.28, 0, "loss", "k3", False, 0, 0, False),
    "dapo": (0.2, 0.28, 0, "loss", "k3", False, 0, 9, True),
    "dr_grpo": (0.2, 0.2, 0, "loss", "k3", False, 0, 0, False),
    "rloo": (0.2, 0.2, 0.01, "reward", "k1", False, 0, 0, False),
    "reinforce_pp": (0.2, 0.2, 0.01, "reward", "k1", False, 0, 0, False),
    "reinforce_pp_baseline": (0.2, 0.2, 0.01, "loss", "k2", False, 0, 0, False),
    "gspo": (3e-4, 4e-4, 0, "loss", "k3", False, 0, 0, False),
}
OPTIONS = ("clip_low", "clip_high", "kl_coef", "kl_in", "kl_estimator", "whiten", "critic_warmup",
           "refill", "mask_truncated")  # fmt: skip
LOSSES = {
    # advantage, mean of the loss, ratio
    "ppo": ("gae", "tokens", "token"),
    "grpo": ("group_normalized", "sequences", "token"),
    "dapo": ("group_normalized", "tokens", "token"),
    "dr_grpo": ("group_centered", "constant", "token"),
    "rloo": ("leave_one_out", "tokens", "token"),
    "reinforce_pp": ("returns", "tokens", "token"),
    "reinforce_pp_baseline": ("centered_returns", "tokens", "token"),
    "gspo": ("group_normalized", "sequences", "sequence"),
}


@pytest.mark.parametrize("name", ONLINE)
def test_an_algorithm_has_the_values_of_its_paper(name: str) -> None:
    settings, chosen = compose_config([f"train={name}"]).settings, ALGORITHMS[name]
    assert tuple(settings["rl"][option] for option in OPTIONS) == PAPERS[name]
    assert (chosen.estimate, chosen.aggregate, chosen.ratio) == LOSSES[name]
    assert (settings["train"]["objective"], chosen.critic) == (name, name == "ppo")


OFFLOADED = {
    "peft.kind": "none", "rollout.engine": "vllm", "zero.stage": 3,
    "zero.offload_optimizer": "none", "train.device": "auto",
}  # fmt: skip
"""Full fine-tuning on GPUs, whose optimizer states leave them while vLLM samples."""
MACHINES: list[tuple[int, str, dict[str, Any], object]] = [
    (0, "train.nproc", {}, 2),
    (1, "train.nproc", {}, 1),
    (8, "train.nproc", {}, 8),
    (8, "train.nproc", {"model.kind": "toy"}, 2),
    (8, "train.nproc", {"train.device": "cpu"}, 2),
    (8, "rollout.offload_trainer", OFFLOADED, True),
    (8, "rollout.offload_trainer", {**OFFLOADED, "train.device": "cpu"}, False),
    (8, "rollout.offload_trainer", {**OFFLOADED, "peft.kind": "lora"}, False),
    (8, "rollout.offload_trainer", {**OFFLOADED, "rollout.engine": "server"}, False),
    (8, "rollout.offload_trainer", {**OFFLOADED, "zero.stage": 0}, False),
    (8, "rollout.offload_trainer", {**OFFLOADED, "zero.offload_optimizer": "cpu"}, False),
]


@pytest.mark.parametrize(("gpus", "key", "facts", "wanted"), MACHINES)
def test_defaults_follow_the_gpus(
    gpus: int, key: str, facts: dict[str, Any], wanted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, gpus)
    assert default(key, known(**facts)).value == wanted


def test_the_dtype_is_what_the_machine_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.core.machine.total_memory", lambda: 32 * 2**30)
    for isa, flag, gpus, parameters, wanted in (
        ("", "avx512_bf16", 0, 1e9, "bfloat16"),
        ("AVX2", "avx512_bf16", 0, 1e9, "float32"),
        ("", "avx2", 0, 1e9, "float32"),
        ("", "avx2", 0, None, "float32"),
        ("", "avx2", 0, 2e9, "bfloat16"),  # three copies of 8 GB in half of 32 GiB
        ("AVX2", "avx2", 1, 1e9, "bfloat16"),
    ):
        with_gpus(monkeypatch, gpus)
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
        monkeypatch.setattr("tasks.core.machine._cpu_flags", lambda flag=flag: frozenset({flag}))
        facts = {"train.device": "auto", "train.nproc": 2, "model.parameters": parameters}
        assert default("model.dtype", known(**facts)).value == wanted, (isa, flag, gpus)


def test_models_that_vllm_computes_in_bf16_alone_keep_it_on_any_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, 0)
    monkeypatch.setattr("tasks.core.machine._cpu_flags", lambda: frozenset({"avx2"}))
    for name, text, wanted in (
        ("delta", {"linear_num_value_heads": 4}, "bfloat16"),
        ("plain", {}, "float32"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        config = {"model_type": "qwen3_5", "text_config": text}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text("{}")
        save_file({"a.weight": np.zeros((2, 3))}, folder / "model.safetensors")
        composed = compose_config(["+exp=sft_qlora", f"model.path={folder}"])
        assert composed.settings["model"]["dtype"] == wanted
        assert computing_dtype_of(folder) == wanted
