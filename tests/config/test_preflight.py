"""Findings of the checks of a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.cli.config import compose_config
from tasks.config.checks import adapter, findings, machine, preflight, ranges
from tasks.config.checks.quantizing import quantizing
from tasks.core.errors import ConfigError
from tasks.core.finding import Finding
from tasks.core.machine import left_in_container

SIZES = st.integers(1, 64)


def divides(size: int, micro: int, nproc: int, nodes: int, sharing: int = 1) -> list[Finding]:
    sizes = {"global_batch_size": size, "micro_batch_size": micro, "sequence_parallel": sharing}
    return ranges.divides({**sizes, "nproc": nproc, "nodes": nodes})


@given(SIZES, SIZES, SIZES, st.integers(1, 4096))
def test_batches_divide_or_the_offered_sizes_do(m: int, n: int, k: int, size: int) -> None:
    problems = divides(size, m, n, k)
    assert bool(problems) == (size % (m * n * k) != 0)
    for finding in problems:
        for offer in finding.override.split(" or "):
            offered = int(offer.removeprefix("train.global_batch_size="))
            assert divides(offered, m, n, k) == []
            assert abs(offered - size) < m * n * k


@pytest.mark.parametrize("size", [0, -64])
def test_a_batch_of_nothing_is_refused(size: int) -> None:
    (finding,) = divides(size, 32, 2, 1)
    assert finding.override == "train.global_batch_size=64"


def test_ranks_that_share_rows_count_once() -> None:
    assert divides(4, 4, 2, 1, sharing=2) == []
    (finding,) = divides(6, 2, 4, 2, sharing=2)
    assert "a multiple of 2 x 4 x 2 / 2 (micro x nproc x nodes / sequence_parallel) = 8" in str(
        finding
    )


def test_qlora_with_zero3() -> None:
    (finding,) = adapter.qlora_with_zero3("qlora", 3)
    assert finding.override == "zero=zero2 or peft=lora"
    assert "QLoRA with ZeRO-3" in finding.found
    assert adapter.qlora_with_zero3("qlora", 2) == adapter.qlora_with_zero3("lora", 3) == []


@pytest.mark.parametrize(("version", "refused"), [("0.19.2", 1), ("0.19.3", 0), ("0.19.10", 0)])
def test_lora_with_zero3_and_deepspeed(version: str, refused: int) -> None:
    problems = adapter.lora_with_zero3("lora", 3, version)
    assert [f.allowed for f in problems] == ["needs DeepSpeed >= 0.19.3"] * refused


@pytest.mark.parametrize(("version", "refused"), [("2.3.1+cpu", 1), ("2.4.0", 0), ("2.13.0", 0)])
def test_checkpointing_and_torch(version: str, refused: int) -> None:
    problems = machine.checkpointing(True, version)
    assert [f.found for f in problems] == [f"gradient checkpointing on torch {version}"] * refused
    assert machine.checkpointing(False, version) == []


def test_offload() -> None:
    assert [f.override for f in ranges.offload(0, "cpu", "cpu")] == [
        "zero=zero2",
        "zero=zero3",
    ]
    assert [f.what for f in ranges.offload(2, "cpu", "cpu")] == ["zero.offload_param"]
    assert ranges.offload(3, "cpu", "cpu") == []


def test_merge_base_and_dtypes() -> None:
    (finding,) = adapter.merge_base("dequantized", "lora")
    assert finding.override == "merge.base=auto"
    assert finding.severity == "error"
    (finding,) = adapter.merge_base("original", "qlora")
    assert finding.severity == "warning"
    assert adapter.merge_base("dequantized", "qlora") == []
    assert adapter.merge_base("original", "lora") == []
    assert machine.dtypes("float32", "bfloat16", half=True) == []
    (finding,) = machine.dtypes("bfloat16", "float16", half=True)
    assert finding.severity == "warning"
    (finding,) = machine.dtypes("float16", "bfloat16", half=False)
    assert finding.allowed == "DeepSpeed has it on a GPU, or a CPU with AVX-512 FP16"
    assert machine.dtypes("float16", "bfloat16", half=True) == []


def test_float16_needs_a_stage_that_scales_losses() -> None:
    (finding,) = machine.loss_scaling("float16", 0)
    assert finding.override == "zero=zero1 or model.dtype=bfloat16"
    assert machine.loss_scaling("float16", 1) == machine.loss_scaling("bfloat16", 0) == []


def test_8bit_moments_stay_on_the_device() -> None:
    (finding,) = ranges.optimizer("adamw_8bit", "cpu")
    assert finding.override == "train.optimizer=adamw or zero.offload_optimizer=none"
    assert ranges.optimizer("adamw", "cpu") == ranges.optimizer("adamw_8bit", "none") == []


def test_lengths() -> None:
    short, long = ranges.lengths(600, 256, 512)
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
    delivery = compose_config(["source=/x", "out=/y"], config_name="deliver").settings
    assert {key for key, *_ in ranges.LIMITS} >= {
        f"timeouts.{name}" for name in delivery["timeouts"]
    }
    for key, low, high, sample in ranges.LIMITS:
        section, name = key.split(".")
        assert name in {**settings[section], **delivery.get(section, {})}, key
        assert low <= sample <= high, key


def test_forced_stages() -> None:
    assert ranges.forced(ranges.STAGES) == []
    (finding,) = ranges.forced(["train", "trian"])
    assert finding.found == "no stage 'trian'"
    assert finding.allowed == f"the stages are {', '.join(ranges.STAGES)}"
    assert finding.override == "force=[train]"


def test_forced_stages_of_one_step() -> None:
    links = ("sft", "ppo")
    assert ranges.forced(["ppo.train", "sft.gather", "merge"], links) == []
    (finding,) = ranges.forced(["pppo.train"], links)
    assert finding.found == "no stage 'pppo.train'"
    assert finding.override.startswith("force=[ppo.train]")
    assert finding.allowed.endswith("of one step alone: sft.train")
    assert ranges.forced(["ppo.train"]) != []  # where there are no links


def test_libraries_that_only_some_settings_need() -> None:
    settings = compose_config(["train.optimizer=adamw_8bit"]).settings
    problems = machine.installed_for(settings, lambda name: "0")
    overrides = ["peft=lora", "train.optimizer=adamw"]
    assert [f.override for f in problems] == overrides
    assert machine.installed_for(settings, lambda name: "1.2") == []


@pytest.mark.parametrize(
    ("engine", "version", "is_reward", "override"),
    [
        ("vllm", "0", False, ["smoke.engine=transformers"]),
        ("server", "0", True, ["smoke.engine=transformers"]),
        ("server", "0.32", True, ["smoke.engine=vllm"]),
        ("server", "0.32", False, []),
        ("vllm", "0.32", True, []),
        ("transformers", "0", True, []),
    ],
)
def test_engines_of_the_smoke_test(
    engine: str, version: str, is_reward: bool, override: list[str]
) -> None:
    problems = machine.smoke_engine(engine, lambda name: version, is_reward=is_reward)
    assert [finding.override for finding in problems] == override


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_attention_that_is_not_installed(name: str) -> None:
    def problems(dtype: str, version: str, gpu: bool) -> list[str]:
        return [f.found for f in machine.attention(name, dtype, lambda _: version, gpu=gpu)]

    assert problems("bfloat16", "1.2", True) == []
    assert len(problems("bfloat16", "0", False)) == 1
    flash = name.startswith("flash")
    assert problems("float32", "1.2", True) == ([f"{name} in float32"] if flash else [])
    assert machine.attention("eager", "float32", lambda _: "0", gpu=False) == []


@pytest.mark.parametrize("text", ["5GB", "500MB", "2 GiB", "1000000"])
def test_shard_size(text: str) -> None:
    assert ranges.shard_size(text) == []


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5 parsecs", "0GB"])
def test_wrong_shard_size(text: str) -> None:
    (finding,) = ranges.shard_size(text)
    assert finding.override == "convert.max_shard_size=5GB"


def test_quantising_reports_all_its_problems_at_once(tmp_path: Path) -> None:
    convert = {"quantize": "w4a16", "group_size": 128}
    config = {"num_local_experts": 8, "hidden_size": 576, "intermediate_size": 100}
    problems = quantizing(
        convert, config, lambda name: "0",
        is_reward=True, engine="none", environment=tmp_path / "bin" / "python",
    )  # fmt: skip
    assert [(finding.found, finding.override) for finding in problems] == [
        ("w4a16 of a reward model", "convert.quantize=none"),
        ("w4a16 of a mixture of experts (num_local_experts 8)", "convert.quantize=none"),
        ("w4a16 without a smoke test", "smoke.engine=vllm"),
        ("w4a16 without compressed-tensors", "pip install compressed-tensors"),
        ("w4a16 without llm-compressor", "make setup-quantize"),
        ("w4a16 of hidden_size 576", "convert.group_size=64"),
        ("w4a16 of intermediate_size 100", "convert.quantize=w8a8"),
    ]
    gguf = {"quantize": "gguf:q4_k_m", "llama_cpp": str(tmp_path)}
    problems = quantizing(gguf, {"model_type": "gpt2"}, lambda name: "0", engine="none")
    names = "convert_hf_to_gguf.py, llama-server, llama-quantize"
    assert [(finding.found, finding.override) for finding in problems] == [
        ("gguf:q4_k_m of gpt2, whose layers are convolutions", "convert.quantize=none"),
        ("gguf:q4_k_m without a smoke test", "smoke.engine=vllm"),
        (f"gguf:q4_k_m without {names} in {tmp_path}", "convert.llama_cpp=<its folder, built>"),
        ("gguf:q4_k_m without gguf", "pip install gguf"),
        ("gguf:q4_k_m of gpt2", "convert.quantize=none"),
    ]
    (odd,) = quantizing(
        {**convert, "group_size": 48}, {}, lambda name: "1", environment=Path(__file__)
    )
    assert odd.override == "convert.group_size=128"
    assert quantizing({"quantize": "none"}, config, lambda name: "0", is_reward=True) == []


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


def test_all_problems_in_one_message(tmp_path: Path) -> None:
    composed = compose_config(
        ["+exp=sft_qlora", "zero=zero3", "train.global_batch_size=7", "data=jsonl", "model=hf"]
    )
    with pytest.raises(ConfigError) as caught:
        preflight(findings(composed.settings, tmp_path))
    what = [line.partition(":")[0] for line in caught.value.details]
    assert what == ["model.path", "peft and zero", "train.global_batch_size", "data.path"]
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("experiment", ["qlora", "lora_zero3", "sft_full"])
def test_experiments_pass(experiment: str, tmp_path: Path) -> None:
    assert findings(compose_config([f"+exp={experiment}"]).settings, tmp_path) == []
