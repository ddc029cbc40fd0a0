"""The files of a base: the side files of every head, and tokens without a row."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.cli.config import compose_config
from tasks.config.checks import findings
from tasks.training.job import Peft, TrainJob
from tests.settings import Settings
from tests.training.conftest import make_tokenizer

ROWS = 259  # 256 bytes and three special tokens


@pytest.mark.parametrize(
    ("base_head", "objective", "kind"),
    [("tokens", "sft", "lora"), ("tokens", "reward", "none"), ("score", "reward", "lora")],
)
def test_files_of_every_head_and_base(
    base: Path, base_head: str, objective: str, kind: str, tmp_path: Path, tokenizer
) -> None:
    """The base has no generation_config.json."""
    from transformers import AutoModelForSequenceClassification

    from tasks.training.model.build import load_model, load_tokenizer
    from tasks.training.model.score_head import config_of_head
    from tasks.training.outputs import write_model

    plain, out = tmp_path / "plain", tmp_path / "out"
    out.mkdir()
    shutil.copytree(base, plain, ignore=shutil.ignore_patterns("generation_config.json"))
    if base_head == "score":
        model = AutoModelForSequenceClassification.from_pretrained(base, **config_of_head(None))
        model.save_pretrained(plain)
    settings = Settings(objective=objective, peft=Peft(kind))
    job = TrainJob(settings, plain, "", tmp_path, out, tmp_path)
    loaded = load_tokenizer(job)
    head = "score" if objective == "reward" else "tokens"
    zero = {"zero_optimization": {"stage": 0}}
    ranks: Any = SimpleNamespace(gpu=False, rank=0, world_size=1, sequence_group=None)
    model = load_model(job, ranks, zero, tokenizer=loaded, head=head)
    write_model(job, model=model, tokenizer=loaded)
    names = {path.name for path in out.iterdir()}
    wanted = {"config.json", "generation_config.json", "partitions.json", "tokenizer"}
    assert names == wanted | ({"adapter_config.json"} if kind == "lora" else set())
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id


def test_a_base_that_pads_with_its_end_token_is_scored_at_the_end(
    base: Path, tmp_path: Path, tokenizer
) -> None:
    """transformers scores at the last token that is not the padding id."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    from tasks.serving.reference.rewards import load_rewarder

    folder, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    padded = {**config, "pad_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(padded))
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, pad_token_id=None, dtype=torch.float32
    )
    adapted = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
    adapted.save_pretrained(adapter)
    ids = [*tokenizer("copy bee")["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        live = float(adapted.eval()(torch.tensor([ids])).logits)
    how = {"dtype": "float32", "attn_implementation": "sdpa", "quantization": None}
    rewarder = load_rewarder(folder, adapter=adapter, **how)
    assert rewarder.scores([ids]) == pytest.approx([live], abs=1e-5)


@pytest.mark.slow
def test_tokens_without_a_row_of_the_embedding_are_named(base: Path, tmp_path: Path) -> None:
    """`tokenizer.add_special_tokens` and no `resize_token_embeddings`."""

    def findings_of(folder: Path, *overrides: str) -> list[str]:
        typed = ["model=hf", f"model.path={folder}", "train.max_len=64", *overrides]
        settings = compose_config(typed).settings
        return [str(finding) for finding in findings(settings, base.parent / "runs")]

    usual = findings_of(base)

    def problem(changes: dict[str, Any], *overrides: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(base, folder)
        tokenizer = make_tokenizer()
        tokenizer.add_special_tokens(changes)
        tokenizer.save_pretrained(folder)
        lines = findings_of(folder, *overrides)
        return "\n".join(line for line in lines if line not in usual)

    padded = problem({"pad_token": "[PAD]"})
    assert "[PAD]" in padded
    assert str(ROWS) in padded
    more = {"additional_special_tokens": ["<a>", "<b>"]}
    assert str(ROWS + 1) in problem(more)
    assert "embedding" not in problem(more, "model.new_tokens=[new]")  # it grows beyond them
