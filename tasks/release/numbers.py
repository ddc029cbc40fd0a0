"""Numbers of a run that the conditions of the gate can name.

A name is known before the run starts, from its objective and `convert.quantize`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.config.defaults import ONLINE
from tasks.core.contract import Z_95, share_interval
from tasks.data.kinds import names_texts


@dataclass(frozen=True)
class Number:
    """A number that a condition can name.

    Attributes:
        key: metric of a stage.
        base: the same metric of the model before training; empty if it is not measured.
        count: metric with the number of rows, if the number is a share of them.
        error: metric with its standard error.
        kinds: kinds of runs that measure it, see `run_kinds`; empty for all.
    """

    key: str
    base: str = ""
    count: str = ""
    error: str = ""
    kinds: tuple[str, ...] = ()


_CHAT, _PROBED = ("chat", "online"), ("chat", "online", "texts")
NUMBERS: Mapping[str, Number] = {
    "eval.exact_match": Number("eval/after", "eval/before", "eval/compared", kinds=_CHAT),
    "eval.pair_accuracy": Number("eval/after", "eval/before", "eval/pairs", kinds=("reward",)),
    "eval.function": Number("eval/function_after", "eval/function_before", kinds=("judged",)),
    "eval.loss": Number(
        "heldout_loss_after", "heldout_loss_before", kinds=("chat", "texts", "reward")
    ),
    "eval.reward": Number("heldout_reward_after", "heldout_reward_before", kinds=("online",)),
    "eval.sampled_exact_match": Number(
        "drawn/after", "drawn/before", "drawn/compared", kinds=("online",)
    ),
    "eval.sampled_reward": Number("scored/after", "scored/before", kinds=("online",)),
    "eval.kl": Number("drawn/kl", error="drawn/kl_error", kinds=("online",)),
    "eval.stop_rate": Number("stop_rate", count="eval/samples", kinds=_CHAT),
    "eval.samples": Number("eval/samples", kinds=_CHAT),
    "eval.left_out": Number("eval/left_out", kinds=_CHAT),
    "eval.greedy_differences": Number("greedy/differences", kinds=_PROBED),
    "eval.tokens_per_s": Number("tokens_per_s", kinds=_PROBED),
    "eval.load_s": Number("engine_load_s", kinds=_PROBED),
    "train.loss": Number("loss"),
    "train.steps": Number("steps"),
    "train.seconds": Number("train_s"),
    "train.kl": Number("kl", kinds=("online",)),
    "train.mismatch": Number("mismatch", kinds=("online",)),
    "data.truncated": Number("data/train_truncated"),
    "data.too_long": Number("data/train_too_long"),
    "quantize.size_ratio": Number("size_ratio", kinds=("quantized",)),
    "quantize.worst_layer": Number("layers/worst", kinds=("quantized",)),
    "quantize.loss": Number(
        "quantized/loss/after", "quantized/loss/before", kinds=("quantized",)
    ),
}  # fmt: skip
LM_EVAL = "lm_eval."
"""Beginning of the names `lm_eval.<task>.<metric>`, which the tasks of `eval.lm_eval` decide."""
_DRIFT = {
    "reward": ("mean_difference", "max_difference", "same_order"),
    "": ("mean_kl", "p95_kl", "max_kl", "top1_agreement", "cosine"),
}
_HANDOFFS = {
    "gather": "", "merge": "adapter", "convert": "", "smoke_eval": "",
    "quantize": "quantized", "smoke_quantized": "quantized",
}  # fmt: skip
"""Stages that measure drift, and the kind of the runs that have them."""


def run_kinds(settings: Mapping[str, Any]) -> set[str]:
    """Return the kinds of a run, which say what it measures.

    Args:
        settings: configuration of the step whose model is registered.
    """
    objective = settings["train"]["objective"]
    kind = "texts" if names_texts(settings["data"]) else "chat"
    if objective in ONLINE or objective == "reward":
        kind = "online" if objective in ONLINE else "reward"
    kinds = {kind}
    if settings["convert"]["quantize"] != "none":
        kinds.add("quantized")
    if settings["eval"]["function"] and kind in _CHAT:
        kinds.add("judged")
    if settings["peft"]["kind"] != "none":
        kinds.add("adapter")
    return kinds


def names_for(kinds: set[str]) -> list[str]:
    """Return the names of all numbers that a run of these kinds measures."""
    drift = _DRIFT["reward" if "reward" in kinds else ""]
    stages = [stage for stage, kind in _HANDOFFS.items() if not kind or kind in kinds]
    plain = [
        name for name, number in NUMBERS.items() if not number.kinds or kinds & {*number.kinds}
    ]
    return [*plain, *(f"drift.{stage}.{measure}" for stage in stages for measure in drift)]


def measured(
    metrics: Mapping[str, float], drifts: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return the numbers of a run by name, and of its base as `base:<name>`.

    Args:
        metrics: metrics of the stages of the registered model. Those of a quantised model are
            preferred to those of the model in 16 bits.
        drifts: drift by stage.
    """
    values: dict[str, float] = {}
    for name, number in NUMBERS.items():
        now = metrics.get(f"quantized/{number.key}", metrics.get(number.key))
        if now is not None:
            values[name] = now
        if number.base in metrics:
            values[f"base:{name}"] = metrics[number.base]
    for key, value in metrics.items():
        if key.startswith(LM_EVAL.replace(".", "/")) and not key.endswith("/error"):
            name, _, when = key.replace("/", ".").rpartition(".")
            values[name if when == "after" else f"base:{name}"] = value
    for stage, drift in drifts.items():
        values |= {f"drift.{stage}.{measure}": value for measure, value in drift.items()}
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}


def _metric(name: str) -> str:
    """Return the beginning of the metrics of a number `lm_eval.<task>.<metric>`."""
    task, _, metric = name.removeprefix(LM_EVAL).partition(".")
    return f"lm_eval/{task}/{metric}"


def interval(name: str, value: float, metrics: Mapping[str, float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a number; None if its spread was not measured."""
    number = NUMBERS.get(name)
    if name.startswith(LM_EVAL):
        number = Number("", error=f"{_metric(name)}/error")
    if number is None:
        return None
    if count := metrics.get(f"quantized/{number.count}", metrics.get(number.count, 0.0)):
        return share_interval(value, count)
    if (error := metrics.get(number.error)) is not None:
        return value - Z_95 * error, value + Z_95 * error
    return None
