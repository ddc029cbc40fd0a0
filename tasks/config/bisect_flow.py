"""Schema of the configuration of `flows/bisect.py`: every key, its type and default."""

from __future__ import annotations

from dataclasses import dataclass, field

from tasks.config.audit_flow import MISSING
from tasks.config.choices import Attention, Device, Dtype, Engine, Profile
from tasks.config.places import Paths


@dataclass(frozen=True)
class Bisect:
    """The whole configuration of `flows/bisect.py`."""

    a: str = MISSING  # folder of the first model, which is taken as right
    b: str = MISSING  # folder of the second model
    a_adapter: str | None = None  # adapter on top of a, unmerged
    b_adapter: str | None = None  # adapter on top of b, unmerged
    a_dtype: Dtype | None = None  # dtype to load a in; null: that of its config.json
    b_dtype: Dtype | None = None  # dtype to load b in; null: that of its config.json
    engine: Engine = "transformers"  # engine that runs b
    profile: Profile = "strict"  # drift within this profile is no difference
    texts: str | None = None  # file of texts to measure on, one a line; null: built-in ones
    probes: int = 4  # number of these texts
    tokens: int = 32  # tokens of a text, at most
    attn_implementation: Attention = "sdpa"  # attention of both models
    device: Device = "auto"  # auto: a GPU if there is one
    threads: int | None = None  # CPU threads; null: torch's own choice
    timeout_s: float = 1800.0  # seconds for everything
    out: str | None = None  # file for the report as JSON, "-" for standard output; null: a table
    paths: Paths = field(default_factory=Paths)
