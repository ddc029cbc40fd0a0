"""A reward model as a reward source: its input, its scores, its errors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.core.errors import ArtifactError, RewardError
from tasks.rl.reward_model import RewardFolder, RewardModel
from tasks.rl.rewards import open_rewards
from tasks.rl.settings import Reward
from tasks.serving.reference.rewards import load_rewarder
from tests.audit.making import edit_json
from tests.rl.making import LOG, TOKENIZER, response, responses
from tests.tiny import make_tokenizer, tiny

MEAN, STD = 0.25, 1.5
OTHER_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def save_reward_model(folder: Path, *, tokenizer: Any = TOKENIZER, **config: Any) -> Path:
    """Save a random Qwen2 with one label, its statistics and its tokenizer."""
    from transformers import Qwen2ForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 128, "hidden_size": 64}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    made = Qwen2ForSequenceClassification(
        tiny("Qwen2", **sizes, **ids, bos_token_id=None, num_labels=1)
    )
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # scores that lie apart
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    edit_json(folder / "config.json", mean=MEAN, std=STD, **config)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward") / "model")


def ids_of(replied: Any) -> list[int]:
    return [*replied.prompt.ids.tolist(), *replied.generated.ids.tolist()]


def alone(folder: Path, texts: list[list[int]]) -> list[float]:
    """Rewards by transformers' own forward pass, one text at a time."""
    how = {"quantization": None, "attn_implementation": "sdpa", "dtype": "float32"}
    return load_rewarder(folder, adapter=None, **how).scores(texts)


def rewards_of(folder: Path, to_score: list[Any], tokenizer: Any = TOKENIZER, **reward: Any) -> Any:
    section = Reward(model=str(folder), **reward)
    how = {"device": torch.device("cpu"), "log": LOG, "logs": folder}
    with open_rewards(section, tokenizer=tokenizer, **how) as rewards:
        return np.array([each.parts["model"] for each in rewards.score(to_score)])


def test_packed_scores_equal_those_of_each_text_alone(folder: Path) -> None:
    to_score = [*responses(), response("copy ape", "bee", ended=False)]
    expected = alone(folder, [ids_of(each) for each in to_score])
    np.testing.assert_allclose(rewards_of(folder, to_score), expected, rtol=1e-4, atol=1e-4)
    assert np.std(expected) > 0.1
    raw = rewards_of(folder, to_score, normalize=False)
    np.testing.assert_allclose((raw - MEAN) / STD, expected, rtol=1e-4, atol=1e-4)


def opened(folder: Path, policy: Any = TOKENIZER) -> RewardModel:
    return RewardModel(folder, policy, torch.device("cpu"), normalize=True, log=LOG)


def test_equal_tokenizers_use_the_policys_ids(folder: Path) -> None:
    to_score, model = response("copy ape", "ape"), opened(folder)
    to_score.generated.ids[0] = TOKENIZER.pad_token_id  # what no text is tokenised to
    assert model.ids(to_score) == ids_of(to_score)
    assert len(model.ids(response("copy ape", "a" * 100))) == 128
    with pytest.raises(RewardError, match=r"129 tokens for row of copy ape.*128"):
        model.ids(response("copy ape", "a" * 101))


def test_another_vocabulary_or_template_renders_again(tmp_path: Path) -> None:
    own, words = make_tokenizer(), make_tokenizer()
    words.add_tokens(["copy"])
    text = opened(save_reward_model(tmp_path / "words", tokenizer=words)).ids(
        response("copy ape", "ape")
    )
    assert words.convert_tokens_to_ids("copy") in text
    assert words.decode(text).endswith("assistant\nape<|im_end|>")
    own.chat_template = OTHER_TEMPLATE
    folder = save_reward_model(tmp_path / "other", tokenizer=own)
    to_score = [response("copy ape", "ape"), response("copy bee", "be", ended=False)]
    texts = list(map(opened(folder).ids, to_score))
    assert [own.decode(text) for text in texts] == [
        "[user] copy ape<|im_end|>[assistant] ape<|im_end|>",
        "[user] copy bee<|im_end|>[assistant] be",  # cut off: it never said that it ends
    ]
    expected = alone(folder, texts)
    np.testing.assert_allclose(rewards_of(folder, to_score), expected, rtol=1e-4, atol=1e-4)


def test_templates_that_cannot_render_name_the_row(tmp_path: Path) -> None:
    own = make_tokenizer()
    own.chat_template = None
    folder = save_reward_model(tmp_path / "without", tokenizer=own)
    with pytest.raises(ArtifactError, match=r"reward\.model="):
        opened(folder)
    own.chat_template = "{{ raise_exception('no bees') }}"
    folder = save_reward_model(tmp_path / "other", tokenizer=own)
    with pytest.raises(RewardError, match="row of copy bee.*no bees"):
        opened(folder).ids(response("copy bee", "bee"))


def test_folders_that_are_not_reward_models(folder: Path, tmp_path: Path) -> None:
    for number, changes in enumerate((
        {"architectures": ["Qwen2ForCausalLM"]},
        {"architectures": None},
        {"id2label": None, "num_labels": None},
        {"id2label": {"0": "bad", "1": "good", "2": "best"}},
        {"mean": None},
        {"std": 0.0},
    )):  # fmt: skip
        broken = tmp_path / f"broken{number}"
        broken.mkdir()
        shutil.copy(folder / "config.json", broken)
        edit_json(broken / "config.json", **changes)
        with pytest.raises(ArtifactError, match=str(broken)):
            RewardFolder.read(broken, normalize=True)
