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
from safetensors.torch import load_file, save_file

from tests.audit.making import edit_json
from tests.delivery.conftest import Done
from tests.delivery.making import differing
from tests.weights.making import state_of

Run = Callable[..., Done]
BASE = "merge.base=original"


def altered(adapter: Path, folder: Path, **changes: torch.Tensor | None) -> Path:
    """Copy an adapter with tensors replaced, added or (None) left out."""
    shutil.copytree(adapter, folder)
    state = {**state_of(adapter, "adapter_model"), **changes}
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


class TestAModelThatEqualsItsBase:
    """verl's merger leaves the base's weights beside `lora_adapter/` (verl #7285)."""

    def test_is_refused_where_the_base_is_known(
        self, here: Run, base: Path, adapter: Path, tmp_path: Path
    ) -> None:
        merged = Path(shutil.copytree(base, tmp_path / "merged"))
        shutil.copytree(adapter, merged / "lora_adapter")
        text = here(f"source={merged}", f"base={base}", code=2).output
        assert f"base={base}" in text
        assert str(merged / "lora_adapter") in text

    @pytest.mark.slow
    def test_is_told_that_nobody_compared_it_otherwise(
        self, here: Run, base: Path, other: Path, tmp_path: Path
    ) -> None:
        tuned = Path(shutil.copytree(base, tmp_path / "tuned"))
        tensors = load_file(tuned / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.01
        save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
        assert "not compared" in here(f"source={tuned}", "plan=true").output
        compared = here(f"source={tuned}", f"base={base}", "plan=true")
        assert "not compared" not in compared.output
        foreign = here(f"source={other}", f"base={base}", "plan=true", code=2)
        assert "WRONG_BASE" in foreign.output


class TestTheBase:
    def test_of_the_same_shape_is_another_model(
        self, here: Run, adapter: Path, shards: Path, base: Path, other: Path, place: Path
    ) -> None:
        """By its folder's name, or by the digest that our training recorded."""
        refused = here(f"source={adapter}", f"base={other}", code=2)
        assert "wrong base" in refused.output
        assert str(base) in refused.output
        refused = here(f"source={shards}", f"base={place / 'made-other'}", code=2)
        assert "wrong base" in refused.output
        override = (BASE, "check_base=false", "plan=true")
        assert "warning: " in here(f"source={adapter}", f"base={other}", *override).output

    def test_of_another_name_than_recorded(
        self, here: Run, adapter: Path, other: Path, tmp_path: Path
    ) -> None:
        source = Path(shutil.copytree(adapter, tmp_path / "renamed"))
        edit_json(source / "adapter_config.json", base_model_name_or_path="somebody/tiny-qwen")
        assert "somebody/tiny-qwen" in here(f"source={source}", f"base={other}", code=2).output
        assert "base=<folder of the base model>" in here(f"source={source}", code=2).output

    def test_with_a_link_to_a_secret(
        self, here: Run, adapter: Path, base: Path, tmp_path: Path
    ) -> None:
        source = Path(shutil.copytree(adapter, tmp_path / "adapter"))
        (source / "vocab.env").symlink_to("/proc/self/environ")
        assert "LINK_OUTSIDE vocab.env" in here(f"source={source}", f"base={base}", code=2).output
        linked = Path(shutil.copytree(base, tmp_path / "linked"))
        (linked / "vocab.txt").symlink_to("/etc/shadow")
        text = here(f"source={adapter}", f"base={linked}", code=2).output
        assert "vocab.txt: a link to /etc/shadow" in text

    @pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
    def test_of_a_billion_layers(
        self, here: Run, adapter: Path, base: Path, model_type: str, tmp_path: Path
    ) -> None:
        hostile = Path(shutil.copytree(base, tmp_path / "hostile"))
        edit_json(hostile / "config.json", model_type=model_type, num_hidden_layers=10**9)
        arguments = [f"source={adapter}", f"base={hostile}", BASE, "check_base=false"]
        assert "num_hidden_layers 1000000000" in here(*arguments, code=2).output


class TestTheSource:
    def test_of_an_unknown_kind(self, here: Run, tmp_path: Path) -> None:
        odd = tmp_path / "odd"
        odd.mkdir()
        (odd / "weights.gguf").touch()
        assert "FOREIGN_FORMAT" in here(f"source={odd}", code=2).output
        (odd / "weights.gguf").rename(odd / "notes.txt")
        assert "NOTHING_HERE" in here(f"source={odd}", code=2).output

    def test_with_several_faults_names_all_of_them(
        self, here: Run, adapter: Path, base: Path, tmp_path: Path
    ) -> None:
        prefix = "base_model.model.model.layers.0.self_attn"
        nan = f"{prefix}.v_proj.lora_B.weight"
        bad = state_of(adapter, "adapter_model")[nan].clone()
        bad[0, 0] = float("nan")
        source = altered(
            adapter, tmp_path / "wrong",
            **{
                f"{prefix}.q_proj.lora_A.weight": None,
                f"{prefix}.k_prj.lora_A.weight": torch.ones(4, 64, dtype=torch.bfloat16),
                f"{prefix}.o_proj.lora_B.weight": torch.ones(64, 5, dtype=torch.bfloat16),
                f"{prefix}.k_proj.lora_B.weight": torch.empty(0),
                nan: bad,
            },
        )  # fmt: skip
        edit_json(source / "adapter_config.json", lora_alpha=0)
        output = here(f"source={source}", f"base={base}", BASE, code=2).output
        for part in (
            "ADAPTER_HALF_PAIR", "ADAPTER_NO_MODULE", "k_prj", "ADAPTER_RANK", "o_proj",
            "NOT_FINITE", nan, "ADAPTER_ALPHA", "EMPTY_TENSOR",
        ):  # fmt: skip
            assert part in output

    def test_to_be_quantised_and_not_measured(self, here: Run, base: Path) -> None:
        arguments = ("convert.quantize=w4a16", "convert.group_size=48")
        text = here(f"source={base}", *arguments, code=2).output
        assert "smoke.engine=vllm" in text
        assert "w4a16 in groups of 48" in text

    def test_with_a_quantiser_left_in_its_configuration(
        self, here: Run, base: Path, tmp_path: Path
    ) -> None:
        source = Path(shutil.copytree(base, tmp_path / "quantised"))
        edit_json(source / "config.json", quantization_config={"quant_method": "gptq"})
        assert "QUANT_CONFIG_STALE config.json" in here(f"source={source}", code=2).output

    def test_with_an_index_that_leads_out_of_the_folder(
        self, here: Run, base: Path, tmp_path: Path
    ) -> None:
        source = Path(shutil.copytree(base, tmp_path / "source"))
        index = source / "model.safetensors.index.json"
        names = dict.fromkeys(state_of(base), "../elsewhere.safetensors")
        index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
        (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
        assert f"INDEX_PATH {index.name}" in here(f"source={source}", code=2).output


class TestOut:
    def test_with_other_files(self, here: Run, base: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "thesis.txt").write_text("42")
        for more in ((), ("overwrite=true",)):
            assert str(out) in here(f"source={base}", *more, code=2).output
        assert [path.name for path in out.iterdir()] == ["thesis.txt"]

    def test_in_an_input(self, here: Run, base: Path) -> None:
        here(f"source={base}", f"out={base / 'served'}", code=2)
        assert not (base / "served").exists()

    def test_another_delivery_is_replaced_with_overwrite(
        self, here: Run, base: Path, other: Path, tmp_path: Path
    ) -> None:
        here(f"source={base}")
        assert "overwrite=true" in here(f"source={other}", code=2).output
        assert differing(state_of(tmp_path / "out"), state_of(base)) == []
        here(f"source={other}", "overwrite=true")
        assert differing(state_of(tmp_path / "out"), state_of(other)) == []


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["out=x", "convert.dtyp=float16"], ["convert.dtyp", "-> convert.dtype=float16"]),
        (["out="], ["out"]),
        (["out=x", "convert.dtype=int3"], ["bfloat16, float16, float32"]),
        (
            ["out=x", "timeouts.merge_s=0", "smoke.timeout_s=-1", "timeouts.reference_s=nan"],
            ["timeouts.merge_s: 0", "timeouts.reference_s: nan", "smoke.timeout_s: -1"],
        ),
    ],
)
def test_mistyped_settings_are_named(
    here: Run, base: Path, words: list[str], parts: list[str]
) -> None:
    output = here(f"source={base}", *words, code=2).output
    assert all(part in output for part in parts), output


ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e\x9b31m"


