"""Reward models of every dialect: equal scores after conversion, and refusals."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.core.errors import ContractError
from tasks.process.launch import launch
from tasks.serving.vllm.job import environment
from tasks.weights.heads.detect import detect
from tasks.weights.heads.folder import read_folder
from tests.weights.heads.making import (
    HIDDEN,
    batch_scores,
    change_config,
    head_tensors,
    rewards,
    save_llamafactory,
    save_openrlhf,
    save_trl,
    scores,
    serve,
)
from tests.weights.making import state_of
from tests.weights.rounding import near


def convert(folder: Path, out: Path) -> dict[str, object]:
    """Convert, and read the new config.json."""
    out.mkdir()
    serve(detect(read_folder(folder)), out, reward=True)
    return dict(json.loads((out / "config.json").read_text()))


@pytest.mark.parametrize(
    ("family", "name", "prefix"),
    [
        ("qwen", "Qwen2ForSequenceClassification", "score"),
        ("llama", "LlamaForSequenceClassification", "value_head"),
        ("neox", "GPTNeoXForSequenceClassification", "score"),
    ],
)
def test_openrlhf_rewards_are_bit_identical(
    tmp_path: Path, family: str, name: str, prefix: str
) -> None:
    mean, std = 1.5, 2.5
    model = save_openrlhf(tmp_path / "rm", family, prefix=prefix, mean=mean, std=std)
    config = convert(tmp_path / "rm", tmp_path / "out")
    with torch.no_grad():  # as RewardModel.forward does in eval mode
        raw = rewards(model, getattr(model, prefix).weight)
        before = (raw - torch.tensor(mean)) / torch.tensor(std)
    assert near(scores(tmp_path / "out"), before)
    assert config["architectures"] == [name]
    assert (config["mean"], config["std"], config["value_head_prefix"]) == (mean, std, "score")
    old, new = state_of(tmp_path / "rm"), state_of(tmp_path / "out")
    assert torch.equal(new.pop("score.weight"), old.pop(f"{prefix}.weight"))
    assert {k: t.shape for k, t in old.items()} == {k: t.shape for k, t in new.items()}
    assert all(torch.equal(new[key], old[key]) for key in old)
    if prefix == "score":
        batch = batch_scores(tmp_path / "out")  # padded
        torch.testing.assert_close((batch - mean) / std, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen", "trl"), ("llama", "wrapped"), ("qwen", "side"), ("llama", "pickled")],
)
def test_rewards_of_a_value_head_with_bias_are_the_same(
    tmp_path: Path, family: str, kind: str
) -> None:
    folder = tmp_path / "rm"
    if kind in ("trl", "wrapped"):
        model = save_trl(folder, family, prefix="pretrained_model." if kind == "wrapped" else "")
    else:
        model = save_llamafactory(folder, family, pickled=kind == "pickled")
    head = head_tensors()
    before = rewards(model, head["v_head.summary.weight"], head["v_head.summary.bias"])
    config = convert(folder, tmp_path / "out")
    # The bias is added after the product's rounding, not within it.
    torch.testing.assert_close(scores(tmp_path / "out"), before, rtol=1e-6, atol=1e-6)
    assert (config["mean"], config["std"]) == (-0.375, 1.0)
    assert not {"lm_head.weight", "v_head.summary.weight"} & set(state_of(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").glob("*head*")] == []


def test_the_head_that_was_saved_wins_over_the_configured_name(tmp_path: Path) -> None:
    """OpenRLHF trains `value_head` and writes the flag `score` into config.json."""
    save_openrlhf(tmp_path / "rm", "qwen", prefix="value_head")
    change_config(tmp_path / "rm", value_head_prefix="score")
    detected = detect(read_folder(tmp_path / "rm"))
    assert detected.head is not None
    assert detected.head.weight == "model:value_head.weight"
    assert len(detected.notes) == 1


def test_bias_and_normalisation_together(tmp_path: Path) -> None:
    model = save_llamafactory(tmp_path / "rm", "qwen")
    head = head_tensors()
    change_config(tmp_path / "rm", mean=0.25, std=4.0)
    convert(tmp_path / "rm", tmp_path / "out")
    before = rewards(model, head["v_head.summary.weight"]) + head["v_head.summary.bias"]
    torch.testing.assert_close(
        scores(tmp_path / "out"), (before - 0.25) / 4.0, rtol=1e-6, atol=1e-6
    )


def test_buffers_and_padding_go_into_config(tmp_path: Path) -> None:
    save_openrlhf(tmp_path / "rm", "qwen")
    change_config(tmp_path / "rm", pad_token_id=0)  # <|endoftext|>, which ends texts
    path = tmp_path / "rm" / "model.safetensors"
    buffers = {"mean": torch.tensor([1.25]), "std": torch.tensor([0.5], dtype=torch.bfloat16)}
    save_file({**load_file(path), **buffers}, path, metadata={"format": "pt"})
    config = convert(tmp_path / "rm", tmp_path / "out")
    assert (config["mean"], config["std"], config["pad_token_id"]) == (1.25, 0.5, None)
    assert not set(buffers) & set(state_of(tmp_path / "out"))


def _refused(folder: Path, out: Path) -> str:
    with pytest.raises(ContractError) as caught:
        convert(folder, out)
    assert list(out.iterdir()) == []
    return caught.value.report()


def test_all_findings_come_in_one_error(tmp_path: Path) -> None:
    save_openrlhf(tmp_path / "rm", "qwen", mean=1.0, std=-1.0)
    path = tmp_path / "rm" / "model.safetensors"
    odd = {"score.weight": torch.zeros(2, HIDDEN + 1), "mean": torch.tensor([2.0])}
    save_file({**load_file(path), **odd}, path, metadata={"format": "pt"})
    text = _refused(tmp_path / "rm", tmp_path / "out")
    for part in ("2 labels", "33 columns", "std is -1.0", "mean: 2.0"):
        assert part in text


def test_other_models_are_no_reward_models(tmp_path: Path) -> None:
    save_openrlhf(tmp_path / "critic", "qwen", name="CriticModel")
    assert "critic" in _refused(tmp_path / "critic", tmp_path / "a")
    save_llamafactory(tmp_path / "lm", "qwen")
    (tmp_path / "lm" / "value_head.safetensors").unlink()
    detected = detect(read_folder(tmp_path / "lm"))
    assert (detected.head, detected.findings, detected.lora_on) == (None, (), "")
    assert "language model" in _refused(tmp_path / "lm", tmp_path / "b")
    save_openrlhf(tmp_path / "rm", "qwen")
    path = tmp_path / "rm" / "model.safetensors"
    tensors = load_file(path)
    del tensors["score.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    assert "RewardModel" in _refused(tmp_path / "rm", tmp_path / "c")


def test_odd_values_in_config_are_reported_or_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "rm"
    save_openrlhf(folder, "qwen", std=2.0)
    path = folder / "config.json"
    text = path.read_text()
    for number in ("1e300", "1" + "0" * 400, "NaN", '"x"', "true"):
        path.write_text(text.rstrip().removesuffix("}") + f', "mean": {number}}}')
        assert any("mean" in line for line in detect(read_folder(folder)).findings), number
    for odd in (
        {"architectures": 5},
        {"architectures": [3, None]},
        {"text_config": "x"},
        {"hidden_size": "wide"},
        {"value_head_prefix": ["score"]},
    ):
        path.write_text(text)
        change_config(folder, **odd)
        detected = detect(read_folder(folder))
        assert detected.head is not None
        assert detected.head.role == "reward"


@pytest.mark.slow
def test_vllm_gives_the_same_scores(tmp_path: Path) -> None:
    """Raw scores by default, normalised ones on request."""
    save_llamafactory(tmp_path / "rm", "llama", heads=1)
    config = convert(tmp_path / "rm", tmp_path / "out")
    arguments = {"raw": [], "normalised": [str(config["mean"]), str(config["std"])]}
    from_vllm = {}
    for name, numbers in arguments.items():
        argv = [sys.executable, "-m", "tests.weights.heads.score_with_vllm"]
        launch(
            [*argv, str(tmp_path / "out"), str(tmp_path / f"{name}.json"), *numbers],
            stage="smoke_eval",
            log=logging.getLogger("tests.weights"),
            log_path=tmp_path / f"{name}.log",
            env={**os.environ, **environment(1, 2)},
            timeout_s=300,
        )
        document = json.loads((tmp_path / f"{name}.json").read_text())
        from_vllm[name] = torch.tensor(document).flatten()
    normalised = scores(tmp_path / "out")
    torch.testing.assert_close(from_vllm["normalised"], normalised, rtol=1e-4, atol=1e-4)
    raw = normalised * config["std"] + config["mean"]
    torch.testing.assert_close(from_vllm["raw"], raw, rtol=1e-4, atol=1e-4)
