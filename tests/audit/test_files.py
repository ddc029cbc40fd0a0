"""Weight files and their index: which files a loader opens, and if the index agrees."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tasks.audit.repair import repair
from tasks.audit.run import audit
from tasks.audit.source import open_source
from tasks.weights.files.folder import inspect_checkpoint
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.files.side_files import require_own_files
from tests.audit.making import (
    adapter_tensors,
    codes,
    edit_json,
    errors,
    make_adapter,
    make_model,
    make_shards,
    tensors,
    write_json,
)  # fmt: skip
from tests.weights.deepspeed.test_partitions_property import write

INDEX = "model.safetensors.index.json"
HEAD = {"v_head.summary.weight": np.ones((1, 16), np.float32)}


def hide(root: Path) -> None:
    """Add what macOS, NFS, hub, editors and browsers leave beside the files."""
    for path in list(root.iterdir()):
        (root / f"._{path.name}").write_bytes(b"\0\5\26\7\0\2\0\0Mac OS X")
        (root / f"{path.name}:Zone.Identifier").write_text("[ZoneTransfer]")
    for name in (".DS_Store", ".nfs0001", "model.safetensors.lock"):
        (root / name).write_bytes(b"")
    (root / ".#config.json").symlink_to("me@host.1")
    (root / ".cache").mkdir()
    (root / ".cache/model.safetensors.metadata").write_text("1")


def table(root: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((root / INDEX).read_text())["weight_map"]
    return weight_map


class TestClean:
    @pytest.mark.parametrize("make", [make_model, make_shards, make_adapter])
    def test_no_errors(self, make: object, tmp_path: Path) -> None:
        assert callable(make)
        assert errors(codes(make(tmp_path / "it"))) == set()

    def test_a_hub_cache_of_links_to_files(self, tmp_path: Path) -> None:
        repository = tmp_path / "models--somebody--something"
        blobs = make_model(repository / "blobs")
        snapshot = repository / "snapshots" / "0123abcd"
        snapshot.mkdir(parents=True)
        for path in blobs.iterdir():
            (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
        assert errors(codes(snapshot)) == set()
        assert "LINK_OUTSIDE" not in codes(snapshot)

    def test_links_inside_the_folder(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        (root / "config.json").rename(root / "the-config.json")
        (root / "config.json").symlink_to("the-config.json")
        assert errors(codes(root)) == set()


class TestIndex:
    def test_a_missing_file(self, tmp_path: Path) -> None:
        root = make_shards(tmp_path / "it")
        (root / "model-00002-of-00003.safetensors").unlink()
        assert codes(root)["INDEX_MISSING_FILE"] == "error"
        assert "TENSOR_MISSING" not in codes(root)  # reported once

    def test_a_tensor_in_no_file(self, tmp_path: Path) -> None:
        root = make_shards(tmp_path / "it")
        edit_json(
            root / INDEX, weight_map={**table(root), "model.mtp.weight": min(table(root).values())}
        )
        assert codes(root)["INDEX_MISSING_KEY"] == "error"

    def test_a_tensor_in_another_file(self, tmp_path: Path) -> None:
        root = make_shards(tmp_path / "it")
        moved = {**table(root), "lm_head.weight": table(root)["model.norm.weight"]}
        assert moved != table(root)
        edit_json(root / INDEX, weight_map=moved)
        assert codes(root)["INDEX_MISSING_KEY"] == "error"

    def test_a_tensor_that_the_index_does_not_name(self, tmp_path: Path) -> None:
        root = make_shards(tmp_path / "it")
        edit_json(
            root / INDEX, weight_map={k: v for k, v in table(root).items() if k != "lm_head.weight"}
        )
        assert codes(root)["KEY_NOT_IN_INDEX"] == "error"

    def test_a_tensor_in_two_files(self, tmp_path: Path) -> None:
        root = make_shards(tmp_path / "it")
        file = root / table(root)["model.norm.weight"]
        part = {name: tensors()[name] for name, at in table(root).items() if at == file.name}
        save_file({**part, "lm_head.weight": tensors()["lm_head.weight"]}, file)
        assert codes(root)["KEY_TWICE"] == "error"

    @pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
    def test_an_invalid_index(self, text: str, tmp_path: Path) -> None:
        root = make_shards(tmp_path / "it")
        (root / INDEX).write_text(text)
        assert codes(root)["INDEX_UNREADABLE"] == "error"

    @pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a\0b", ".."])
    def test_a_path_in_the_index_is_not_followed(self, name: str, tmp_path: Path) -> None:
        make_model(tmp_path / "other")
        root = make_shards(tmp_path / "it")
        edit_json(root / INDEX, weight_map={**table(root), "lm_head.weight": name})
        reported = codes(root)
        assert reported["INDEX_PATH"] == "error"
        assert "KEY_TWICE" not in reported

    @pytest.mark.parametrize(("size", "reported"), [(0, True), (None, False)])
    def test_total_size(self, size: int | None, reported: bool, tmp_path: Path) -> None:
        root = make_shards(tmp_path / "it")
        if size is not None:  # verl counts elements
            edit_json(root / INDEX, metadata={"total_size": 4000})
        assert ("INDEX_TOTAL_SIZE" in codes(root)) is reported
        if reported:
            repair(root, tmp_path / "new")
            assert "INDEX_TOTAL_SIZE" not in codes(tmp_path / "new")

    def test_shards_without_an_index(self, tmp_path: Path) -> None:
        root = make_shards(tmp_path / "it")
        (root / INDEX).unlink()
        assert errors(codes(root)) == {"INDEX_ABSENT"}
        (root / "model-00003-of-00003.safetensors").unlink()
        assert errors(codes(root)) >= {"INDEX_ABSENT", "SHARDS_INCOMPLETE"}

    def test_a_single_file_beside_an_index(self, tmp_path: Path) -> None:
        root = make_shards(tmp_path / "it")
        save_file(tensors(1), root / "model.safetensors")
        assert codes(root)["STALE_INDEX"] == "warning"


class TestStrays:
    """Patterns of vLLM 0.32, `default_loader._prepare_weights`."""

    @pytest.mark.parametrize("name", ["value_head.safetensors", "other.safetensors"])
    def test_beside_a_single_file(self, name: str, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        save_file(HEAD, root / name)
        assert codes(root)["STRAY_WEIGHT_FILE"] == "error"

    def test_beside_shards_with_an_index(self, tmp_path: Path) -> None:
        root = make_shards(tmp_path / "it")
        save_file(HEAD, root / "value_head.safetensors")
        assert codes(root)["STRAY_WEIGHT_FILE"] == "warning"

    def test_a_pickled_head_beside_a_pickled_model(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        (root / "model.safetensors").unlink()
        torch.save(
            {k: torch.from_numpy(v) for k, v in tensors().items()}, root / "pytorch_model.bin"
        )
        torch.save({"v_head.summary.weight": torch.ones(1, 16)}, root / "value_head.bin")
        assert codes(root)["STRAY_WEIGHT_FILE"] == "error"

    def test_a_trainers_own_pickles_are_not_strays(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.save({"step": 1}, root / name)
        assert "STRAY_WEIGHT_FILE" not in codes(root)

    @pytest.mark.parametrize("name", ["scheduler.bin", "sampler_1.bin", "pytorch_model_fsdp.bin"])
    def test_accelerates_states_are_not_strays(self, name: str, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        torch.save({"step": 1}, root / name)
        assert "STRAY_WEIGHT_FILE" not in codes(root)

    def test_what_no_loader_reads_is_no_fault(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        before = codes(root)
        hide(root)
        assert codes(root) == {**before, "HIDDEN_WEIGHT_FILE": "info"}
        require_own_files(root)  # of deliver
        assert read_checkpoint(root).tensors.keys() == tensors().keys()
        assert inspect_checkpoint(root).files["model.safetensors"]

    def test_vllm_reads_only_a_consolidated_file(self, tmp_path: Path) -> None:
        root = make_shards(tmp_path / "it")
        save_file(HEAD, root / "consolidated.safetensors")
        assert codes(root)["STRAY_WEIGHT_FILE"] == "error"

    def test_an_adapter_among_a_models_files(self, tmp_path: Path) -> None:
        root = make_adapter(make_model(tmp_path / "it"))
        report = audit(root)
        assert report.kind == "mixture"
        assert codes(root)["MIXTURE"] == "error"


class TestSets:
    def test_empty_safetensors_beside_a_good_bin(self, tmp_path: Path) -> None:
        """OpenRLHF's save under ZeRO-3, interrupted between its two halves (#651)."""
        root = make_adapter(tmp_path / "it", {k: v[:0, 0] for k, v in adapter_tensors().items()})
        good = {key: torch.from_numpy(value) for key, value in adapter_tensors().items()}
        torch.save(good, root / "adapter_model.bin")
        reported = codes(root)
        assert reported["TWO_WEIGHT_SETS"] == "warning"
        assert reported["EMPTY_TENSOR"] == "error"

    def test_a_configuration_without_weights(self, tmp_path: Path) -> None:
        for make in (make_model, make_adapter):
            root = make(tmp_path / make.__name__)
            for file in root.glob("*.safetensors"):
                file.unlink()
            assert codes(root)["WEIGHTS_MISSING"] == "error"

    def test_weights_without_a_configuration(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        (root / "config.json").unlink()
        assert codes(root)["CONFIG_MISSING"] == "error"


class TestFolder:
    def test_the_fix_names_the_newest_checkpoint_inside(self, tmp_path: Path) -> None:
        for step in (500, 1000):
            make_adapter(tmp_path / f"checkpoint-{step}")
        (finding,) = audit(tmp_path).findings
        assert finding.code == "NOTHING_HERE"
        assert finding.fix == f"python flows/audit.py source={tmp_path}/checkpoint-1000"

    def test_a_trainers_folder_names_its_newest_deepspeed_checkpoint(self, tmp_path: Path) -> None:
        for step in (500, 1000):
            write(
                tmp_path / f"checkpoint-{step}", [{"w": torch.ones(4)}], stage=3, world=2, align=1
            )
        (finding,) = audit(tmp_path).findings
        assert finding.code == "NOTHING_HERE"
        assert finding.found.endswith("in subfolders: checkpoint-1000, checkpoint-500")
        assert finding.fix == f"python flows/audit.py source={tmp_path}/checkpoint-1000"
        assert audit(tmp_path / "checkpoint-1000").ok

    def test_a_raw_state_dict(self, tmp_path: Path) -> None:
        torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
        assert codes(tmp_path)["FOREIGN_FORMAT"] == "error"

    @pytest.mark.parametrize(
        ("file", "command"),
        [
            ("actor/model_world_size_2_rank_0.pt", "verl.model_merger merge --backend fsdp"),
            ("pytorch_model_fsdp_0/__0_0.distcp", "accelerate merge-weights"),
            ("iter_1/mp_rank_00/model_optim_rng.pt", "Megatron-Bridge"),
            ("model.pt", "save_pretrained"),
        ],
    )
    def test_another_tools_format_names_the_command_that_converts_it(
        self, file: str, command: str, tmp_path: Path
    ) -> None:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"w": torch.ones(2)}, tmp_path / file)
        (finding,) = (
            finding for finding in audit(tmp_path).findings if finding.code == "FOREIGN_FORMAT"
        )
        assert command in finding.fix

    def test_verls_merged_model_with_an_adapter_beside(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        make_adapter(root / "lora_adapter")
        assert codes(root)["LORA_BESIDE_MODEL"] == "warning"

    @pytest.mark.parametrize(
        "name",
        [
            "config.json",
            "generation_config.json",
            "processor_config.json",
            "preprocessor_config.json",
            "chat_template.json",
        ],
    )
    def test_a_truncated_json_file(self, name: str, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        (root / name).write_text('{"eos_token_id": ')
        assert codes(root)["JSON_UNREADABLE"] == "error"

    def test_links_and_pipes(self, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        os.mkfifo(root / "tokenizer.json")
        (root / "again").symlink_to(root)
        (root / "lost.bin").symlink_to(tmp_path / "nowhere")
        findings = audit(root).findings
        assert sorted(f.file for f in findings if f.code == "ODD_ENTRY") == ["again", "lost.bin"]
        assert [f.file for f in findings if f.code == "SPECIAL_FILE"] == ["tokenizer.json"]

    @pytest.mark.parametrize("name", ["vocab.txt", "README.md", "generation_config.json"])
    def test_a_link_out_of_the_folder(self, name: str, tmp_path: Path) -> None:
        root = make_model(tmp_path / "it")
        (root / name).unlink(missing_ok=True)
        secret = tmp_path / "id_ed25519"
        secret.write_text('{"secret": 3}')
        (root / name).symlink_to(secret)
        (root / "environ").symlink_to("/proc/self/environ")
        findings = {f.file: f for f in audit(root).findings if f.code == "LINK_OUTSIDE"}
        assert set(findings) == {name, "environ"}
        assert str(secret) in findings[name].found
        assert "/proc/self/environ" in findings["environ"].found
        assert f"cp -rL {root}" in findings[name].fix

    def test_a_hub_cache_whose_blob_is_a_link(self, tmp_path: Path) -> None:
        repository = tmp_path / "models--somebody--something"
        snapshot = make_model(repository / "snapshots" / "0123abcd")
        (repository / "blobs").mkdir()
        (repository / "blobs" / "beef").symlink_to("/etc/hostname")
        (snapshot / "vocab.txt").symlink_to("../../blobs/beef")
        assert codes(snapshot)["LINK_OUTSIDE"] == "error"

    def test_nothing_is_written(self, tmp_path: Path) -> None:
        root = make_shards(tmp_path / "it")
        before = {path: path.stat() for path in root.rglob("*")}
        shutil.copystat(root, root)
        times = root.stat().st_mtime_ns
        audit(root, values=True)
        assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == {
            path: stat.st_mtime_ns for path, stat in before.items()
        }
        assert root.stat().st_mtime_ns == times


def test_a_relative_path_is_read_by_child_processes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "it")
    monkeypatch.chdir(tmp_path)
    opened = open_source(Path("it"), Path("it"))
    assert opened.base is not None
    assert opened.folder.root == opened.base.folder.root == tmp_path / "it"


def test_a_configuration_that_is_a_list(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", [])
    assert codes(tmp_path)["JSON_UNREADABLE"] == "error"
