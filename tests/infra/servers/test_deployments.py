"""The deployments, on a real Prefect server with a real worker: by hand, and by a schedule."""

from __future__ import annotations

import json
import os
import re
import subprocess
from datetime import UTC, datetime

import pytest

from tests.infra.servers.site import Site

pytestmark = pytest.mark.slow


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
    (found,) = re.findall(r"UUID: (\S+)", started.stdout)
    run = site.finished_run(found)
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["parameters"] == {"overrides": site.overrides(), "tag": "manual"}


def test_a_schedule_fires(site: Site) -> None:
    """With SQLAlchemy 2.1 this Prefect never creates a scheduled run; runs by hand go on."""
    deployment = site.deployment("rlhf-nightly")
    schedule = {
        "schedule": {"interval": 15, "anchor_date": datetime.now(UTC).isoformat()},
        "active": True,
        "slug": "soon",
        "parameters": {"overrides": site.overrides(), "tag": "soon"},
    }
    path = f"/deployments/{deployment['id']}/schedules"
    (made,) = site.services.prefect.post(path, [schedule])
    query = {"deployment_id": {"any_": [deployment["id"]]}, "tags": {"all_": ["auto-scheduled"]}}
    try:
        run = site.finished(query)
    finally:  # it would take the only slot from other tests
        site.services.prefect.call("DELETE", f"{path}/{made['id']}")
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["parameters"] == {"overrides": site.overrides(), "tag": "soon"}
