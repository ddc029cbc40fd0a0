"""Texts as in pre-training, by the literal command, in a folder that has the base already."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.pipeline.artifact import open_artifact
from tasks.toy.splits import conversation, examples
from tests.e2e.conftest import Run, curve

pytestmark = pytest.mark.slow


def test_raw_texts_as_in_pre_training(rlhf: Callable[..., Run], runs: Path, tmp_path: Path) -> None:
    """One long text among short ones; served by vLLM, which goes on as transformers does."""
    talks = (conversation(each)["messages"] for each in examples(500, seed=3, held_out=False))
    lines = [f"{talk[-2]['content']} {talk[-1]['content']}" for talk in talks]
    path = tmp_path / "books.jsonl"
    rows = [*lines[:460], "\n".join(lines[460:])]
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in rows))
    data = ("data=jsonl", f"data.path={path}", "data.text_key=body")
    length = ("train.max_len=64", "train.max_steps=40", "smoke.eval_samples=40")
    done = rlhf(runs, "+exp=sft_qlora", "train=pretrain", *data, *length)
    assert done.code == 0, done.output
    account = json.loads((done.artifact("prepare_data") / "dataset.json").read_text())
    assert account["rows"] == "texts"
    told = open_artifact(done.artifact("train")).notes["data"]
    assert sum(split["read"] for split in told.values()) == 461
    assert sum(split["in_pieces"] for split in told.values()) == 1
    assert sum(split["kept"] for split in told.values()) > 461
    losses = curve(done, "train/loss")
    assert sum(losses[-5:]) < sum(losses[:5])
    assert done.summary["eval"]["loss_after"] < done.summary["eval"]["loss_before"]
    assert done.summary["eval"]["after"] is None  # a text is not answered right or wrong
    assert done.stage("gather")["drift"]["mean_kl"] == 0.0
    report = json.loads((done.artifact("smoke_eval") / "report.json").read_text())
    assert report["notes"]["engine"] == "vllm"
    assert all(check["ok"] for check in report["checks"])
    assert "texts as training tokenised them" in {check["name"] for check in report["checks"]}
    written = done.artifact("smoke_eval") / "generations.jsonl"
    first = json.loads(written.read_text().splitlines()[0])
    assert first["after"]
