"""Checkpoints that cannot be delivered: one message, exit status 2, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.delivery.conftest import Done
from tests.weights.making import state_of

Run = Callable[..., Done]


@pytest.fixture
def refused(here: Run, tmp_path: Path) -> Callable[..., str]:
    """Run deliver, check that it refused and wrote nothing, and return the message."""

    def run(*arguments: str, code: int = 2, left: tuple[str, ...] = ()) -> str:
        before = {path.name for path in tmp_path.iterdir()}
        done = here(*arguments)
        assert done.code == code, done.output
        assert {path.name for path in tmp_path.iterdir()} == before | set(left)
        assert "Traceback" not in done.output
        return done.output

    return run


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
        self, refused: Callable[..., str], base: Path, adapter: Path, tmp_path: Path
    ) -> None:
        merged = tmp_path / "merged"
        shutil.copytree(base, merged)
        shutil.copytree(adapter, merged / "lora_adapter")
        text = refused(f"source={merged}", f"base={base}", f"out={tmp_path / 'out'}")
        assert f"every tensor is that of base={base}, bit for bit" in text
        assert f"an adapter lies in {merged / 'lora_adapter'}" in text
        assert "check_base=false" in text

    def test_is_told_that_nobody_compared_it_otherwise(
        self, here: Run, base: Path, other: Path, tmp_path: Path
    ) -> None:
        out = f"out={tmp_path / 'out'}"
        tuned = Path(shutil.copytree(base, tmp_path / "tuned"))
        tensors = load_file(tuned / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.01
        save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
        alone = here(f"source={tuned}", out, "plan=true")
        assert (alone.code, "the base was not compared" in alone.output) == (0, True)
        compared = here(f"source={tuned}", f"base={base}", out, "plan=true")
        assert (compared.code, "not compared" in compared.output) == (0, False)
        foreign = here(f"source={other}", f"base={base}", out, "plan=true")
        assert (foreign.code, "WRONG_BASE" in foreign.output) == (2, True), foreign.output


class TestTheBase:
    def test_another_model_of_the_same_shape(
        self, refused: Callable[..., str], adapter: Path, base: Path, other: Path, tmp_path: Path
    ) -> None:
        message = refused(f"source={adapter}", f"base={other}", f"out={tmp_path / 'out'}")
        assert f"wrong base: trained on {base}" in message
        assert "check_base=false" in message

    def test_base_with_another_digest_than_recorded(
        self, refused: Callable[..., str], shards: Path, place: Path, tmp_path: Path
    ) -> None:
        other = place / "made-other"
        if not other.exists():
            from tests.weights.making import make_base

            make_base(other, "qwen", seed=3)
        message = refused(f"source={shards}", f"base={other}", f"out={tmp_path / 'out'}")
        assert "wrong base: trained on the base" in message

    def test_base_with_another_name_than_recorded(
        self, refused: Callable[..., str], adapter: Path, other: Path, tmp_path: Path
    ) -> None:
        source = Path(shutil.copytree(adapter, tmp_path / "renamed"))
        config = json.loads((source / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "somebody/tiny-qwen"
        (source / "adapter_config.json").write_text(json.dumps(config))
        message = refused(f"source={source}", f"base={other}", f"out={tmp_path / 'out'}")
        assert "trained on somebody/tiny-qwen" in message
        message = refused(f"source={source}", f"out={tmp_path / 'out'}")
        assert "its base is needed" in message
        assert "base=<folder of the base model>" in message

    def test_with_a_link_to_a_secret(
        self, refused: Callable[..., str], adapter: Path, base: Path, tmp_path: Path
    ) -> None:
        source = Path(shutil.copytree(adapter, tmp_path / "adapter"))
        (source / "vocab.env").symlink_to("/proc/self/environ")
        message = refused(f"source={source}", f"base={base}", f"out={tmp_path / 'out'}")
        assert "LINK_OUTSIDE vocab.env: a link to /proc/self/environ" in message
        assert "cp -rL" in message
        linked = Path(shutil.copytree(base, tmp_path / "linked"))
        (linked / "vocab.txt").symlink_to("/etc/shadow")
        message = refused(f"source={adapter}", f"base={linked}", f"out={tmp_path / 'out'}")
        assert "vocab.txt: a link to /etc/shadow" in message

    @pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
    def test_that_asks_for_a_billion_layers(
        self, refused: Callable[..., str], adapter: Path, base: Path, model_type: str,
        tmp_path: Path,
    ) -> None:  # fmt: skip
        hostile = Path(shutil.copytree(base, tmp_path / "hostile"))
        config = json.loads((hostile / "config.json").read_text()) | {"model_type": model_type}
        (hostile / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
        told = refused(
            f"source={adapter}",
            f"base={hostile}",
            "merge.base=original",
            f"out={tmp_path / 'out'}",
            "check_base=false",
        )
        assert "num_hidden_layers 1000000000, models have up to 2000" in told

    def test_the_override_takes_it(
        self, here: Run, adapter: Path, other: Path, tmp_path: Path
    ) -> None:
        done = here(
            f"source={adapter}", f"base={other}", "merge.base=original",
            f"out={tmp_path / 'out'}", "check_base=false",
            "plan=true",
        )  # fmt: skip
        assert done.code == 0, done.output
        assert "warning: trained on" in done.output


class TestTheSource:
    def test_unknown_kind(self, refused: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "odd").mkdir()
        (tmp_path / "odd" / "weights.gguf").touch()
        message = refused(f"source={tmp_path / 'odd'}", f"out={tmp_path / 'out'}")
        assert "a GGUF model: FOREIGN_FORMAT" in message
        assert "expected config.json and safetensors" in message
        (tmp_path / "odd" / "weights.gguf").rename(tmp_path / "odd" / "notes.txt")
        message = refused(f"source={tmp_path / 'odd'}", f"out={tmp_path / 'out'}")
        assert "nothing known: NOTHING_HERE" in message

    def test_with_wrong_keys_names_all_of_them(
        self, refused: Callable[..., str], adapter: Path, base: Path, tmp_path: Path
    ) -> None:
        prefix = "base_model.model.model.layers.0.self_attn"
        source = altered(
            adapter, tmp_path / "wrong",
            **{
                f"{prefix}.q_proj.lora_A.weight": None,
                f"{prefix}.k_prj.lora_A.weight": torch.ones(4, 64, dtype=torch.bfloat16),
                f"{prefix}.o_proj.lora_B.weight": torch.ones(64, 5, dtype=torch.bfloat16),
            },
        )  # fmt: skip
        output = refused(
            f"source={source}", f"base={base}", "merge.base=original", f"out={tmp_path / 'out'}"
        )
        for part in ("ADAPTER_HALF_PAIR", "ADAPTER_NO_MODULE", "k_prj", "ADAPTER_RANK", "o_proj"):
            assert part in output

    def test_with_numbers_that_are_none(
        self, refused: Callable[..., str], adapter: Path, base: Path, tmp_path: Path
    ) -> None:
        name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
        bad = state_of(adapter, "adapter_model")[name].clone()
        bad[0, 0] = float("nan")
        source = altered(adapter, tmp_path / "nan", **{name: bad})
        output = refused(
            f"source={source}", f"base={base}", "merge.base=original", f"out={tmp_path / 'out'}"
        )
        assert "NOT_FINITE" in output
        assert name in output

    def test_to_be_quantised_and_not_measured(
        self, refused: Callable[..., str], base: Path, tmp_path: Path
    ) -> None:
        arguments = ("convert.quantize=w4a16", "convert.group_size=48")
        text = refused(f"source={base}", f"out={tmp_path / 'out'}", *arguments)
        assert "w4a16 without a smoke test" in text
        assert "smoke.engine=vllm" in text
        assert "w4a16 in groups of 48" in text

    def test_stored_quantised(
        self, refused: Callable[..., str], base: Path, tmp_path: Path
    ) -> None:
        source = Path(shutil.copytree(base, tmp_path / "quantised"))
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "gptq"}
        (source / "config.json").write_text(json.dumps(config))
        output = refused(f"source={source}", f"out={tmp_path / 'out'}")
        assert "QUANT_CONFIG_STALE config.json" in output


class TestOut:
    def test_that_holds_something_else(
        self, refused: Callable[..., str], base: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "thesis.txt").write_text("42")
        for more in ((), ("overwrite=true",)):
            message = refused(f"source={base}", f"out={out}", *more)
            assert "is not empty, and no delivery made it" in message
        assert [path.name for path in out.iterdir()] == ["thesis.txt"]

    def test_that_is_an_input(
        self, refused: Callable[..., str], base: Path, tmp_path: Path
    ) -> None:
        message = refused(f"source={base}", f"out={base / 'served'}")
        assert "lies in the input" in message

    def test_another_delivery_is_replaced_with_overwrite(
        self, here: Run, base: Path, other: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        assert here(f"source={base}", f"out={out}").code == 0
        done = here(f"source={other}", f"out={out}")
        assert done.code == 2, done.output
        assert "overwrite=true replaces it" in done.output
        done = here(f"source={other}", f"out={out}", "overwrite=true")
        assert done.code == 0, done.output
        actual, wanted = state_of(out), state_of(other)
        assert all(torch.equal(actual[name], wanted[name]) for name in wanted)


class TestTheCommandLine:
    def test_misspelt_keys_are_told(self, refused: Callable[..., str], base: Path) -> None:
        message = refused(f"source={base}", "out=x", "convert.dtyp=float16")
        assert "convert.dtyp is not a setting" in message
        assert "-> convert.dtype=float16" in message

    def test_numbers_that_are_no_limits_are_told_at_once(
        self, refused: Callable[..., str], base: Path, tmp_path: Path
    ) -> None:
        text = refused(
            f"source={base}", f"out={tmp_path / 'out'}", "timeouts.merge_s=0", "smoke.timeout_s=-1",
            "timeouts.reference_s=nan",
        )  # fmt: skip
        assert "timeouts.merge_s: 0; more than 0 -> timeouts.merge_s=3600" in text
        assert "timeouts.reference_s: nan; more than 0 -> timeouts.reference_s=3600" in text
        assert "smoke.timeout_s: -1; more than 0 -> smoke.timeout_s=900" in text

    def test_a_missing_value_is_told(self, refused: Callable[..., str], base: Path) -> None:
        assert "out has to be given" in refused(f"source={base}")

    def test_a_value_of_no_kind_is_told(self, refused: Callable[..., str], base: Path) -> None:
        message = refused(f"source={base}", "out=x", "convert.dtype=int3")
        assert "bfloat16, float16, float32" in message


ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e\x9b31m"


@pytest.mark.parametrize("where", ["file", "token", "tensor", "config", "adapter", "base"])
def test_escape_sequences_of_a_checkpoint_do_not_reach_the_terminal(
    here: Run, adapter: Path, base: Path, tmp_path: Path, where: str
) -> None:
    def edit(path: Path, **changes: object) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    model = Path(shutil.copytree(base, tmp_path / "model"))
    lora = Path(shutil.copytree(adapter, tmp_path / "lora"))
    if where == "file":
        (model / f"pytorch_model{ESCAPES}.bin").write_bytes(b"x")
    elif where == "token":
        edit(model / "tokenizer_config.json", eos_token=ESCAPES, pad_token=ESCAPES)
    elif where == "tensor":
        save_file({**state_of(model), ESCAPES: torch.ones(2)}, model / "model.safetensors")
    elif where == "config":
        edit(model / "config.json", model_type=ESCAPES, architectures=[ESCAPES])
    elif where == "adapter":
        edit(lora / "adapter_config.json", target_modules=[ESCAPES], peft_type=ESCAPES)
    else:
        edit(lora / "adapter_config.json", base_model_name_or_path=f"somebody/{ESCAPES}")
    source = (f"source={lora}", f"base={model}") if where in ("adapter", "base") else (
        f"source={model}",
    )  # fmt: skip
    done = here(*source, "plan=true", f"out={tmp_path / 'out'}")
    assert done.code in (0, 2), done.output
    assert "Traceback" not in done.output
    assert done.output
    assert {char for char in done.output if not char.isprintable()} <= {"\n", "\t"}
    assert "\u202e" not in done.output
