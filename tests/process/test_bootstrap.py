"""The environment of a run, read in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from flows.cli.bootstrap import CACHES
from tests.conftest import PROJECT

LOOK = """
import json, os, sys
from pathlib import Path
from typing import Any
from flows.cli.bootstrap import bootstrap
bootstrap(Path(sys.argv[1]), Path("/somewhere"))
heavy = {"prefect", "mlflow", "torch", "transformers"} & set(sys.modules)
print(json.dumps({**os.environ, "heavy": sorted(heavy)}))
"""


def environment(runs: Path, **extra: str) -> dict[str, Any]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PROJECT), **extra}
    argv = [sys.executable, "-c", LOOK, str(runs)]
    out = subprocess.run(argv, env=env, check=True, capture_output=True, cwd=runs.parent)
    variables: dict[str, Any] = json.loads(out.stdout)
    return variables


def test_files_are_inside_and_the_users_own_settings_caches_and_server_win(tmp_path: Path) -> None:
    """A Hugging Face cache that the user has is used: nothing is downloaded twice."""
    home, runs = {"HOME": str(tmp_path)}, tmp_path / "runs"
    env = environment(runs, **home)
    assert env["heavy"] == []
    assert all(env[name].startswith("/somewhere/.cache/") for name in CACHES)
    assert (env["DO_NOT_TRACK"], env["MLFLOW_DISABLE_TELEMETRY"]) == ("true", "true")
    assert env["PREFECT_HOME"] == str(runs / "prefect")
    assert env["HF_HOME"] == "/somewhere/.cache/huggingface"
    assert not runs.exists()  # nothing on disk is touched
    (tmp_path / ".cache/huggingface/hub").mkdir(parents=True)
    env = environment(runs, **home, PREFECT_HOME="/p", NO_PROXY="intranet")
    assert env["HF_HOME"] == str(tmp_path / ".cache/huggingface")
    assert (env["PREFECT_HOME"], env["NO_PROXY"]) == ("/p", "intranet,127.0.0.1,localhost")
    env = environment(runs, **home, HF_HOME="/mine", PREFECT_API_URL="http://prefect:4200/api")
    assert env["HF_HOME"] == "/mine"
    assert "PREFECT_HOME" not in env
