"""Settings that cannot work together: each is refused with settings that do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flows.cli.config import compose_config
from tasks.config.checks import adapter, machine, model, ranges
from tasks.config.checks.machine import checkpoints
from tasks.config.checks.objective import mask_fits, objective_fits
from tasks.config.checks.quantizing import quantizing
from tasks.core.finding import Finding
from tasks.core.machine import left_in_container
from tasks.training.engine.checkpoint import Progress, describe, publish, work_folder
from tests.weights.making import near_nf4

SIZES = st.integers(1, 64)
GIB = machine.GIB


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


def plan_of(convert: Mapping[str, Any], name: str = "0") -> list[Finding]:
    return quantizing(convert, {}, lambda _: name, environment=Path(__file__))


@cache
def composed() -> dict[str, Any]:
    return compose_config(["peft=lora", "train.optimizer=adamw_8bit"]).settings


def peft(**changes: Any) -> list[Finding]:
    return adapter.adapter({**composed()["peft"], **changes}, model.TOY)


def smoke(engine: str, version: str, is_reward: bool) -> list[Finding]:
    return machine.smoke_engine(engine, lambda _: version, is_reward=is_reward)


def attention(name: str, dtype: str, version: str, gpu: bool) -> list[Finding]:
    return machine.attention(name, dtype, lambda _: version, gpu=gpu)


def libraries(version: str) -> list[Finding]:
    return machine.installed_for(composed(), lambda _: version)


SCHEDULE: dict[str, Any] = {
    "objective": "dpo", "best_metric": "accuracy", "eval_steps": 10, "keep": "best",
    "early_stop_patience": 3, "scheduler": "cosine", "min_lr_ratio": 0.0, "decay_ratio": 0.1,
    "power": 1.0, "num_cycles": 1,
}  # fmt: skip


def schedule(**changes: Any) -> list[Finding]:
    return ranges.schedule({**SCHEDULE, **changes})


def evaluation(**changes: Any) -> list[Finding]:
    return ranges.evaluation({**SCHEDULE, **changes})


W8A8: dict[str, Any] = {"quantize": "w8a8"}
FLASH = "flash_attention_2"
ALLOWED: list[Callable[[], list[Finding]]] = [
    lambda: divides(4, 4, 2, 1, sharing=2),  # ranks that share rows count once
    lambda: adapter.qlora_with_zero3("qlora", 2) + adapter.qlora_with_zero3("lora", 3),
    lambda: adapter.lora_with_zero3("lora", 3, "0.19.3"),
    lambda: adapter.lora_with_zero3("lora", 3, "0.19.10"),
    lambda: ranges.offload(3, "cpu", "cpu"),
    lambda: adapter.merge_base("dequantized", "qlora") + adapter.merge_base("original", "lora"),
    lambda: machine.dtypes("float32", "bfloat16", half=True),
    lambda: machine.loss_scaling("float16", 1) + machine.loss_scaling("bfloat16", 0),
    lambda: ranges.optimizer("adamw", "cpu") + ranges.optimizer("adamw_8bit", "none"),
    lambda: ranges.forced(["ppo.train", "sft.gather", "merge"], ("sft", "ppo")),
    lambda: libraries("1.2"),
    lambda: smoke("server", "0.32", False) + smoke("vllm", "0.32", True),
    lambda: smoke("transformers", "0", True),
    lambda: attention(FLASH, "bfloat16", "1.2", True),
    lambda: attention("flex_attention", "float32", "1.2", True),
    *(partial(ranges.shard_size, text) for text in ("5GB", "2 GiB", "1000000")),
    lambda: adapter.new_tokens(["<a>", "<b>"], 64),
    lambda: adapter.targets("all-linear", "lora", model.TOY),
    lambda: peft(
        use_dora=True, rank_pattern={"q_proj": 4}, alpha_pattern={"layers.1.x.up_proj": 8},
        modules_to_save=["embed_tokens", "norm"], exclude_modules=["down_proj"],
    ),
    lambda: schedule() + evaluation() + schedule(scheduler="polynomial", power=2.0),
    lambda: ranges.resume("auto") + ranges.resume("never"),
    lambda: model.quantised("qlora", model.TOY),
    lambda: model.vllm_serves("vllm", True, model.TOY),
    lambda: model.vllm_serves("vllm", False, SMALL_HEADS),
    lambda: model.vllm_serves("transformers", True, SMALL_HEADS),
    lambda: quantizing(W8A8, model.TOY.config, lambda _: "0.17.0"),
    lambda: quantizing({"quantize": "none"}, {"num_experts": 8}, lambda _: "0", is_reward=True),
    lambda: objective_fits("reward", replace(model.TOY, score=(1, 64))),
    lambda: objective_fits("dpo", replace(model.TOY, score=None)),
    lambda: machine.memory(5 * GIB, 3 * GIB, 2 * GIB, smaller=[]),
    lambda: machine.compiler("cpu", "/usr/bin/g++") + machine.compiler("none", None),
    lambda: mask_fits("every_token", "sft") + mask_fits("every_answer", "dpo"),
]  # fmt: skip
SMALL_HEADS = model.Known(config={"hidden_size": 64, "num_attention_heads": 4})
NESTED_HEADS = model.Known(config={"text_config": {"head_dim": 24, "num_attention_heads": 4}})
QUANTISED = model.Known(config={"quantization_config": {"quant_method": "gptq"}})
REFUSED: list[tuple[Callable[[], list[Finding]], list[str]]] = [
    (lambda: divides(0, 32, 2, 1), ["train.global_batch_size=64"]),
    (lambda: divides(6, 2, 4, 2, sharing=2), ["train.global_batch_size=8"]),
    (lambda: adapter.qlora_with_zero3("qlora", 3), ["zero=zero2 or peft=lora"]),
    (lambda: adapter.lora_with_zero3("lora", 3, "0.19.2"), ["deepspeed"]),
    (lambda: ranges.offload(0, "cpu", "cpu"), ["zero=zero2", "zero=zero3"]),
    (lambda: ranges.offload(2, "cpu", "cpu"), ["zero=zero3"]),
    (lambda: adapter.merge_base("dequantized", "lora"), ["merge.base=auto"]),
    (lambda: machine.dtypes("bfloat16", "float16", half=True), ["convert.dtype"]),
    (lambda: machine.dtypes("float16", "bfloat16", half=False), ["model.dtype"]),
    (lambda: machine.loss_scaling("float16", 0), ["zero=zero1 or model.dtype=bfloat16"]),
    (
        lambda: ranges.optimizer("adamw_8bit", "cpu"),
        ["train.optimizer=adamw or zero.offload_optimizer=none"],
    ),
    (
        lambda: ranges.lengths(600, 256, 512),
        ["smoke.max_model_len=600", "train.max_len=512"],
    ),
    (lambda: ranges.forced(["train", "trian"]), ["force=[train]"]),
    (lambda: ranges.forced(["ppo.train"]), ["force"]),  # in a run without steps
    (lambda: libraries("0"), ["train.optimizer=adamw"]),
    (lambda: smoke("vllm", "0", False), ["smoke.engine=transformers"]),
    (lambda: smoke("server", "0.32", True), ["smoke.engine=vllm"]),
    *(
        (partial(ranges.shard_size, text), ["convert.max_shard_size=5GB"])
        for text in ("", "-5GB", "5 parsecs", "0GB")
    ),
    (
        lambda: adapter.new_tokens(["<a>", "<a>"], 0),
        ["model.new_tokens=['<tool>']", "model.vocab_multiple=64"],
    ),
    (
        lambda: peft(target_modules=["q_proj", "v_proj"], modules_to_save=["v_proj"]),
        ["peft.target_modules=[q_proj]"],
    ),
    (
        lambda: peft(kind="none", use_dora=True, init="gaussian", use_rslora=True),
        ["peft.use_rslora", "peft.use_dora", "peft.init"],
    ),
    (
        lambda: peft(
            rank_pattern={"q_prj": 4}, alpha_pattern={"k_proj": 0}, exclude_modules=["gate"],
            modules_to_save=["lm_haed"],
        ),
        ["peft.rank_pattern", "peft.alpha_pattern", "peft.exclude_modules", "peft.modules_to_save"],
    ),
    (lambda: adapter.targets("q_proj", "lora", model.TOY), ["peft.target_modules"]),
    (lambda: evaluation(objective="sft"), ["train.best_metric=loss"]),
    (lambda: evaluation(eval_steps=0), ["train.keep", "train.early_stop_patience"]),
    *(
        (partial(schedule, **{name: value}), [f"train.{name}"])
        for name, value in (
            ("min_lr_ratio", 0.1), ("decay_ratio", 0.2), ("power", 2.0), ("num_cycles", 3)
        )
    ),
    (lambda: attention(FLASH, "bfloat16", "0", False), ["model.attn_implementation"]),
    (lambda: attention(FLASH, "float32", "1.2", True), ["model.attn_implementation"]),
    (lambda: attention("flex_attention", "bfloat16", "0", False), ["model.attn_implementation"]),
    (lambda: quantizing(W8A8, {"num_local_experts": 8}, lambda _: "1"), ["convert.quantize=none"]),
    (
        lambda: quantizing(W8A8, {"text_config": {"n_routed_experts": 4}}, lambda _: "1"),
        ["convert.quantize=none"],
    ),
    (lambda: quantizing(W8A8, {"model_type": "gpt2"}, lambda _: "1"), ["convert.quantize=none"]),
    (
        lambda: plan_of({"quantize": "w4a16", "group_size": 48}, "1"),
        ["convert.group_size=128"],
    ),
    (lambda: model.quantised("qlora", QUANTISED), ["model.path"]),
    (lambda: model.vllm_serves("vllm", True, SMALL_HEADS), ["smoke.engine=transformers"]),
    (lambda: model.vllm_serves("vllm", True, NESTED_HEADS), ["smoke.engine=transformers"]),
    (lambda: mask_fits("every_token", "dpo"), ["train.mask=every_answer"]),
    (lambda: objective_fits("sft", replace(model.TOY, score=(1, 64))), ["train.objective"]),
    (lambda: objective_fits("reward", replace(model.TOY, score=(2, 64))), ["model.path"]),
    (
        lambda: machine.memory(GIB, 3 * GIB, 0, smaller=["peft=lora", "zero=zero3"]),
        ["peft=lora or zero=zero3"],
    ),
    (lambda: machine.compiler("cpu", None), ["g++"]),
    (lambda: machine.disk(GIB, 3 * GIB, Path("/runs")), ["disk"]),
]  # fmt: skip
"""Each check with the names of its findings, or the settings that they suggest."""


def test_valid_combinations_pass() -> None:
    assert [str(finding) for check in ALLOWED for finding in check()] == []


def test_an_invalid_combination_is_answered_with_settings_to_type() -> None:
    wrong = []
    for check, expected in REFUSED:
        reported = [(finding.what, finding.override) for finding in check()]
        if len(reported) != len(expected) or any(map(_lacks, reported, expected)):
            wrong.append((reported, expected))
    assert wrong == []


def _lacks(reported: tuple[str, str], expected: str) -> bool:
    return expected not in reported


def test_some_findings_are_warnings() -> None:
    """A warning lets the run start; the others do not."""
    (original,) = adapter.merge_base("original", "qlora")
    (served,) = machine.dtypes("bfloat16", "float16", half=True)
    (tight,) = machine.memory(4 * GIB, 3 * GIB, 2 * GIB, smaller=["train.max_len=128"])
    assert {original.severity, served.severity, tight.severity} == {"warning"}
    (wrong,) = adapter.merge_base("dequantized", "lora")
    (small,) = machine.memory(GIB, 3 * GIB, 0, smaller=["peft=lora"])
    assert {wrong.severity, small.severity} == {"error"}


def test_a_merged_qlora_model_is_no_base_for_qlora(tmp_path: Path) -> None:
    folder = near_nf4(tmp_path / "merged", 0.01)
    (folder / "config.json").write_text("{}")
    (finding,) = adapter.merged("qlora", folder)
    assert "model.layers.0.mlp.up_proj.weight" in finding.found
    assert finding.override.startswith("peft=lora")
    assert adapter.merged("lora", folder) == adapter.merged("qlora", tmp_path / "none") == []


def test_a_folder_to_resume_from_holds_a_complete_checkpoint(tmp_path: Path) -> None:
    (gone,) = ranges.resume(str(tmp_path / "gone"))
    (empty,) = ranges.resume(str(tmp_path))
    assert str(tmp_path) in empty.found
    assert gone.found != empty.found
    work = work_folder(tmp_path, 3)
    work.mkdir()
    describe(work, world_size=1, identity={}, progress=Progress(3), files={})
    made = publish(work)
    assert ranges.resume(str(tmp_path)) == ranges.resume(str(made)) == []


def test_disk_space_for_checkpoints_is_counted() -> None:
    each = 16_000
    assert checkpoints(1000, most=3, most_gb=None) == 5 * each
    assert checkpoints(1000, most=0, most_gb=None) == 6 * each
    assert checkpoints(1000, most=20, most_gb=1e-5) == 10_000 + 2 * each


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    old = "memory/memory"  # cgroups of version 1
    for number, (files, left) in enumerate((
        ({}, None),
        ({"memory.max": "max\n"}, None),
        ({"memory.max": "1000\n", "memory.current": "700\n",
          "memory.stat": "anon 500\ninactive_file 150\nactive_file 50\n"}, 450),
        ({f"{old}.limit_in_bytes": "1000\n", f"{old}.usage_in_bytes": "1200\n",
          f"{old}.stat": "cache 9\ntotal_inactive_file 100\n"}, 0),
    )):  # fmt: skip
        for name, text in files.items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert left_in_container(tmp_path / str(number)) == left
