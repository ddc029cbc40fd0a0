"""Schema of the configuration of `flows/audit.py`: every key, its type and default."""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.config.places import Paths, Tracking

MISSING = "???"
"""Marks a value that the user has to give, for Hydra."""


@dataclass(frozen=True)
class Audit:
    """The whole configuration of `flows/audit.py`."""

    source: str = MISSING  # folder to audit: nothing is written into it
    base: str | None = None  # folder of its base model; null: the one an adapter names
    adapter: str | None = None  # adapter that was merged into base: with values=true, the proof
    values: bool = False  # true: read tensor data of models and large adapters, too
    verify: str | None = None  # file of a public key: source has to be signed by its owner
    out: str | None = None  # file for the report as JSON, "-" for standard output; null: a table
    fix: bool = False  # true: write a repaired copy into out_dir
    out_dir: str | None = None  # folder to write the repaired copy to
    prefect: bool = False  # true: run as a Prefect flow, with the findings in MLflow
    tag: str = ""  # free text that tells flow runs apart
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)
