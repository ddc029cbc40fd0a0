"""Data of several kinds and a run that was killed, by the literal command in the main job's folder.

A small share of the main job each: its base is there already.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.pipeline.artifact import open_artifact
from tasks.toy.splits import conversation, examples
from tests.commands import command, environment
from tests.flows.conftest import Run
from tests.flows.test_bad_input import ours
from tests.flows.tracked import children, client, curve
from tests.training.places import files

pytestmark = pytest.mark.slow
NATIVE = ("smoke.engine=transformers", "smoke.eval_samples=8", "smoke.min_stop_rate=0")
STEPS = ("train.max_steps=12", "train.save_steps=4")


def questions(count: int, seed: int) -> list[tuple[str, str]]:
    """Return questions of the toy world with their answers."""
    talks = [
        conversation(example)["messages"] for example in examples(count, seed=seed, held_out=False)
    ]
    return [(talk[-2]["content"], talk[-1]["content"]) for talk in talks]


def account(run: Run) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        (Path(run.stage("prepare_data")["artifact"]) / "dataset.json").read_text()
    )
    return document


def test_several_sources_are_mixed_by_probability_and_each_is_read_to_its_limit(
    rlhf: Callable[..., Run], runs: Path, tmp_path: Path
) -> None:
    chats, table = tmp_path / "chats.jsonl", tmp_path / "table.csv"
    rows = [{"prompt": q, "response": f"{a}"} for q, a in questions(400, 1)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "reply"])
        writer.writerows([f"{q}?", a] for q, a in questions(120, 2))
    sources = (
        f"data.sources=[{{path: {chats}, probability: 0.75, max_samples: 300}},"
        f"{{path: {table}, kind: csv, probability: 0.25, prompt_key: question,"
        " response_key: reply}]"
    )
    overrides = ("+exp=sft_qlora", "data=jsonl", sources, "data.stopping=first_exhausted")
    done = rlhf(runs, *overrides, "train.max_steps=6", *NATIVE)
    assert done.code == 0, done.output
    counts = account(done)
    first, second = (source["rows"] for source in counts["sources"])
    assert first == 300 or second == 120  # either source was used up
    assert first <= 300
    assert first / (first + second) == pytest.approx(0.75, abs=0.07)  # 3 sigma of 400 draws
    splits = counts["splits"].values()
    assert sum(split["read"] for split in splits) == first + second
    folder = Path(done.stage("prepare_data")["artifact"])
    kept = [
        json.loads(line)["messages"][0]["content"].endswith("?")
        for split in ("train", "heldout")
        for line in (folder / f"{split}.jsonl").read_text().splitlines()
    ]
    assert (kept.count(False), kept.count(True)) == (first, second)
    assert len(curve(done, "train/loss")) == 6


def points(run: Run, name: str) -> list[tuple[int, float]]:
    """Return step and value of every point of a curve of training."""
    history = client(run).get_metric_history(children(run)["train"].info.run_id, name)
    assert history, name
    return sorted((metric.step, metric.value) for metric in history)


def test_a_run_resumed_after_kill_9_gives_bit_identical_weights_and_one_curve(
    rlhf: Callable[..., Run], runs: Path, tmp_path: Path
) -> None:
    """kill -9 of flow, torchrun and ranks; `train.resume=auto` is the default."""
    overrides = ("+exp=sft_qlora", *STEPS, *NATIVE)
    whole = rlhf(runs, *overrides)
    assert whole.code == 0, whole.output
    shards = Path(whole.stage("train")["artifact"])
    kept = Path(shutil.move(shards, tmp_path / "whole"))

    checkpoints = runs / "checkpoints" / shards.name
    argv = command("rlhf", *overrides, f"paths.runs={runs}")
    with subprocess.Popen(
        argv, cwd=tmp_path, env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as child:  # fmt: skip
        while not (checkpoints / "step-00000004" / "state.json").is_file():
            assert child.poll() is None
            time.sleep(0.05)
        os.kill(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any("tasks.training" in line for line in ours(runs)):
        assert time.monotonic() < deadline, "ranks live on"
        time.sleep(0.1)
    assert not shards.exists()

    again = rlhf(runs, *overrides)
    assert again.code == 0, again.output
    assert "train: going on after step" in again.output
    assert Path(again.stage("train")["artifact"]) == shards
    assert open_artifact(shards).notes["resumed_after_step"] >= 4
    losses = [
        json.loads((folder / "train.json").read_text())["losses"] for folder in (kept, shards)
    ]
    assert len(losses[0]) == 12
    assert losses[0] == losses[1]
    expected, resumed = files(kept), files(shards)
    assert sorted(expected) == sorted(resumed)
    # These have times and the step at which the run started.
    may_differ = {"train.json", "manifest.json"}
    assert {path for path in expected if expected[path] != resumed[path]} <= may_differ
    for name in ("train/loss", "train/grad_norm", "train/lr", "eval/loss"):
        assert points(again, name) == points(whole, name), name
    assert [step for step, _ in points(again, "train/loss")] == list(range(1, 13))


def test_raw_texts_as_in_pre_training(rlhf: Callable[..., Run], runs: Path, tmp_path: Path) -> None:
    """One long text among short ones; served by vLLM, which goes on as transformers does."""
    lines = [f"{question} {answer}" for question, answer in questions(500, 3)]
    path = tmp_path / "books.jsonl"
    rows = [*lines[:460], "\n".join(lines[460:])]
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in rows))
    data = ("data=jsonl", f"data.path={path}", "data.text_key=body")
    length = ("train.max_len=64", "train.max_steps=40", "smoke.eval_samples=40")
    done = rlhf(runs, "+exp=sft_qlora", "train=pretrain", *data, *length)
    assert done.code == 0, done.output
    assert account(done)["rows"] == "texts"
    told = open_artifact(Path(done.stage("train")["artifact"])).notes["data"]
    assert sum(split["read"] for split in told.values()) == 461
    assert sum(split["in_pieces"] for split in told.values()) == 1
    assert sum(split["kept"] for split in told.values()) > 461
    losses = curve(done, "train/loss")
    assert sum(losses[-5:]) < sum(losses[:5])
    assert done.summary["eval"]["loss_after"] < done.summary["eval"]["loss_before"]
    assert done.summary["eval"]["after"] is None  # a text is not answered right or wrong
    assert done.stage("gather")["drift"]["mean_kl"] == 0.0
    report = json.loads((Path(done.stage("smoke_eval")["artifact"]) / "report.json").read_text())
    assert report["notes"]["engine"] == "vllm"
    assert all(check["ok"] for check in report["checks"])
    assert "texts as training tokenised them" in {check["name"] for check in report["checks"]}
    written = Path(done.stage("smoke_eval")["artifact"]) / "generations.jsonl"
    first = json.loads(written.read_text().splitlines()[0])
    assert first["after"]
