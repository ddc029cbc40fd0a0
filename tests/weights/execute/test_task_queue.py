"""The task queue: the largest tensors first, few large ones at a time, no worker waits for ever."""

from __future__ import annotations

import threading
from pathlib import Path

from tasks.weights.execute.sinks import Sink
from tasks.weights.execute.task_queue import LARGE, Pending, Task
from tasks.weights.files.header import TensorInfo
from tasks.weights.plan.operations import Op


def _task(name: str, rows: int, *, memory: int = 0, torch: bool = False) -> Task:
    dtype = "F64" if torch else "F32"
    op = Op(name, (rows,), "BF16", f"base:{name}", dtype)
    return Task(
        op, Sink(-1, Path("out"), TensorInfo((rows,), "BF16", 0, 2 * rows)), None, None, memory
    )


def _names(pending: Pending, count: int) -> list[str | None]:
    taken = [pending.take() for _ in range(count)]
    return [None if task is None else task.op.name for task in taken]


def test_largest_tasks_first() -> None:
    tasks = [_task(str(rows), rows) for rows in (1, 30, 20, 40)]
    assert _names(Pending(tasks), 5) == ["40", "30", "20", "1", None]


def test_at_most_two_large_tasks_at_a_time() -> None:
    tasks = [_task(str(index), 9, memory=LARGE + 1) for index in range(3)]
    pending = Pending(tasks)
    taken = [pending.take() for _ in range(2)]
    third: list[Task | None] = []
    waiting = threading.Thread(target=lambda: third.append(pending.take()))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert taken[0] is not None
    pending.done(taken[0])
    waiting.join(10)
    assert third == [tasks[2]]


def test_tasks_that_need_torch_wait_for_its_import() -> None:
    tasks = [_task("heavy", 9, torch=True), _task("light", 1)]
    pending = Pending(tasks)
    assert pending.waits_for_torch
    assert _names(pending, 1) == ["light"]
    pending.torch_is_there()
    assert _names(pending, 1) == ["heavy"]


def test_close_wakes_waiting_workers() -> None:
    pending = Pending([_task("heavy", 9, torch=True)])
    got: list[Task | None] = []
    waiting = threading.Thread(target=lambda: got.append(pending.take()))
    waiting.start()
    pending.close()
    waiting.join(10)
    assert got == [None]
    assert pending.closed
