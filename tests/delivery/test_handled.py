"""Errors of the audit that a delivery repairs are not in OUT; all others stop the delivery."""

from __future__ import annotations

import json
import re
import shutil
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
    stored = load_file(folder / "model.safetensors")
    model = {name: tensor for name, tensor in stored.items() if not name.startswith("v_head")}
    save_file(model, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text()) | {"eos_token_id": 7}
        (folder / name).write_text(json.dumps(config))


def _compiled(folder: Path) -> None:
    """Save a model that torch.compile and FSDP had wrapped."""
    save_trl(folder, "qwen")
    stored = load_file(folder / "model.safetensors")
    model = {f"_orig_mod.{name}": tensor for name, tensor in stored.items() if "v_head" not in name}
    inner = {name.replace(".0.", ".0._fsdp_wrapped_module."): t for name, t in model.items()}
    save_file(inner, folder / "model.safetensors", metadata={"format": "pt"})


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
    "prefixes of wrappers": (_compiled, {"WRAPPER_RESIDUE"}),
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
    stored = load_file(adapter / "adapter_model.safetensors")
    half = next(name for name in stored if "lora_B" in name)
    stored[half] = torch.empty(0)
    save_file(stored, source / "adapter_model.safetensors")
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
def test_wrapped_weights_beside_a_head_are_delivered(
    here: Run, tmp_path: Path, prefix: str
) -> None:
    ppo, out = tmp_path / "ppo", tmp_path / "out"
    save_llamafactory(ppo, "qwen")
    stored = load_file(ppo / "model.safetensors")
    wrapped = {prefix + name: tensor for name, tensor in stored.items()}
    save_file(wrapped, ppo / "model.safetensors", metadata={"format": "pt"})
    done = here(f"source={ppo}", f"out={out}")
    assert done.code == 0, done.output
    served = load_file(out / "model.safetensors")
    assert served.keys() == stored.keys()
    assert all(torch.equal(each, stored[name].to(each.dtype)) for name, each in served.items())


def _wrapped(adapter: Path, folder: Path, how: Callable[[str], str], *, pickled: bool) -> Path:
    shutil.copytree(adapter, folder)
    stored = load_file(folder / "adapter_model.safetensors")
    named = {how(name): tensor for name, tensor in stored.items()}
    assert named.keys() != stored.keys()
    (folder / "adapter_model.safetensors").unlink()
    if pickled:
        torch.save(named, folder / "adapter_model.bin")
    else:
        save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


WRAPPERS: dict[str, Callable[[str], str]] = {
    "outside": lambda key: f"_orig_mod.{key}",
    "the model": lambda key: key.replace("base_model.model.", "base_model.model.module."),
    "layers": lambda key: re.sub(r"(layers[.]\d+[.])", r"\1_checkpoint_wrapped_module.", key),
    "attention alone": lambda key: key.replace("self_attn.", "self_attn._fsdp_wrapped_module."),
    "several": lambda key: "module._orig_mod." + key.replace("mlp.", "_orig_mod.mlp.module."),
}


@pytest.mark.parametrize(
    "where",
    ["layers", "several"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in WRAPPERS
        if name not in ("layers", "several")
    ],
)
def test_a_wrapped_adapter_is_merged_as_the_clean_one(
    here: Run, adapter: Path, base: Path, tmp_path: Path, where: str
) -> None:
    is_bin = where == "layers"
    source = _wrapped(adapter, tmp_path / "source", WRAPPERS[where], pickled=is_bin)
    findings = audit(source, base=base).findings
    assert [each.code for each in findings if each.severity == "error"] == ["WRAPPER_RESIDUE"]
    outs = []
    for each in (source, adapter):
        out = tmp_path / f"out-{each.name}"
        arguments = [f"source={each}", f"base={base}", f"out={out}", "merge.base=original"]
        done = here(*arguments, "merge.rounding=unbiased")
        assert done.code == 0, done.output
        assert ("WRAPPER_RESIDUE" in done.output) is (each is source)
        outs.append((out / "model.safetensors").read_bytes())
    assert outs[0] == outs[1]


@pytest.mark.slow
def test_the_reference_of_wrapped_names_is_the_trained_model(
    here: Run, adapter: Path, base: Path, tmp_path: Path
) -> None:
    """Peft and transformers find none of these names, and would answer as another model."""
    how = WRAPPERS["several"]
    source = _wrapped(adapter, tmp_path / "source", how, pickled=False)
    model = tmp_path / "wrapped"
    shutil.copytree(base, model)
    stored = load_file(model / "model.safetensors")
    named = {how(name): tensor for name, tensor in stored.items()}
    save_file(named, model / "model.safetensors", metadata={"format": "pt"})
    for name, more in (("adapter", [f"base={base}", "merge.base=original"]), ("model", [])):
        each = source if name == "adapter" else model
        arguments = [f"source={each}", f"out={tmp_path / name / 'out'}", "smoke.probes=4", *more]
        done = here(*arguments, engine="transformers")
        assert done.code == 0, done.output
        assert done.summary["stages"][-1]["drift"]["mean_kl"] < 1e-4
        assert load_file(tmp_path / name / "out" / "model.safetensors").keys() == stored.keys()


def test_a_base_of_wrapped_names_is_refused(
    here: Run, adapter: Path, base: Path, tmp_path: Path
) -> None:
    """Training and servers read the base as well: the command repairs it for all of them."""
    wrapped = tmp_path / "base"
    shutil.copytree(base, wrapped)
    stored = load_file(wrapped / "model.safetensors")
    named = {f"_orig_mod.{name}": tensor for name, tensor in stored.items()}
    save_file(named, wrapped / "model.safetensors", metadata={"format": "pt"})
    done = here(f"source={adapter}", f"base={wrapped}", f"out={tmp_path / 'out'}")
    assert done.code == 2, done.output
    assert "WRAPPER_RESIDUE" in done.output
    assert not (tmp_path / "out").exists()
