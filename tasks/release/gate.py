"""The gate: conditions on the numbers of a run, judged before its model is registered.

    gate.conditions: {eval.exact_match: ">= champion - 0.01", drift.smoke_eval.mean_kl: "<= 1e-4"}

A limit is a number, or relative to the same number of the `champion` in the registry or of the
`base` (the model before training): `champion - 0.01`, `base * 0.9`. The names of the numbers are
known before the run starts, from its objective and `convert.quantize`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tasks.config.defaults import ONLINE
from tasks.core.contract import Z_95, share_interval
from tasks.core.report import Page, Report, Row
from tasks.data.kinds import names_texts
from tasks.tracking.mlflow_server import Version


@dataclass(frozen=True)
class Number:
    """A number that a condition can name, by the keys of its metrics."""

    key: str
    base: str = ""  # the same metric before training; empty if it is not measured
    count: str = ""  # metric with the number of rows, if the number is a share of them
    error: str = ""  # metric with its standard error
    kinds: tuple[str, ...] = ()  # runs that measure it, see `run_kinds`; empty for all


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
    "": ("mean_kl", "p95_kl", "max_kl", "top1_agreement"),
}
_HANDOFFS = {
    "gather": "", "merge": "adapter", "convert": "", "smoke_eval": "",
    "quantize": "quantized", "smoke_quantized": "quantized",
}  # fmt: skip
"""Stages that measure drift, and the kind of the runs that have them."""


def run_kinds(settings: Mapping[str, Any]) -> set[str]:
    """Return the kinds of a run, which say what it measures."""
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

    Those of a quantised model are preferred to those of the model in 16 bits.
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


def interval(name: str, value: float, metrics: Mapping[str, float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a number; None if its spread was not measured."""
    number = NUMBERS.get(name)
    if name.startswith(LM_EVAL):  # lm_eval.<task>.<metric>
        number = Number("", error="/".join(("lm_eval", *name.split(".", 2)[1:], "error")))
    if number is None:
        return None
    if count := metrics.get(f"quantized/{number.count}", metrics.get(number.count, 0.0)):
        return share_interval(value, count)
    if (error := metrics.get(number.error)) is not None:
        return value - Z_95 * error, value + Z_95 * error
    return None


_CONDITION = re.compile(
    r"\s*(?P<op>>=|<=|>|<)\s*"
    r"((?P<to>champion|base)(\s*(?P<sign>[-+*])\s*(?P<by>[0-9.]+(e[-+]?[0-9]+)?))?"
    r"|(?P<limit>[-+]?[0-9.]+(e[-+]?[0-9]+)?))\s*"
)
EXAMPLES = '">= 0.8", ">= base + 0.1", ">= champion - 0.01", "<= champion * 1.05"'


@dataclass(frozen=True)
class Condition:
    """A number and its limit: absolute (`by`), or `by` added to or multiplied with that of `to`."""

    name: str
    op: str
    to: str = ""
    sign: str = "+"
    by: float = 0.0

    def __str__(self) -> str:
        if not self.to:
            return f"{self.name} {self.op} {self.by:g}"
        more = f" {self.sign} {self.by:g}" if (self.sign, self.by) != ("+", 0) else ""
        return f"{self.name} {self.op} {self.to}{more}"

    def limit(self, to: float) -> float:
        """Return the limit, from the number of the champion or the base; 0 if it is absolute."""
        if self.sign == "*":
            return to * self.by
        return to - self.by if self.sign == "-" else to + self.by

    def holds(self, value: float, limit: float) -> bool:
        """Return True if a value meets a limit; 0.7 - 0.5 is at least 0.2 here."""
        return bool(_COMPARE[self.op](round(value - limit, 9), 0))


