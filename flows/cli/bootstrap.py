"""The environment of a run, set before prefect, mlflow, torch or Hugging Face are imported.

They read it when they are imported. Everything they keep goes under the project or the folder of
runs, and none of them calls home. A setting that the user made is left alone.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Mapping
from pathlib import Path

from tasks.core.errors import PlumblineError

QUIET = {
    "DO_NOT_TRACK": "true",  # Prefect's SDK takes several spellings, MLflow only this one
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # libraries' notes to each other, in every child
    "TQDM_DISABLE": "1",  # the children's bars; ours is drawn by the parent
    "TOKENIZERS_PARALLELISM": "false",  # a warning at each fork otherwise
    # Prefect's least: an automation of a server can then tell a dead flow from a long one.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
}

CACHES = {
    "HF_HOME": "huggingface",
    "TORCH_HOME": "torch",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "VLLM_CONFIG_ROOT": "vllm/config",
    "MPLCONFIGDIR": "matplotlib",
    "XDG_CACHE_HOME": "xdg",
    "XDG_CONFIG_HOME": "xdg/config",
}

_ours: set[str] = set()


def bootstrap(project: Path, runs: Path) -> None:
    """Set the environment of this process and of its children. Nothing on disk is touched.

    Args:
        project: the project's root; caches go under its `.cache`.
        runs: `paths.runs`; Prefect's home goes under it, unless `PREFECT_API_URL` names a server:
            then Prefect's settings are left as they are.
    """
    offer(QUIET)
    offer({name: str(project / ".cache" / folder) for name, folder in CACHES.items()})
    stay_off_proxies()
    if "PREFECT_API_URL" not in os.environ:
        offer(prefect_settings(runs))
    quiet_logging()


def prefect_settings(runs: Path) -> dict[str, str]:
    """Settings that keep everything of an embedded Prefect under `<runs>/prefect`.

    `PREFECT_HOME` alone moves the database and the profiles, and neither results nor the memo
    store. Absolute, because Prefect would resolve them against the current directory.
    """
    home = runs.absolute() / "prefect"
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "storage"),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),
    }


def offer(settings: Mapping[str, str]) -> None:
    """Set what the user has not set. What was set here earlier may be set anew."""
    for name, value in settings.items():
        if name not in os.environ or name in _ours:
            os.environ[name] = value
            _ours.add(name)


def stay_off_proxies() -> None:
    """The embedded server is on loopback: no proxy of the user's can reach it for us."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        missing = [host for host in ("127.0.0.1", "localhost") if host not in hosts]
        if missing and hosts != ["*"]:
            os.environ[name] = ",".join(hosts + missing)


def quiet_logging() -> None:
    """Short tracebacks for failed runs, and not a line for each request to the server."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logger = logging.getLogger(name)
        if not any(isinstance(known, ShortTracebacks) for known in logger.filters):
            logger.addFilter(ShortTracebacks())


class ShortTracebacks(logging.Filter):
    """Leaves the orchestrator's own frames out of tracebacks: a screen, not five."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, PlumblineError):
            # Said on purpose: its report follows at the end, and no line of code explains more.
            record.exc_info = record.exc_text = None
        elif error is not None:
            frames = [
                frame
                for frame in traceback.extract_tb(error.__traceback__)
                if "/site-packages/prefect/" not in frame.filename
            ]
            lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
            record.exc_text = "".join(["Traceback (ours only):\n", *lines]).rstrip()
        return True
