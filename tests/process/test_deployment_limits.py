"""Folders and code that a run of a deployment may name; a run on a terminal is not limited."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flows.cli.config import compose_config
from flows.orchestration import deployment
from flows.orchestration.deployment import CODE, FOLDERS, check_overrides, check_settings
from tasks.core.errors import ConfigError


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A deployment's run with the folders `runs` and `code`; `elsewhere` is not allowed."""
    for name in ("runs", "code", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(deployment, "in_deployment", lambda: True)
    monkeypatch.setenv(FOLDERS, f"{tmp_path / 'runs'}{os.pathsep}{tmp_path / 'more'}")
    monkeypatch.setenv(CODE, str(tmp_path / "code"))
    return tmp_path


def check(*overrides: str, config: str = "rlhf") -> None:
    check_overrides(overrides)
    check_settings(compose_config(list(overrides), config_name=config).settings)


ALLOWED: list[list[str]] = [
    ["paths.runs={}/runs"],
    ["paths.runs={}/runs/deeper"],
    ["paths.runs={}/more"],
    ["paths.runs={}/runs", "reward.function={}/code/judge.py:score"],
    ["paths.runs={}/runs", "reward.function=exact_match"],
    ["paths.runs={}/runs", "model.path={}/code/m", "model.trust_remote_code=true"],
    ["paths.runs={}/runs", "model.path={}/elsewhere/m"],
    ["paths.runs={}/runs", "tracking.uri=http://mlflow:5000"],
    ["paths.runs={}/runs", "tracking.uri=postgresql+psycopg2://me@db/mlflow"],
    ["paths.runs={}/runs", "tracking.uri=sqlite:///{}/runs/mlflow.db"],
    ["paths.runs={}/runs", "train.resume={}/runs/checkpoint"],
    ["paths.runs={}/runs", "register.sign={}/runs/key.pem"],
    ["paths.runs={}/runs", "register.verify={}/elsewhere/key.pub"],
    ["paths.runs={}/runs", "hydra.searchpath=[{}/code]"],
]

REFUSED: list[list[str]] = [
    ["paths.runs={}/elsewhere"],
    ["paths.runs={}/runs/../elsewhere"],
    ["paths.runs={}/runs/link"],
    ["paths.runs=runs"],
    ["paths.runs={}/runs", "register.sign={}/elsewhere/key.pem"],
    ["paths.runs={}/runs", "reward.function={}/elsewhere/judge.py:score"],
    ["paths.runs={}/runs", "reward.function={}/code/../elsewhere/judge.py:score"],
    ["paths.runs={}/runs", "reward.function={}/runs/judge.py:score"],
    ["paths.runs={}/runs", "reward.function=${{oc.env:EVIL_FUNCTION}}"],
    ["paths.runs={}/runs", "model.path={}/elsewhere/m", "model.trust_remote_code=true"],
    ["paths.runs={}/runs", "tracking.uri=sqlite:///{}/elsewhere/mlflow.db"],
    ["paths.runs={}/runs", "tracking.uri=sqlite+pysqlite:///{}/elsewhere/mlflow.db"],
    ["paths.runs={}/runs", "tracking.uri=file:///etc"],
    ["paths.runs={}/runs", "tracking.uri=file:/etc"],
    ["paths.runs={}/runs", "tracking.uri={}/elsewhere"],
    ["paths.runs={}/runs", "tracking.prometheus={}/elsewhere/x.prom"],
    ["paths.runs={}/runs", "train.resume={}/elsewhere/checkpoint"],
    ["paths.runs={}/runs", "hydra.searchpath=[{}/elsewhere]"],
    ["paths.runs={}/runs", "hydra.searchpath=[{}/code,file://{}/elsewhere]"],
    ["paths.runs={}/runs", "hydra.searchpath=[pkg://somewhere.conf]"],
    ["paths.runs={}/runs", "+hydra.job.env_set.PATH=/tmp"],
    ["paths.runs={}/runs", "hydra/job_logging=disabled"],
    ["paths.runs={}/runs", "ppo:hydra.run.dir=/tmp"],
]


def filled(words: list[str], folder: Path) -> list[str]:
    return [word.format(*[folder] * 3) for word in words]


@pytest.mark.parametrize("words", ALLOWED, ids=lambda words: words[-1])
def test_allowed(folders: Path, words: list[str]) -> None:
    check(*filled(words, folders))


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: words[-1])
def test_refused(folders: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (folders / "runs/link").symlink_to(folders / "elsewhere")
    monkeypatch.setenv("EVIL_FUNCTION", f"{folders / 'elsewhere'}/judge.py:score")
    with pytest.raises(ConfigError, match="not allowed in a deployment") as refused:
        check(*filled(words, folders))
    assert CODE in refused.value.hint
    monkeypatch.setattr(deployment, "in_deployment", lambda: False)
    check_overrides(filled(words, folders))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("deliver", ["source=/c", "out={}/elsewhere/out", "paths.runs={}/runs"]),
        ("audit", ["source=/c", "out={}/elsewhere/report.json", "paths.runs={}/runs"]),
        ("audit", ["source=/c", "fix=true", "out_dir={}/elsewhere/x", "paths.runs={}/runs"]),
    ],
)
def test_outputs_of_the_other_commands(folders: Path, config: str, words: list[str]) -> None:
    with pytest.raises(ConfigError, match="elsewhere"):
        check(*filled(words, folders), config=config)
    inside = [word.replace("/elsewhere/", "/runs/") for word in filled(words, folders)]
    check(*inside, config=config)


def test_without_settings_there_is_one_folder_and_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "in_deployment", lambda: True)
    for name in (FOLDERS, CODE, "PLUMBLINE_RUNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    check()
    with pytest.raises(ConfigError, match="paths.runs"):
        check(f"paths.runs={tmp_path}")
    with pytest.raises(ConfigError, match=f"{CODE}=none"):
        check("reward.function=runs/judge.py:score")
    monkeypatch.setenv("PLUMBLINE_RUNS", str(tmp_path / "data"))
    settings: dict[str, Any] = compose_config([]).settings
    assert settings["paths"]["runs"] == str(tmp_path / "data")
    check()


def test_all_problems_are_listed(folders: Path) -> None:
    words = ["paths.runs={}/elsewhere", "reward.function={}/elsewhere/judge.py:score"]
    with pytest.raises(ConfigError) as refused:
        check(*filled(words, folders))
    assert len(refused.value.details) == 2
