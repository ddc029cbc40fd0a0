"""Schema of the configuration of `flows/deliver.py`: every key, its type, unit and default."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tasks.config.after_training import Convert, Signing
from tasks.config.choices import Profile, QuantType, Rounding
from tasks.config.places import MISSING, DeliverTimeouts, Paths, Tracking

BaseMode = Literal["auto", "dequantized", "original", "compare"]
"""The base that an adapter is merged into, which is the one it was trained on.

    auto          as the trainer's own files say; refused if they do not say it
    dequantized   the base after a round trip through 4 bits, as QLoRA training saw it
    original      the base as it is stored, as LoRA training saw it
    compare       measure how far apart the two merges are; writes nothing
"""
SmokeEngine = Literal["vllm", "server", "transformers", "none"]


@dataclass(frozen=True)
class DeliverMerge:
    """The base that an adapter is merged into."""

    base: BaseMode = "auto"  # compare: measure both, write nothing
    rounding: Rounding = "unbiased"  # nearest: as other tools; loses updates below half a step
    quant_type: QuantType = "nf4"  # base=dequantized: code book, if training left no record
    double_quant: bool = True  # base=dequantized: block scales in 8 bits, likewise


@dataclass(frozen=True)
class DeliverSmoke:
    """The test of the served model."""

    engine: SmokeEngine = "vllm"  # server: `vllm serve`, over HTTP; none: no test, no Prefect
    probes: int = 32  # texts that the fingerprints are taken on
    texts: str | None = None  # file, one text per line; null: built-in ones
    greedy_tokens: int = 5  # first greedy tokens that have to equal transformers'
    kv_cache_gib: int = 1  # GiB of KV cache, on CPU
    max_model_len: int | None = None  # tokens; null: what the probes need
    timeout_s: float | None = None  # seconds for the whole test; null: by the size of the weights
    threads: int | None = None  # CPU threads
    profile: Profile = "standard"  # drift limits


@dataclass(frozen=True)
class Deliver:
    """The whole configuration of `flows/deliver.py`."""

    source: str | None = None  # folder: adapter, model, our shards, DeepSpeed checkpoint
    adapters: list[str] = field(default_factory=list)  # instead: "<folder>:<weight>", added up
    base: str | None = None  # folder of the base model; null: what SOURCE itself names
    out: str = MISSING  # folder to write the served model to
    adapter_config: str | None = None  # adapter_config.json; null: the one in or above SOURCE
    check_base: bool = True  # false: accept a base that is recorded as another one
    overwrite: bool = False  # true: replace an OUT that an earlier delivery wrote
    plan: bool = False  # true: print what would be done, write nothing
    force: list[str] = field(default_factory=list)  # stages to run again, by name
    tag: str = ""  # free text that tells runs apart
    push: str | None = None  # <owner>/<name> on the Hub, for a model that passed every check
    merge: DeliverMerge = field(default_factory=DeliverMerge)
    convert: Convert = field(default_factory=Convert)
    smoke: DeliverSmoke = field(default_factory=DeliverSmoke)
    register: Signing = field(default_factory=Signing)
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)
    timeouts: DeliverTimeouts = field(default_factory=DeliverTimeouts)
