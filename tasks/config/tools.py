"""Settings of the commands that need no Hydra: a section each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Interval

from tasks.config.sections import (
    MISSING,
    Device,
    Dtype,
    Natural,
    NonNegative,
    Paths,
    Positive,
    Profile,
    Section,
    Server,
    SmokeEngine,
)


@dataclass(frozen=True)
class InRuns(Section):
    """A command that reads the folder of runs."""

    paths: Paths = field(default_factory=Paths)


@dataclass(frozen=True)
class Recorded(InRuns):
    """A command that reads MLflow, or records itself there."""

    tracking: Server = field(default_factory=Server)


@dataclass(frozen=True)
class Audit(Recorded):
    """Settings of `plumbline audit`."""

    source: str = MISSING  # folder to audit; nothing is written into it
    base: str | None = None  # folder of its base model; null: the one that an adapter names
    adapter: str | None = None  # adapter that was merged into base: proves the merge
    values: bool | None = None  # true: read all tensor data; null: up to 2 GB
    out: str | None = None  # file for the report: .xml JUnit, .md, .txt, else JSON; "-": print JSON
    fix: bool = False  # true: write a repaired copy into out_dir
    out_dir: str | None = None  # folder to write the repaired copy to
    prefect: bool = False  # true: run as a Prefect flow, with the findings in MLflow
    tag: str = ""  # free text that tells flow runs apart


@dataclass(frozen=True)
class Verify(Recorded):
    """Settings of `plumbline verify`."""

    url: str | None = None  # address of the server, such as http://host:8000; it has to be set
    source: str | None = None  # folder with plumbline.witness, or a served one; it has to be set
    name: str | None = None  # name of the model on the server; null: the one made of source
    base: str | None = None  # name of its base on the server; null: what the server says
    profile: Profile = "standard"  # limits of the server's distance from the trained model
    timeout_s: Positive = 60.0  # seconds to wait for one response
    workers: Annotated[int, Interval(ge=1, le=256)] = 8  # requests at a time
    out: str | None = None  # file for the report: .xml JUnit, .md, .txt, else JSON; "-": print JSON
    prefect: bool = False  # true: run as a Prefect flow, with the report in MLflow
    tag: str = ""  # free text that tells flow runs apart


@dataclass(frozen=True)
class Bisect(InRuns):
    """Settings of `plumbline bisect`."""

    a: str = MISSING  # folder of the first model, which is taken as right
    b: str = MISSING  # folder of the second model
    a_adapter: str | None = None  # adapter on top of a, unmerged
    b_adapter: str | None = None  # adapter on top of b, unmerged
    a_dtype: Dtype | None = None  # dtype to load a in; null: that of its config.json
    b_dtype: Dtype | None = None  # dtype to load b in; null: that of its config.json
    engine: SmokeEngine = "transformers"  # engine that runs b
    profile: Profile = "strict"  # drift within this profile is no difference
    device: Device = "auto"  # auto: a GPU if there is one
    timeout_s: Positive = 1800.0  # seconds for everything
    out: str | None = None  # file for the report: .xml JUnit, .md, .txt, else JSON; "-": print JSON


@dataclass(frozen=True)
class Status(InRuns):
    """Settings of `plumbline status`."""

    json: bool = False  # true: print a list of runs as JSON, for programs
    limit: Natural = 10  # number of ended runs to list, the newest first; 0: all


@dataclass(frozen=True)
class Compare(InRuns):
    """Settings of `plumbline compare`."""

    a: str = MISSING  # the first run: its folder, or its name in paths.runs or the end of it
    b: str = MISSING  # the second run, likewise


@dataclass(frozen=True)
class Promote(Recorded):
    """Settings of `plumbline promote`."""

    source: str = MISSING  # models:/<name>/<number> or models:/<name>@<alias>


@dataclass(frozen=True)
class Serve(Recorded):
    """Settings of `plumbline serve`; what begins with `-` goes to vLLM."""

    source: str = MISSING  # models:/<name>/<number>, models:/<name>@<alias>, or a served folder


@dataclass(frozen=True)
class Prune(Recorded):
    """Settings of `plumbline prune`."""

    keep: Natural | None = None  # number of the newest runs whose files stay; null: no such limit
    older_than: NonNegative | None = None  # days since the last use of a file; null: no such limit
    yes: bool = False  # true: remove; false: only show what would be removed
    unfinished: bool = False  # true: also old files that only an unfinished run needs to go on
