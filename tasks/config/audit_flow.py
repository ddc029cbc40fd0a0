"""The configuration's schema of `flows/audit.py`: every key, its type, its default."""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.config.places import Paths, Tracking

MISSING = "???"
"""What Hydra takes for a value that has to be given."""


@dataclass
class Audit:
    """The whole configuration of `flows/audit.py`."""

    source: str = MISSING  # folder to look at: nothing is written into it
    base: str | None = None  # folder of the model it was made from; null: the one an adapter names
    adapter: str | None = None  # adapter that was merged into base: with values=true, the proof
    values: bool = False  # true: read tensor data too, at the speed of the disk
    out: str | None = None  # file for the report as JSON, "-" for standard output; null: a table
    fix: bool = False  # true: write a repaired copy into out_dir
    out_dir: str | None = None  # folder that is to hold the repaired copy
    prefect: bool = False  # true: as a Prefect flow, its findings in MLflow
    tag: str = ""  # free text that tells flow runs apart
    tracking: Tracking = field(default_factory=Tracking)  # of MLflow, with prefect=true
    paths: Paths = field(default_factory=Paths)
