"""A base model that a run cannot train is refused before anything starts."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from flows.cli.config import compose_config
from tasks.config.checks import Known, findings, model
from tasks.config.checks.model import head_exists
from tests.machines import QWEN_7B, with_hub, with_hub_at
from tests.tiny import tiny


def test_a_model_that_is_neither_a_folder_nor_an_id(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    for path in ("/no/such/folder", "a/b/c", "./nothing", str(tmp_path / "model.gguf")):
        assert path in look(path)[1][0].found
    assert look(None)[1][0].override == "model.path=<folder or hub id>"
    assert look("owner/name") == (model.Known(), [])


def look(path: str | None, revision: str | None = None) -> Any:
    return model.look_at({"kind": "hf", "path": path, "revision": revision})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model folder whose headers name one tensor of 2 x 3."""
    config = {"model_type": "qwen2", "max_position_embeddings": 99}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"a.q_proj.weight": np.zeros((2, 3))}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_model_folder_and_all_of_its_faults(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    known = model.Known(("a.q_proj",), 6, config, owners=("a.q_proj",))
    assert look(str(folder)) == (known, [])
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    names = ("config.json", "tokenizer.json")
    for name in names:
        (folder / name).unlink()
    texts = [finding.found for finding in look(str(folder))[1]]
    assert [n for n, text in zip((*names, weights.name), texts, strict=True) if n in text] == [
        *names, weights.name,
    ]  # fmt: skip


def test_a_hub_id_is_known_once_its_config_is_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defaults, memory and context are computed from it."""
    experts = QWEN_7B | {"num_experts": 8}
    with_hub(monkeypatch, tmp_path, {"owner/seven": QWEN_7B, "owner/experts": experts})
    known, problems = look("owner/seven")
    assert problems == []
    assert known.parameters == 7_615_616_512 - 28 * 4_608
    assert (known.context, known.config) == (32768, QWEN_7B)
    assert look("owner/seven", revision="other") == (model.Known(), [])
    assert look("owner/experts")[0].parameters is None
    arguments = ["+exp=sft_qlora", "data.path=rows.jsonl", "train.nproc=1"]
    for name, rate in (("seven", 2e-4), ("absent", 1e-4)):
        composed = compose_config([*arguments, f"model.path=owner/{name}"])
        assert composed.settings["train"]["lr"] == rate
    unknown = model.why_unknown({"path": "owner/absent", "revision": None})
    assert "hf download owner/absent config.json" in str(unknown)


def test_without_a_network_a_model_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recipes are planned on machines that cannot reach the Hub."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with_hub_at(monkeypatch, tmp_path, port)
    assert look("owner/unreachable") == (Known(), [])
    assert "refused" in model.why_unknown({"path": "owner/unreachable", "revision": None})


def test_a_family_that_cannot_be_packed_is_refused(folder: Path) -> None:
    """Training packs sequences, and recurrent layers would carry one into the next."""
    gemma = Known(config=tiny("Gemma2", head_dim=32).to_dict())
    (capped,) = model.packed("sdpa", 1, gemma)
    assert capped.override.startswith("model.attn_implementation=eager")
    assert list(model.packed("eager", 1, gemma)) == []
    (eager,) = model.packed("eager", 2, gemma)
    assert eager.severity == "warning"
    for family in ("mamba2", "gpt_oss"):
        (folder / "config.json").write_text(json.dumps({"model_type": family}))
        settings = compose_config(["model=hf", f"model.path={folder}"]).settings
        problems = [str(finding) for finding in findings(settings, folder / "runs")]
        assert [text for text in problems if text.startswith(f"model.path: {family} ")]


@pytest.mark.parametrize(
    ("objective", "known", "refused"),
    [
        ("sft", Known(config={"model_type": "t5", "is_encoder_decoder": True}), True),
        ("dpo", Known(config={"model_type": "bert", "architectures": ["BertForMaskedLM"]}), True),
        ("sft", replace(model.TOY, score=(1, 64)), True),
        ("reward", replace(model.TOY, score=(2, 64)), True),
        ("sft", model.TOY, False),
        ("reward", replace(model.TOY, score=(1, 64)), False),
    ],
)
def test_an_objective_that_this_kind_of_model_cannot_have(
    objective: str, known: Known, refused: bool
) -> None:
    assert [f.what for f in head_exists(objective, known)] == ["train.objective"] * refused
