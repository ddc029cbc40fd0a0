"""The online experiments for real hardware, planned on a machine without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.chain.steps import chain_steps, compose
from flows.cli.plan import forecast, render
from tasks.config.checks import findings
from tasks.config.checks.phases import ASLEEP, RankMemory, in_words, memory_of
from tasks.training.job import Peft
from tasks.training.memory.estimate import LIBRARIES, adapter_weights
from tasks.training.memory.sizes import Sizes
from tests.config.test_plan import CHAIN
from tests.machines import GIB, H100, QWEN_7B, with_gpus, with_hub
from tests.settings import Settings

ROWS = ({"prompt": "2 + 2?", "answer": 4}, {"prompt": "who are you?", "answer": ""})


@pytest.fixture(autouse=True)
def whole_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans here show DeepSpeed's configuration."""
    monkeypatch.setenv("PLUMBLINE_LOG_LEVEL", "DEBUG")


@pytest.mark.parametrize(
    ("experiment", "stages"),
    [
        ("ppo_qwen7b_lora", CHAIN),
        ("grpo_qwen7b_qlora", [*CHAIN[:2], "rollout_base", *CHAIN[2:]]),
    ],
)
def test_the_whole_chain_is_planned_without_findings(
    experiment: str, stages: list[str], tmp_path: Path
) -> None:
    """The reward is a function of the user; prompts need no answer."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "judge.py").write_text(
        "def score(completions, **_):\n    return [0.0] * len(completions)\n"
    )
    arguments = [
        f"+exp={experiment}", f"data.path={tmp_path}/rows.jsonl", "reward=none",
        f"reward.function={tmp_path}/judge.py:score", f"paths.runs={tmp_path}/runs",
    ]  # fmt: skip
    composed = compose(arguments)
    (link,) = chain_steps(composed, arguments)
    assert [name for name, _ in forecast(link)] == stages
    text = render([link])
    deepspeed = json.loads(text[text.index("deepspeed:\n") + 11 : text.index("preflight:")])
    assert deepspeed["zero_optimization"]["stage"] == 2
    assert deepspeed["train_batch_size"] == composed.settings["train"]["global_batch_size"]
    assert findings(composed.settings, composed.runs) == []
    assert not composed.runs.exists()


def planned(tmp_path: Path, experiment: str, *overrides: str) -> tuple[RankMemory, list[str]]:
    """Return a rank's memory and the findings of an experiment with Qwen2.5-7B."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    arguments = [
        f"+exp={experiment}", "model.path=Qwen/Qwen2.5-7B-Instruct",
        f"data.path={tmp_path}/rows.jsonl", f"paths.runs={tmp_path}/runs", *overrides,
    ]  # fmt: skip
    (link,) = chain_steps(compose(arguments), arguments)
    rank = memory_of(link.composed.settings)
    assert rank is not None
    return rank, list(map(str, findings(link.composed.settings, link.composed.runs, rank)))


def sizes_of(rank: RankMemory) -> dict[str, int]:
    return {term.name: term.size for term in rank.terms}


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 8)
    with_hub(monkeypatch, tmp_path / "hub")


@pytest.mark.usefixtures("eight")
def test_full_ppo_of_7b_counts_critic_reference_and_engine(tmp_path: Path) -> None:
    """ZeRO-2: three copies of the weights on each GPU, and half of the GPU for the engine."""
    stays = ("rollout.offload_trainer=false", "rollout.gpu_memory=0.5")
    rank, (problems,) = planned(tmp_path, "ppo_full", *stays)
    weights, table = Sizes.of(QWEN_7B).weights(), 152064 * 3584
    terms = sizes_of(rank)
    assert terms["weights"] == terms["reference"] == terms["engine weights"] == 2 * weights
    assert terms["optimizer"] == 12 * weights // 8
    assert terms["critic"] == 2 * weights
    assert terms["critic, its optimizer"] == 12 * (weights - table) // 8
    assert terms["engine activations"] == LIBRARIES
    engine = sum(terms[name] for name in ("engine weights", "KV cache", "engine activations"))
    assert engine == H100 // 2
    lasting = terms["weights"] + terms["optimizer"] + terms["critic"] + terms["reference"]
    lasting += terms["critic, its optimizer"]
    assert rank.peaks["generate"] == lasting + engine
    score = lasting + terms["pass without gradients"] + ASLEEP
    assert rank.peaks["score"] == score
    passing = terms["gradients"] + terms["activations"] + terms["logits"]
    assert rank.peaks["train"] == lasting + max(passing, terms["step"]) + ASLEEP
    assert 102.5 < rank.total / GIB < 103.5
    assert problems.startswith("GPU memory: 79.6 GiB available; needs about 103.9 GiB, generate: ")
    for name in ("weights", "optimizer", "critic", "reference", "engine weights", "KV cache"):
        assert f"{name} {in_words(terms[name])}" in problems
    named = problems.rpartition(" -> ")[2].split(" or ")
    advised = {"rollout.offload_trainer=true", "rollout.gpu_memory=0.3"}
    assert {"zero=zero3", "peft=lora", *advised} <= set(named)
    split, none = planned(tmp_path, "ppo_full", *stays, "zero=zero3")
    assert none == []
    assert sizes_of(split)["reference"] == 2 * weights // 8
    assert split.peaks["generate"] < rank.peaks["generate"] - 4 * weights


