"""Adapters with embeddings, as peft saves them: grown, tied, rows of tokens; and their heads.

The delivered model is peft's own merge, on the base with as many rows as in training.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.delivery.conftest import Done
from tests.delivery.making import differing, merged_by_peft, with_rows
from tests.weights.adapters.making import save, train
from tests.weights.heads.making import classifier
from tests.weights.making import save_tokenizer, small_config, state_of

Run = Callable[..., Done]
ROWS = small_config("qwen").vocab_size
MORE = 7
TOKENS = [ROWS, ROWS + 1]
BOTH = {"embed_tokens": TOKENS, "lm_head": TOKENS}

KEPT_TIED = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
CASES: dict[str, tuple[bool, int, dict[str, Any], bool]] = {
    # base tied, rows added, what is trained, served tied
    "both, tied": (True, MORE, {"modules_to_save": ["embed_tokens", "lm_head"]}, False),
    "grown embedding, tied": (True, MORE, {"modules_to_save": ["embed_tokens"]}, False),
    "grown embedding, kept tied": (True, MORE, KEPT_TIED, True),
    "tokens, tied": (True, MORE, {"trainable_token_indices": TOKENS}, True),
    "tokens of both": (False, MORE, {"trainable_token_indices": BOTH}, False),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The same model with and without tied embeddings."""
    from transformers import AutoModelForCausalLM

    made = {}
    for tied in (True, False):
        config = small_config("qwen")
        config.tie_word_embeddings = tied
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        made[tied] = tmp_path_factory.mktemp("bases") / f"tied-{tied}"
        model.save_pretrained(made[tied])
        save_tokenizer(made[tied])
    return made


def trained(model: Any, folder: Path, *, task: str = "CAUSAL_LM", **options: Any) -> Path:
    """Save an adapter on `model` with peft, all weights random, and a tokenizer of its rows."""
    from peft import LoraConfig
    from transformers import AutoTokenizer

    config = LoraConfig(
        r=4, lora_alpha=8, task_type=task, target_modules=["q_proj", "v_proj"], **options
    )
    save(train(model, config, seed=3), folder)
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = model.get_input_embeddings().weight.shape[0]
    tokenizer.add_tokens([f"<new-{index}>" for index in range(rows - len(tokenizer))])
    tokenizer.save_pretrained(folder)
    return folder


DEFAULT = ("grown embedding, kept tied", "tokens of both")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in CASES],
)
def test_is_delivered_as_peft_merges_it(
    here: Run, name: str, bases: dict[bool, Path], tmp_path: Path
) -> None:
    tied, more, options, served_tied = CASES[name]
    source = trained(with_rows(bases[tied], more), tmp_path / "adapter", **options)
    done = here(f"source={source}", f"base={bases[tied]}", "merge.base=original")
    ours, theirs = state_of(tmp_path / "out"), merged_by_peft(bases[tied], source, more)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["vocab_size"]) == (served_tied, ROWS + more)
    assert ("lm_head.weight" in ours) is not served_tied
    assert differing(ours, theirs) == []
    assert not [finding for finding in done.summary["findings"] if finding["severity"] == "error"]


@pytest.mark.slow
def test_a_reward_adapter_that_names_every_head(
    here: Run, bases: dict[bool, Path], tmp_path: Path
) -> None:
    """ms-swift names v_head, classifier and score; the model has one of them."""
    heads = ["v_head", "classifier", "score"]
    model = classifier(bases[True])
    source = trained(model, tmp_path / "adapter", task="SEQ_CLS", modules_to_save=list(heads))
    path = source / "adapter_config.json"
    settings = json.loads(path.read_text()) | {"task_type": "CAUSAL_LM", "modules_to_save": heads}
    path.write_text(json.dumps(settings))
    here(f"source={source}", f"base={bases[True]}", "merge.base=original")
    stored = state_of(source, "adapter_model")["base_model.model.score.weight"]
    assert torch.equal(state_of(tmp_path / "out")["score.weight"], stored.bfloat16())
