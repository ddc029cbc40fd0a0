"""Models in vLLM with the attention kernel, and with layers that it does not know: log-probs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.launch import launch, python_child

REPLY = 20
SAME = list(range(10, 150))
PROMPTS = [[*SAME, 7], [*SAME, 9], [5, 6, 7], list(range(60, 100))]
"""The first two begin alike, for longer than a block of vLLM's cache."""
SIZES = {
    "vocab_size": 200,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def qwen() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2, **SIZES))


def gemma() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=3, layer_types=kinds, sliding_window=16, query_pre_attn_scalar=32, **SIZES
    )
    return Gemma3ForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        pytest.param(qwen, [True, True], id="all", marks=pytest.mark.slow),
        pytest.param(gemma, [False, True, False], id="some"),
    ],
)
def test_replies_are_those_of_the_model(
    make: Callable[[], Any], layers: list[bool], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    model.save_pretrained(tmp_path / "model")
    found = replies(tmp_path)
    assert found["layers"] == layers
    for prompt, ids, told in zip(PROMPTS, found["ids"], found["logprobs"], strict=True):
        assert len(ids) == REPLY
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(told), expected, rtol=0, atol=1e-3)


def replies(folder: Path) -> dict[str, Any]:
    """What the model in the folder answers to `PROMPTS`."""
    out = folder / "told.json"
    program = ("-m", "tests.serving.attention_program", str(folder / "model"), str(out))
    launch(
        python_child("torch.distributed.run", "--standalone", *program),
        stage="train",
        log=logging.getLogger("test"),
        log_path=folder / "log",
        env={"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"},
    )
    found: dict[str, Any] = json.loads(out.read_text())
    return found