@pytest.mark.usefixtures("eight")
def test_full_ppo_of_7b_fits_with_offloaded_optimizer_states(tmp_path: Path) -> None:
    """Optimizer states are on the GPU only during updates; the host holds those of eight ranks."""
    rank, problems = planned(tmp_path, "ppo_full", "train.async_save=true")
    assert problems == []
    terms = sizes_of(rank)
    weights = terms["weights"] + terms["critic"] + terms["reference"]
    assert rank.peaks["generate"] == pytest.approx(weights + 0.4 * H100, abs=1)
    assert rank.peaks["score"] == weights + terms["pass without gradients"] + ASLEEP
    phases = {term.name: term.phases for term in rank.terms}
    assert phases["optimizer"] == phases["critic, its optimizer"] == ("train",)
    optimizers = terms["optimizer"] + terms["critic, its optimizer"]
    assert rank.host == optimizers + 16 * optimizers // 12  # beside them copies for checkpoints
    (kept, _) = planned(tmp_path, "ppo_full")
    assert kept.host == optimizers
    assert rank.total == rank.peaks["generate"]


@pytest.mark.usefixtures("eight")
def test_what_an_adapter_a_reward_model_and_other_engines_add(tmp_path: Path) -> None:
    folder = tmp_path / "reward"
    folder.mkdir()
    names = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(QWEN_7B | names | {"dtype": "bfloat16"}))
    rewards = [f"reward.model={folder}", "reward.normalize=false"]
    rank, _ = planned(tmp_path, "ppo_qwen7b_lora", *rewards)
    sizes = Sizes.of(QWEN_7B)
    terms, weights = sizes_of(rank), sizes.weights()
    pairs = adapter_weights(sizes, Settings(peft=Peft("lora", rank=32)))
    assert terms["critic"] == 2 * pairs  # an adapter on the policy's trunk
    assert terms["critic, its optimizer"] == 12 * pairs // 8
    assert terms["reward model"] == 2 * (weights - 152064 * 3584)
    assert "reference" not in terms  # the policy without its adapter
    assert rank.host == 2 * weights  # the base of the engine's adapters, while it sleeps
    saving, _ = planned(tmp_path, "ppo_qwen7b_lora", *rewards, "train.async_save=true")
    assert saving.host == 2 * weights + 2 * (16 * pairs // 8)  # both adapters, for checkpoints
    (elsewhere,) = {"reward model"} - set(
        sizes_of(planned(tmp_path, "ppo_qwen7b_lora", *rewards, "reward.engine=vllm")[0])
    )
    assert elsewhere == "reward model"
    own, _ = planned(tmp_path, "ppo_qwen7b_lora", *rewards, "rollout=transformers")
    share = rank.peaks["generate"] - own.peaks["generate"]
    assert share == pytest.approx(0.4 * H100, abs=1)
    group, problems = planned(tmp_path, "grpo", "rollout.tensor_parallel=4")
    assert sizes_of(group)["engine weights"] == 2 * weights // 4
    assert problems == []
    _, (problems, *_) = planned(tmp_path, "grpo", "rollout.gpu_memory=0.15")
    assert problems.startswith(
        "rollout.gpu_memory: 0.0 GiB for keys and values; vLLM needs room for"
    )
    assert problems.endswith("-> rollout.gpu_memory=0.2")


@pytest.mark.usefixtures("eight")
def test_ranks_that_see_no_gpu_need_an_engine_that_needs_none(tmp_path: Path) -> None:
    _, problems = planned(tmp_path, "grpo", "train.device=cpu")
    assert "rollout.engine: vllm; the installed vLLM computes on GPUs" in problems[0]
    rank, problems = planned(tmp_path, "grpo_qlora", "train.device=cpu", "rollout=transformers")
    assert problems == []
    assert rank.mapped == 2 * Sizes.of(QWEN_7B).weights()  # as on a CPU
