"""Sections `tracking`, `paths` and `timeouts`."""

from __future__ import annotations

from dataclasses import dataclass

MISSING = "???"
"""Marks a value that the user has to give, for OmegaConf."""


@dataclass(frozen=True)
class Tracking:
    """MLflow, and event files with the same numbers."""

    uri: str | None = None  # null: SQLite under paths.runs
    experiment: str = "plumbline"  # MLflow experiment of the runs
    model_name: str = "plumbline"  # in the model registry
    tensorboard: bool = False  # write event files under paths.runs/tensorboard too


@dataclass(frozen=True)
class Paths:
    """Folders."""

    runs: str = "runs"  # folder for artifacts, MLflow, Prefect and logs
    wait_s: float | None = None  # seconds to wait for other runs; null: as long as it takes


@dataclass(frozen=True)
class Timeouts:
    """Time limits of stages, in seconds. Others have one of their own: train, smoke."""

    prepare_data_s: float | None = None  # seconds for reading and checking the data; null: no limit
    prepare_base_s: float | None = None  # seconds for the base, a download included; null: no limit
    rollout_base_s: float | None = None  # seconds for the base of rollouts; null: no limit
    gather_s: float | None = None  # seconds for joining the partitions; null: no limit
    merge_s: float | None = None  # seconds for the merge; null: no limit
    convert_s: float | None = None  # seconds for the served files; null: no limit
    quantize_s: float | None = None  # seconds for the quantised files; null: no limit
    lm_eval_s: float | None = None  # seconds for lm-evaluation-harness; null: no limit


@dataclass(frozen=True)
class DeliverTimeouts:
    """Time limits of stages, in seconds. The test of the served model has smoke.timeout_s."""

    gather_s: float | None = None  # seconds for joining the partitions; null: no limit
    reference_s: float | None = None  # seconds for the first fingerprint; null: half an hour
    merge_s: float | None = None  # seconds for the merge; null: no limit
    convert_s: float | None = None  # seconds for the served files; null: no limit
    quantize_s: float | None = None  # seconds for the quantised files; null: no limit
