"""Settings of the commands that need no Hydra: a dataclass each, whose docstrings are the help."""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.config.after_training import MISSING
from tasks.config.choices import Attention, Device, Dtype, Profile, ServerKind, SmokeEngine

__all__ = [
    "Audit", "Bisect", "Compare", "Lineage", "Open", "Promote", "Prune", "Serve", "Status",
    "Verify",
]  # fmt: skip


@dataclass(frozen=True)
class Paths:
    """Folders."""

    runs: str = "${oc.env:PLUMBLINE_RUNS,runs}"
    """Folder of artifacts, MLflow, Prefect and logs."""
    wait_s: float | None = None
    """Seconds to wait for other runs; null: as long as it takes."""


@dataclass(frozen=True)
class Tracking:
    """MLflow."""

    uri: str | None = "${oc.env:MLFLOW_TRACKING_URI,null}"
    """Server of MLflow; null: SQLite under paths.runs. A password appears in no log."""
    experiment: str = "plumbline"
    """MLflow experiment of the runs."""


@dataclass(frozen=True)
class Audit:
    """Settings of `plumbline audit`."""

    source: str = MISSING
    """Folder to audit; nothing is written into it."""
    base: str | None = None
    """Folder of its base model; null: the one that an adapter names, here or in the hub cache."""
    adapter: str | None = None
    """Adapter that was merged into base; the merge is proven by the values of all three."""
    values: bool | None = None
    """true: read all tensor data; false: none; null: up to 2 GB, and all with `adapter`."""
    verify: str | None = None
    """File of a public key; source has to be signed by its owner."""
    out: str | None = None
    """File for the report as JSON, "-" for standard output; null: a table."""
    fix: bool = False
    """true: write a repaired copy into out_dir."""
    out_dir: str | None = None
    """Folder to write the repaired copy to."""
    prefect: bool = False
    """true: run as a Prefect flow, with the findings in MLflow."""
    tag: str = ""
    """Free text that tells flow runs apart."""
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Verify:
    """Settings of `plumbline verify`."""

    url: str | None = None
    """Address of the server, such as http://host:8000; it has to be set."""
    source: str | None = None
    """Folder with plumbline.witness, or a served one; it has to be set."""
    name: str | None = None
    """Name of the model on the server; null: the only one, or the one made of source."""
    base: str | None = None
    """Name of its base on the server; null: what the server says."""
    kind: ServerKind = "auto"
    """API of the server; auto: by its endpoints."""
    profile: Profile = "standard"
    """Limits of the server's distance from the trained model."""
    timeout_s: float = 60.0
    """Seconds to wait for one response."""
    workers: int = 8
    """Requests at the same time; the checks under load send up to 32."""
    ca: str | None = None
    """File with the certificates to trust; null: those of the system."""
    out: str | None = None
    """File for the report, .xml as JUnit, else JSON; "-": print JSON."""
    watch: float | None = None
    """Seconds from check to check, for monitoring; null: check once."""
    prometheus: str | None = None
    """With watch: file of metrics, *.prom; null: verify.prom in paths.runs."""
    prefect: bool = False
    """true: run as a Prefect flow, with the report in MLflow."""
    tag: str = ""
    """Free text that tells flow runs apart."""
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Bisect:
    """Settings of `plumbline bisect`."""

    a: str = MISSING
    """Folder of the first model, which is taken as right."""
    b: str = MISSING
    """Folder of the second model."""
    a_adapter: str | None = None
    """Adapter on top of a, unmerged."""
    b_adapter: str | None = None
    """Adapter on top of b, unmerged."""
    a_dtype: Dtype | None = None
    """Dtype to load a in; null: that of its config.json."""
    b_dtype: Dtype | None = None
    """Dtype to load b in; null: that of its config.json."""
    engine: SmokeEngine = "transformers"
    """Engine that runs b."""
    profile: Profile = "strict"
    """Drift within this profile is no difference."""
    texts: str | None = None
    """File of texts to measure on, one a line; null: built-in ones."""
    probes: int = 4
    """Number of these texts."""
    tokens: int = 32
    """Tokens of a text, at most."""
    attn_implementation: Attention = "sdpa"
    """Attention of both models."""
    device: Device = "auto"
    """auto: a GPU if there is one."""
    threads: int | None = None
    """CPU threads; null: torch's own choice."""
    timeout_s: float = 1800.0
    """Seconds for everything."""
    out: str | None = None
    """File for the report as JSON, "-" for standard output; null: a table."""
    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Status:
    """Settings of `plumbline status`."""

    json: bool = False
    """true: print a list of runs as JSON, for programs."""
    limit: int = 10
    """Number of ended runs to list, the newest first; 0: all."""
    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Open:
    """Settings of `plumbline open`."""

    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Compare:
    """Settings of `plumbline compare`."""

    a: str = MISSING
    """The first run: its folder, its name in paths.runs, its summary or report."""
    b: str = MISSING
    """The second run, likewise."""
    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Promote:
    """Settings of `plumbline promote`."""

    source: str = MISSING
    """models:/<name>/<number> or models:/<name>@<alias>."""
    verify: str | None = None
    """File of a public key that has to have signed its folder."""
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Lineage:
    """Settings of `plumbline lineage`."""

    source: str = MISSING
    """models:/<name>/<number>, models:/<name>@<alias>, or a served folder."""
    json: bool = False
    """true: print the artifacts as JSON, for programs."""
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Serve:
    """Settings of `plumbline serve`; what begins with `-` goes to vLLM."""

    source: str = MISSING
    """models:/<name>/<number>, models:/<name>@<alias>, or a served folder."""
    verify: str | None = None
    """File of a public key that has to have signed the folder."""
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Prune:
    """Settings of `plumbline prune`."""

    keep: int | None = None
    """Number of the newest runs whose files stay; null: no such limit."""
    older_than: float | None = None
    """Days since the last use of a file; null: no such limit."""
    yes: bool = False
    """true: remove; false: only show what would be removed."""
    unfinished: bool = False
    """true: also old files that only an unfinished run needs to go on."""
    tag: str = ""
    """Free text that tells flow runs apart."""
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)
