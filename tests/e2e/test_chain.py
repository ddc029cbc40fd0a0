"""The main job, end to end: vLLM serves the trained model."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import mlflow
import pytest
from huggingface_hub import ModelCard
from mlflow import MlflowClient

from tasks.drift.fingerprint import PROFILES, Fingerprint
from tasks.pipeline.artifact import open_artifact, verify
from tests.flows.conftest import Run
from tests.flows.tracked import children
from tests.monitoring.records import status_json
from tests.monitoring.test_prometheus import samples

CONFIG = "adapter_config.json"
STAGES = ["prepare_data", "prepare_base", "train", "gather", "merge", "convert", "smoke_eval"]


def client(run: Run) -> MlflowClient:
    return MlflowClient(f"sqlite:///{run.runs}/mlflow/mlflow.db")


def tensors_of(folder: Path) -> dict[str, Any]:
    """Return all tensors of a folder, by name."""
    from safetensors.torch import load_file

    tensors = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    assert tensors, folder
    return tensors


def stem(key: str) -> str:
    return key.removesuffix(".weight")


def check_chain(run: Run, stages: list[str]) -> None:
    """Assert what is true of every experiment."""
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["status"] == "completed"
    assert [s["name"] for s in summary["stages"]] == [*stages, "register"]
    gathered = run.stage("gather")["drift"]
    trained = Fingerprint.load(Path(run.stage("train")["artifact"]) / "fingerprint.fp")
    assert trained.engine == "deepspeed"
    assert trained.noise is not None
    assert gathered["mean_kl"] <= 1e-5
    assert gathered["mean_kl"] <= 2 * trained.noise
    for name in set(stages) & {"merge", "convert", "smoke_eval"}:
        assert run.stage(name)["drift"]["mean_kl"] <= PROFILES["standard"].mean_kl, name
        handoff = run.stage(name)["handoff"]
        assert handoff["value"] == run.stage(name)["drift"]["mean_kl"]
        assert (handoff["ok"], handoff["unit"]) == (True, "nats per token")
        assert handoff["limit"] == PROFILES["standard"].mean_kl
        assert f"KL {handoff['value']:.1e}  nats  <= 1.0e-03  ok" in run.output
    for stage in summary["stages"][:-1]:
        assert verify(open_artifact(Path(stage["artifact"]))) == []
    assert summary["served"] == run.stage("convert")["artifact"]
    check_card(run)


def check_card(run: Run) -> None:
    """Assert that the Hub can read the served model's card, and that it has the run's numbers."""
    card = ModelCard.load(Path(run.summary["served"]) / "README.md")
    assert {"plumbline", "vllm"} <= set(card.data.tags)
    drift = run.stage("convert")["handoff"]["value"]
    for text in (f"| {drift:.2g} | 0.001 |", "eval.exact_match", "vllm serve"):
        assert text in card.text, text
    assert str(run.runs) not in card.text  # no path of this machine


class TestQlora:
    def test_every_hand_off_holds(self, qlora: Run) -> None:
        check_chain(qlora, STAGES)

    def test_training_visibly_works(self, qlora: Run) -> None:
        scores = qlora.summary["eval"]
        assert scores["after"] - scores["before"] >= 0.20
        assert scores["loss_after"] < scores["loss_before"]

    def test_status_and_metrics_say_how_it_ended(self, qlora: Run) -> None:
        status = [
            run for run in status_json(qlora.runs) if run["seconds"] == qlora.summary["seconds"]
        ]
        (run,) = status
        assert (run["state"], run["exit_status"], run["exp"]) == ("completed", 0, "sft_qlora")
        assert [stage["name"] for stage in run["stages"]] == [*STAGES, "register"]
        assert run["step"] == run["steps"] > 10
        assert {"loss", "tokens_per_s"} <= set(run["numbers"])
        written = samples(qlora.runs / "metrics.prom")
        assert written["plumbline_runs_total", "rlhf", "completed"] >= 1
        assert written["plumbline_stage_last_seconds", "rlhf", "train"] > 0
        assert written["plumbline_disk_bytes", "artifacts/served"] > 0

    def test_rows_that_were_cut_are_counted_in_mlflow_and_summary(self, qlora: Run) -> None:
        rows = qlora.stage("train")["rows"]
        measured = children(qlora)["train"].data.metrics
        for split in ("train", "heldout"):
            path = Path(qlora.stage("prepare_data")["artifact"]) / f"{split}.jsonl"
            lines = len(path.read_text().splitlines())
            assert rows[split] == {"rows": lines, "truncated": 0, "tokens_cut": 0, "too_long": 0}
            assert measured[f"data/{split}_rows"] == lines
            assert measured[f"data/{split}_truncated"] == 0

    def test_every_adapter_tensor_was_checked(self, qlora: Run) -> None:
        manifest = open_artifact(Path(qlora.stage("gather")["artifact"])).manifest()
        tensors = manifest["tensors"]["adapter_model.safetensors"]
        assert len(tensors) == 4 * 7 * 2  # layers x linear modules x (A, B)
        checks = json.loads((Path(qlora.stage("gather")["artifact"]) / "contract.json").read_text())
        assert set(tensors) <= {check["name"] for check in checks}
        assert all(check["ok"] for check in checks)

    def test_the_merge_went_into_the_dequantised_base(self, qlora: Run) -> None:
        """bitsandbytes' own values, plus the adapter's product, for every linear layer."""
        import torch
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        merged = open_artifact(Path(qlora.stage("merge")["artifact"]))
        assert merged.notes["merge_base"] == "dequantized"
        folders = (qlora.stage(name)["artifact"] for name in ("prepare_base", "gather", "merge"))
        base, adapter, weights = (tensors_of(Path(folder)) for folder in folders)
        config = json.loads((Path(qlora.stage("gather")["artifact"]) / CONFIG).read_text())
        scale = config["lora_alpha"] / config["r"]
        layers = [key for key in base if f"base_model.model.{stem(key)}.lora_A.weight" in adapter]
        assert len(layers) == 4 * 7
        for key in layers:
            first, second = (adapter[f"base_model.model.{stem(key)}.lora_{x}.weight"] for x in "AB")
            loaded = base[key].to(first.dtype)  # as training loaded it
            packed = quantize_4bit(loaded, quant_type="nf4", compress_statistics=True)
            seen = dequantize_4bit(*packed).float()
            expected = seen + scale * (second.float() @ first.float())
            torch.testing.assert_close(weights[key].float(), expected, rtol=2.0**-7, atol=1e-6)
            assert (seen - base[key].float()).abs().max() > 2.0**-6 * base[key].abs().max(), key

    def test_first_greedy_tokens_equal_transformers_on_every_probe(self, qlora: Run) -> None:
        folder = Path(qlora.stage("smoke_eval")["artifact"])
        report = json.loads((folder / "report.json").read_text())
        trained = Fingerprint.load(Path(qlora.stage("train")["artifact"]) / "fingerprint.fp")
        probes = len(trained.probes)
        assert report["notes"]["settings"]["greedy_tokens"] == 5
        (check,) = [check for check in report["checks"] if check["name"] == "first 5 greedy tokens"]
        assert check["ok"]
        metrics = report["metrics"]
        assert (metrics["greedy/differences"], report["notes"]["greedy_differences"]) == (0, [])
        assert metrics["greedy/equal"] + metrics["greedy/ties"] == probes == 32
        assert metrics["greedy/equal"] >= 28

    def test_the_table_has_the_numbers_of_the_summary(self, qlora: Run) -> None:
        for stage in qlora.summary["stages"]:
            (row,) = re.findall(rf"^{stage['name']} .*$", qlora.output, re.MULTILINE)
            cells = row.split()
            assert cells[1] == f"{stage['seconds']:.1f}"
            if stage["handoff"]:
                drift, limit = (f"{stage['handoff'][name]:.1e}" for name in ("value", "limit"))
                assert f"KL {drift}  nats  <= {limit}  ok  " in row
            if stage["artifact"]:
                assert f"/{cells[-1]}" in stage["artifact"]
        before, after = (100 * qlora.summary["eval"][when] for when in ("before", "after"))
        gain = f"({after - before:+.1f} points)"
        assert f"exact match {before:.1f}% -> {after:.1f}% {gain}" in qlora.output
        report = qlora.runs / "reports" / qlora.summary["run"] / "report.html"
        own = str(Path(sys.executable).with_name("plumbline"))
        program = "plumbline" if shutil.which("plumbline") == own else own
        assert qlora.output.splitlines()[-3:] == [
            f"next: {program} serve {qlora.summary['served']}",  # the vLLM of CPUs
            f"pages: {program} open paths.runs={qlora.runs}",  # no server runs
            f"report: {report}",
        ]

    def test_transformers_loads_what_is_served_with_no_key_left_over(self, qlora: Run) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        served = qlora.summary["served"]
        _, info = AutoModelForCausalLM.from_pretrained(served, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        tokenizer = AutoTokenizer.from_pretrained(served)
        assert tokenizer.chat_template
        assert tokenizer.eos_token == "<|im_end|>"


class TestTracking:
    def test_one_parent_and_a_child_a_stage(self, qlora: Run) -> None:
        tracker = client(qlora)
        parent = tracker.get_run(qlora.summary["mlflow_run_id"])
        assert parent.info.status == "FINISHED"
        assert parent.data.params["peft.kind"] == "qlora"
        children = tracker.search_runs(
            [parent.info.experiment_id],
            f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'",
        )
        assert {c.data.tags["stage"] for c in children} == set(STAGES)
        assert {c.info.status for c in children} == {"FINISHED"}
        for child in children:
            names = {f.path for f in tracker.list_artifacts(child.info.run_id)}
            assert {"manifest.json", "contract.json"} <= names

    def test_the_loss_curve_is_there_and_falls(self, qlora: Run) -> None:
        tracker = client(qlora)
        parent = qlora.summary["mlflow_run_id"]
        (train,) = tracker.search_runs(
            [tracker.get_run(parent).info.experiment_id],
            f"tags.`mlflow.parentRunId` = '{parent}' and tags.stage = 'train'",
        )
        for name in ("loss", "lr", "grad_norm", "tokens_per_s", "step_s"):
            assert len(tracker.get_metric_history(train.info.run_id, f"train/{name}")) > 10, name
        losses = tracker.get_metric_history(train.info.run_id, "train/loss")
        assert losses[-1].value < losses[0].value / 2

    def test_weights_are_never_uploaded(self, qlora: Run) -> None:
        files = [p for p in (qlora.runs / "mlflow" / "artifacts").rglob("*") if p.is_file()]
        assert files
        assert not [p for p in files if p.suffix in {".safetensors", ".bin", ".pt"}]

    def test_the_candidate_points_at_the_served_folder(self, qlora: Run) -> None:
        name = qlora.summary["gate"]["version"].split("/")[-1]
        version = client(qlora).get_model_version("plumbline", name)
        assert version.tags["path"] == qlora.summary["served"]
        served = open_artifact(Path(qlora.summary["served"]))
        assert version.tags["digest"] == served.digest
        # The alias is with the model of this folder that was trained last.
        candidate = client(qlora).get_model_version_by_alias("plumbline", "candidate")
        assert int(candidate.version) >= int(name)

    def test_the_registered_model_answers_as_the_served_one_did(self, qlora: Run) -> None:
        """`mlflow.pyfunc.load_model`, with transformers; smoke_eval asked vLLM."""
        mlflow.set_tracking_uri(f"sqlite:///{qlora.runs}/mlflow/mlflow.db")
        model = mlflow.pyfunc.load_model(qlora.summary["gate"]["version"])
        mlflow.set_tracking_uri(None)
        report = Path(qlora.stage("smoke_eval")["artifact"])
        rows = [json.loads(line) for line in (report / "generations.jsonl").open()][:5]
        same = 0
        for row in rows:
            reply = model.predict(
                {"messages": row["messages"], "max_tokens": 32, "temperature": 0.0}
            )
            same += reply["choices"][0]["message"]["content"].strip() == row["after"].strip()
        assert same >= 4  # engines may differ where two tokens are nearly as likely

    def test_mlflow_has_the_data_the_commit_and_the_load(self, qlora: Run) -> None:
        parent = client(qlora).get_run(qlora.summary["mlflow_run_id"])
        assert parent.info.run_name == "sft_qlora sft toy"
        (data,) = parent.inputs.dataset_inputs
        digest = open_artifact(Path(qlora.stage("prepare_data")["artifact"])).digest
        assert data.dataset.digest == digest[:36]
        assert parent.data.metrics["system/system_memory_usage_megabytes"] > 0
        assert parent.data.tags["mlflow.source.name"] == "flows/rlhf.py"


def test_prefect_draws_the_edges_of_the_stages(qlora: Run) -> None:
    with sqlite3.connect(qlora.runs / "prefect" / "prefect.db") as db:
        first = "select id from flow_run order by start_time limit 1"
        rows = db.execute(
            f"select id, name, task_inputs from task_run where flow_run_id = ({first})"
        ).fetchall()
    names = {str(UUID(number)): name.split("-")[0] for number, name, _ in rows}
    edges = {
        names[str(UUID(number))]: {
            names[parent["id"]] for parents in json.loads(inputs).values() for parent in parents
        }
        for number, _, inputs in rows
    }
    assert edges == {
        "prepare_data": set(),
        "prepare_base": set(),
        "train": {"prepare_base", "prepare_data"},
        "gather": {"prepare_base", "train"},
        "merge": {"prepare_base", "train", "gather"},
        "convert": {"train", "gather", "merge"},
        "smoke_eval": {"prepare_base", "prepare_data", "gather", "convert"},
        "register": {"convert", "smoke_eval"},
    }


def test_prefect_has_the_flow_its_tasks_by_name_and_the_table(qlora: Run) -> None:
    with sqlite3.connect(qlora.runs / "prefect" / "prefect.db") as db:
        first = "select id from flow_run order by start_time limit 1"
        flows = db.execute(f"select state_type, parameters from flow_run where id = ({first})")
        flows = flows.fetchall()
        tasks = db.execute(
            f"select name, state_type, total_run_time from task_run where flow_run_id = ({first})"
        ).fetchall()
        artifacts = db.execute("select data from artifact where type = 'markdown'").fetchall()
    assert [state for state, _ in flows] == ["COMPLETED"]
    assert "+exp=sft_qlora" in flows[0][1]
    assert {name.split("-")[0] for name, *_ in tasks} == {*STAGES, "register"}
    assert {state for _, state, _ in tasks} == {"COMPLETED"}
    assert any("| smoke_eval |" in str(data) for (data,) in artifacts)


def test_a_second_run_reuses_every_stage(qlora: Run, rlhf: Callable[..., Run]) -> None:
    again = rlhf(qlora.runs, "+exp=sft_qlora")
    assert again.code == 0, again.output
    assert all(s["reused"] for s in again.summary["stages"] if s["name"] != "register")
    assert again.output.count("reusing") == len(STAGES)
    assert again.summary["seconds"] < 45


@pytest.mark.slow  # stages and ranks of both are tested in tests/training and tests/weights
@pytest.mark.parametrize(
    ("experiment", "steps"),
    [("lora_zero3", 15), ("sft_full", 40)],
)
def test_other_experiments_hold_too(
    experiment: str, steps: int, qlora: Run, rlhf: Callable[..., Run]
) -> None:
    done = rlhf(qlora.runs, f"+exp={experiment}", f"train.max_steps={steps}")  # of 100
    stages = [s for s in STAGES if s != "merge" or experiment != "sft_full"]
    check_chain(done, stages)
    assert done.stage("prepare_base")["reused"]
    assert done.summary["eval"]["after"] > done.summary["eval"]["before"]
