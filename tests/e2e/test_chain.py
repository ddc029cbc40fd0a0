"""The main job, end to end: what was trained is what vLLM serves, and every record says so."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
import pytest

from tasks.config.checks.inputs import PEEK
from tasks.drift.fingerprint import PROFILES, Fingerprint
from tasks.pipeline.artifact import open_artifact, verify
from tasks.training.job import TrainJob
from tests.commands import command, environment
from tests.e2e.conftest import SHORT, Run, children, client, curve
from tests.training.places import read_json, run_train

pytestmark = pytest.mark.timeout(1200)
STAGES = ["prepare_data", "prepare_base", "train", "gather", "merge", "convert", "smoke_eval"]


def check_chain(run: Run, stages: list[str], limit: float = PROFILES["standard"].mean_kl) -> None:
    """Assert what is true of every experiment; `limit` is the largest that a hand-off may have."""
    assert run.code == 0, run.output
    assert run.summary["status"] == "completed"
    assert [s["name"] for s in run.summary["stages"]] == [*stages, "register"]
    trained = Fingerprint.load(run.artifact("train") / "fingerprint.fp")
    assert trained.engine == "deepspeed"
    assert trained.noise is not None
    assert run.stage("gather")["drift"]["mean_kl"] <= min(1e-5, 2 * trained.noise)
    for name in set(stages) & {"merge", "convert", "smoke_eval"}:
        handoff, drift = run.stage(name)["handoff"], run.stage(name)["drift"]["mean_kl"]
        assert (handoff["ok"], handoff["value"], handoff["unit"]) == (True, drift, "nats per token")
        assert drift <= handoff["limit"] <= limit
    for stage in run.summary["stages"][:-1]:
        assert verify(open_artifact(Path(stage["artifact"]))) == []
    assert run.summary["served"] == run.stage("convert")["artifact"]


def tensors_of(folder: Path) -> dict[str, Any]:
    """Return all tensors of a folder, by name."""
    from safetensors.torch import load_file

    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@pytest.fixture(scope="module")
def killed(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """Start the short chain in an empty folder, and kill the flow in mid-training; return its job.

    The checkpoint of step 4 of 8 is complete then. What the flow had started ends with it.
    """
    with subprocess.Popen(
        command("rlhf", *SHORT, f"paths.runs={runs}"), cwd=tmp_path_factory.mktemp("killed"),
        env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as child:  # fmt: skip

        def wait_for(file: str) -> Path:
            while not (there := list(runs.glob(f"checkpoints/*/{file}"))):
                assert child.poll() is None
                time.sleep(0.05)
            return there[0]

        wait_for("job.json")
        family = psutil.Process(child.pid).children(recursive=True)
        lines = [p.info["cmdline"] or () for p in psutil.process_iter(["cmdline"]) if p in family]
        server = next(line for line in lines if "uvicorn" in line)
        url = f"http://127.0.0.1:{server[server.index('--port') + 1]}/api/admin/version"
        status = httpx.get(url, trust_env=False).status_code
        assert status == 401, "other users of the machine have no login"
        wait_for("step-00000004/state.json")
        family = psutil.Process(child.pid).children(recursive=True)
        os.kill(child.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    return TrainJob.read(wait_for("job.json"))


@pytest.fixture(scope="module")
def chain(killed: TrainJob, rlhf: Callable[..., Run], runs: Path) -> Run:
    """The same command again, which goes on: Prefect, MLflow, two ranks, the scorer, vLLM."""
    return rlhf(runs, *SHORT)


def test_every_hand_off_holds(chain: Run) -> None:
    check_chain(chain, STAGES)


def test_every_adapter_tensor_was_checked(chain: Run) -> None:
    manifest = open_artifact(chain.artifact("gather")).manifest()
    tensors = manifest["tensors"]["adapter_model.safetensors"]
    assert len(tensors) == 4 * 7 * 2  # layers x linear modules x (A, B)
    checks = json.loads((chain.artifact("gather") / "contract.json").read_text())
    assert set(tensors) <= {check["name"] for check in checks}
    assert all(check["ok"] for check in checks)


def test_the_merge_went_into_the_dequantised_base(chain: Run) -> None:
    """bitsandbytes' own values, plus the adapter's product, for every linear layer."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    assert open_artifact(chain.artifact("merge")).notes["merge_base"]["base"] == "dequantized"
    base, adapter, merged = (
        tensors_of(chain.artifact(name)) for name in ("prepare_base", "gather", "merge")
    )
    config = json.loads((chain.artifact("gather") / "adapter_config.json").read_text())
    scale, prefix = config["lora_alpha"] / config["r"], "base_model.model."
    names = {key: f"{prefix}{key.removesuffix('weight')}" for key in base}
    layers = {key: name for key, name in names.items() if f"{name}lora_A.weight" in adapter}
    assert len(layers) == 4 * 7
    for key, name in layers.items():
        a, b = (adapter[f"{name}lora_{side}.weight"] for side in "AB")
        loaded = base[key].to(a.dtype)  # as training loaded it
        packed = quantize_4bit(loaded, quant_type="nf4", compress_statistics=True)
        seen = dequantize_4bit(*packed).float()
        expected = seen + scale * (b.float() @ a.float())
        torch.testing.assert_close(merged[key].float(), expected, rtol=2.0**-7, atol=1e-6)
        assert (seen - base[key].float()).abs().max() > 2.0**-6 * base[key].abs().max(), key


