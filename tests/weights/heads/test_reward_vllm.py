"""vLLM serves a converted reward model: raw scores by default, normalised ones on request."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch

from tasks.process.launch import launch
from tasks.serving.vllm.job import environment
from tests.weights.heads.making import save_llamafactory, scores
from tests.weights.heads.test_reward import convert


@pytest.mark.slow
def test_vllm_gives_the_same_scores(tmp_path: Path) -> None:
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
        from_vllm[name] = torch.tensor(
            json.loads((tmp_path / f"{name}.json").read_text())
        ).flatten()
    normalised = scores(tmp_path / "out")
    torch.testing.assert_close(from_vllm["normalised"], normalised, rtol=1e-4, atol=1e-4)
    raw = normalised * config["std"] + config["mean"]
    torch.testing.assert_close(from_vllm["raw"], raw, rtol=1e-4, atol=1e-4)
