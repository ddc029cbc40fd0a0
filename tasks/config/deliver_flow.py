"""The configuration's schema of `flows/deliver.py`: every key, its type, its unit, its default."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from tasks.config.after_training import Convert
from tasks.config.choices import Profile
from tasks.config.places import Paths, Tracking

MISSING = "???"
"""What Hydra takes for a value that has to be given."""


class SmokeEngine(Enum):
    """What loads the served model; `none`: nothing does, and nothing is started for it."""

    vllm = auto()
    transformers = auto()
    none = auto()


class BaseMode(Enum):
    """The base that an adapter is merged into: the one it was trained on.

    auto: what the trainer's own files say; refused where they do not.
    dequantized: the base after a round trip through 4 bits, as QLoRA training saw it.
    original: the base as it is stored, as LoRA training saw it.
    compare: measure how far apart the two merges are; writes nothing.
    """

    auto = 1  # a member named like the function: numbers here
    dequantized = 2
    original = 3
    compare = 4


class FourBits(Enum):
    """4-bit code book of the base that an adapter was trained on (arXiv:2305.14314)."""

    nf4 = auto()
    fp4 = auto()


@dataclass
class DeliverMerge:
    """The base that an adapter is merged into."""

    base: BaseMode = BaseMode.auto  # compare: measure both, write nothing
    quant_type: FourBits = FourBits.nf4  # base=dequantized, where training left no record
    double_quant: bool = True  # the same


@dataclass
class DeliverSmoke:
    """The test of the served model."""

    engine: SmokeEngine = SmokeEngine.vllm
    probes: int = 32  # texts that the fingerprints are taken on
    texts: str | None = None  # file, one text a line; null: built-in ones
    greedy_tokens: int = 5  # first greedy tokens that have to equal transformers'
    kv_cache_gib: int = 1  # on CPU
    max_model_len: int | None = None  # tokens; null: what the probes need
    timeout_s: float | None = None  # seconds for the whole test; null: by the size of the weights
    threads: int | None = None  # CPU threads
    profile: Profile = Profile.standard  # drift limits


@dataclass
class Deliver:
    """The whole configuration of `flows/deliver.py`."""

    source: str | None = None  # folder: adapter, model, our shards, DeepSpeed checkpoint
    adapters: list[str] = field(default_factory=list)  # instead: "<folder>:<weight>", added up
    base: str | None = None  # folder of the base model; null: what SOURCE itself names
    out: str = MISSING  # folder that is to hold the served model
    adapter_config: str | None = None  # adapter_config.json; null: the one in or above SOURCE
    check_base: bool = True  # false: take a base that is recorded as another one
    overwrite: bool = False  # true: replace an OUT that an earlier delivery made
    plan: bool = False  # true: print what would be done, write nothing
    force: list[str] = field(default_factory=list)  # stages to run anew, by name
    tag: str = ""  # free text that tells runs apart
    merge: DeliverMerge = field(default_factory=DeliverMerge)
    convert: Convert = field(default_factory=Convert)
    smoke: DeliverSmoke = field(default_factory=DeliverSmoke)
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)
