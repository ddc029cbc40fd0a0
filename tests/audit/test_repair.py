"""`fix=true`: repairs without loss; everything else is refused with its reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tasks.audit.repair import repair
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
    make_shards,
    tensors,
    wrapped,
)


def same(path: Path, arrays: Arrays) -> bool:
    """Return True if the tensors equal those of the file, bit for bit."""
    stored = load_file(path)
    return stored.keys() == arrays.keys() and all(
        stored[key].tobytes() == array.tobytes() for key, array in arrays.items()
    )


def pickled(root: Path) -> Path:
    (root / "model.safetensors").unlink()
    state = {key: torch.from_numpy(array) for key, array in wrapped(tensors()).items()}
    torch.save(state, root / "pytorch_model.bin")
    return root


def without_index(root: Path) -> Path:
    (root / "model.safetensors.index.json").unlink()
    return root


def test_a_repaired_copy_has_the_same_tensors(tmp_path: Path) -> None:
    live = {k.replace(".weight", ".default.weight"): v for k, v in adapter_tensors().items()}
    cases = {
        "prefix": (make_model(tmp_path / "1", wrapped(tensors())), tensors()),
        "pickle": (pickled(make_model(tmp_path / "2")), tensors()),
        "index": (without_index(make_shards(tmp_path / "3")), tensors()),
        "adapter": (make_adapter(tmp_path / "4", wrapped(live)), adapter_tensors()),
    }
    for name, (root, arrays) in cases.items():
        before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        assert audit(root).mendable, name
        done = repair(root, tmp_path / name)
        assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
        assert verify(open_artifact(done.path)) == []
        assert done.manifest()["notes"]["repaired"]
        assert errors(codes(done.path, values=True)) == set()
        (file,) = done.path.glob("*.safetensors")
        assert same(file, arrays), name


def test_what_cannot_be_repaired(tmp_path: Path) -> None:
    """The audit says so beforehand, and nothing is written."""
    empty = {key: array[:0, 0] for key, array in adapter_tensors().items()}
    lost, not_finite = wrapped(tensors()), wrapped(tensors())
    del lost["module.lm_head.weight"]
    not_finite["module.lm_head.weight"][0, 0] = np.nan
    twice = {**tensors(), "module.lm_head.weight": tensors(1)["lm_head.weight"]}
    for number, (root, thing) in enumerate((
        (make_adapter(tmp_path / "empty", empty), "EMPTY_TENSOR"),
        (make_model(tmp_path / "lost", lost), "lm_head"),
        (make_model(tmp_path / "twice", twice), r"lm_head\.weight")
    )):  # fmt: skip
        assert not audit(root).mendable
        with pytest.raises(ContractError, match=thing):
            repair(root, tmp_path / str(number))
        assert not (tmp_path / str(number)).exists()
    assert not audit(make_model(tmp_path / "nan", not_finite), values=True).mendable


def test_an_output_folder_that_is_in_use(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    for out in (make_adapter(tmp_path / "taken"), root / "new", root, tmp_path):
        with pytest.raises(ConfigError, match=str(out)):
            repair(root, out)


def test_an_altered_artifact_does_not_get_a_new_manifest(tmp_path: Path) -> None:
    work, root = make_model(tmp_path / "work", wrapped(tensors())), tmp_path / "it"
    publish(work, root, Origin("weights", "merge", "it"))
    assert audit(root).mendable
    (root / "generation_config.json").write_text("{}")
    assert not audit(root).mendable
    with pytest.raises(ContractError, match="MANIFEST_DIFFERS"):
        repair(root, tmp_path / "new")
