"""The plan's estimate of vLLM's KV cache equals vLLM's own number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli.config import compose_config
from tasks.config.checks.memory import engine_memory
from tasks.serving.vllm.job import environment

ASK = """
import json, sys
from vllm import LLM
llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=128, enforce_eager=True)
cache = llm.llm_engine.vllm_config.cache_config
print("cache:" + json.dumps([cache.num_gpu_blocks, cache.block_size]))
"""


@pytest.mark.slow
def test_vllm_allocates_the_estimated_number_of_tokens(tmp_path: Path, served: Path) -> None:
    env = os.environ | environment(1, None) | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(served)],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    line_ = next(line for line in done.stdout.splitlines() if line.startswith("cache:"))
    blocks, size = json.loads(line_.removeprefix("cache:"))
    settings = compose_config(["smoke.max_model_len=128"]).settings
    config = json.loads((served / "config.json").read_text())
    ours = engine_memory(config, settings, gpu_bytes=None)
    assert size == ours.block
    assert blocks == ours.cache // (ours.token * ours.block)