def test_vllm_answers_with_the_trained_models_first_tokens(chain: Run) -> None:
    report = json.loads((chain.artifact("smoke_eval") / "report.json").read_text())
    assert report["notes"]["engine"] == "vllm"
    assert all(check["ok"] for check in report["checks"])
    metrics = report["metrics"]
    assert metrics["greedy/differences"] == 0
    assert metrics["greedy/equal"] + metrics["greedy/ties"] == 32  # probes
    assert metrics["greedy/equal"] >= 28


def test_transformers_loads_what_is_served_with_no_key_left_over(chain: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    served = chain.summary["served"]
    _, info = AutoModelForCausalLM.from_pretrained(served, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(served)
    assert tokenizer.chat_template
    assert tokenizer.eos_token == "<|im_end|>"


def test_mlflow_has_a_run_of_each_stage_with_its_proofs_and_no_weights(chain: Run) -> None:
    tracker, stages = client(chain), children(chain)
    parent = tracker.get_run(chain.summary["mlflow_run_id"])
    assert parent.info.status == "FINISHED"
    assert parent.data.params["peft.kind"] == "qlora"
    assert parent.data.tags["mlflow.source.name"] == "flows/rlhf.py"
    assert parent.data.metrics["system/system_memory_usage_megabytes"] > 0
    digest = open_artifact(chain.artifact("prepare_data")).digest
    assert parent.inputs.dataset_inputs[0].dataset.digest == digest[:36]
    assert set(stages) == set(STAGES)
    for child in stages.values():
        assert child.info.status == "FINISHED"
        names = {file.path for file in tracker.list_artifacts(child.info.run_id)}
        assert {"manifest.json", "contract.json"} <= names
    for name in ("loss", "lr", "grad_norm", "tokens_per_s", "step_s"):
        assert len(curve(chain, f"train/{name}")) == 8, name
    files = [path for path in (chain.runs / "mlflow" / "artifacts").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if path.suffix in {".safetensors", ".bin", ".pt"}]


def test_the_registered_model_answers_as_the_served_one_did(chain: Run) -> None:
    """`mlflow.pyfunc.load_model`, with transformers; the smoke test asked vLLM."""
    import mlflow

    number = chain.summary["gate"]["version"].rpartition("/")[2]
    version = client(chain).get_model_version("plumbline", number)
    assert version.tags["path"] == chain.summary["served"]
    assert version.tags["digest"] == open_artifact(Path(chain.summary["served"])).digest
    mlflow.set_tracking_uri(f"sqlite:///{chain.runs}/mlflow/mlflow.db")
    model = mlflow.pyfunc.load_model(chain.summary["gate"]["version"])
    mlflow.set_tracking_uri(None)
    lines = (chain.artifact("smoke_eval") / "generations.jsonl").read_text().splitlines()[:5]
    same = 0
    for row in map(json.loads, lines):
        reply = model.predict({"messages": row["messages"], "max_tokens": 32, "temperature": 0.0})
        same += reply["choices"][0]["message"]["content"].strip() == row["after"].strip()
    assert same >= 4  # engines may differ where two tokens are nearly as likely


def test_prefect_draws_the_edges_of_the_stages(chain: Run) -> None:
    tags = client(chain).get_run(chain.summary["mlflow_run_id"]).data.tags
    with sqlite3.connect(chain.runs / "prefect" / "prefect.db") as db:
        runs = db.execute("select id, state_type from flow_run").fetchall()
        ((number, state),) = (
            run for run in runs if UUID(run[0]) == UUID(tags["prefect.flow_run_id"])
        )
        query = "select id, name, task_inputs, state_type from task_run where flow_run_id = ?"
        rows = db.execute(query, (number,)).fetchall()
    assert {state, *(row[3] for row in rows)} == {"COMPLETED"}
    names = {str(UUID(number)): name.split("-")[0] for number, name, *_ in rows}
    assert {
        names[str(UUID(number))]: {
            names[parent["id"]] for parents in json.loads(inputs).values() for parent in parents
        }
        for number, _, inputs, _ in rows
    } == {
        "prepare_data": set(),
        "prepare_base": set(),
        "train": {"prepare_base", "prepare_data"},
        "gather": {"prepare_base", "train"},
        "merge": {"prepare_base", "train", "gather"},
        "convert": {"train", "gather", "merge"},
        "smoke_eval": {"prepare_base", "prepare_data", "gather", "convert"},
        "register": {"convert", "smoke_eval"},
    }


def test_the_same_command_reuses_every_stage(chain: Run, rlhf: Callable[..., Run]) -> None:
    again = rlhf(chain.runs, *SHORT)
    assert again.code == 0, again.output
    assert all(s["reused"] for s in again.summary["stages"] if s["name"] != "register")
    assert again.summary["served"] == chain.summary["served"]


def test_after_kill_9_in_training_the_same_command_ends_in_the_same_bytes(
    killed: TrainJob, chain: Run, tmp_path: Path
) -> None:
    """Compared with the training of the same job without a kill."""
    assert chain.stage("prepare_base")["reused"]
    shards = open_artifact(chain.artifact("train"))
    assert shards.notes["resumed_after_step"] >= 4
    limit = {"max_truncated": killed.max_truncated}
    run_train(tmp_path, killed.base, killed.data, killed.settings, **limit)
    for path in (tmp_path / "out" / "shards").iterdir():
        assert (shards.path / "shards" / path.name).read_bytes() == path.read_bytes(), path
    assert curve(chain, "train/loss") == read_json(tmp_path / "out" / "train.json")["losses"]


def test_a_truncated_base_starts_nothing(
    chain: Run, rlhf: Callable[..., Run], tmp_path: Path
) -> None:
    base = Path(shutil.copytree(chain.artifact("prepare_base"), tmp_path / "base"))
    os.truncate(base / "model.safetensors", (base / "model.safetensors").stat().st_size - 1000)
    done = rlhf(tmp_path / "runs", *SHORT, "model=hf", f"model.path={base}")
    assert done.code == 2, done.output
    assert "model.safetensors" in done.output
    assert not (tmp_path / "runs").exists()


def test_a_broken_row_that_the_preflight_does_not_read_is_named(
    chain: Run, rlhf: Callable[..., Run], tmp_path: Path
) -> None:
    lines = [
        json.dumps(
            {"messages": [{"role": role, "content": f"{n}"} for role in ("user", "assistant")]}
        )
        for n in range(PEEK + 50)
    ]
    lines[PEEK + 40] = '{"messages": [{"role": "user"'
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    done = rlhf(chain.runs, *SHORT, "data=jsonl", f"data.path={tmp_path}/chats.jsonl")
    assert done.code == 1, done.output
    assert f"chats.jsonl:{PEEK + 41}" in done.output
    assert (done.summary["status"], done.summary["stages"]) == ("failed", [])
    assert not list(chain.runs.glob("artifacts/*/.*.tmp")), "a staging folder was left"
    assert client(chain).get_run(done.summary["mlflow_run_id"]).info.status == "FAILED"


def deliver(tmp_path: Path, chain: Run, *words: str) -> tuple[int, str]:
    """Deliver the chain's adapter by the literal command; returns its exit status and output."""
    argv = command(
        "deliver", f"source={chain.artifact('gather')}", f"out={tmp_path / 'out'}",
        f"paths.runs={chain.runs}", "smoke.engine=none", *words,
    )  # fmt: skip
    done = subprocess.run(
        argv, cwd=tmp_path, env=environment(OMP_NUM_THREADS="1"), timeout=280, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_deliver_knows_the_base_of_our_adapter_and_writes_the_same_bytes(
    chain: Run, tmp_path: Path
) -> None:
    status, output = deliver(tmp_path, chain)
    assert status == 0, output
    for path in Path(chain.summary["served"]).glob("*.safetensors"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_a_full_fine_tuning_holds_too(rlhf: Callable[..., Run], runs: Path) -> None:
    done = rlhf(runs, "+exp=sft_full", "train.max_steps=40")  # of 100
    check_chain(done, [stage for stage in STAGES if stage != "merge"])
    assert done.summary["eval"]["after"] > done.summary["eval"]["before"]
