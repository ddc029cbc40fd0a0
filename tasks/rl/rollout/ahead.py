"""Responses that are sampled in the background, beside an update of the policy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tasks.core.errors import PlumblineError, TrainingError
from tasks.rl.experience.responses import Request
from tasks.serving.vllm.colocation import Generated


class Ahead:
    """Responses to the requests of all ranks, sampled by a thread of rank 0.

    Args:
        everyone: the requests, by rank.
        work: samples their responses; None on the other ranks, which have no thread.
    """

    def __init__(
        self,
        everyone: Sequence[Sequence[Request]],
        work: Callable[[], list[Generated]] | None,
    ) -> None:
        self._key = _key(everyone)
        self._responses: list[Generated] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if work is not None:
            self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
            self._thread.start()

    def is_for(self, everyone: Sequence[Sequence[Request]]) -> bool:
        """Return True if these are the requests that are sampled here."""
        return self._key == _key(everyone)

    def wait(self) -> None:
        """Wait for the end, whatever it is."""
        if self._thread is not None:
            self._thread.join()

    def result(self) -> list[Generated]:
        """Return the responses to all requests, in order; on rank 0.

        Raises:
            PlumblineError: the error that prevented them.
            TrainingError: any other error.
        """
        self.wait()
        if isinstance(self._error, PlumblineError):
            raise self._error
        if self._error is not None:
            raise TrainingError(f"sampling in the background failed: {self._error!r}")
        return self._responses

    def _run(self, work: Callable[[], list[Generated]]) -> None:
        try:
            self._responses = work()
        except BaseException as error:  # raised where the responses are collected
            self._error = error


def _key(everyone: Sequence[Sequence[Request]]) -> list[list[tuple[bytes, int, int, int | None]]]:
    """Return what tells requests apart from others."""
    return [
        [(r.ids.tobytes(), r.samples, r.seed, r.limit) for r in requests] for requests in everyone
    ]
