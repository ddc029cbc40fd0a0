"""Sections `merge`, `convert`, `smoke` and `gate`: what becomes of it, and what has to hold."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.config.choices import Dtype, Engine, MergeBase, Profile, Quantize
from tasks.config.defaults import COMPUTED


@dataclass
class Merge:
    """How an adapter becomes weights."""

    base: MergeBase = MergeBase.auto


@dataclass
class Convert:
    """What is served."""

    dtype: Dtype = Dtype.bfloat16
    max_shard_size: str = "5GB"  # size of one weight file, e.g. 500MB
    quantize: Quantize = Quantize.none


@dataclass
class Smoke:
    """The test of the served model; see `tasks/smoke_eval.py: SmokeSettings`."""

    engine: Engine = Engine.vllm
    greedy_tokens: int = 5  # first greedy tokens that have to equal transformers'
    max_new_tokens: int = COMPUTED  # 512, or a quarter of the model's context
    eval_samples: int = 200  # held-out rows that are evaluated
    kv_cache_gib: int = 1  # on CPU
    max_model_len: int | None = None  # tokens; null: what the prompts need
    timeout_s: float | None = None  # seconds for the whole test; null: by the size of the weights
    min_stop_rate: float = 0.9  # share of answers that end by themselves
    max_degenerate_rate: float = 0.02  # share of answers caught in a loop
    threads: int | None = None  # CPU threads
    tensor_parallel: int = 1  # processes that share the model, each on a GPU of its own


@dataclass
class Gate:
    """What has to hold before a run is registered as a candidate."""

    profile: Profile = Profile.standard
    min_eval_gain: float | None = None  # points of exact match; null: none
