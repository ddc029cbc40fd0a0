"""The task queue: large tensors one per worker and few at a time, and no worker waits for ever."""

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


def _names(pending: Pending, count: int, memory: int = 0) -> list[str | None]:
    taken = [pending.take(index, memory) for index in range(count)]
    return [None if task is None else task.op.name for task in taken]


def test_largest_tasks_first_and_an_equal_share_per_worker() -> None:
    tasks = [_task(str(rows), rows) for rows in (1, 30, 20, 40)]
    assert _names(Pending(tasks, 2, 8), 3) == ["40", "30", None]
    assert _names(Pending(tasks, 1, 8), 5) == ["40", "30", "20", "1", None]


def test_a_tensor_that_takes_much_memory_is_taken_alone() -> None:
    tasks = [_task("a", 9, memory=LARGE + 1), _task("b", 8, memory=LARGE), _task("c", 7)]
    pending = Pending(tasks, 1, 8)
    first = pending.take(0, 0)
    assert first is not None
    assert first.op.name == "a"
    assert _names(Pending(tasks[1:], 1, 8), 3, memory=1) == ["c", None, None]


def test_at_most_two_large_tasks_at_a_time() -> None:
    tasks = [_task(str(index), 9, memory=LARGE + 1) for index in range(3)]
    pending = Pending(tasks, 3, 8)
    taken = [pending.take(0, 0) for _ in range(2)]
    third: list[Task | None] = []
    waiting = threading.Thread(target=lambda: third.append(pending.take(0, 0)))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert taken[0] is not None
    pending.done(taken[0])
    waiting.join(10)
    assert third == [tasks[2]]


def test_tasks_that_need_torch_wait_for_its_import() -> None:
    tasks = [_task("heavy", 9, torch=True), _task("light", 1)]
    pending = Pending(tasks, 1, 8)
    assert pending.waits_for_torch
    assert _names(pending, 2) == ["light", None]
    pending.torch_is_there()
    assert _names(pending, 1) == ["heavy"]


def test_close_wakes_waiting_workers() -> None:
    pending = Pending([_task("heavy", 9, torch=True)], 1, 8)
    got: list[Task | None] = []
    waiting = threading.Thread(target=lambda: got.append(pending.take(0, 0)))
    waiting.start()
    pending.close()
    waiting.join(10)
    assert got == [None]
    assert pending.closed
