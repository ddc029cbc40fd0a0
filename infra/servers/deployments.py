"""The work pool, and the deployments of infra/prefect.yaml, on the Prefect server of `make up`."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flows.servers.api import Api
from flows.servers.services import CLIENT_SETTINGS
from infra.servers.daemon import TAIL_LINES
from tasks.core.errors import PlumblineError

PROJECT = Path(__file__).resolve().parents[2]
POOL = "plumbline"


def make_pool(prefect: Api) -> None:
    """Create or update the work pool: one run at a time on this machine.

    Its template has no job variables. Prefect's own one has `command`, `env` and `working_dir`,
    with which a flow run of any deployment could run any command.
    """
    template = json.loads((PROJECT / "infra" / "servers" / "work_pool.json").read_text())
    settings = {"base_job_template": template, "concurrency_limit": 1}
    if prefect.get(f"/work_pools/{POOL}") is None:
        prefect.post("/work_pools/", {"name": POOL, "type": "process", **settings})
    else:
        prefect.call("PATCH", f"/work_pools/{POOL}", settings)


def register(prefect: Api, home: Path, env: Mapping[str, str]) -> list[str]:
    """Register all deployments; what was paused on the server stays paused.

    Returns:
        One line for each deployment, and the command that starts a run of the first one.

    Raises:
        PlumblineError: Prefect refused a deployment.
    """
    document = _document(prefect)
    path = home / "prefect.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    done = subprocess.run(
        [tool("prefect"), "--no-prompt", "deploy", "--all", "--prefect-file", str(path)],
        cwd=PROJECT,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise PlumblineError(
            f"prefect deploy ended with code {done.returncode}",
            details=(done.stdout + done.stderr).splitlines()[-TAIL_LINES:],
        )
    lines = [f"deployed {_name(entry)}{_schedules(entry)}" for entry in document["deployments"]]
    # Prefect's own output names commands that find no server, and no login.
    login = shlex.quote(str(home / CLIENT_SETTINGS))
    start = f"{shlex.quote(tool('prefect'))} deployment run {_name(document['deployments'][0])}"
    return [*lines, f"start    . {login} && {start} -p 'overrides=[\"+exp=qlora\"]'"]


def tool(name: str) -> str:
    """Return the path of a command in this Python's environment; PATH may have another one."""
    return str(Path(sys.executable).with_name(name))


def _document(prefect: Api) -> dict[str, Any]:
    """Return infra/prefect.yaml with the pauses that the server knows."""
    document: dict[str, Any] = yaml.safe_load((PROJECT / "infra/prefect.yaml").read_text())
    registered = {entry["name"]: entry for entry in prefect.post("/deployments/filter", {})}
    for entry in document["deployments"]:
        before = registered.get(entry["name"], {})
        if before.get("paused"):
            entry["paused"] = True
        active = {each["slug"]: each["active"] for each in before.get("schedules", ())}
        for schedule in entry.get("schedules", ()):
            schedule["active"] = active.get(schedule["slug"], True)
    return document


def _name(entry: Mapping[str, Any]) -> str:
    """Return the name of a deployment as Prefect's commands take it: flow/deployment."""
    flow = entry["entrypoint"].rpartition(":")[2].replace("_", "-")
    return f"{flow}/{entry['name']}"


def _schedules(entry: Mapping[str, Any]) -> str:
    """Return the schedules of a deployment as text; empty if it is started by hand."""
    return "".join(
        f"  {each['cron']} {each['timezone']}{'' if each['active'] else ', paused'}"
        for each in entry.get("schedules", ())
    )
