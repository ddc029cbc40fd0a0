"""smoke_eval of a reward model: serve it, and prove that it scores as it did in training.

The engine that will serve the model loads the served folder. Its scores on the probes are compared
with the live training engine's. Held-out pairs show how often it scores the chosen answer higher.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from tasks.core.errors import DataError
from tasks.drift.reward_scores import SCORES, ScorePrint, score_drift
from tasks.drift.verdict import verdict
from tasks.evaluation.evaluation_prompts import read_pairs
from tasks.evaluation.smoke import SmokeTest, smoke_test
from tasks.pipeline.report import StageReport

CHANCE = 0.5
"""Share of pairs that an untrained head puts in the right order."""


@smoke_test
def smoke_rewards(test: SmokeTest, out: Path, *, data: Path) -> StageReport:
    """Serve a reward model and compare its scores with the trained model's.

    Args:
        test: the common arguments.
        out: staging directory; gets `report.json`, `scores.json`, `pairs.jsonl`.
        data: dataset artifact with `heldout.jsonl`, pairs of answers.

    Raises:
        DataError: no held-out pair fits the model's context.
        StageProcessError: the engine did not start or crashed.
    """
    reference = ScorePrint.load(test.trained / SCORES)
    pairs = _encoded(test, data)
    texts = [*map(list, reference.probes), *(ids for pair in pairs for ids in pair)]
    scores = test.scores(texts, out)
    count = len(reference.probes)
    now = ScorePrint(reference.probes, tuple(scores[:count]), test.engine)
    now.save(out / SCORES)
    moved = score_drift(reference, now)
    scored = list(zip(scores[count::2], scores[count + 1 :: 2], strict=True))
    right = sum(chosen > rejected for chosen, rejected in scored) / len(pairs)
    name = "drift of the engine's scores from the trained model's"
    metrics = {
        "eval/before": CHANCE,
        "eval/after": right,
        "eval/pairs": float(len(pairs)),
        **{f"reward/{name}": value for name, value in asdict(moved).items()},
    }
    with (out / "pairs.jsonl").open("w") as file:
        for chosen, rejected in scored:
            file.write(json.dumps({"chosen": chosen, "rejected": rejected}) + "\n")
    check = verdict(moved, test.profile, name=name)
    report = test.report(out, (check,), metrics, moved)
    test.log.info(
        "smoke_eval: %.1f %% of %d pairs in the right order, scores move by %.2e of their spread",
        100 * right, len(pairs), moved.mean_difference,
    )  # fmt: skip
    return report


def _encoded(test: SmokeTest, data: Path) -> list[tuple[list[int], list[int]]]:
    """Token ids of the held-out pairs that fit the context: (chosen, rejected)."""
    pairs = read_pairs(data / "heldout.jsonl")[: test.settings.eval_samples]
    texts = test.scorer.encode_whole(
        test.served, [conversation for pair in pairs for conversation in pair]
    )
    encoded = list(zip(texts[::2], texts[1::2], strict=True))
    fitting = [pair for pair in encoded if max(map(len, pair)) <= test.max_len]
    if not fitting:
        raise DataError(
            f"none of {len(encoded)} held-out pairs fits into {test.max_len} tokens",
            hint="smoke.max_model_len=... (larger), or other held-out data",
        )
    return fitting
