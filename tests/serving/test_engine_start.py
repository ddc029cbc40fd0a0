"""Start of an engine in a training rank: with compilation on a GPU, without on a CPU."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from tasks.process.launch import launch, python_child
from tasks.training.job import Peft, TrainJob
from tests.settings import Loop, Settings

LENGTHS = {"max_new_tokens": 6, "max_prompt_len": 8}
ROLLOUT = {"rl": vars(Loop()), "rollout": {**LENGTHS, "offload_trainer": False}, "reward": {}}


def written(folder: Path, base: Path, online: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    settings = Settings(objective="grpo", online=online, peft=Peft("lora"))
    TrainJob(settings, base, "b", folder, folder, folder).write(folder / "job.json")
    return folder / "job.json"


@pytest.mark.slow
def test_an_engine_compiles_in_a_rank(served: Path, tmp_path: Path) -> None:
    """vLLM used to fail here with "aot_compile is not supported by the current configuration"."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    texts = {}
    for compiled in ("no", "yes"):
        job = written(tmp_path / compiled, served, ROLLOUT)
        launch(
            python_child("tests.serving.compiled_program", str(job), compiled),
            stage="train",
            log=logging.getLogger("tests.serving"),
            log_path=tmp_path / "log",
            env={**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
        )
        texts[compiled] = json.loads((tmp_path / compiled / "answer.json").read_text())
    assert texts["no"]["graphs"] == 0
    assert texts["yes"]["graphs"] > 0
    assert texts["yes"]["ids"] == texts["no"]["ids"]
    assert texts["yes"]["logprobs"] == pytest.approx(texts["no"]["logprobs"], abs=0.05)
