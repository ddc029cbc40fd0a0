"""A base with trained adapters, a real vLLM server on the CPU, and the command as users type it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import environment
from tests.conftest import PROJECT
from tests.verify import faults
from tests.verify.serving import Running, serve

ADAPTERS = 3
SPOILT = f"lora-{ADAPTERS - 1}"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that a user's training has written: `base`, `lora-<n>`, `qlora`."""
    folder = tmp_path_factory.mktemp("verify") / "models"
    paths = f"{PROJECT}:{PROJECT / 'tasks' / 'witness'}"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("train_adapters.py")), folder, str(ADAPTERS)],
        env=environment(PYTHONPATH=paths, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="session")
def modules(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return all adapters of the main server by name.

    They are those that were trained, but not the last one, which is there in faulty versions only.
    """
    folder = tmp_path_factory.mktemp("faulty")
    trained = {f"lora-{number}": models / f"lora-{number}" for number in range(ADAPTERS - 1)}
    return {
        **trained,
        "qlora": models / "qlora",
        **faults.adapters(models / SPOILT, models / "lora-0", folder),
    }


@pytest.fixture(scope="session")
def server(
    models: Path, modules: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """Start the main server: the base in bf16, and all adapters beside it."""
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with serve(models / "base", modules, log=log) as running:
        yield running


class Answer:
    """Exit status, report and output of one command."""

    def __init__(self, done: subprocess.CompletedProcess[str], report: Path) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.report: dict[str, Any] = json.loads(report.read_text()) if report.is_file() else {}

    @property
    def causes(self) -> list[str]:
        """Codes of the likely causes, in the order of the checks."""
        return list(self.report["causes"])

    @property
    def verdicts(self) -> dict[str, str]:
        """Verdicts by check."""
        return {check["name"]: check["verdict"] for check in self.report["checks"]}


@pytest.fixture
def verify(tmp_path: Path) -> Callable[..., Answer]:
    """Run `python flows/verify.py` as a user does; the report is read from `out=`."""

    def run(*words: str, **env: str) -> Answer:
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        own = any(word.startswith("out=") for word in words)
        done = subprocess.run(
            [sys.executable, str(PROJECT / "flows" / "verify.py"), *words]
            + ([] if own else [f"out={report}"]),
            cwd=tmp_path, env=environment(**env), timeout=280,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return Answer(done, report)

    return run
