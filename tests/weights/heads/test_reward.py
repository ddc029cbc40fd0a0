"""Reward models of every dialect: equal scores after conversion, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.core.errors import ContractError
from tasks.weights.heads.detect import detect
from tasks.weights.heads.folder import read_folder
from tests.weights.heads.making import (
    HIDDEN,
    PAD,
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
    ("family", "name"),
    [
        ("qwen", "Qwen2ForSequenceClassification"),
        ("llama", "LlamaForSequenceClassification"),
        ("neox", "GPTNeoXForSequenceClassification"),
    ],
)
@pytest.mark.parametrize("prefix", ["score", "value_head"])
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


@pytest.mark.parametrize("family", ["qwen", "llama"])
@pytest.mark.parametrize("kind", ["trl", "wrapped", "side", "pickled"])
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


def test_padded_batches_score_as_single_texts(tmp_path: Path) -> None:
    save_openrlhf(tmp_path / "rm", "qwen")
    convert(tmp_path / "rm", tmp_path / "out")
    one_by_one, together = scores(tmp_path / "out"), batch_scores(tmp_path / "out")
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-5)


def test_a_padding_token_that_ends_texts_is_removed(tmp_path: Path) -> None:
    save_openrlhf(tmp_path / "rm", "qwen")
    change_config(tmp_path / "rm", pad_token_id=0)  # <|endoftext|>, the tokenizer's own ending
    assert convert(tmp_path / "rm", tmp_path / "out")["pad_token_id"] is None
    scores(tmp_path / "out")
    with pytest.raises(ValueError, match="no padding token"):
        batch_scores(tmp_path / "out")


def test_a_converted_model_converts_to_itself(tmp_path: Path) -> None:
    save_openrlhf(tmp_path / "rm", "llama", mean=0.5, std=2.0)
    first = convert(tmp_path / "rm", tmp_path / "one")
    assert convert(tmp_path / "one", tmp_path / "two") == first
    assert state_of(tmp_path / "one").keys() == state_of(tmp_path / "two").keys()


def test_a_head_under_another_name_than_configured_is_reported(tmp_path: Path) -> None:
    """OpenRLHF trains `value_head` and writes the flag `score` into config.json."""
    save_openrlhf(tmp_path / "rm", "qwen", prefix="value_head")
    change_config(tmp_path / "rm", value_head_prefix="score")
    detected = detect(read_folder(tmp_path / "rm"))
    assert detected.head is not None
    assert detected.head.weight == "model:value_head.weight"
    assert detected.notes == (
        "config.json names the head 'score'; the head that was saved is 'value_head'",
    )


@pytest.mark.parametrize("bias", [0.0, -0.1, 3.0])
def test_bias_and_normalisation_together(tmp_path: Path, bias: float) -> None:
    model = save_llamafactory(tmp_path / "rm", "qwen")
    head = {**head_tensors(), "v_head.summary.bias": torch.tensor([bias])}
    save_file(head, tmp_path / "rm" / "value_head.safetensors", metadata={"format": "pt"})
    change_config(tmp_path / "rm", mean=0.25, std=4.0)
    convert(tmp_path / "rm", tmp_path / "out")
    before = (rewards(model, head["v_head.summary.weight"]) + bias - 0.25) / 4.0
    torch.testing.assert_close(scores(tmp_path / "out"), before, rtol=1e-6, atol=1e-6)


def test_buffers_are_read_and_go_into_config(tmp_path: Path) -> None:
    save_openrlhf(tmp_path / "rm", "qwen")
    path = tmp_path / "rm" / "model.safetensors"
    buffers = {"mean": torch.tensor([1.25]), "std": torch.tensor([0.5], dtype=torch.bfloat16)}
    save_file({**load_file(path), **buffers}, path, metadata={"format": "pt"})
    config = convert(tmp_path / "rm", tmp_path / "out")
    assert (config["mean"], config["std"]) == (1.25, 0.5)
    assert not set(buffers) & set(state_of(tmp_path / "out"))


def _refused(folder: Path, out: Path) -> str:
    with pytest.raises(ContractError) as caught:
        convert(folder, out)
    assert list(out.iterdir()) == []
    return caught.value.report()


def test_a_missing_head_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_openrlhf(tmp_path / "rm", "qwen")
    path = tmp_path / "rm" / "model.safetensors"
    tensors = load_file(path)
    del tensors["score.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    text = _refused(tmp_path / "rm", tmp_path / "out")
    assert "no head" in text
    assert "RewardModel" in text
    assert "never saved" in text


def test_two_labels_are_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    from tests.weights.heads.making import config_of

    AutoModelForSequenceClassification.from_config(config_of("qwen")).save_pretrained(
        tmp_path / "rm"
    )
    assert "2 labels" in _refused(tmp_path / "rm", tmp_path / "out")


def test_a_critic_is_not_a_reward_model(tmp_path: Path) -> None:
    save_openrlhf(tmp_path / "rm", "qwen", name="CriticModel")
    assert "a critic" in _refused(tmp_path / "rm", tmp_path / "out")


def test_all_findings_come_in_one_error(tmp_path: Path) -> None:
    save_openrlhf(tmp_path / "rm", "qwen", mean=1.0, std=-1.0)
    path = tmp_path / "rm" / "model.safetensors"
    odd = {"score.weight": torch.zeros(2, HIDDEN + 1), "mean": torch.tensor([2.0])}
    save_file({**load_file(path), **odd}, path, metadata={"format": "pt"})
    text = _refused(tmp_path / "rm", tmp_path / "out")
    for part in ("2 labels", "33 columns", "std is -1.0", "mean: 2.0 in the weights, 1.0 in conf"):
        assert part in text


def test_a_tensor_that_the_class_does_not_have_is_refused(tmp_path: Path) -> None:
    save_openrlhf(tmp_path / "rm", "qwen")
    path = tmp_path / "rm" / "model.safetensors"
    save_file({**load_file(path), "model.extra": torch.ones(2)}, path, metadata={"format": "pt"})
    assert "model.extra" in _refused(tmp_path / "rm", tmp_path / "out")


def test_a_plain_language_model_has_no_head_and_no_findings(tmp_path: Path) -> None:
    model = save_llamafactory(tmp_path / "lm", "qwen")
    (tmp_path / "lm" / "value_head.safetensors").unlink()
    detected = detect(read_folder(tmp_path / "lm"))
    assert (detected.head, detected.findings, detected.lora_on) == (None, (), "")
    assert "a language model" in _refused(tmp_path / "lm", tmp_path / "out")
    assert model.config.pad_token_id == PAD


@pytest.mark.parametrize("number", ["1e300", "1" + "0" * 400, "NaN", '"x"', "true"])
def test_a_normalisation_that_fp32_cannot_hold_is_refused(tmp_path: Path, number: str) -> None:
    save_openrlhf(tmp_path / "rm", "qwen", std=2.0)
    path = tmp_path / "rm" / "config.json"
    path.write_text(path.read_text().rstrip().removesuffix("}") + f', "mean": {number}}}')
    detected = detect(read_folder(tmp_path / "rm"))
    assert any("is not a number in fp32" in line for line in detected.findings)


@pytest.mark.parametrize(
    "odd",
    [
        {"architectures": 5}, {"architectures": "RewardModel"}, {"architectures": [3, None]},
        {"text_config": "x"}, {"hidden_size": "wide"}, {"value_head_prefix": ["score"]},
    ],
)  # fmt: skip
def test_a_config_with_wrong_types_does_not_crash(tmp_path: Path, odd: dict[str, object]) -> None:
    save_openrlhf(tmp_path / "rm", "qwen")
    change_config(tmp_path / "rm", **odd)
    detected = detect(read_folder(tmp_path / "rm"))
    assert detected.head is not None
    assert detected.head.role == "reward"
