"""Memory of ranks and engines, computed by hand, on this machine and on GPUs that are not here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from flows.chain import handoff
from flows.chain.plan import render
from flows.chain.steps import chain_steps, compose
from flows.cli.config import compose_config
from flows.cli.vocabulary import CONF, experiments
from flows.orchestration.flow_run import device_names
from tasks.config.checks import findings
from tasks.config.checks.machine import shareable
from tasks.config.checks.memory import (
    ASLEEP,
    LIBRARIES,
    Memory,
    Sizes,
    engine_memory,
    estimate,
    memory_of,
)
from tasks.config.checks.model import look_at
from tasks.core import machine
from tasks.pipeline.locks import Needs
from tasks.training.job import Peft, Zero
from tasks.training.model.families import why_padded
from tasks.weights.model_class import loadable_attention
from tests.machines import (
    GIB,
    H100,
    QWEN_7B,
    QWEN_72B,
    published,
    with_gpus,
    with_hub,
    with_installed,
)
from tests.settings import Batch, Launch, Settings

WEIGHTS = 7_615_616_512 - 28 * 4_608
"""Parameters of Qwen2.5-7B without the biases of attention."""


def test_the_memory_plan_of_a_published_model() -> None:
    sizes, weights = Sizes(QWEN_7B), WEIGHTS
    assert sizes.weights() == weights
    # Rank 64 on all seven maps, the number peft prints for this model.
    assert sizes.adapter_weights(Peft("lora", rank=64)) == 161_480_704
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        with pytest.raises(KeyError):  # better unknown than one of eight experts
            Sizes({**QWEN_7B, key: 8})
    four = {"batch": Batch(4, 16), "launch": Launch(nproc=4), "dtype": "float32"}
    full = [estimate(QWEN_7B, Settings(zero=Zero(s, bucket_size=0), **four)) for s in range(4)]
    overlapped = [
        estimate(QWEN_7B, Settings(zero=Zero(s, overlap_comm=o, bucket_size=10**8), **four))
        for s in range(4) for o in (False, True)
    ]  # fmt: skip
    buckets = [plan.gradients for plan in overlapped]
    alone = [plan.gradients for plan in full for _ in "12"]
    assert [a - b for a, b in zip(buckets, alone, strict=True)] == [
        4 * 10**8 * number for number in (0, 0, 1, 2, 1, 2, 1, 1)
    ]
    # Weights, gradients, their copy for the step, two moments: each divided from its stage on.
    needed = [plan.optimizer + plan.gradients for plan in full]
    assert needed == [16 * weights, 7 * weights, 4 * weights, 4 * weights]
    assert [plan.weights for plan in full] == [4 * weights] * 3 + [weights + 4 * 10**9]


def test_weights_of_the_recipes_models_are_those_that_transformers_makes() -> None:
    """Biases and towers for images are not counted; linear attention is, roughly."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, config in published().items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        language = {n: p for n, p in model.named_parameters() if not re.search("vision|modal", n)}
        weights = sum(parameter.numel() for parameter in language.values())
        assert Sizes(config).weights() == pytest.approx(weights, rel=0.03), name


def test_an_engine_on_a_cpu_by_hand() -> None:
    """56 KiB per token: 2 x 28 layers x 4 heads x 128 x 2 bytes; 1 GiB holds 18,724 tokens."""
    settings = compose_config(["model.dtype=bfloat16"]).settings
    expected = settings["train"]["max_len"] + settings["smoke"]["max_new_tokens"] + 8
    assert engine_memory(QWEN_7B, settings, gpu_bytes=None).context == expected
    short = {**QWEN_7B, "max_position_embeddings": 128}
    assert engine_memory(short, settings, gpu_bytes=None).context == 128
    settings["smoke"]["max_model_len"] = 1000
    engine = engine_memory(QWEN_7B, settings, gpu_bytes=None)
    assert (engine.weights, engine.cache) == (2 * WEIGHTS, GIB)
    assert engine.longest == 1000 * 57_344


def rows_in(folder: Path) -> Path:
    """Write rows that every objective reads."""
    rows, answers = folder / "rows.jsonl", {"chosen": "good", "rejected": "bad", "answer": "4"}
    texts = ({"prompt": f"question {n}", "response": "good", **answers} for n in range(40))
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in texts))
    return rows


NEEDS = re.compile(r"^# Needs: (\d+) GPUs? of (\d+) GB", re.M)
"""GPUs and gigabytes of one, in the header of a recipe: there users look whether theirs will do."""