_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class Verdict:
    """Row of the gate's table; what is not known is None. `low` and `high` are a 95 % interval."""

    condition: str
    value: float | None = None
    limit: float | None = None
    low: float | None = None
    high: float | None = None
    ok: bool = False
    verdict: str = "not measured"

    @property
    def text(self) -> str:
        """Value, 95 % interval, limit and result."""
        value = "" if self.value is None else f"{self.value:.6g}"
        value += "" if self.low is None else f" ({self.low:.4g} to {self.high:.4g})"
        limit = "" if self.limit is None else f", and the limit is {self.limit:.6g}"
        return f"{value}{limit}: {self.verdict}" if value else self.verdict


@dataclass(frozen=True)
class Gate(Report):
    """Outcome of the gate: a verdict on each condition."""

    command = "gate"
    verdicts: tuple[Verdict, ...] = ()

    @property
    def reasons(self) -> list[str]:
        """Conditions that are not met."""
        return [f"{each.condition}: {each.text}" for each in self.verdicts if not each.ok]

    @property
    def passed(self) -> bool:
        """True if all conditions are met."""
        return not self.reasons

    def page(self) -> Page:
        """Return the conditions."""
        rows = [
            Row(each.condition, "ok" if each.ok else "failed", each.text) for each in self.verdicts
        ]
        return Page((), rows, f"gate {'passed' if self.passed else 'not passed'}")

    def as_json(self) -> dict[str, Any]:
        """Return the verdict, the reasons and the table, for the summary of a run."""
        table = [asdict(verdict) for verdict in self.verdicts]
        return {"passed": self.passed, "reasons": self.reasons, "conditions": table}


def parse(name: str, text: str) -> Condition:
    """Read a condition such as ">= champion - 0.01". Raises ValueError if it is none."""
    match = _CONDITION.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{str(text)!r} is no condition")
    if not match["to"]:
        return Condition(name, match["op"], by=float(match["limit"]))
    by = float(match["by"] or 0)
    return Condition(name, match["op"], match["to"], match["sign"] or "+", by)


def conditions(
    stated: Mapping[str, str], min_eval_gain: float | None, kinds: set[str]
) -> list[Condition]:
    """Return the conditions of section `gate`. Raises ValueError if a text is no condition.

    `min_eval_gain` is the least rise of exact match in percentage points; None for no condition.
    """
    parsed = [parse(name, text) for name, text in stated.items()]
    if min_eval_gain is not None:
        name = "eval.pair_accuracy" if "reward" in kinds else "eval.exact_match"
        parsed.append(Condition(name, ">=", "base", "+", min_eval_gain / 100))
    return parsed


def judge(
    asked: Sequence[Condition],
    metrics: Mapping[str, float],
    numbers: Mapping[str, float],
    champion: Version | None,
    rows: str = "",
) -> Gate:
    """Judge all conditions. A number that was not measured does not meet its condition.

    Without a champion, conditions relative to it hold. `rows` is the hash of the evaluation rows.
    """
    return Gate(tuple(_verdict(each, metrics, numbers, champion, rows) for each in asked))


def _verdict(
    condition: Condition,
    metrics: Mapping[str, float],
    numbers: Mapping[str, float],
    champion: Version | None,
    rows: str,
) -> Verdict:
    name, text = condition.name, str(condition)
    value = numbers.get(name)
    if value is None:
        return Verdict(text)
    low, high = interval(name, value, metrics) or (None, None)
    to: float | None = 0.0
    problem = ""
    if condition.to == "base":
        to, problem = numbers.get(f"base:{name}"), "not measured of the base"
    elif condition.to == "champion":
        if champion is None:
            return Verdict(text, value, None, low, high, True, "ok, no champion yet")
        to, problem = champion.numbers.get(name), f"{champion.name} has no such number"
        if to is not None and name.startswith("eval.") and champion.rows != rows:
            to, problem = None, f"{champion.name} was evaluated on other rows"
    if to is None:
        return Verdict(text, value, None, low, high, False, problem)
    limit = condition.limit(to)
    ok = condition.holds(value, limit)
    noise = low is not None and high is not None and low < limit < high
    words = ("ok" if ok else "failed") + (", within noise" if noise else "")
    return Verdict(text, value, limit, low, high, ok, words)
