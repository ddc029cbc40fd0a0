"""`fix=true`: repairs without loss; everything else is refused with its reason."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

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
    make_shards,
    tensors,
    wrapped,
    write_json,
)

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
EMPTY = {key: array[:0, 0] for key, array in adapter_tensors().items()}
V_HEAD = {
    "v_head.summary.weight": np.ones((1, 16), np.float32),
    "v_head.summary.bias": np.zeros(1, np.float32),
}


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


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "pretrained_model.", "base_model.model."]
)
def test_prefixes_of_a_model(prefix: str, tmp_path: Path) -> None:
    done = repaired(make_model(tmp_path / "it", wrapped(tensors(), prefix)))
    assert same(done.artifact.path / WEIGHTS, tensors())


def test_a_merged_peft_model_with_a_module_in_modules_to_save(tmp_path: Path) -> None:
    keys: Arrays = {}
    for key, array in tensors().items():
        if key == "lm_head.weight":
            keys["base_model.model.lm_head.original_module.weight"] = array * 0
            keys["base_model.model.lm_head.modules_to_save.default.weight"] = array
        else:
            keys["base_model.model." + key.replace("q_proj.", "q_proj.base_layer.")] = array
    done = repaired(make_model(tmp_path / "it", keys))
    assert same(done.artifact.path / WEIGHTS, tensors())


def test_an_adapter_without_its_prefix(tmp_path: Path) -> None:
    bare = {k.removeprefix("base_model.model."): v for k, v in adapter_tensors().items()}
    done = repaired(make_adapter(tmp_path / "it", bare))
    assert same(done.artifact.path / ADAPTER, adapter_tensors())


def test_shards_without_an_index(tmp_path: Path) -> None:
    root = make_shards(tmp_path / "it")
    (root / f"{WEIGHTS}.index.json").unlink()
    done = repaired(root)
    assert same(done.artifact.path / WEIGHTS, tensors())


def test_strays(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    save_file({"x": np.ones(2, np.float32)}, root / "other.safetensors")
    assert repaired(root).done == ("left out other.safetensors",)


def test_the_intact_set_of_weights(tmp_path: Path) -> None:
    import torch

    root = make_adapter(tmp_path / "it", EMPTY)
    good = {key: torch.from_numpy(value) for key, value in adapter_tensors().items()}
    torch.save(good, root / "adapter_model.bin")
    done = repaired(root)
    assert same(done.artifact.path / ADAPTER, adapter_tensors())
    assert not (done.artifact.path / "adapter_model.bin").exists()


@pytest.mark.parametrize("place", ["", "pretrained_model.", "a file"])
def test_the_head_of_trl_or_llamafactory(place: str, tmp_path: Path) -> None:
    root = tmp_path / "it"
    if place == "a file":
        save_file(V_HEAD, make_model(root) / "value_head.safetensors")
    else:
        make_model(root, {**wrapped(tensors(), place), **V_HEAD})
    new = repaired(root).artifact.path
    assert not (new / "value_head.safetensors").exists()
    assert same(new / WEIGHTS, tensors())
    assert same(new / "value_head" / "value_head.safetensors", V_HEAD)


def test_tied_embeddings(tmp_path: Path) -> None:
    arrays = tensors()
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    done = repaired(make_model(tmp_path / "equal" / "it", arrays, tie_word_embeddings=True))
    del arrays["lm_head.weight"]
    assert same(done.artifact.path / WEIGHTS, arrays)
    root = make_model(tmp_path / "different" / "it", tie_word_embeddings=True)
    new = repaired(root).artifact.path
    assert same(new / WEIGHTS, tensors())
    assert json.loads((new / "config.json").read_text())["tie_word_embeddings"] is False


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


def test_nothing_to_repair(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it")
    report = audit(root)
    assert (report.ok, report.mendable) == (True, False)
    assert "fix=true" not in report.text()
    with pytest.raises(ConfigError, match="nothing to repair"):
        repair(root, tmp_path / "new")


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


def test_the_printed_command_has_the_base_and_can_be_typed(tmp_path: Path) -> None:
    root = make_model(tmp_path / "a b", tensors(1), rms_norm_eps=1e-3)
    base = make_model(tmp_path / "lr=1e-4,wd=0")
    report = audit(root, base=base)
    words = [word for word in shlex.split(report.mending) if "=" in word]
    assert words[:2] == [f"source='{root}'", f"base='{base}'"]
    assert any(f"base='{base}'" in finding.fix for finding in report.findings)


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
