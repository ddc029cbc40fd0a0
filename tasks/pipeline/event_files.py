"""TensorBoard's event files: the same numbers as MLflow's, for those who look at them there.

    tensorboard --logdir runs/tensorboard

The only importer of tensorboard. Files are opened at the first number, so that a stage that logs
none leaves none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventFile:
    """Scalars of one stage.

    Args:
        folder: where its event file goes; made when the first number comes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers of one step; NaN is left out, as in MLflow."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        found = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in values.items()
            if not math.isnan(float(value))
        ]
        if found:
            event = Event(wall_time=time.time(), step=step, summary=Summary(value=found))
            self._opened().add_event(event)

    def flush(self) -> None:
        """Let a reader see what was written."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write the rest."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _opened(self) -> Any:
        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self._folder))
        return self._writer
