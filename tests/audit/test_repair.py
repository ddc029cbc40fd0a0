"""`fix=true`: repairs without loss; everything else is refused with its reason."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
    write_json,
)  # fmt: skip

INDEX = "model.safetensors.index.json"
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


class TestKeys:
    @pytest.mark.parametrize(
        "prefix", ["module.", "_orig_mod.", "pretrained_model.", "base_model.model."]
    )
    def test_prefixes_of_a_model(self, prefix: str, tmp_path: Path) -> None:
        root = make_model(
            tmp_path / "it", {prefix + key: array for key, array in tensors().items()}
        )
        done = repaired(root)
        assert same(done.artifact.path / "model.safetensors", tensors())

    def test_a_merged_peft_model_with_a_module_in_modules_to_save(self, tmp_path: Path) -> None:
        keys: Arrays = {}
        for key, array in tensors().items():
            if key == "lm_head.weight":
                keys["base_model.model.lm_head.original_module.weight"] = array * 0
                keys["base_model.model.lm_head.modules_to_save.default.weight"] = array
            else:
                keys["base_model.model." + key.replace("q_proj.", "q_proj.base_layer.")] = array
        done = repaired(make_model(tmp_path / "it", keys))
        assert same(done.artifact.path / "model.safetensors", tensors())

    def test_an_adapter_without_its_prefix(self, tmp_path: Path) -> None:
        bare = {k.removeprefix("base_model.model."): v for k, v in adapter_tensors().items()}
        done = repaired(make_adapter(tmp_path / "it", bare))
        assert same(done.artifact.path / "adapter_model.safetensors", adapter_tensors())

    def test_two_tensors_with_the_same_name(self, tmp_path: Path) -> None:
        twice = {**tensors(), "module.lm_head.weight": tensors(1)["lm_head.weight"]}
        with pytest.raises(ContractError, match=r"both would be named lm_head\.weight"):
            repair(make_model(tmp_path / "it", twice), tmp_path / "new")


class TestFiles:
    def test_shards_without_an_index(self, tmp_path: Path) -> None:
        root = make_shards(tmp_path / "it")
        (root / INDEX).unlink()
        done = repaired(root)
        assert f"{INDEX} rebuilt" in done.done
        assert same(done.artifact.path / "model.safetensors", tensors())

    def test_strays(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        save_file({"x": np.ones(2, np.float32)}, root / "other.safetensors")
        assert repaired(root).done == ("left out other.safetensors",)

    def test_the_intact_set_of_weights(self, tmp_path: Path) -> None:
        root = make_adapter(tmp_path / "it", {k: v[:0, 0] for k, v in adapter_tensors().items()})
        good = {key: torch.from_numpy(value) for key, value in adapter_tensors().items()}
        torch.save(good, root / "adapter_model.bin")
        done = repaired(root)
        assert same(done.artifact.path / "adapter_model.safetensors", adapter_tensors())
        assert not (done.artifact.path / "adapter_model.bin").exists()


class TestHeads:
    @pytest.mark.parametrize("prefix", ["", "pretrained_model."])
    def test_trl_head(self, prefix: str, tmp_path: Path) -> None:
        keys = {prefix + key: array for key, array in tensors().items()}
        done = repaired(make_model(tmp_path / "it", {**keys, **V_HEAD}))
        assert same(done.artifact.path / "model.safetensors", tensors())
        assert same(done.artifact.path / "value_head" / "value_head.safetensors", V_HEAD)

    def test_llamafactory_head(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        save_file(V_HEAD, root / "value_head.safetensors")
        done = repaired(root)
        assert not (done.artifact.path / "value_head.safetensors").exists()
        assert same(done.artifact.path / "value_head" / "value_head.safetensors", V_HEAD)


class TestTies:
    def test_equal_embeddings(self, tmp_path: Path) -> None:
        arrays = tensors()
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
        done = repaired(make_model(tmp_path / "it", arrays, tie_word_embeddings=True))
        del arrays["lm_head.weight"]
        assert same(done.artifact.path / "model.safetensors", arrays)

    def test_different_embeddings(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it", tie_word_embeddings=True)
        assert "TIED_HEAD_DIFFERS" in codes(root, values=True)
        done = repaired(root)
        assert same(done.artifact.path / "model.safetensors", tensors())
        assert done.done == ("config.json: tie_word_embeddings is false: the two differ",)


def test_all_eos_ids(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it", eos_token_id=2)
    added = [{"id": 5, "content": "<|end|>", "special": True}]
    write_json(
        root / "tokenizer.json", {"added_tokens": added, "model": {"vocab": {"a": 0, "b": 1}}}
    )
    write_json(root / "tokenizer_config.json", {"eos_token": "<|end|>"})
    assert "EOS_DISAGREES" in codes(root)
    assert "generation_config.json: eos_token_id [5, 2]" in repaired(root).done


class TestRefused:
    def test_an_empty_tensor_cannot_be_invented(self, tmp_path: Path) -> None:
        root = make_adapter(tmp_path / "it", {k: v[:0, 0] for k, v in adapter_tensors().items()})
        with pytest.raises(ContractError, match="EMPTY_TENSOR") as raised:
            repair(root, tmp_path / "new")
        assert any("flows/deliver.py" in detail for detail in raised.value.details)
        assert not (tmp_path / "new").exists()

    def test_nothing_to_repair(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="nothing to repair"):
            repair(make_adapter(tmp_path / "it"), tmp_path / "new")

    def test_an_output_folder_that_is_in_use(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        with pytest.raises(ConfigError, match="is not empty"):
            repair(root, make_adapter(tmp_path / "taken"))
        for out in (root / "new", root, tmp_path):
            with pytest.raises(ConfigError, match="one contains the other"):
                repair(root, out)


def test_an_altered_artifact_does_not_get_a_new_manifest(tmp_path: Path) -> None:
    root = make_model(tmp_path / "it", {f"module.{k}": v for k, v in tensors().items()})
    work = tmp_path / "artifact"
    root.rename(work)
    publish(work, tmp_path / "it", Origin("weights", "merge", "it"))
    assert audit(root).mendable
    (root / "generation_config.json").write_text("{}")
    assert not audit(root).mendable
    with pytest.raises(ContractError, match="MANIFEST_DIFFERS"):
        repair(root, tmp_path / "new")


class TestMendable:
    """`mendable` of an audit predicts the result of a repair."""

    def test_a_clean_checkpoint(self, tmp_path: Path) -> None:
        report = audit(make_model(tmp_path / "it"))
        assert (report.ok, report.mendable) == (True, False)
        assert "fix=true" not in report.text()

    def test_a_lost_tensor(self, tmp_path: Path) -> None:
        arrays = {f"module.{key}": array for key, array in tensors().items()}
        del arrays["module.lm_head.weight"]
        root = make_model(tmp_path / "it", arrays)
        assert not audit(root).mendable
        with pytest.raises(ContractError):
            repair(root, tmp_path / "new")

    def test_nan_values(self, tmp_path: Path) -> None:
        arrays = {f"module.{key}": array for key, array in tensors().items()}
        arrays["module.lm_head.weight"][0, 0] = np.nan
        assert not audit(make_model(tmp_path / "it", arrays), values=True).mendable

    def test_a_wrong_base(self, tmp_path: Path) -> None:
        arrays = {
            key.replace("q_proj", "x_proj"): array for key, array in adapter_tensors().items()
        }
        root = make_adapter(tmp_path / "it", {f"module.{k}": v for k, v in arrays.items()})
        report = audit(root, base=make_model(tmp_path / "base"))
        assert not report.ok
        assert not report.mendable


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
        settings = root / name
        document = json.loads(settings.read_text()) if settings.is_file() else {}
        write_json(settings, {**document, "chat_template": marked})
    before = codes(root)
    assert "TEMPLATE_MARK" in errors(before)
    done = repaired(root)
    new = (done.artifact.path / name).read_bytes().decode()
    assert (new if name == "chat_template.jinja" else json.loads(new)["chat_template"]) == text