@pytest.mark.parametrize(
    "experiment",
    [
        name if name.startswith("recipes/") else pytest.param(name, marks=pytest.mark.slow)
        for name in experiments(CONF)
        if not name.startswith("smollm2/")  # a batch for two cores
    ],
)
def test_every_experiment_plans_without_a_finding(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe fits the GPUs that its header names, others fit eight."""
    arguments = [f"+exp={experiment}", f"paths.runs={tmp_path / 'runs'}"]
    recipe = experiment.removeprefix("recipes/")
    count, size = 8, H100
    if recipe != experiment:
        (needed,) = NEEDS.findall((CONF / "exp" / f"{experiment}.yaml").read_text())
        count, size = int(needed[0]), int(needed[1]) * 10**9
        arguments += [f"data.path={rows_in(tmp_path)}"]
    if recipe.endswith("/grpo"):
        arguments += ["reward.function=exact_match"]
    with_gpus(monkeypatch, count, size)
    with_installed(monkeypatch, {"torchvision": "0.28.0"})  # as on GPUs
    with_hub(monkeypatch, tmp_path / "hub", published())
    for link in chain_steps(compose(arguments), arguments):
        settings = link.composed.settings
        rank = memory_of(settings, rewarded=link.rewarded)
        assert rank is not None
        assert rank.total + LIBRARIES <= size
        text = render([link])
        config = look_at(settings["model"])[0].config
        padded = why_padded(config, loadable_attention(config, "sdpa"))
        padded = padded if settings["train"]["micro_batch_size"] > 1 else ""
        assert text.count("  warning: ") == bool(padded), text
        assert "  error: " not in text, text
        assert recipe == experiment or settings["train"]["nproc"] == count


def test_a_stage_reserves_every_gpu_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 8)
    server = ["rollout=server", "rollout.servers=3", "rollout.tensor_parallel=2"]
    served = compose_config(["+exp=sft_full", "train.nproc=4", "smoke.tensor_parallel=8"])
    sampled = compose_config(["+exp=grpo", "train.nproc=2", *server])
    shared = compose_config(["+exp=grpo", "train.nproc=2", "rollout.tensor_parallel=2"])
    for composed, needs, count in (
        (served, Needs.RANKS, 4),
        (served, Needs.DEVICE, 1),
        (served, handoff.SMOKE.needs, 8),
        (sampled, handoff.REINFORCE.needs, 8),
        (shared, Needs.RANKS, 2),
    ):
        uuids = [gpu.uuid for gpu in machine.gpus()[:count]]
        assert device_names(composed, needs) == uuids, needs


def test_processes_that_share_a_model_divide_it_as_vllm_does() -> None:
    """Heads, key-value heads or copies of them, widths, the padded vocabulary; a GPU each."""
    key = "smoke.tensor_parallel"
    small = QWEN_7B | {
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
    }
    middle = small | {"num_attention_heads": 12, "intermediate_size": 8960}
    odd = {"num_attention_heads": 12, "num_key_value_heads": 4}
    for processes, text, gpus, ranks, wanted in (
        (4, QWEN_7B, 8, 0, None), (1, {}, 0, 0, None), (4, {}, 8, 0, None),
        (8, QWEN_7B, 8, 0, 4), (8, QWEN_72B, 2, 0, 2), (8, QWEN_72B, 7, 0, 4),
        (7, small, 8, 0, 2), (12, middle, 16, 0, 4), (6, odd, 8, 0, 4),
        (3, {"num_attention_heads": 12, "moe_intermediate_size": 1408}, 8, 0, 2),
        (3, {"num_attention_heads": 12, "vocab_size": 151936}, 8, 0, 2),
        (3, {"num_attention_heads": 12, "vocab_size": 49152}, 8, 0, None),
        (4, QWEN_7B, 0, 6, 2), (3, QWEN_7B, 0, 6, 2), (8, {}, 0, 4, 4),
    ):  # fmt: skip
        problems = list(shareable(key, processes, text, gpus=gpus, ranks=ranks))
        advised = [f"{key}={wanted}"] if wanted else []
        assert [problem.override for problem in problems] == advised, (processes, text)


def planned(tmp_path: Path, experiment: str, *overrides: str) -> tuple[Memory, list[str]]:
    """Return a rank's memory and the findings of an experiment with Qwen2.5-7B."""
    arguments = [
        f"+exp={experiment}", "model.path=Qwen/Qwen2.5-7B-Instruct",
        f"data.path={rows_in(tmp_path)}", f"paths.runs={tmp_path}/runs", *overrides,
    ]  # fmt: skip
    (link,) = chain_steps(compose(arguments), arguments)
    rank = memory_of(link.composed.settings)
    assert rank is not None
    return rank, list(map(str, findings(link.composed.settings, link.composed.runs)))


def test_full_ppo_of_7b_counts_critic_reference_and_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO-2: three copies of the weights on each GPU, and half of the GPU for the engine."""
    with_gpus(monkeypatch, 8)
    with_hub(monkeypatch, tmp_path / "hub")
    stays = ("rollout.offload_trainer=false", "rollout.gpu_memory=0.5")
    rank, (problems,) = planned(tmp_path, "ppo_full", *stays)
    weights, table = 2 * Sizes(QWEN_7B).weights(), 2 * 152064 * 3584
    lasting = 3 * weights  # policy, critic, reference
    lasting += 6 * weights // 8 + 6 * (weights - table) // 8  # fp32 weights and moments, 8 ranks
    assert rank.weights + rank.optimizer + rank.engine == pytest.approx(lasting + H100 // 2, abs=10)
    assert rank.total > lasting + ASLEEP + weights // 8  # gradients and their bucket
    assert 100 < rank.total / GIB < 108
    assert problems.startswith("GPU memory: ")
    named = problems.rpartition(" -> ")[2].split(" or ")
    advised = {"rollout.offload_trainer=true", "rollout.gpu_memory=0.3"}
    assert {"zero=zero3", "peft=lora", *advised} <= set(named)
    split, none = planned(tmp_path, "ppo_full", *stays, "zero=zero3")
    assert none == []
    assert split.weights + split.optimizer < rank.weights + rank.optimizer - 2 * weights
