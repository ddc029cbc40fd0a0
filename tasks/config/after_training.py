"""Sections for what follows training: `merge`, `convert`, `smoke`, `eval`, `gate`, `register`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.config.choices import (
    Dtype,
    MergeBase,
    Profile,
    Quantize,
    QuantizeProfile,
    Rounding,
    SmokeEngine,
)
from tasks.config.defaults import COMPUTED


def engine_dtype(settings: Mapping[str, Any]) -> str:
    """Return the torch name of the dtype in which the engine of the smoke test computes."""
    dtype = "float32" if settings["model"]["dtype"] == "float32" else settings["convert"]["dtype"]
    return str(dtype)


@dataclass(frozen=True)
class Merge:
    """Merging an adapter into its base weights."""

    base: MergeBase = "auto"  # base to merge into; auto: dequantized for QLoRA, else original
    rounding: Rounding = "unbiased"  # nearest: as other tools; loses updates below half a step


@dataclass(frozen=True)
class Convert:
    """The files that are served."""

    dtype: Dtype = "bfloat16"  # number format of the served files
    max_shard_size: str = "5GB"  # size of one weight file, e.g. 500MB
    quantize: Quantize = "none"  # also make a version whose linear layers have this format
    quantize_profile: QuantizeProfile = "auto"  # drift limits of that version; auto: by format
    group_size: int = 128  # w4a16: numbers of a row that share a scale; 32, 64 or 128
    calibration_rows: int = 128  # training rows that its layers are calibrated and compared on
    llama_cpp: str | None = None  # gguf: folder of llama.cpp, built; null: its programs on PATH
    max_eval_drop: float | None = 5.0  # points of exact match that it may lose; null: no limit


@dataclass(frozen=True)
class Smoke:
    """The test of the served model."""

    engine: SmokeEngine = "vllm"  # loads the served model; server: `vllm serve`, over HTTP
    greedy_tokens: int = 5  # first greedy tokens that have to equal transformers'
    max_new_tokens: int = COMPUTED  # default 512, or a quarter of the model's context
    eval_samples: int = 200  # held-out rows that are evaluated
    kv_cache_gib: int = 1  # GiB of KV cache, on CPU
    max_model_len: int | None = None  # tokens; null: what the prompts need
    timeout_s: float | None = None  # seconds for the whole test; null: by the size of the weights
    min_stop_rate: float = 0.9  # share of responses that end by themselves, at least
    max_degenerate_rate: float = 0.02  # share caught in a loop, at most, or as before training
    threads: int | None = None  # CPU threads
    tensor_parallel: int = 1  # processes that share the model, each on a GPU of its own


@dataclass(frozen=True)
class Eval:
    """Further measures of the served model, beside those of section `smoke`."""

    function: str | None = None  # path.py:name; a number per response, higher is better
    timeout_s: float = 600.0  # seconds for a call, which gets all responses of a model
    lm_eval: list[str] = field(default_factory=list)  # tasks of lm-evaluation-harness: names, files
    lm_eval_limit: int | None = None  # rows of each of them; null: all


@dataclass(frozen=True)
class Gate:
    """Conditions that a run has to meet; its model stays a candidate otherwise."""

    profile: Profile = "standard"  # drift limits, see `tasks/drift/fingerprint.py`
    min_eval_gain: float | None = None  # points of exact match; null: none
    conditions: dict[str, str] | None = None  # limits of numbers: docs/training.md; null: none


@dataclass(frozen=True)
class Signing:
    """Signing of the served folder."""

    sign: str | None = None  # file of the private key that signs the served folder (model.sig)


@dataclass(frozen=True)
class Register(Signing):
    """Registering the served model."""

    verify: str | None = None  # file of a public key: only what it signed is registered
    promote: bool = False  # true: `champion` names the model if the gate passes
