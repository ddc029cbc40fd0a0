"""Every configuration file composes; short names and old names of experiments are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from flows.cli.config import CONF, Composed, compose_config
from flows.cli.vocabulary import short_names
from tasks.core.errors import ConfigError
from tests.machines import with_gpus

FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
EXPERIMENTS = [file for file in FILES if file.parts[0] == "exp"]
OPTIONS = [file for file in FILES if len(file.parts) == 2 and file.parts[0] not in ("exp", "hydra")]

SHORT = short_names(CONF)
BEFORE = {
    *("dpo", "dpo_lora_zero3", "dpo_qwen72b_lora", "grpo", "grpo_qlora", "grpo_qwen7b_qlora"),
    *("kto", "lora_zero3", "orpo", "ppo_full", "ppo_lora_zero3", "ppo_qwen7b_lora", "qlora"),
    *("qlora_qwen7b", "reinforce_pp", "reward", "reward_lora_zero3", "reward_qwen14b_lora_zero3"),
    *("rloo", "sft_full", "sft_llama8b_lora_zero3", "sft_qlora", "simpo"),
}
"""Experiments before they had folders; commands of those days work."""


def named(file: Path) -> str:
    """Return what follows `+exp=`."""
    return file.relative_to("exp").with_suffix("").as_posix()


def _holds(section: Any, written: Any, path: str = "") -> list[str]:
    """Return the keys of an option's file whose values differ from the settings."""
    wrong = []
    for key, value in written.items():
        if isinstance(value, dict):
            wrong += _holds(section[key], value, f"{path}{key}.")
        elif not (isinstance(value, str) and "${" in value) and section[key] != value:
            wrong.append(f"{path}{key}: {section[key]} is not {value}")
    return wrong


@pytest.mark.parametrize("file", OPTIONS, ids=str)
def test_option_composes_and_reaches_the_settings(file: Path) -> None:
    section = compose_config([f"{file.parts[0]}={file.stem}"]).settings[file.parts[0]]
    written = OmegaConf.to_container(OmegaConf.load(CONF / file), resolve=False)
    assert written
    assert _holds(section, written) == []


@pytest.mark.parametrize("file", EXPERIMENTS, ids=str)
def test_an_experiment_composes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    settings = compose_config([f"+exp={named(file)}"]).settings
    assert (settings["model"]["kind"] == "toy") == (file.parts[1] == "toy")


def test_every_name_of_before_is_known_and_every_toy_has_a_short_one() -> None:
    assert set(SHORT) >= BEFORE
    assert set(SHORT.values()) <= {named(file) for file in EXPERIMENTS}


@pytest.mark.parametrize("short", SHORT)
def test_a_short_name_is_the_experiment(short: str) -> None:
    assert compose_config([f"+exp={short}"]).text == compose_config([f"+exp={SHORT[short]}"]).text


def test_relative_runs_are_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert compose_config([]).runs == tmp_path / "runs"
    assert compose_config(["paths.runs=/somewhere"]).runs == Path("/somewhere")


def test_passwords_are_not_in_the_text() -> None:
    composed = compose_config(["tracking.uri='https://me:s3cret@host:5000/x'"])
    assert composed.tracking_uri == "https://me:s3cret@host:5000/x"
    assert "s3cret" not in composed.text
    assert "https://me:***@host:5000/x" in composed.text
    assert composed.tracking_root is None


@pytest.mark.parametrize("override", ["train.lrr=1", "+train.lrr=1"])
def test_misspelt_key(override: str) -> None:
    error = refused(override)
    assert error.message.startswith("train.lrr is not a setting (command line: ")
    assert error.hint == "train.lr=1"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("trian.lr=1", "train.lr=1"),
        ("trian=dpo", "train=dpo or tracking.<key>=dpo"),
        ("+lr=1", "train.lr=1"),
        ("+seeds=1", "seed=1"),
        ("+train.rank=1", "peft.rank=1"),
        ("+gamma=1", "train.loss.gamma=1 or rl.gamma=1"),
        ("ppo.rl.iterations=3", "ppo:rl.iterations=3"),
        ("+zero.q=1", "python flows/rlhf.py --help zero"),
    ],
)
def test_hints_look_beside_the_key_first(override: str, hint: str) -> None:
    assert refused(override).hint == hint


def test_all_wrong_overrides_are_reported_at_once() -> None:
    error = refused("learning_rate=1", "train.epochs=two", "peft=adalora", "seed=3")
    assert error.message == "3 settings are wrong"
    assert [line.rpartition(" -> ")[2] for line in error.details] == [
        "train.lr=1", "train.epochs=1.0", "peft=lora or peft=qlora",
    ]  # fmt: skip


def test_wrong_type_is_answered_with_the_default() -> None:
    error = refused("train.loss.beta=much", "+exp=dpo")
    assert error.message.startswith("train.loss.beta: 'much' is not allowed (command line: ")
    assert error.details == ("train.loss.beta is a number, or null; its default is 0.1",)
    assert error.hint == "train.loss.beta=0.1"


def test_wrong_word_lists_the_allowed_ones() -> None:
    error = refused("smoke.engine=transformer")
    assert error.details[0].startswith("smoke.engine is one of vllm, server, transformers;")
    assert error.hint == "smoke.engine=transformers"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("train:\n  lrr: 3\n", "train.lrr is not a setting"),
        ("zero:\n  stage: two\n", "zero.stage: 'two' is not allowed"),
        ("trian:\n  lr: 3\n", "trian is not a setting"),
    ],
)
def test_faults_of_an_experiment_file_name_it(tmp_path: Path, body: str, message: str) -> None:
    file = tmp_path / "exp" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\n" + body)
    error = refused(f"hydra.searchpath=[file://{tmp_path}]", "+exp=mine")
    assert error.message.startswith(message)
    line = 2 if "trian" in body else 3
    assert f"({file}:{line})" in error.message


def refused(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose_config(list(overrides))
    return caught.value


def test_composed_is_plain() -> None:
    composed = compose_config(["+exp=sft_qlora"])
    assert isinstance(composed, Composed)
    assert composed.settings["peft"]["kind"] == "qlora"
    assert type(composed.settings["train"]) is dict
