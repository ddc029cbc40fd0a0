"""Write a checkpoint beside training: copies of the states, and a thread that writes them.

    states = host_copies(engine, lambda: engine.save_checkpoint(...))   training waits for this only
    writer.start(write)                                                 `write` runs in the thread
    writer.check()                                                      raises its error, if any

DeepSpeed 0.19 has an asynchronous writer of its own; decision 22 says why it is not used.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

States = list[tuple[Path, Any]]
"""Files that a checkpoint still lacks, and the object that `torch.save` has to write to each."""


def host_copies(engine: Any, save: Callable[[], object]) -> States:
    """Return copies in host memory of the states that DeepSpeed would write.

    Args:
        engine: the DeepSpeed engine.
        save: calls `engine.save_checkpoint`, which makes all folders and small files.
    """
    usual, kept = engine.checkpoint_engine, _KeptStates()
    engine.checkpoint_engine = kept
    try:
        save()
    finally:
        engine.checkpoint_engine = usual
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # copies to page-locked memory return before they are complete
    return kept.states


class _KeptStates:
    """DeepSpeed's interface `CheckpointEngine`: keeps a copy of every state instead of a file."""

    def __init__(self) -> None:
        self.states: States = []

    def save(self, state_dict: Any, path: str) -> None:
        self.states.append((Path(path), on_host(state_dict)))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def create(self, info: Any) -> None:
        pass

    def commit(self, info: Any) -> bool:
        return True

    def is_decoupled(self) -> bool:
        return False

    def preserves_storage_sharing(self) -> bool:
        return False  # DeepSpeed would copy tensors that share one


def on_host(value: Any) -> Any:
    """Return a deep copy whose tensors are in host memory, page-locked if they were on a GPU."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        if tensor.device.type == "cpu":
            return tensor.clone()
        copied = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return copied.copy_(tensor, non_blocking=True)
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((key, on_host(item)) for key, item in value.items())
    if kind in (list, tuple):
        return kind(on_host(item) for item in value)
    return copy.deepcopy(value)


class Writer:
    """A thread that writes one checkpoint at a time. Its methods belong to the main thread.

    A SIGTERM that arrives while it writes ends this process only after the checkpoint.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._on_sigterm: Any = signal.SIG_DFL

    def start(self, write: Callable[[], object]) -> None:
        """Run `write` in the thread; an earlier one has to be complete (`wait`)."""
        assert self._thread is None, "a checkpoint is being written"
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="checkpoint", daemon=True
        )
        self._on_sigterm = signal.signal(signal.SIGTERM, self._end_after_write)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a write that has ended; do not wait for one that has not."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the write.

        Raises:
            Exception: whatever `write` has raised, once.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """Wait for the write, and leave its error to the next `check` or `wait`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def _end_after_write(self, number: int, _: object) -> None:
        self.join()
        if self._error is not None:
            traceback.print_exception(self._error)
        os.kill(os.getpid(), number)
