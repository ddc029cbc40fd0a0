"""Shared by all tests: nothing a test does may touch the user's own folders or the network."""

from __future__ import annotations

import os
from pathlib import Path

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
