"""The compose file, the Dockerfile and the deployments: valid, pinned, agreeing with the locks."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.infra.requirements_files import PROJECT, lock

INFRA = PROJECT / "infra"
SECRET = re.compile(r"PASSWORD|SECRET|ACCESS_KEY|AUTH_STRING|_URI$|CONNECTION_URL")
PINNED = re.compile(r"[a-z/]+:v?\d+\.\d+(\.\d+)?(-[a-z]+)*@sha256:[0-9a-f]{64}")
FROM_ENVIRONMENT = re.compile(r"\$\{[A-Z0-9_]+:\?[^}]+\}")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((INFRA / "compose.yaml").read_text())


def check_schema(path: Path) -> subprocess.CompletedProcess[str]:
    """Runs check-jsonschema with the compose specification that it ships."""
    return subprocess.run(
        [Path(sys.executable).with_name("check-jsonschema")]
        + ["--builtin-schema", "vendor.compose-spec", path],
        check=False,
        capture_output=True,
        text=True,
    )


def test_the_compose_file_follows_its_specification(tmp_path: Path) -> None:
    done = check_schema(INFRA / "compose.yaml")
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((INFRA / "compose.yaml").read_text().replace("depends_on:", "depend_on:", 1))
    assert check_schema(wrong).returncode == 1


def test_every_image_is_pinned_by_digest(compose: dict[str, Any]) -> None:
    images = {service["image"] for service in compose["services"].values()}
    ours = {image for image in images if image.startswith("plumbline-")}
    others = images - ours
    stages = re.findall(r"^FROM (\S+)", (INFRA / "Dockerfile").read_text(), re.MULTILINE)
    others |= {stage for stage in stages if stage not in ("base",)}
    assert len(others) == 3
    assert [image for image in others if not PINNED.fullmatch(image)] == []
    release = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    assert ours == {f"plumbline-server:{release}", f"plumbline-worker:{release}"}


def test_secrets_come_from_the_environment_only(compose: dict[str, Any]) -> None:
    literal = [
        (name, key)
        for name, service in compose["services"].items()
        for key, value in service.get("environment", {}).items()
        if SECRET.search(key)
        and not FROM_ENVIRONMENT.search(value)
        and ("@" in value or not re.search(r"_UR[IL]$", key))
    ]
    assert literal == []


def test_ports_open_on_loopback_only(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert len(ports) == 2
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_prefect_has_a_login_and_its_clients_use_it(compose: dict[str, Any]) -> None:
    services = compose["services"]
    server = services["prefect"]
    assert server["command"][:3] == ["uvicorn", "--factory", "prefect_app:create_app"]
    secret = server["environment"]["PREFECT_SERVER_API_AUTH_STRING"]
    for client in ("deploy", "worker"):
        assert services[client]["environment"]["PREFECT_API_AUTH_STRING"] == secret
    assert "--base-job-template infra/servers/work_pool.json" in services["deploy"]["command"][-1]


def test_services_depend_on_services_that_exist(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services), name
        for volume in service.get("volumes", []):
            own = re.sub(r"\$\{[A-Z]+:-([a-z]+)\}", r"\1", volume)
            assert own.split(":")[0] in compose["volumes"], name


def test_the_worker_of_profile_cuda_has_the_gpus_and_that_of_cpu_needs_none(
    compose: dict[str, Any],
) -> None:
    services = compose["services"]
    workers = {name: each for name, each in services.items() if "profiles" in each}
    assert {name: each["profiles"] for name, each in workers.items()} == {
        "worker": ["cpu"],
        "worker-cuda": ["cuda"],
    }
    (devices,) = services["worker-cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert "deploy" not in services["worker"]
    for worker in workers.values():
        # One variable chooses the worker and the profile of its image; without it nothing starts.
        assert worker["build"]["args"]["PROFILE"].startswith("${COMPOSE_PROFILES:?")
        assert worker["environment"] == services["worker"]["environment"]


def test_workers_see_folders_of_the_machine(compose: dict[str, Any]) -> None:
    for name in ("worker", "worker-cuda"):
        volumes = compose["services"][name]["volumes"]
        assert volumes == ["${RUNS:-runs}:/app/runs", "${DATA:-data}:/data:ro"]


def test_the_dockerfile_installs_from_the_locks_on_the_python_they_are_for() -> None:
    text = (INFRA / "Dockerfile").read_text()
    base = re.search(r"^FROM python:(\d+\.\d+)\.\d+-slim-\w+@\S+ AS base$", text, re.MULTILINE)
    made_for = re.search(r"--python-version (\S+)", (PROJECT / "requirements/lock.sh").read_text())
    assert base
    assert made_for
    assert base[1] == made_for[1]
    installs = [line for line in text.splitlines() if "pip install" in line]
    assert installs
    assert [line for line in installs if "--require-hashes" not in line] == []
    assert "infra/setup.sh sign" in text  # a deployment can sign, too


def test_what_the_dockerfile_copies_exists() -> None:
    text = (INFRA / "Dockerfile").read_text()
    copies = [line.split() for line in text.splitlines() if line.startswith("COPY")]
    sources = {word for words in copies for word in words[1:-1] if not word.startswith("--")}
    assert "requirements/server.lock" in sources
    assert [source for source in sources if not (PROJECT / source).exists()] == []


def test_deployments_are_those_the_documentation_names() -> None:
    config = yaml.safe_load((INFRA / "prefect.yaml").read_text())
    assert config["prefect-version"] == lock("cpu")["prefect"]
    deployments = {entry["name"]: entry for entry in config["deployments"]}
    entrypoints = {
        "rlhf-qlora": "flows/rlhf.py:rlhf",
        "rlhf-nightly": "flows/rlhf.py:rlhf",
        "deliver": "flows/deliver.py:deliver",
        "audit-registry": "flows/audit.py:audit_registry",
        "verify-served": "flows/verify.py:verify",
    }
    assert {name: entry["entrypoint"] for name, entry in deployments.items()} == entrypoints
    for name, entry in deployments.items():
        chosen = ["+exp=qlora"] if name.startswith("rlhf") else []
        assert entry["parameters"]["overrides"] == chosen
        assert entry["work_pool"]["name"] == "plumbline"
        assert entry["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
    schedules = {
        name: [schedule["cron"] for schedule in entry["schedules"]]
        for name, entry in deployments.items()
        if "schedules" in entry
    }
    assert schedules == {"rlhf-nightly": ["0 2 * * *"], "audit-registry": ["0 5 * * 0"]}
