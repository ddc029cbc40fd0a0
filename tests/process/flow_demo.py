"""The flow that `flow_script.py` runs; apart, because importing it imports Prefect."""

from __future__ import annotations

import sys
from pathlib import Path

from prefect import flow, get_run_logger, task

from tasks.process.launch import launch

SLEEPER = "import os, time; print('child', os.getpid(), flush=True); time.sleep(600)"


@task
def quick(i: int) -> int:
    return i


@task
def long(log_path: Path) -> None:
    argv = [sys.executable, "-c", SLEEPER]
    launch(argv, stage="long", log=get_run_logger(), log_path=log_path)


@flow(flow_run_name="{mode}")
def demo(mode: str, logs: Path) -> None:
    for i in range(20):
        quick(i)
    if mode.startswith("long"):
        long(logs / "long.log")
    if mode == "fail":
        raise ValueError("wrong on purpose")
