"""Shared by all tests: nothing a test does may touch the user's own folders or the network."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sqlite3
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.core.errors import PlumblineError

try:
    from hypothesis import settings
    from xdist.scheduler import LoadFileScheduling
except ModuleNotFoundError:  # `tests/gpu` runs on machines that have pytest alone
    settings, LoadFileScheduling = None, object

PROJECT = Path(__file__).resolve().parents[1]
CACHE = PROJECT / ".cache"

gc.set_threshold(50_000)  # as in flows/cli/start.py: imports create a million objects, free none

# Set before anything is imported: several of these libraries read the environment at import.
os.environ.update(
    DO_NOT_TRACK="true",
    MLFLOW_DISABLE_TELEMETRY="true",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    HF_HUB_OFFLINE="1",
    HF_HOME=str(CACHE / "huggingface"),
    TORCH_EXTENSIONS_DIR=str(CACHE / "torch_extensions"),
    XDG_CACHE_HOME=str(CACHE / "xdg"),
    VLLM_NO_USAGE_STATS="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_WAIT_POLICY="passive",  # threads that spin take the other workers' cores
)
for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
    os.environ.pop(name, None)
# As in the children of stages (`torch_process.py`): half of what peft imports is not used.
if not Path("/dev/nvidiactl").exists():
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
for name in ("sklearn", "scipy", "tensorboard", "wandb"):
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]

# Machines are busy: an example that takes long says nothing about what is tested.
if settings is not None:
    settings.register_profile("plumbline", deadline=None)
    settings.load_profile("plumbline")

TOGETHER = ("training", "serving", "witness")
"""Folders whose tests share what is expensive to make: one worker runs all of a folder.

A folder in such a folder is a group of its own.
"""
LONGEST = (
    "tests/e2e/test_chain.py", "tests/e2e/test_first_screen.py", "tests/delivery/test_sources.py",
    "tests/weights/", *(f"tests/{name}/" for name in TOGETHER),
)  # fmt: skip
"""Files and folders to start first, so that nothing waits for them at the end."""


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow database without runs, made once for all workers: its tables take seconds to make."""
    from filelock import FileLock

    from tests.commands import mlflow_client

    root = tmp_path_factory.getbasetemp()
    path = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "mlflow.db"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            made = path.with_suffix(".new")
            mlflow_client(f"sqlite:///{made}").search_experiments()
            with sqlite3.connect(made) as db:
                db.execute("vacuum into ?", (str(path),))
    return path


@pytest.fixture(scope="session")
def database(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """MLflow database of all tests of this process."""
    own = shutil.copy(empty_database, tmp_path_factory.mktemp("mlflow"))
    return f"sqlite:///{own}"


class ByFolder(LoadFileScheduling):
    """A file's tests stay in one worker, and so do those of the folders in `TOGETHER`.

    (pytest-xdist's own `loadgroup` loses its groups with pytest 9.2.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        together = tuple(f"tests/{name}/" for name in TOGETHER)
        return file.rpartition("/")[0] if file.startswith(together) else file


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Know the options of pytest-timeout in `pyproject.toml` where it is not installed."""
    if not pluginmanager.hasplugin("timeout"):
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "of pytest-timeout, which is not installed")


def pytest_configure(config: pytest.Config) -> None:
    """Know its marker, too."""
    config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFolder:
    """Used when tests run in several workers."""
    return ByFolder(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest groups; give a whole run its time."""
    items.sort(
        key=lambda item: next(
            (place for place, name in enumerate(LONGEST) if item.nodeid.startswith(name)),
            len(LONGEST),
        )
    )
    for item in items:
        if item.path.parent.name == "e2e" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1200))


def pytest_collection_finish() -> None:
    """Spare the garbage collector the millions of objects of the imported libraries."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def process_is_as_before() -> Iterator[None]:
    """Restore what a command that a test runs in this process leaves.

    These are variables for its child processes, the umask, and handlers that write to output that
    is closed by then.
    """
    root = logging.getLogger()
    handlers, variables, umask = list(root.handlers), dict(os.environ), os.umask(0o022)
    os.umask(umask)
    yield
    os.umask(umask)
    os.environ.clear()
    os.environ.update(variables)
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the details of our errors, too: pytest has one line, a child's last words are there."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, PlumblineError):
        report.sections.append(("details of the error", call.excinfo.value.report()))
    return report
