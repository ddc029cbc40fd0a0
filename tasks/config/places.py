"""Sections `tracking`, `paths` and `timeouts`, and commands that have little else."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tracking:
    """MLflow, and files with the same numbers."""

    uri: str | None = None  # null: SQLite under paths.runs
    experiment: str = "plumbline"  # MLflow experiment of the runs
    model_name: str = "plumbline"  # in the model registry
    tensorboard: bool = False  # write event files under paths.runs/tensorboard too
    prometheus: str | None = None  # file of metrics, *.prom; null: metrics.prom in paths.runs


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


@dataclass(frozen=True)
class Status:
    """The whole configuration of `flows/status.py`."""

    json: bool = False  # true: print a list of runs as JSON, for programs
    limit: int = 10  # number of ended runs to list, the newest first; 0: all
    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Open:
    """The whole configuration of `flows/open.py`."""

    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Compare:
    """The whole configuration of `flows/compare.py`."""

    a: str = "???"  # the first run: its folder, its name in paths.runs, its summary or report
    b: str = "???"  # the second run, likewise
    out: str | None = None  # file for a page with the curves of both, such as compare.html
    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Promote:
    """The whole configuration of `flows/promote.py`."""

    source: str = "???"  # models:/<name>/<number> or models:/<name>@<alias>
    verify: str | None = None  # file of a public key that has to have signed its folder
    tracking: Tracking = field(default_factory=Tracking)  # where the model is registered
    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Lineage:
    """The whole configuration of `flows/lineage.py`."""

    source: str = "???"  # models:/<name>/<number>, models:/<name>@<alias>, or a served folder
    json: bool = False  # true: print the artifacts as JSON, for programs
    tracking: Tracking = field(default_factory=Tracking)  # where the model is registered
    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Serve:
    """The whole configuration of `flows/serve.py`; what begins with `-` goes to vLLM."""

    source: str = "???"  # models:/<name>/<number>, models:/<name>@<alias>, or a served folder
    verify: str | None = None  # file of a public key that has to have signed the folder
    tracking: Tracking = field(default_factory=Tracking)  # where the model is registered
    paths: Paths = field(default_factory=Paths)
