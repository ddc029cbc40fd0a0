"""Launching on several nodes: the recipes, and ZeRO-3 over two network namespaces as two nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from tasks.core.errors import ConfigError
from tests.conftest import PROJECT

NODES = PROJECT / "infra" / "nodes"
SCHEMA = Path(__file__).with_name("kubernetes.schema.json")
SMALL = [
    "+exp=lora_zero3",
    "train.nodes=2",
    "train.nproc=1",
    "train.threads=1",
    "train.max_steps=4",
    "model.steps=20",
    "smoke.engine=transformers",
    "smoke.eval_samples=4",
    "smoke.min_stop_rate=0",
    "smoke.max_degenerate_rate=1",
]


@pytest.mark.parametrize("name", ["bare.sh", "slurm.sbatch"])
def test_scripts_parse_and_say_how_they_are_used(name: str) -> None:
    subprocess.run(["bash", "-n", NODES / name], check=True)
    assert os.access(NODES / name, os.X_OK)
    assert f"infra/nodes/{name}" in (NODES / name).read_text().split("set -euo", 1)[0]


def test_bare_without_arguments_says_how() -> None:
    ran = subprocess.run([NODES / "bare.sh"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "First argument: number of this machine" in ran.stderr


def test_slurm_asks_for_the_nodes_of_the_job(tmp_path: Path) -> None:
    """With a `srun` and a `scontrol` that only print their arguments."""
    for name, does in (
        ("srun", 'echo "$MASTER_ADDR $MASTER_PORT $*"'),
        ("scontrol", "echo n7\necho n8"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    printed = subprocess.run(
        [NODES / "slurm.sbatch", "+exp=lora_zero3"],
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "40001",
            "SLURM_JOB_NODELIST": "n[7-8]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_ON_NODE": "4",
        },
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.startswith("n7 20001 ")
    assert printed.strip().endswith("flows/rlhf.py +exp=lora_zero3 train.nodes=2 train.nproc=4")


def test_slurm_opens_its_log_in_a_folder_that_exists() -> None:
    """SLURM opens it in the folder of `sbatch` before the script runs, and makes no folder."""
    text = (NODES / "slurm.sbatch").read_text()
    (output,) = re.findall(r"^#SBATCH --output=(.+)$", text, re.MULTILINE)
    assert "/" not in output
    assert "%j" in output


def kubernetes() -> tuple[Any, Any, Any]:
    """Return the NetworkPolicy, the JobSet, and the Job that it makes."""
    documents = list(yaml.safe_load_all((NODES / "kubernetes.yaml").read_text()))
    assert [each["kind"] for each in documents] == ["NetworkPolicy", "JobSet"]
    policy, jobset = documents
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    return policy, jobset, replicated


def refused(kind: str, document: dict[str, Any]) -> list[str]:
    """Return what the schema of Kubernetes, JobSet or PyTorchJob refuses in a document."""
    schema = json.loads(SCHEMA.read_text())
    name = {"NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy"}.get(kind, kind)
    validator = Draft7Validator({**schema, "$ref": f"#/definitions/{name}"})
    return [error.message for error in validator.iter_errors(document)]


def test_kubernetes_follows_the_schemas() -> None:
    policy, jobset, replicated = kubernetes()
    assert refused("NetworkPolicy", policy) == []
    assert refused("JobSet", jobset) == []
    pod = replicated["template"]["spec"]["template"]["spec"]
    pod["securityContext"]["runAsNonroot"] = True
    assert "'runAsNonroot' was unexpected" in refused("JobSet", jobset)[0]
    del pod["securityContext"]["runAsNonroot"], pod["containers"]
    assert refused("JobSet", jobset) == ["'containers' is a required property"]
    policy["spec"]["policyTypes"] = "Ingress"
    assert len(refused("NetworkPolicy", policy)) == 1


def test_a_pytorchjob_has_the_same_pods_and_follows_its_schema() -> None:
    """The operator sets the variables that tell pods apart, and finds the container by name."""
    job = yaml.safe_load((NODES / "pytorchjob.yaml").read_text())
    assert refused("PyTorchJob", job) == []
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master", "Worker"]
    pod = kubernetes()[2]["template"]["spec"]["template"]["spec"]
    (node,) = pod["containers"]
    node["name"] = "pytorch"
    node["env"] = [each for each in node["env"] if not each["name"].startswith("MASTER_")]
    del pod["restartPolicy"]  # of the replicas here
    for replica in replicas.values():
        assert replica["template"]["spec"] == pod
        assert replica["restartPolicy"] == "Never"
    count = sum(replica["replicas"] for replica in replicas.values())
    assert f"train.nodes={count}" in node["args"]
    replicas["Worker"]["replica"] = replicas["Worker"].pop("replicas")
    assert "'replica' was unexpected" in refused("PyTorchJob", job)[0]


def test_kubernetes_tells_pods_apart_and_lets_them_meet() -> None:
    _, jobset, replicated = kubernetes()
    spec: dict[str, Any] = replicated["template"]["spec"]
    node = spec["template"]["spec"]["containers"][0]
    assert spec["completionMode"] == "Indexed"  # sets JOB_COMPLETION_INDEX
    assert f"train.nodes={spec['completions']}" in node["args"]
    assert spec["completions"] == spec["parallelism"]
    network = jobset["spec"]["network"]
    assert network["enableDNSHostnames"]
    assert network["publishNotReadyAddresses"]  # pods that wait for each other are not ready
    address = next(e["value"] for e in node["env"] if e["name"] == "MASTER_ADDR")
    first = f"{jobset['metadata']['name']}-{replicated['name']}-0-0"
    assert address == f"{first}.{network['subdomain']}"


def test_a_lost_pod_starts_all_again_and_a_refused_configuration_does_not() -> None:
    _, jobset, replicated = kubernetes()
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    job = replicated["template"]["spec"]
    assert job["backoffLimit"] == 0  # one pod alone cannot join ranks that have begun
    (exit_rule,) = job["podFailurePolicy"]["rules"]
    assert exit_rule["onExitCodes"]["values"] == [ConfigError.exit_code]
    node = job["template"]["spec"]["containers"][0]
    assert exit_rule["onExitCodes"]["containerName"] == node["name"]
    assert any(word.startswith("train.save_steps=") for word in node["args"])


def test_pods_have_no_privileges_and_write_to_their_volumes_only() -> None:
    """The fields that the `restricted` Pod Security Standard asks for, and more."""
    pod = kubernetes()[2]["template"]["spec"]["template"]["spec"]
    user = int(re.search(r"--uid (\d+)", (PROJECT / "infra" / "Dockerfile").read_text())[1])
    context = pod["securityContext"]
    assert context["runAsNonRoot"]
    assert {context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {user}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        # The caches lie in the project's folder (flows/cli/bootstrap.py), which is /app.
        assert set(mounts) == {"/runs", "/dev/shm", "/tmp", "/app/.cache"}
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
        assert "paths.runs=/runs" in container["args"]


def test_only_the_pods_of_the_job_reach_each_other() -> None:
    policy, jobset, _ = kubernetes()
    label = {"jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"]}
    ours = {"podSelector": {"matchLabels": label}}
    spec = policy["spec"]
    assert spec["podSelector"] == ours["podSelector"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    assert spec["ingress"] == [{"from": [ours]}]
    others = [rule for rule in spec["egress"] if rule != {"to": [ours]}]
    assert len(others) == len(spec["egress"]) - 1
    assert [{port["port"] for port in rule["ports"]} for rule in others] == [{53}]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces that see each other as 10.77.0.1 and 10.77.0.2, and nothing else."""
    tag = uuid.uuid4().hex[:6]
    names = [f"pl{tag}a", f"pl{tag}b"]
    try:
        for name in names:
            ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        ip("link", "add", "node0", "netns", names[0], "type", "veth",
           "peer", "name", "node1", "netns", names[1])  # fmt: skip
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"node{number}")
            for device in ("lo", f"node{number}"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_zero3_over_two_nodes(namespaces: list[str], tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    started = []
    for number, name in enumerate(namespaces):
        inside = ["ip", "netns", "exec", name, NODES / "bare.sh", str(number), "10.77.0.1"]
        started.append(
            subprocess.Popen(
                [*inside, *SMALL, f"paths.runs={runs}"],
                env={**os.environ, "INTERFACE": f"node{number}"},
                stdout=(tmp_path / f"node{number}.log").open("w"),
                stderr=subprocess.STDOUT,
            )
        )
    ended = [process.wait(timeout=500) for process in started]
    logs = [(tmp_path / f"node{number}.log").read_text() for number in range(2)]
    assert ended == [0, 0], "\n".join(logs)
    shards = sorted((runs / "artifacts" / "shards").glob("*/shards/*.safetensors"))
    assert [path.name for path in shards] == [f"rank-0000{r}-of-00002.safetensors" for r in (0, 1)]
    summary = json.loads((runs / "latest" / "summary.json").read_text())
    assert summary["status"] == "completed"
    drift = {stage["name"]: stage["drift"] for stage in summary["stages"]}
    assert drift["gather"]["mean_kl"] == 0.0
    assert "node 1 of 2 follows 10.77.0.1" in logs[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_without_leader_reports_it(tmp_path: Path) -> None:
    """The error names the folder in which the node waits."""
    ran = subprocess.run(
        [NODES / "bare.sh", "1", "127.0.0.1", *SMALL, f"paths.runs={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "node 0 has not come within 60 s" in ran.stderr
