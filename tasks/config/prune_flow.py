"""Schema of the configuration of `flows/prune.py`: every key, its type and default."""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.config.places import Paths, Tracking


@dataclass(frozen=True)
class Prune:
    """The whole configuration of `flows/prune.py`."""

    keep: int | None = None  # number of the newest runs whose files stay; null: no such limit
    older_than: float | None = None  # days since the last use of a file; null: no such limit
    yes: bool = False  # true: remove; false: only show what would be removed
    unfinished: bool = False  # true: also old files that only an unfinished run needs to go on
    tag: str = ""  # free text that tells flow runs apart
    tracking: Tracking = field(default_factory=Tracking)  # names registered models
    paths: Paths = field(default_factory=Paths)
