"""The servers of `make up` as a web page, another user, and a user of the deployments meet them."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from flows.servers.services import client_settings
from tests.infra.servers.conftest import Site

pytestmark = pytest.mark.slow
EVIL = "http://evil.example"


def test_other_users_can_read_nothing(site: Site) -> None:
    runs, settings = site.services.runs, client_settings(site.services.home)
    assert stat.S_IMODE((site.services.home / "prefect.env").stat().st_mode) == 0o600
    assert stat.S_IMODE(site.services.home.stat().st_mode) == 0o700
    assert settings["PREFECT_API_URL"] == site.services.prefect_url
    assert len(settings["PREFECT_API_AUTH_STRING"]) > 40
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            assert settings["PREFECT_API_AUTH_STRING"].encode() not in path.read_bytes()
    folders = [runs / name for name in ("prefect", "mlflow", "logs", "reports", "services")]
    paths = [p for folder in folders for p in folder.rglob("*") if not p.is_symlink()]
    assert {"mlflow.db", "worker.log"} <= {path.name for path in paths}
    assert [path for path in paths if path.stat().st_mode & 0o077] == []


def test_prefect_wants_the_login_and_a_token(site: Site) -> None:
    """A page of another site has neither, and its browser shows it no answer."""
    path = f"/deployments/{site.deployment('rlhf-qlora')['id']}"
    login = tuple(site.services.auth.split(":"))
    for method, place, headers, auth, statuses in (
        ("POST", f"{path}/create_flow_run", {}, None, (401, 403)),
        ("GET", "/csrf-token?client=x", {}, None, (401,)),
        ("GET", "/admin/version", {}, ("a", "b"), (401,)),
        ("GET", "/admin/version", {}, login, (200,)),
        ("GET", "/admin/version", {"Origin": EVIL}, None, (401,)),
        ("POST", f"{path}/create_flow_run", {"Origin": EVIL}, login, (403,)),
        ("OPTIONS", f"{path}/create_flow_run",
         {"Origin": EVIL, "Access-Control-Request-Method": "POST"}, None, (400,)),
    ):  # fmt: skip
        body = {} if method == "POST" else None
        answer = httpx.request(
            method, site.services.prefect_url + place, json=body, headers=headers, auth=auth
        )
        assert answer.status_code in statuses, (method, place, headers)


def test_the_printed_command_starts_a_run(site: Site) -> None:
    """Typed on any terminal: in another folder, with nothing of `make` in the environment."""
    printed = site.require("deploy").splitlines()[-1].removeprefix("start").strip()
    assert '["+exp=qlora"]' in printed
    typed = printed.replace('["+exp=qlora"]', json.dumps(site.overrides()))
    started = subprocess.run(
        ["bash", "-c", typed],
        cwd="/", env={"HOME": str(site.services.runs), "PATH": os.environ["PATH"]},
        capture_output=True, text=True,
    )  # fmt: skip
    assert started.returncode == 0, started.stdout + started.stderr
    (run_id,) = re.findall(r"UUID: (\S+)", started.stdout)
    run = site.finished_run(run_id)
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["parameters"] == {"overrides": site.overrides(), "tag": "manual"}
