"""The online experiments for real hardware, planned where that hardware is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.links import compose, links
from flows.plan import forecast, render
from tasks.preflight import findings
from tests.conf.test_plan import CHAIN

ROWS = ({"prompt": "2 + 2?", "answer": 4}, {"prompt": "who are you?", "answer": ""})


@pytest.mark.parametrize(
    ("experiment", "stages"),
    [
        ("ppo_qwen7b_lora", CHAIN),
        ("grpo_qwen7b_qlora", [*CHAIN[:2], "rollout_base", *CHAIN[2:]]),
    ],
)
def test_flash_attention_is_all_that_is_missing(
    experiment: str, stages: list[str], tmp_path: Path
) -> None:
    """Rewards are the user's own, a function here; prompts need no answer."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "judge.py").write_text(
        "def score(completions, **_):\n    return [0.0] * len(completions)\n"
    )
    given = [
        f"+exp={experiment}", f"data.path={tmp_path}/rows.jsonl", "reward=none",
        f"reward.function={tmp_path}/judge.py:score", f"paths.runs={tmp_path}/runs",
    ]  # fmt: skip
    composed = compose(given)
    (link,) = links(composed, given)
    assert [name for name, _ in forecast(link)] == [*stages, "register"]
    text = render([link])
    deepspeed = json.loads(text[text.index("deepspeed:\n") + 11 : text.index("preflight:")])
    assert deepspeed["zero_optimization"]["stage"] == 2
    assert deepspeed["train_batch_size"] == composed.settings["train"]["global_batch_size"]
    found = findings(composed.settings, composed.runs)
    assert [one.override for one in found] == ["model.attn_implementation=sdpa"]
    assert not composed.runs.exists()
