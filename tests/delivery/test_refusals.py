"""Checkpoints that cannot be delivered: exit status 2, the thing is named, nothing is written."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.audit.making import edit_json
from tests.delivery.conftest import Done
from tests.weights.making import state_of

Run = Callable[..., Done]
BASE = "merge.base=original"


def test_a_model_that_equals_its_base_is_refused(here, base, adapter, tmp_path) -> None:
    """verl's merger leaves the base's weights beside `lora_adapter/` (verl #7285)."""
    merged = Path(shutil.copytree(base, tmp_path / "merged"))
    shutil.copytree(adapter, merged / "lora_adapter")
    text = here(f"source={merged}", f"base={base}", code=2).output
    assert f"base={base}" in text
    assert str(merged / "lora_adapter") in text


def test_a_base_of_the_same_shape_that_is_another_model_is_refused(
    here: Run, adapter: Path, shards: Path, base: Path, other: Path, place: Path
) -> None:
    """By its folder's name, or by the digest that our training recorded."""
    refused = here(f"source={adapter}", f"base={other}", code=2)
    assert "wrong base" in refused.output
    assert str(base) in refused.output
    refused = here(f"source={shards}", f"base={place / 'made-other'}", code=2)
    assert "wrong base" in refused.output
    override = (BASE, "check_base=false", "plan=true")
    assert "warning: " in here(f"source={adapter}", f"base={other}", *override).output


def test_a_base_of_another_name_than_recorded_is_refused(here, adapter, other, tmp_path) -> None:
    source = Path(shutil.copytree(adapter, tmp_path / "renamed"))
    edit_json(source / "adapter_config.json", base_model_name_or_path="somebody/tiny-qwen")
    assert "somebody/tiny-qwen" in here(f"source={source}", f"base={other}", code=2).output
    assert "base=<folder of the base model>" in here(f"source={source}", code=2).output


def test_a_link_to_a_secret_is_refused(here, adapter, base, tmp_path) -> None:
    source = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    (source / "vocab.env").symlink_to("/proc/self/environ")
    assert "UNSAFE_FILE vocab.env" in here(f"source={source}", f"base={base}", code=2).output
    linked = Path(shutil.copytree(base, tmp_path / "linked"))
    (linked / "vocab.txt").symlink_to("/etc/shadow")
    text = here(f"source={adapter}", f"base={linked}", code=2).output
    assert all(thing in text for thing in ("vocab.txt", "/etc/shadow"))


def test_a_base_of_a_billion_layers_is_refused(here, adapter, base, tmp_path) -> None:
    hostile = Path(shutil.copytree(base, tmp_path / "hostile"))
    edit_json(hostile / "config.json", model_type="qwen3_moe", num_hidden_layers=10**9)
    arguments = [f"source={adapter}", f"base={hostile}", BASE, "check_base=false"]
    assert "num_hidden_layers 1000000000" in here(*arguments, code=2).output


def test_an_out_with_other_files_is_left_alone(here: Run, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("42")
    for more in ((), ("overwrite=true",)):
        assert str(out) in here(f"source={base}", *more, code=2).output
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_an_out_within_an_input_is_refused(here: Run, base: Path) -> None:
    here(f"source={base}", f"out={base / 'served'}", code=2)
    assert not (base / "served").exists()


ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e\x9b31m"


def test_escape_sequences_of_a_checkpoint_do_not_reach_the_terminal(
    here: Run, adapter: Path, base: Path, tmp_path: Path
) -> None:
    changes = {
        "token": ("tokenizer_config.json", {"eos_token": ESCAPES, "pad_token": ESCAPES}),
        "config": ("config.json", {"model_type": ESCAPES, "architectures": [ESCAPES]}),
        "adapter": ("adapter_config.json", {"target_modules": [ESCAPES], "peft_type": ESCAPES}),
        "base": ("adapter_config.json", {"base_model_name_or_path": f"somebody/{ESCAPES}"}),
        "tensor": ("", {}),
        "file": ("", {}),
    }
    for where, (file, fields) in changes.items():
        folder = adapter if where in ("adapter", "base") else base
        source = Path(shutil.copytree(folder, tmp_path / where))
        if fields:
            edit_json(source / file, **fields)
        elif where == "tensor":
            save_file({**state_of(base), ESCAPES: torch.ones(2)}, source / "model.safetensors")
        else:
            (source / f"pytorch_model{ESCAPES}.bin").write_bytes(b"\0")
        words = [f"source={source}", *([f"base={base}"] if folder is adapter else []), "plan=true"]
        done = here(*words, code=0 if where == "file" else 2)
        assert done.output
        assert {char for char in done.output if not char.isprintable()} <= {"\n", "\t"}, where


CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, LlamaForCausalLM
class OwnConfig(PreTrainedConfig):
    model_type = "own"
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
class OwnModel(LlamaForCausalLM):
    pass
"""


@pytest.mark.parametrize("known", [False, True])
def test_code_of_a_model_never_runs(here, base, known, tmp_path, monkeypatch) -> None:
    """Even for a user who answers every question with yes, in the folder of the model."""
    source = Path(shutil.copytree(base, tmp_path / "source"))
    (source / "own.py").write_text(CODE.format(marker=str(source / "ran")))
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_json(source / "config.json", auto_map=classes, **({} if known else {"model_type": "own"}))
    edit_json(source / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.OwnToken"]})
    monkeypatch.chdir(source)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    done = here(f"source={source}", code=0 if known else 2)
    assert not (source / "ran").exists()
    assert "y/N" not in done.output
    if known:
        assert not list((tmp_path / "out").glob("*.py"))
        for name in ("config.json", "tokenizer_config.json"):
            assert "auto_map" not in json.loads((tmp_path / "out" / name).read_text())
    else:
        assert "auto_map" in done.output
