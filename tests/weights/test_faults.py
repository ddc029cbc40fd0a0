"""A full disk, a failed write or an interruption leaves nothing visible behind."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.convert import convert
from tasks.core.errors import ArtifactError
from tasks.drift.fingerprint import PROFILES
from tasks.gather import gather
from tasks.pipeline.artifact import Origin, publish, staging
from tasks.pipeline.report import StageReport
from tasks.weights.execute import writer
from tests.weights.making import Copies, copy_reference, merged

Run = Callable[[Path], StageReport]
JUDGED = {"profile": PROFILES["standard"], "log": logging.getLogger("tests.weights")}
OTHERS = [pytest.param(stage, marks=pytest.mark.slow) for stage in ("gather", "convert")]


@pytest.fixture(params=["merge", *OTHERS])
def run(request, lora_run, llama, lora_adapter, full_weights, full_run, qwen) -> Run:
    """Each stage, ready to run into a directory; convert is set up so that it has to write."""

    def run_gather(out: Path) -> StageReport:
        return gather(out, trained=lora_run, base=llama.path, scorer=Copies(), **JUDGED)

    def run_merge(out: Path) -> StageReport:
        return merged(out, lora_adapter, llama.path, lora_run)

    def run_convert(out: Path) -> StageReport:
        settings: dict[str, Any] = {"dtype": "float32", "max_shard_size": "60KB"}
        settings |= {"reference": full_weights, "score": copy_reference}
        return convert(out, weights=full_weights, trained=full_run, **settings, **JUDGED)

    return {"gather": run_gather, "merge": run_merge, "convert": run_convert}[request.param]


def _publish(store: Path, run: Run) -> Path:
    final = store / "artifact"
    with staging(final) as work:
        report = run(work)
        publish(work, final, Origin(report.kind, "test", "artifact"))
    return final


@pytest.mark.parametrize(("call", "number"), [(1, errno.EIO), (9, errno.ENOSPC)])
def test_a_refused_write_shows_nothing_and_the_next_run_succeeds(
    run: Run, call: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.pwrite, []

    def failing(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == call:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        with pytest.raises(ArtifactError, match=os.strerror(number)) as caught:
            _publish(tmp_path, run)
    assert "paths.runs=" in caught.value.hint
    # Hidden folders are continued by the next run.
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    assert (_publish(tmp_path, run) / "manifest.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


def test_too_little_space_and_an_interruption_leave_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer.shutil, "disk_usage", lambda _: Usage)
        with pytest.raises(ArtifactError, match="free"):
            _publish(tmp_path, run)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "pwrite", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _publish(tmp_path, run)
    assert list(tmp_path.iterdir()) == []
