"""Errors of the audit that a delivery repairs are not in OUT; all others stop the delivery."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.audit.catalogue import CATALOGUE
from tasks.audit.run import audit
from tasks.delivery.handled import HANDLED
from tests.delivery.conftest import Done
from tests.weights.heads.making import (
    change_config,
    save_llamafactory,
    save_openrlhf,
    save_trl,
)

Run = Callable[..., Done]
Make = Callable[[Path], object]


def _other_prefix(folder: Path) -> None:
    """Write OpenRLHF's mistake: config.json names `value_head`, the weights have `score`."""
    save_openrlhf(folder, "qwen")
    change_config(folder, value_head_prefix="value_head")


def _eos_of_the_base(folder: Path) -> None:
    """Write another EOS id into both configurations than the tokenizer's (LLaMA-Factory #9338)."""
    save_trl(folder, "llama")
    held = load_file(folder / "model.safetensors")
    model = {name: tensor for name, tensor in held.items() if not name.startswith("v_head")}
    save_file(model, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text()) | {"eos_token_id": 7}
        (folder / name).write_text(json.dumps(config))


def _other_trainers_state(folder: Path) -> None:
    """Save settings of a class that nobody knows, and random states that are cut."""
    save_llamafactory(folder, "qwen")
    (folder / "training_args.bin").write_bytes(b"\x80\x02cmy_trainer.args\nMyArguments\n)\x81.")
    (folder / "rng_state_0.pth").write_bytes(b"\x80\x02}q\x00X\x05")


CASES: dict[str, tuple[Make, set[str]]] = {
    "a head in the model": (lambda folder: save_trl(folder, "qwen"), {"HEAD_IN_MODEL"}),
    "TRL's wrapper around it": (
        lambda folder: save_trl(folder, "qwen", prefix="pretrained_model."),
        {"HEAD_IN_MODEL", "TRL_RESIDUE", "TENSOR_MISSING", "TENSOR_UNEXPECTED"},
    ),
    "a head beside the model": (
        lambda folder: save_llamafactory(folder, "qwen"), {"STRAY_WEIGHT_FILE"},
    ),
    "a reward model of OpenRLHF": (
        lambda folder: save_openrlhf(folder, "llama"), {"HEAD_LABELS", "VLLM_ARCHITECTURE"},
    ),
    "a head of another name": (
        _other_prefix, {"HEAD_LABELS", "HEAD_PREFIX", "VLLM_ARCHITECTURE"},
    ),
    "the state of an unknown trainer": (
        _other_trainers_state, {"STRAY_WEIGHT_FILE", "PICKLE_CALLS", "PICKLE_OPAQUE"},
    ),
    "an end that stops nothing": (_eos_of_the_base, {"EOS_DISAGREES"}),
}  # fmt: skip
ELSEWHERE = {"MANIFEST_DIFFERS", "WRONG_BASE"}
"""`test_intact.py`, and `TestTheBase` in `test_refusals.py`."""


def errors(folder: Path) -> set[str]:
    return {finding.code for finding in audit(folder).findings if finding.severity == "error"}


@pytest.mark.parametrize("name", CASES)
def test_handled_errors_are_not_in_out(here: Run, name: str, tmp_path: Path) -> None:
    make, codes = CASES[name]
    make(tmp_path / "source")
    assert errors(tmp_path / "source") == codes
    done = here(f"source={tmp_path / 'source'}", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    handled = {finding["code"] for finding in done.summary["findings"] if finding["handled"]}
    assert handled == codes
    assert errors(tmp_path / "out") == set()
    (stage,) = (entry for entry in done.summary["stages"] if entry["name"] == "audit")
    kept = json.loads((Path(stage["artifact"]) / "findings.json").read_text())
    assert kept["findings"] == done.summary["findings"]
    manifest = json.loads((Path(stage["artifact"]) / "manifest.json").read_text())
    assert manifest["notes"]["metrics"]["audit/errors"] >= len(codes)


def test_every_entry_has_a_case() -> None:
    assert set().union(*(codes for _, codes in CASES.values()), ELSEWHERE) == set(HANDLED)
    assert set(HANDLED) <= set(CATALOGUE)


def test_shards_of_our_ranks_have_no_error_to_be_dealt_with(
    here: Run, shards: Path, ours: Path, tmp_path: Path
) -> None:
    done = here(f"source={shards}", f"base={ours}", f"out={tmp_path / 'out'}", "plan=true")
    assert done.code == 0, done.output
    assert f"source: {shards}: Plumbline's shards of a LoRA adapter of rank 4 of 3 ranks" in (
        done.output
    )
    assert errors(shards) == set()
    assert "WEIGHTS_MISSING" not in done.output


def test_other_errors_are_all_reported(
    here: Run, adapter: Path, base: Path, tmp_path: Path
) -> None:
    source = tmp_path / "adapter"
    source.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"lora_alpha": 0}
    (source / "adapter_config.json").write_text(json.dumps(config))
    held = load_file(adapter / "adapter_model.safetensors")
    half = next(name for name in held if "lora_B" in name)
    held[half] = torch.empty(0)
    save_file(held, source / "adapter_model.safetensors")
    done = here(f"source={source}", f"base={base}", f"out={tmp_path / 'out'}")
    assert done.code == 2, done.output
    assert "ADAPTER_ALPHA adapter_config.json" in done.output
    assert f"EMPTY_TENSOR adapter_model.safetensors: {half}" in done.output
    assert done.output.count("  fix: ") >= 2
    assert {path.name for path in tmp_path.iterdir()} == {"adapter"}


@pytest.mark.slow
def test_the_findings_are_in_the_tracker_and_in_the_summary(here: Run, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    save_trl(tmp_path / "ppo", "llama")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    done = here(f"source={tmp_path / 'ppo'}", f"out={tmp_path / 'out'}", f"tracking.uri={uri}")
    assert done.code == 0, done.output
    (line,) = [each for each in done.output.splitlines() if each.startswith("audit, dealt with: ")]
    assert line.count(", ") == 2  # two codes
    client = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, "tags.stage = 'audit'")
    assert run.data.metrics["audit/errors"] == 2  # the head, and ends that disagree
    assert "notes.json" in {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    parent = client.get_run(run.data.tags["mlflow.parentRunId"])
    assert line in parent.data.tags["mlflow.note.content"]


@pytest.mark.parametrize("prefix", ["_orig_mod.module.", "pretrained_model.module."])
def test_other_wrapper_prefixes_are_refused_with_the_fix_command(
    here: Run, tmp_path: Path, prefix: str
) -> None:
    """A split-off head keeps the names of its own wrapper; other wrappers are refused."""
    ppo, out = tmp_path / "ppo", tmp_path / "out"
    save_llamafactory(ppo, "qwen")
    held = load_file(ppo / "model.safetensors")
    wrapped = {prefix + name: tensor for name, tensor in held.items()}
    save_file(wrapped, ppo / "model.safetensors", metadata={"format": "pt"})
    done = here(f"source={ppo}", f"out={out}")
    assert done.code == 2, done.output
    assert "WRAPPER_RESIDUE model.safetensors" in done.output
    assert f"-> python flows/audit.py source={ppo} fix=true out_dir=" in done.output
    assert list(tmp_path.iterdir()) == [ppo]
