"""Write the metrics of a stage to TensorBoard's event files, beside MLflow.

    tensorboard --logdir runs/tensorboard

No other module imports tensorboard. A file is created with the first number, so a stage without
metrics has no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventFile:
    """Event file of one stage.

    Args:
        folder: folder of the file; created with the first number.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def scalars(self, values: Mapping[str, float], step: int, at: float) -> None:
        """Write the numbers of one step, at a time in seconds; NaN is left out, as in MLflow."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in values.items()
            if not math.isnan(float(value))
        ]
        if scalars:
            event = Event(wall_time=at, step=step, summary=Summary(value=scalars))
            self._opened().add_event(event)

    def flush(self) -> None:
        """Write buffered numbers to disk."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write buffered numbers and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _opened(self) -> Any:
        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self._folder))
        return self._writer
