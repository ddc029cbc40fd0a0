"""Schema of the configuration of `flows/verify.py`: every key, its type and default."""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.config.choices import Profile, ServerKind
from tasks.config.places import Paths, Tracking


@dataclass(frozen=True)
class Verify:
    """The whole configuration of `flows/verify.py`."""

    url: str | None = None  # address of the server, as http://host:8000; it has to be set
    source: str | None = None  # folder with plumbline.witness, or a served one; it has to be set
    name: str | None = (
        None  # name of the model on the server; null: the only one, or the one made of source
    )
    base: str | None = None  # name of its base on the server; null: what the server says
    kind: ServerKind = "auto"  # API of the server; auto: by its endpoints
    profile: Profile = "standard"  # how far the server may be from the trained model
    timeout_s: float = 60.0  # seconds to wait for one response
    workers: int = 8  # requests at the same time; the checks under load send up to 32
    ca: str | None = None  # file with the certificates to trust; null: those of the system
    out: str | None = None  # file for the report, .xml as JUnit, else JSON; "-": print JSON
    watch: float | None = None  # seconds from check to check, for monitoring; null: check once
    prefect: bool = False  # true: run as a Prefect flow, with the report in MLflow
    tag: str = ""  # free text that tells flow runs apart
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)
