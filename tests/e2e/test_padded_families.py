"""Families that are padded, through the whole chain: packed sequences would influence each other,
or attention is eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.toy.pretrain import train_tokenizer
from tasks.toy.splits import corpus, write_dataset
from tests.e2e.conftest import Run
from tests.training.model.test_packed_families import GPT_OSS, PADDED, SIZES

pytestmark = pytest.mark.slow
FAMILIES = {"gpt_oss": GPT_OSS, **PADDED}
del FAMILIES["bloom"], FAMILIES["mamba2"]  # of 2022, and without a chat model
OBJECTIVES = {
    "sft": ["+exp=sft_qlora", "train.max_steps=4"],
    "dpo": ["+exp=dpo", "train.max_steps=3", "train.lr=1e-4"],
}
OPTIONS = {"llama4_text": ["train.router_aux_loss_coef=0"]}


def base_of(family: str, folder: Path) -> Path:
    """Write an untrained tiny model of a family."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    talk = [text for pair in corpus(400, seed=1) for text in pair]
    tokenizer = train_tokenizer(talk, context=512)
    sizes = {**SIZES, **FAMILIES[family], "max_position_embeddings": 512}
    config = AutoConfig.for_model(
        family, **{**sizes, "vocab_size": len(tokenizer)},
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    config.pad_token_id = tokenizer.pad_token_id
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_trained_is_what_transformers_serves(
    family: str, objective: str, rlhf: Callable[..., Run], tmp_path: Path
) -> None:
    base = base_of(family, tmp_path / "base")
    write_dataset(tmp_path, {"train": 200, "heldout": 8}, seed=0)
    sources = [f"data.path={tmp_path}/train.jsonl"] if objective == "sft" else []
    done = rlhf(
        tmp_path / "runs", *OBJECTIVES[objective], "peft=lora", f"model.path={base}", *sources,
        "train.max_len=256", "train.global_batch_size=16", "smoke=transformers",
        "smoke.max_new_tokens=16", "smoke.eval_samples=8", "smoke.min_stop_rate=0",
        "smoke.max_degenerate_rate=1", *OPTIONS.get(family, []),
    )  # fmt: skip
    assert done.code == 0, done.output
    assert done.stage("gather")["drift"]["mean_kl"] == 0.0
    for name in ("merge", "smoke_eval"):
        assert done.stage(name)["handoff"]["value"] < 1e-5
