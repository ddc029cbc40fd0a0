"""Errors of the audit that a delivery repairs are not in OUT; all others stop the delivery."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tasks.audit.run import audit
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


def _other_trainers_state(folder: Path) -> None:
    """Save settings of a class that nobody knows, and random states that are cut."""
    save_llamafactory(folder, "qwen")
    (folder / "training_args.bin").write_bytes(b"\x80\x02cmy_trainer.args\nMyArguments\n)\x81.")
    (folder / "rng_state_0.pth").write_bytes(b"\x80\x02}q\x00X\x05")


def _in_trls_wrapper(folder: Path) -> None:
    save_trl(folder, "qwen", prefix="pretrained_model.")


CASES: dict[str, tuple[Make, set[str]]] = {
    "a head of another name": (
        _other_prefix, {"HEAD_LABELS", "HEAD_PREFIX", "VLLM_ARCHITECTURE"},
    ),
    "an end that stops nothing": (_eos_of_the_base, {"EOS_DISAGREES"}),
}  # fmt: skip
SLOW: dict[str, tuple[Make, set[str]]] = {
    "TRL's wrapper around a model with a head": (
        _in_trls_wrapper, {"HEAD_IN_MODEL", "TRL_RESIDUE", "TENSOR_MISSING", "TENSOR_UNEXPECTED"},
    ),
    "the state of an unknown trainer, and a head beside the model": (
        _other_trainers_state, {"STRAY_WEIGHT_FILE", "PICKLE_CALLS", "PICKLE_OPAQUE"},
    ),
}  # fmt: skip


def errors(folder: Path) -> set[str]:
    return {finding.code for finding in audit(folder).findings if finding.severity == "error"}


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_handled_errors_are_not_in_out(here: Run, name: str, tmp_path: Path) -> None:
    make, codes = {**CASES, **SLOW}[name]
    make(tmp_path / "source")
    assert errors(tmp_path / "source") == codes
    done = here(f"source={tmp_path / 'source'}")
    handled = {finding["code"] for finding in done.summary["findings"] if finding["handled"]}
    assert handled == codes
    assert errors(tmp_path / "out") == set()
    (stage,) = (entry for entry in done.summary["stages"] if entry["name"] == "audit")
    kept = json.loads((Path(stage["artifact"]) / "findings.json").read_text())
    assert kept["findings"] == done.summary["findings"]
    manifest = json.loads((Path(stage["artifact"]) / "manifest.json").read_text())
    assert manifest["notes"]["metrics"]["audit/errors"] >= len(codes)
