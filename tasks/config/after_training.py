"""Sections for what follows training, and the configuration of `flows/deliver.py`.

Sections `tracking`, `paths` and `timeouts` are those of any run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tasks.config.choices import (
    Count,
    Dtype,
    MergeBase,
    Natural,
    NonNegative,
    Positive,
    Profile,
    Quantize,
    QuantizeProfile,
    QuantType,
    Rounding,
    Share,
    SmokeEngine,
)
from tasks.config.defaults import COMPUTED
from tasks.config.section import Section

MISSING = "???"
"""Marks a value that the user has to give, for OmegaConf."""


def engine_dtype(settings: Mapping[str, Any]) -> str:
    """Return the torch name of the dtype in which the engine of the smoke test computes."""
    dtype = "float32" if settings["model"]["dtype"] == "float32" else settings["convert"]["dtype"]
    return str(dtype)


@dataclass(frozen=True)
class Merge(Section):
    """Merging an adapter into its base weights."""

    base: MergeBase = "auto"  # base to merge into; auto: dequantized for QLoRA, else original
    rounding: Rounding = "unbiased"  # nearest: as other tools; loses updates below half a step


@dataclass(frozen=True)
class Convert(Section):
    """The files that are served."""

    dtype: Dtype = "bfloat16"  # number format of the served files
    max_shard_size: str = "5GB"  # size of one weight file, e.g. 500MB
    quantize: Quantize = "none"  # also make a version whose linear layers have this format
    quantize_profile: QuantizeProfile = "auto"  # drift limits of that version; auto: by format
    llama_cpp: str | None = None  # gguf: folder of llama.cpp, built; null: its programs on PATH
    max_eval_drop: NonNegative | None = 5.0  # points of exact match that it may lose; null: any


@dataclass(frozen=True)
class Served(Section):
    """The engine of a test of the served model."""

    kv_cache_gib: Count = 1  # GiB of KV cache, on CPU
    max_model_len: Count | None = None  # tokens; null: what the prompts need
    timeout_s: Positive | None = None  # seconds for the whole test; null: by the weights' size
    threads: Count | None = None  # CPU threads


@dataclass(frozen=True)
class Smoke(Served):
    """The test of the served model."""

    engine: SmokeEngine = "vllm"  # loads the served model; server: `vllm serve`, over HTTP
    max_new_tokens: Count = COMPUTED  # default 512, or a quarter of the model's context
    eval_samples: Natural = 200  # held-out rows that are evaluated
    min_stop_rate: Share = 0.9  # share of responses that end by themselves, at least
    max_degenerate_rate: Share = 0.02  # share caught in a loop, at most, or as before training
    tensor_parallel: Count = 1  # processes that share the model, each on a GPU of its own


@dataclass(frozen=True)
class Eval(Section):
    """Further measures of the served model, beside those of section `smoke`."""

    function: str | None = None  # path.py:name; a number per response, higher is better
    timeout_s: Positive = 600.0  # seconds for a call, which gets all responses of a model
    lm_eval: list[str] = field(default_factory=list)  # tasks of lm-evaluation-harness: names, files
    lm_eval_limit: Count | None = None  # rows of each of them; null: all


@dataclass(frozen=True)
class Gate(Section):
    """Conditions that a run has to meet; its model stays a candidate otherwise."""

    profile: Profile = "standard"  # drift limits, see `tasks/drift/fingerprint.py`
    min_eval_gain: float | None = None  # points of exact match; null: none
    conditions: dict[str, str] | None = None  # limits of numbers: docs/training.md; null: none


@dataclass(frozen=True)
class Register(Section):
    """Registering the served model."""

    promote: bool = False  # true: `champion` names the model if the gate passes


@dataclass(frozen=True)
class Server(Section):
    """MLflow."""

    uri: str | None = "${oc.env:MLFLOW_TRACKING_URI,null}"  # null: SQLite under paths.runs
    experiment: str = "plumbline"  # MLflow experiment of the runs


@dataclass(frozen=True)
class Tracking(Server):
    """MLflow and its model registry."""

    model_name: str = "plumbline"  # in the model registry


@dataclass(frozen=True)
class Paths(Section):
    """Folders."""

    runs: str = "${oc.env:PLUMBLINE_RUNS,runs}"  # folder for artifacts, MLflow, Prefect and logs
    wait_s: NonNegative | None = None  # seconds to wait for other runs; null: as long as it takes


@dataclass(frozen=True)
class HandOffTimeouts(Section):
    """Time limits of the stages after training, in seconds; null: no limit."""

    gather_s: Positive | None = None  # joining the partitions
    merge_s: Positive | None = None  # the merge
    convert_s: Positive | None = None  # the served files
    quantize_s: Positive | None = None  # the quantised files


@dataclass(frozen=True)
class Timeouts(HandOffTimeouts):
    """Time limits of stages, in seconds; null: none. train and smoke have one of their own."""

    prepare_data_s: Positive | None = None  # reading the data
    prepare_base_s: Positive | None = None  # the base
    rollout_base_s: Positive | None = None  # the base of rollouts
    lm_eval_s: Positive | None = None  # lm-evaluation-harness


@dataclass(frozen=True)
class DeliverTimeouts(HandOffTimeouts):
    """Time limits of stages, in seconds; null: none. The test has smoke.timeout_s."""

    reference_s: Positive | None = None  # the first fingerprint; null: half an hour


DeliverEngine = Literal["vllm", "server", "transformers", "none"]


@dataclass(frozen=True)
class DeliverMerge(Section):
    """The base that an adapter is merged into."""

    base: MergeBase = "auto"  # base to merge into; auto: by what the trainer recorded
    rounding: Rounding = "unbiased"  # nearest: as other tools; loses updates below half a step
    quant_type: QuantType = "nf4"  # base=dequantized: code book, if training left no record
    double_quant: bool = True  # base=dequantized: block scales in 8 bits, likewise


@dataclass(frozen=True)
class DeliverSmoke(Served):
    """The test of the served model."""

    engine: DeliverEngine = "vllm"  # server: `vllm serve`, over HTTP; none: no test, no Prefect
    probes: Count = 32  # texts that the fingerprints are taken on
    texts: str | None = None  # file, one text per line; null: built-in ones
    profile: Profile = "standard"  # drift limits


@dataclass(frozen=True)
class Deliver(Section):
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
    merge: DeliverMerge = field(default_factory=DeliverMerge)
    convert: Convert = field(default_factory=Convert)
    smoke: DeliverSmoke = field(default_factory=DeliverSmoke)
    tracking: Tracking = field(default_factory=Tracking)
    paths: Paths = field(default_factory=Paths)
    timeouts: DeliverTimeouts = field(default_factory=DeliverTimeouts)
