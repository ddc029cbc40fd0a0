"""The real command on every kind of SOURCE; the result is compared with peft's own merge."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.pipeline.artifact import open_artifact, verify
from tests.delivery.conftest import Done
from tests.weights.making import (
    Spread,
    live_fingerprint,
    save_tokenizer,
    small_config,
    state_of,
    trained_model,
)

Run = Callable[..., Done]


def merged_by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Return peft's merge in fp32, cast to bf16."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return {name: tensor.to(torch.bfloat16) for name, tensor in merged.state_dict().items()}


def same(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, wanted[name]) for name, tensor in actual.items())


def loads(folder: Path) -> Any:
    """Load the folder in transformers, and check keys and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert AutoTokenizer.from_pretrained(folder, local_files_only=True).chat_template
    return model


def is_served(out: Path) -> None:
    """Check the artifact, and that no hidden file is left beside it."""
    assert verify(open_artifact(out, "served")) == []
    assert "## Proof" in (out / "README.md").read_text()
    assert not [path.name for path in out.parent.iterdir() if path.name.startswith(".")]


class TestAnAdapter:
    def test_is_merged_as_peft_merges_it_and_a_second_run_does_nothing(
        self, deliver: Run, adapter: Path, base: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        arguments = (f"source={adapter}", f"base={base}", "merge.base=original", f"out={out}")
        done = deliver(*arguments)
        assert done.code == 0, done.output
        assert done.stages == ["audit", "merge", "convert"]
        assert "a PEFT adapter of rank 4 (adapter_model.safetensors)" in done.output
        assert "fold 14 tensors" in done.output
        assert done.summary["served"] == str(out)
        is_served(out)
        actual = state_of(out)
        assert set(actual) == set(state_of(base))
        assert same(actual, merged_by_peft(base, adapter))
        loads(out)
        store = tmp_path / "runs" / "artifacts" / "served"
        (published,) = (path for path in store.iterdir() if path.name[0] != ".")
        made, stored = out / "model.safetensors", published / "model.safetensors"
        assert made.read_bytes() == stored.read_bytes()
        assert not os.path.samefile(made, stored)
        assert not (tmp_path / "runs" / "prefect").exists()
        assert not (tmp_path / "runs" / "mlflow").exists()
        before = (out / "manifest.json").stat()
        again = deliver(*arguments)
        assert again.code == 0, again.output
        assert all(stage["reused"] for stage in again.summary["stages"])
        assert (out / "manifest.json").stat() == before

    def test_in_a_bin_file_gives_the_same_bytes(
        self, either: Run, adapter: Path, base: Path, tmp_path: Path
    ) -> None:
        pickled = tmp_path / "pickled"
        pickled.mkdir()
        torch.save(state_of(adapter, "adapter_model"), pickled / "adapter_model.bin")
        shutil.copy(adapter / "adapter_config.json", pickled)
        done = either(
            f"source={pickled}", f"base={base}", "merge.base=original", f"out={tmp_path / 'out'}"
        )
        assert done.code == 0, done.output
        assert "(adapter_model.bin)" in done.output
        assert same(state_of(tmp_path / "out"), merged_by_peft(base, adapter))

    def test_finds_the_base_it_names_and_goes_to_fp16_in_small_files(
        self, either: Run, adapter: Path, base: Path, tmp_path: Path
    ) -> None:
        done = either(
            f"source={adapter}", f"out={tmp_path / 'out'}",
            "convert.dtype=float16", "convert.max_shard_size=60KB", "merge.base=original",
        )  # fmt: skip
        assert done.code == 0, done.output
        assert f"base: {base}" in done.output
        assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["dtype"] == "float16"
        assert loads(tmp_path / "out").dtype == torch.float16


def test_a_full_model_is_taken_as_it_is(either: Run, base: Path, tmp_path: Path) -> None:
    done = either(f"source={base}", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    assert done.stages == ["audit", "convert"]
    assert same(state_of(tmp_path / "out"), state_of(base))
    loads(tmp_path / "out")
    again = either(f"source={tmp_path / 'out'}", f"out={tmp_path / 'second'}")
    assert again.code == 0, again.output
    assert "Plumbline artifact of kind served" in again.output
    first, second = (tmp_path / name / "model.safetensors" for name in ("out", "second"))
    content = second.read_bytes()
    assert first.read_bytes() == content
    with first.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([content[-1] ^ 1]))
    assert second.read_bytes() == content, "a write to the source changes nothing that is served"
    is_served(tmp_path / "second")
    runs = tmp_path / "runs" / "artifacts" / "served"
    for stored in runs.glob("*/model.safetensors"):
        assert stored.read_bytes() == content


@pytest.mark.parametrize("layout", ["adapter", "full"])
def test_shards_of_our_ranks(
    either: Run, request: pytest.FixtureRequest, layout: str, ours: Path, tmp_path: Path
) -> None:
    source = request.getfixturevalue("shards" if layout == "adapter" else "full_shards")
    done = either(f"source={source}", f"base={ours}", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    assert done.stages == [
        "audit",
        "gather",
        *(["merge"] if layout == "adapter" else []),
        "convert",
    ]
    model = loads(tmp_path / "out")
    live = trained_model(ours, Spread(full=layout == "full"), 1)
    if layout == "full":
        assert same(state_of(tmp_path / "out"), live.state_dict())
    else:
        live = live.merge_and_unload()
    before, after = live_fingerprint(live, None), live_fingerprint(model.to(torch.bfloat16), None)
    assert (before.top1 == after.top1).mean() > 0.95


def test_plan_only_writes_nothing(either: Run, adapter: Path, base: Path, tmp_path: Path) -> None:
    done = either(
        f"source={adapter}",
        f"base={base}",
        "merge.base=original",
        f"out={tmp_path / 'out'}",
        "plan=true",
    )
    assert done.code == 0, done.output
    for part in ("source:", "merge       to run", "fold 14 tensors", "served: 26 tensors"):
        assert part in done.output
    assert {path.name for path in tmp_path.iterdir()} <= {"elsewhere"}


def test_a_value_head_is_kept_apart(either: Run, base: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = Path(shutil.copytree(base, tmp_path / "ppo"))
    head = {
        "v_head.summary.weight": torch.randn(1, 64).bfloat16(),
        "v_head.summary.bias": torch.randn(1).bfloat16(),
    }
    save_file({**state_of(base), **head}, source / "model.safetensors", metadata={"format": "pt"})
    done = either(f"source={source}", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    assert done.stages == ["audit", "convert", "value_head"]
    assert same(state_of(tmp_path / "out"), state_of(base))
    loads(tmp_path / "out")
    kept = Path(done.summary["stages"][2]["artifact"]) / "value_head.safetensors"
    assert same(load_file(kept), head)


@pytest.mark.slow
def test_a_loaded_engine_agrees_with_base_and_adapter_in_peft(
    deliver: Run, adapter: Path, base: Path, tmp_path: Path
) -> None:
    done = deliver(
        f"source={adapter}", f"base={base}", "merge.base=original",
        f"out={tmp_path / 'out'}", "smoke.probes=8",
        engine="transformers",
    )  # fmt: skip
    assert done.code == 0, done.output
    assert done.stages == ["audit", "reference", "merge", "convert", "smoke_eval"]
    drifts = [stage["drift"]["mean_kl"] for stage in done.summary["stages"][2:]]
    assert all(0 <= drift < 1e-3 for drift in drifts)
    assert done.summary["mlflow_run_id"]
    assert (tmp_path / "runs" / "prefect" / "prefect.db").is_file()


def servable(folder: Path) -> Path:
    """A model with heads of 32, as vLLM needs on a CPU, and with distinct probabilities."""
    from transformers import AutoModelForCausalLM

    config = small_config("qwen")
    config.hidden_size = 128
    config.max_position_embeddings = 128
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 0.5 if "embed" in name else 0.08
            parameter.add_(torch.randn_like(parameter, dtype=torch.float32).to(parameter) * size)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.mark.slow
def test_vllm_serves_what_peft_computes(deliver: Run, tmp_path: Path) -> None:
    base = servable(tmp_path / "base")
    trained_model(base, Spread(), 1).save_pretrained(tmp_path / "adapter")
    done = deliver(
        f"source={tmp_path / 'adapter'}", f"base={base}", "merge.base=original",
        f"out={tmp_path / 'out'}",
        engine="vllm",
    )  # fmt: skip
    assert done.code == 0, done.output
    assert done.stages == ["audit", "reference", "merge", "convert", "smoke_eval"]
    assert done.summary["stages"][-1]["drift"]["mean_kl"] < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_serves_a_quantised_version_and_the_16_bits_stay(deliver: Run, tmp_path: Path) -> None:
    source = servable(tmp_path / "source")
    arguments = (f"source={source}", f"out={tmp_path / 'out'}", "convert.quantize=w8a8")
    planned = deliver(*arguments, "plan=true", engine="vllm")
    assert "quantize: linear layers to w8a8, in OUT; the model in 16 bits is kept" in planned.output
    assert "  quantized: w8a8, " in planned.output
    done = deliver(*arguments, engine="vllm", timeout=800)
    assert done.code == 0, done.output
    own = ["audit", "reference", "convert", "smoke_eval", "quantize", "smoke_quantized"]
    assert done.stages == own
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
    before, after = (done.summary["stages"][at]["drift"]["mean_kl"] for at in (3, 5))
    assert before < after < 1e-2
    whole = Path(done.summary["stages"][2]["artifact"]) / "config.json"
    assert "quantization_config" not in json.loads(whole.read_text())
