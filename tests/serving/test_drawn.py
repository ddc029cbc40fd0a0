"""Sampled responses of a served policy in smoke_eval: texts, train-inference mismatch, rewards."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tasks.evaluation.model_folder import computing_dtype_of
from tasks.evaluation.responses import Measure
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.pipeline.stage import StageReport
from tests.serving.models import CONVERSATIONS, END, load
from tests.settings import smoke_settings
from tests.tiny import make_tokenizer

pytestmark = pytest.mark.slow
NEW = 12
SETTINGS = smoke_settings(
    engine="transformers", max_new_tokens=NEW, min_stop_rate=0.0, max_degenerate_rate=1.0
)
ROWS = [{"messages": messages} for messages in CONVERSATIONS]


@pytest.fixture
def run(smoke: Callable[..., StageReport]) -> Callable[..., StageReport]:
    """Run smoke_eval of a policy with its rollout temperature; arguments override."""
    return partial(smoke, settings=SETTINGS, temperature=1.0)


@pytest.fixture(scope="module")
def judge(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with the policy's tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("models") / "judge"
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(
        served, num_labels=1, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_distance_and_rewards_are_those_of_the_sampled_ids(
    run: Callable[..., StageReport], scorer: ReferenceScorer, served: Path, base: Path,
    judge: Path, tmp_path: Path,
) -> None:  # fmt: skip
    import torch

    metrics = run(reward=judge, dtype="bfloat16").metrics  # as `load` computes
    prompts = scorer.encode(served, ROWS).tokens
    lines = (tmp_path / "out" / "drawn.jsonl").read_text().splitlines()
    replies = {}
    for when, folder in (("before", base), ("after", served)):
        replies[when] = scorer.generate(ModelRef(folder), prompts, NEW, [END], 1.0).tokens
        texts = [[*p, *r] for p, r in zip(prompts, replies[when], strict=True)]
        scores = scorer.rewards(ModelRef(judge, dtype=computing_dtype_of(judge)), texts)
        assert metrics[f"scored/{when}"] == pytest.approx(sum(scores) / len(scores), abs=1e-6)
        written = [json.loads(line)[f"reward_{when}"] for line in lines]
        assert written == pytest.approx(scores, abs=1e-6)
    assert metrics["scored/before"] != metrics["scored/after"]
    assert metrics["scored/left_out"] == 0
    models, moves = [load(served), load(base)], []
    for prompt, reply in zip(prompts, replies["after"], strict=True):
        ids = torch.tensor([[*prompt, *reply]])
        with torch.no_grad():
            now, then = (m(ids).logits[0].float().log_softmax(-1) for m in models)
        at = range(len(prompt) - 1, ids.shape[1] - 1)
        moves += [float(now[i, t] - then[i, t]) for i, t in zip(at, reply, strict=True)]
    assert metrics["drawn/kl"] == pytest.approx(sum(moves) / len(moves), rel=1e-4)
    assert 0 < metrics["drawn/kl_error"] < metrics["drawn/kl"]


def test_a_function_of_the_user_judges_the_responses_of_both_models(
    run: Callable[..., StageReport], tmp_path: Path
) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text(
        "def size(completions, **_):\n"
        "    return [sum(map(ord, c[0]['content'])) for c in completions]\n"
    )
    function = Measure.of(f"{judge}:size")
    metrics = run(temperature=None, function=function, tools={"function_s": 60.0}).metrics
    lines = (tmp_path / "out" / "generations.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for when in ("before", "after"):
        sizes = [sum(map(ord, row[when])) for row in rows]
        assert [row[f"function_{when}"] for row in rows] == sizes
        assert metrics[f"eval/function_{when}"] == pytest.approx(sum(sizes) / len(sizes))
    assert metrics["eval/function_before"] != metrics["eval/function_after"]
