"""The flow that `flow_script.py` runs; apart, because importing it imports Prefect."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task

from flows.orchestration.failure import reported
from tasks.process.launch import launch

SLEEPER = """
import os, time
from tasks.core.events import say
say(f'child {os.getpid()}')
time.sleep(600)
"""


@task
def quick(i: int) -> int:
    return i


@task
def long(log_path: Path) -> None:
    argv = [sys.executable, "-c", SLEEPER]
    launch(argv, stage="long", log=get_run_logger(), log_path=log_path)


@flow(flow_run_name="{mode}")
def demo(mode: str, logs: Path) -> dict[str, Any]:
    return reported(lambda: work(mode, logs))


def work(mode: str, logs: Path) -> dict[str, Any]:
    for i in range(20):
        quick(i)
    if mode.startswith("long"):
        long(logs / "long.log")
    if mode == "fail":
        raise ValueError("wrong on purpose")
    return {"mode": mode}
