"""Set the environment of a run, before Prefect, MLflow, torch or Hugging Face are imported.

These libraries read their environment when they are imported. Their files go under the project or
the folder of runs, and their telemetry is off. A variable that the user has set is left alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from tasks.core.errors import PlumblineError
from tasks.core.files import is_full
from tasks.core.terminal import clean_logging
from tasks.process.child import PROJECT

QUIET = {
    "DO_NOT_TRACK": "true",  # Prefect accepts several spellings, MLflow only this one
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # of libraries, in every child process
    "TQDM_DISABLE": "1",  # no bars of child processes; the parent draws its own
    "TOKENIZERS_PARALLELISM": "false",  # otherwise a warning at each fork
    # The shortest interval: lets an automation of a server tell a dead flow from a long one.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
}

CACHES = {
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

_FAILED = "Finished in state Failed"
_set_here: set[str] = set()


def bootstrap(runs: Path, project: Path = PROJECT) -> None:
    """Set the environment of this process and of its child processes. Writes nothing to disk.

    Caches go under `.cache` of the project, Prefect's home under the folder of runs, unless
    `PREFECT_API_URL` is set: then Prefect's settings are left alone.
    """
    offer(QUIET)
    if level := os.environ.get("PLUMBLINE_LOG_LEVEL"):
        offer({"PREFECT_LOGGING_LEVEL": level})
    offer({"HF_HOME": str(_hugging_face_home(project))})
    offer({name: str(project / ".cache" / folder) for name, folder in CACHES.items()})
    stay_off_proxies()
    if "PREFECT_API_URL" not in os.environ:
        offer(prefect_settings(runs))
    quiet_logging()


def _hugging_face_home(project: Path) -> Path:
    """Return the user's own Hugging Face cache if there is one, else a folder of the project."""
    users = "" if "XDG_CACHE_HOME" in _set_here else os.environ.get("XDG_CACHE_HOME")
    own = Path(users or Path.home() / ".cache") / "huggingface"
    return own if own.is_dir() else project / ".cache" / "huggingface"


def prefect_settings(runs: Path) -> dict[str, str]:
    """Return variables that put all files of an embedded Prefect under `<runs>/prefect`.

    `PREFECT_HOME` alone moves the database and the profiles, but not results and the memo store.
    Paths are absolute, because Prefect resolves relative ones against the current directory.
    """
    home = runs.absolute() / "prefect"
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "storage"),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),
    }


def offer(settings: Mapping[str, str]) -> None:
    """Set variables that the user has not set; a value set here earlier is replaced."""
    for name, value in settings.items():
        if name not in os.environ or name in _set_here:
            os.environ[name] = value
            _set_here.add(name)


def stay_off_proxies() -> None:
    """Exclude loopback from the user's proxies; the embedded server listens there."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        missing = [host for host in ("127.0.0.1", "localhost") if host not in hosts]
        if missing and hosts != ["*"]:
            os.environ[name] = ",".join(hosts + missing)


def quiet_logging() -> None:
    """Clean messages, and leave out reports of errors and requests to the server."""
    clean_logging()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # MLflow logs tracebacks of its database. Its outbox reports the error, in one line.
    logging.getLogger("mlflow.store.db.utils").addFilter(lambda record: False)
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_without_reports)


def _without_reports(record: logging.LogRecord) -> bool:
    """Leave out the traceback of an error whose report is printed once, at the end."""
    if str(record.msg).startswith(_FAILED):
        record.msg = _FAILED
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, PlumblineError) and not is_full(error)
