"""Write what a run leaves, with the classes that write it in a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.orchestration.summary import Summary, stage_entry
from tasks.core.contract import Check
from tasks.drift.fingerprint import PROFILES, Drift
from tasks.drift.verdict import verdict
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.stage import StageResult
from tests.test_status import record_at

NAME = "20261123-140000-0a1b2c3d"
EVAL = {
    "before": 0.34375, "after": 0.53125, "loss_before": None, "loss_after": None,
    "reward_before": 0.3769116495228512, "reward_after": 1.2641759593410464, "kl": 0.00788497836,
    "drawn_before": 0.0, "drawn_after": 1.0, "scored_before": -0.5, "scored_after": 0.875,
}  # fmt: skip
DRIFT = Drift(mean_kl=8.857e-05, p95_kl=2.88e-04, max_kl=1.2e-03, top1_agreement=1.0)
REFUSED = Drift(mean_kl=1.62e-02, p95_kl=2.79e-02, max_kl=0.4, top1_agreement=0.57)
SERVED = "/models/my served"
LENGTHS = [[5, 1], [112, 60], [128, 30], [3072, 9]]
"""Training rows by their length, as `Tally.counts` reports them."""
TRAINED = {
    "notes": {"data": {"train": {"lengths": LENGTHS}}},
    "config": {"settings": {"batch": {"max_len": 1024}}},
}
"""Parts of the manifest of a training."""


def publish(runs: Path, kind: str, files: Mapping[str, str]) -> Artifact:
    """Write a small artifact with a manifest."""
    folder = runs / "artifacts" / kind / "0123456789abcdef0123"
    folder.mkdir(parents=True)
    versions = {"torch": "2.13.0+cpu", "vllm": "absent"}
    manifest = {"versions": versions, **(TRAINED if kind == "shards" else {})}
    texts = {"manifest.json": json.dumps(manifest), **files}
    for name, text in texts.items():
        (folder / name).write_text(text)
    return Artifact(kind, folder, "0" * 64)


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def responses(*rows: tuple[str, str, str]) -> dict[str, str]:
    """Return the files of an evaluation: prompt, response before and after of each row."""
    greedy = [
        {"id": str(number), "messages": [{"role": "user", "content": prompt}], "expected": "k",
         "before": before, "after": after, "stopped": number != 1,
         "tokens_before": [5] * len(before), "tokens_after": [5] * len(after)}
        for number, (prompt, before, after) in enumerate(rows)
    ]  # fmt: skip
    rewards = ((-1.0, 0.5), (0.0, 1.25))
    sampled = [
        {"id": str(number), "before": " p", "after": " k", "reward_before": a, "reward_after": b}
        for number, (a, b) in enumerate(rewards)
    ]
    return {"generations.jsonl": lines(greedy), "drawn.jsonl": lines(sampled)}


def recorded(runs: Path, *, response: str = " k") -> Path:
    """Write a completed run of three stages. Returns its folder."""
    results: list[StageResult] = []

    def run(name: str, artifact: Artifact, *checks: Check, drift: Drift | None = None) -> None:
        with record.stage(name):
            for step in range(1, 6 if name == "train" else 0):
                record.on_event({"event": "step", "step": step, "loss": 1 / step, "kl": 0.1 * step})
            if name == "train":
                record.on_event({"event": "eval", "step": 0, "when": "before", "loss": 1.5})
                record.on_event({"event": "eval", "step": 5, "when": "after", "loss": float("nan")})
        numbers = asdict(drift) if drift else None
        results.append(StageResult(name, artifact, False, 1.5, checks, numbers, {}))

    with record_at(runs, NAME) as record:
        good = Check("model.norm.weight", "BF16 [128]", "BF16 [128]", ok=True)
        run("train", publish(runs, "shards", {}), good)
        moved = verdict(DRIFT, PROFILES["standard"])
        run("merge", publish(runs, "weights", {}), good, moved, drift=DRIFT)
        files = responses(("Same?", " yes", " yes"), ("Last letter: e p i k", " p", response))
        run("smoke_eval", publish(runs, "report", files))
        summary = Summary("completed", "rlhf", "qlora", 61.25, run=NAME)
        summary.stages = [stage_entry(result) for result in results]
        summary.served, summary.eval, summary.exit_status = SERVED, dict(EVAL), 0
        summary.gate = {"passed": True, "reasons": [], "version": "models:/m/1", "candidate": ""}
        summary.memory = {"train": {"planned": 3 << 30, "peak": 7 << 29}}
        summary.command = "python flows/rlhf.py +exp=qlora"
        summary.write(runs, NAME, {"config.yaml": "seed: 0\n"})
    return runs / "reports" / NAME


def refused(runs: Path) -> Path:
    """Write a run that failed at the drift of its merge. Returns its folder."""
    check = verdict(REFUSED, PROFILES["standard"])
    error = f"merge: contract not met: {check.name}: expected {check.expected}, found {check.found}"
    with record_at(runs, NAME) as record:
        try:
            with record.stage("merge"):
                raise ValueError(error)
        except ValueError:
            pass
        summary = Summary("failed", "rlhf", "qlora", 12.5, run=NAME, error=error, exit_status=1)
        bound = check.as_dict()["bound"]
        summary.refused = {"stage": "merge", **bound, "ok": check.ok}
        summary.error_report = f"merge failed: {error}\n  -> gate=loose"
        summary.write(runs, NAME, {})
    return runs / "reports" / NAME
