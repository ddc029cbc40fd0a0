"""Shared by all tests: nothing a test does may touch the user's own folders or the network."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
CACHE = PROJECT / ".cache"

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
)
for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
    os.environ.pop(name, None)

TOGETHER = ("flows", "training", "serving", "weights")
"""Folders whose tests share what is expensive to make: one worker runs all of a folder."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Say which tests stay in one worker (pytest-xdist), and start with the longest group."""
    for item in items:
        path = item.path.relative_to(PROJECT / "tests")
        folder = path.parts[0] if path.parts[0] in TOGETHER else path.as_posix()
        item.add_marker(pytest.mark.xdist_group(folder))
        if folder == "flows":
            item.add_marker(pytest.mark.timeout(600))
    yield  # pytest-xdist reads the marks, pytest-randomly shuffles
    items.sort(key=lambda item: item.path.parent.name != "flows")
