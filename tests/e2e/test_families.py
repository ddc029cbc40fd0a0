"""Families through the whole chain: those that are padded, since packed sequences would influence
each other, and vision-language bases, trained on text and delivered whole.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.toy.pretrain import train_tokenizer
from tasks.toy.splits import corpus, write_dataset
from tests.e2e.conftest import Run, curve
from tests.e2e.test_chain import tensors_of
from tests.training.model.test_packed_families import GPT_OSS, PADDED, SIZES
from tests.vision import FAMILIES as VISION
from tests.vision import PROCESSOR, save_base

pytestmark = pytest.mark.slow
TEXT = {"gpt_oss": GPT_OSS, **PADDED}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
del TEXT["bloom"], TEXT["mamba2"]  # of 2022, and without a chat model
TRAININGS = {
    "sft": ("+exp=sft_qlora", "peft=lora", "train.max_steps=4"),
    "full": ("+exp=sft_qlora", "peft=none", "train.max_steps=4"),
    "dpo": ("+exp=dpo", "peft=lora", "train.max_steps=3", "train.lr=1e-4"),
}
OPTIONS = {"llama4_text": ["train.router_aux_loss_coef=0"]}
TOWERS = ("vision_", "visual.", "projector", "embed_vision")


@pytest.fixture
def trained(rlhf: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    """Train the base in `tmp_path`, and serve it by transformers."""

    def train(training: str, *more: str) -> Run:
        write_dataset(tmp_path, {"train": 200, "heldout": 8}, seed=0)
        rows = [f"data.path={tmp_path}/train.jsonl"] if training != "dpo" else []
        done = rlhf(
            tmp_path / "runs", *TRAININGS[training], f"model.path={tmp_path}/base", *rows,
            "train.max_len=256", "train.global_batch_size=16", "smoke=transformers",
            "smoke.max_new_tokens=16", "smoke.eval_samples=8", "smoke.min_stop_rate=0",
            "smoke.max_degenerate_rate=1", *more,
        )  # fmt: skip
        assert done.code == 0, done.output
        assert done.stage("gather")["drift"]["mean_kl"] == 0.0
        return done

    return train


def tokenizer() -> Any:
    return train_tokenizer([text for pair in corpus(400, seed=1) for text in pair], context=512)


def write_text_base(family: str, folder: Path) -> None:
    """Write an untrained tiny model of a family."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    words = tokenizer()
    sizes = {**SIZES, **TEXT.get(family, EXPERTS), "max_position_embeddings": 512}
    config = AutoConfig.for_model(
        family, **{**sizes, "vocab_size": len(words)},
        bos_token_id=None, eos_token_id=words.eos_token_id,
    )  # fmt: skip
    config.pad_token_id = words.pad_token_id
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(torch.bfloat16)
    model.save_pretrained(folder)
    words.save_pretrained(folder)


@pytest.mark.parametrize("training", ["sft", "dpo"])
@pytest.mark.parametrize("family", TEXT)
def test_what_was_trained_is_what_transformers_serves(
    family: str, training: str, trained: Callable[..., Run], tmp_path: Path
) -> None:
    write_text_base(family, tmp_path / "base")
    done = trained(training, *OPTIONS.get(family, []))
    for name in ("merge", "smoke_eval"):
        assert done.stage(name)["handoff"]["value"] < 1e-5


def test_full_weights_of_experts_are_sampled_by_vllm(
    rlhf: Callable[..., Run], tmp_path: Path
) -> None:
    """GRPO of a packed family whose experts are stored one by one; rewards differ, weights move."""
    write_text_base("qwen3_moe", tmp_path / "base")
    write_dataset(tmp_path, {"train": 64, "heldout": 8}, seed=0)
    (tmp_path / "judge.py").write_text(
        "def score(completions, **_):\n"
        "    return [sum(map(ord, c[0]['content'])) % 7 / 7 for c in completions]\n"
    )
    done = rlhf(
        tmp_path / "runs", "+exp=grpo", "peft=none", f"model.path={tmp_path}/base",
        "model.dtype=float32", f"data.path={tmp_path}/train.jsonl",
        f"reward.function={tmp_path}/judge.py:score", "train.nproc=1", "train.lr=1e-3",
        "train.global_batch_size=32", "train.router_aux_loss_coef=0", "rl.iterations=2",
        "rl.rollout_batch_size=8", "rl.num_generations=4", "rl.eval_prompts=8",
        "rollout.max_new_tokens=16", "smoke.max_new_tokens=16", "smoke.eval_samples=8",
        "smoke.min_stop_rate=0", "smoke.max_degenerate_rate=1",
    )  # fmt: skip
    assert done.code == 0, done.output
    before, after = tensors_of(tmp_path / "base"), tensors_of(done.artifact("convert"))
    experts = [name for name in before if ".experts." in name]
    assert not any(before[name].float().equal(after[name].float()) for name in experts)
    assert max(curve(done, "train/mismatch/mean_abs")) < 1e-2
    assert done.stage("smoke_eval")["handoff"]["value"] < 1e-5


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("family", VISION)
def test_the_whole_model_is_delivered_with_a_trained_language_tower(
    family: str, training: str, trained: Callable[..., Run], tmp_path: Path
) -> None:
    """All other files and tensors are those of the base."""
    base = save_base(family, tmp_path / "base", tokenizer())
    done = trained(training, "model=hf")
    assert done.stage("smoke_eval")["handoff"]["value"] < 1e-4
    served = done.artifact("convert")
    before, after = tensors_of(base), tensors_of(served)
    assert set(after) == set(before)
    changed = [name for name, tensor in before.items() if not tensor.equal(after[name])]
    assert changed
    assert [name for name in changed if any(tower in name for tower in TOWERS)] == []
    assert (served / PROCESSOR).read_bytes() == (base / PROCESSOR).read_bytes()