@pytest.mark.parametrize("where", ["file", "token", "tensor", "config", "adapter", "base"])
def test_escape_sequences_of_a_checkpoint_do_not_reach_the_terminal(
    here: Run, adapter: Path, base: Path, tmp_path: Path, where: str
) -> None:
    model = Path(shutil.copytree(base, tmp_path / "model"))
    lora = Path(shutil.copytree(adapter, tmp_path / "lora"))
    if where == "file":
        (model / f"pytorch_model{ESCAPES}.bin").write_bytes(b"x")
    elif where == "token":
        edit_json(model / "tokenizer_config.json", eos_token=ESCAPES, pad_token=ESCAPES)
    elif where == "tensor":
        save_file({**state_of(model), ESCAPES: torch.ones(2)}, model / "model.safetensors")
    elif where == "config":
        edit_json(model / "config.json", model_type=ESCAPES, architectures=[ESCAPES])
    elif where == "adapter":
        edit_json(lora / "adapter_config.json", target_modules=[ESCAPES], peft_type=ESCAPES)
    else:
        edit_json(lora / "adapter_config.json", base_model_name_or_path=f"somebody/{ESCAPES}")
    source = [f"source={lora}", f"base={model}"] if where in ("adapter", "base") else [
        f"source={model}",
    ]  # fmt: skip
    done = here(*source, "plan=true", code=0 if where == "file" else 2)
    assert done.output
    assert {char for char in done.output if not char.isprintable()} <= {"\n", "\t"}


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
def test_code_of_a_model_never_runs(
    here: Run, base: Path, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
