"""Configuration files compose; wrong overrides are answered with right ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from flows.cli.config import CONF, compose_config
from flows.cli.vocabulary import experiments, short_names
from tasks.core.errors import ConfigError

FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
OPTIONS = [file for file in FILES if len(file.parts) == 2 and file.parts[0] not in ("exp", "hydra")]


def _holds(section: Any, written: Any, path: str = "") -> list[str]:
    """Return the keys of an option's file whose values differ from the settings."""
    wrong = []
    for key, value in written.items():
        if isinstance(value, dict):
            wrong += _holds(section[key], value, f"{path}{key}.")
        elif not (isinstance(value, str) and "${" in value) and section[key] != value:
            wrong.append(f"{path}{key}: {section[key]} is not {value}")
    return wrong


def test_every_option_composes_and_reaches_the_settings() -> None:
    """An option of each group at a time: groups do not set each other's keys."""
    groups: dict[str, list[Path]] = {}
    for file in OPTIONS:
        groups.setdefault(file.parts[0], []).append(file)
    wrong = {}
    for number in range(max(map(len, groups.values()))):
        files = [files[min(number, len(files) - 1)] for files in groups.values()]
        settings = compose_config([f"{file.parts[0]}={file.stem}" for file in files]).settings
        for file in files:
            written = OmegaConf.to_container(OmegaConf.load(CONF / file), resolve=False)
            assert written, file
            if differs := _holds(settings[file.parts[0]], written):
                wrong[str(file)] = differs
    assert wrong == {}


def test_a_short_name_is_an_experiment() -> None:
    short = short_names(CONF)
    assert set(short.values()) <= set(experiments(CONF))
    assert compose_config(["+exp=qlora"]).text == compose_config([f"+exp={short['qlora']}"]).text


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


def refused(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose_config(list(overrides))
    return caught.value


def test_all_wrong_overrides_are_reported_at_once() -> None:
    error = refused("learning_rate=1", "train.epochs=two", "peft=adalora", "seed=3")
    assert [line.rpartition(" -> ")[2] for line in error.details] == [
        "train.lr=1", "train.epochs=1.0", "peft=lora or peft=qlora",
    ]  # fmt: skip
    assert refused("train.loss.beta=much", "+exp=dpo").hint == "train.loss.beta=0.1"


@pytest.mark.parametrize(
    ("body", "key", "line"),
    [
        ("train:\n  lrr: 3\n", "train.lrr", 3),
        ("zero:\n  stage: two\n", "zero.stage", 3),
        ("trian:\n  lr: 3\n", "trian", 2),
    ],
)
def test_faults_of_an_experiment_file_name_it(
    tmp_path: Path, body: str, key: str, line: int
) -> None:
    file = tmp_path / "exp" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\n" + body)
    error = refused(f"hydra.searchpath=[file://{tmp_path}]", "+exp=mine")
    assert error.message.startswith(key)
    assert f"({file}:{line})" in error.message
