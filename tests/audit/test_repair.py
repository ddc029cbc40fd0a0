"""`fix=true`: repairs without loss; everything else is refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tasks.audit.repair import Repaired, repair
from tasks.audit.run import audit
from tasks.core.errors import ConfigError, ContractError
from tasks.pipeline.artifact import Origin, open_artifact, publish, verify
from tests.audit.making import (
    Arrays,
    adapter_tensors,
    codes,
    errors,
    make_adapter,
    make_model,
    tensors,
    wrapped,
    write_json,
)

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
EMPTY = {key: array[:0, 0] for key, array in adapter_tensors().items()}


def repaired(root: Path, **options: Any) -> Repaired:
    """Repair a folder and check the invariants of every repair."""
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    done = repair(root, root.with_name("new"), **options)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert verify(open_artifact(done.artifact.path)) == []
    assert done.artifact.manifest()["notes"]["repaired"] == list(done.done)
    assert errors(codes(done.artifact.path, values=True)) == set()
    return done


def same(path: Path, arrays: Arrays) -> bool:
    """Return True if the tensors equal those of the file, bit for bit."""
    stored = load_file(path)
    return stored.keys() == arrays.keys() and all(
        stored[key].tobytes() == array.tobytes() for key, array in arrays.items()
    )


def test_all_eos_ids(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it", eos_token_id=2)
    added = [{"id": 5, "content": "<|end|>", "special": True}]
    write_json(
        root / "tokenizer.json", {"added_tokens": added, "model": {"vocab": {"a": 0, "b": 1}}}
    )
    write_json(root / "tokenizer_config.json", {"eos_token": "<|end|>"})
    assert "EOS_DISAGREES" in codes(root)
    assert "generation_config.json: eos_token_id [5, 2]" in repaired(root).done


def test_what_cannot_be_repaired(tmp_path: Path) -> None:
    """The audit says so beforehand, and nothing is written."""
    lost = wrapped(tensors())
    del lost["module.lm_head.weight"]
    twice = {**tensors(), "module.lm_head.weight": tensors(1)["lm_head.weight"]}
    for number, (root, thing) in enumerate((
        (make_adapter(tmp_path / "empty", EMPTY), "EMPTY_TENSOR"),
        (make_model(tmp_path / "lost", lost), "lm_head"),
        (make_model(tmp_path / "twice", twice), r"lm_head\.weight"),
    )):  # fmt: skip
        assert not audit(root).mendable
        with pytest.raises(ContractError, match=thing):
            repair(root, tmp_path / str(number))
        assert not (tmp_path / str(number)).exists()
    not_finite = wrapped(tensors())
    not_finite["module.lm_head.weight"][0, 0] = np.nan
    assert not audit(make_model(tmp_path / "nan", not_finite), values=True).mendable
    foreign = {k.replace("q_proj", "x_proj"): v for k, v in adapter_tensors().items()}
    adapter = make_adapter(tmp_path / "foreign", wrapped(foreign))
    report = audit(adapter, base=make_model(tmp_path / "base"))
    assert (report.ok, report.mendable) == (False, False)


def test_an_output_folder_that_is_in_use(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    for out in (make_adapter(tmp_path / "taken"), root / "new", root, tmp_path):
        with pytest.raises(ConfigError, match=str(out)):
            repair(root, out)


def test_an_altered_artifact_does_not_get_a_new_manifest(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it", wrapped(tensors()))
    work = tmp_path / "artifact"
    root.rename(work)
    publish(work, tmp_path / "it", Origin("weights", "merge", "it"))
    assert audit(root).mendable
    (root / "generation_config.json").write_text("{}")
    assert not audit(root).mendable
    with pytest.raises(ContractError, match="MANIFEST_DIFFERS"):
        repair(root, tmp_path / "new")


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("place", ["beginning", "middle"])
def test_a_byte_order_mark_of_a_template(name: str, place: str, tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    text = "{% for m in messages %}{{ m.content }}\u00e9\r\n{% endfor %}"
    marked = f"\ufeff{text}" if place == "beginning" else text.replace("\u00e9", "\u00e9\ufeff")
    if name == "chat_template.jinja":
        (root / name).write_text(marked, newline="")
    else:
        write_json(root / name, {"chat_template": marked})
    assert "TEMPLATE_MARK" in errors(codes(root))
    done = repaired(root)
    new = (done.artifact.path / name).read_bytes().decode()
    assert (new if name == "chat_template.jinja" else json.loads(new)["chat_template"]) == text
