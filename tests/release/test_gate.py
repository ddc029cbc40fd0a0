"""Conditions of the gate: reading, judging, and refusing those that no run can judge."""

from __future__ import annotations

import pytest

from flows.cli.config import compose_config
from tasks.config.checks.release import conditions as findings
from tasks.core.errors import ContractError
from tasks.register import require_passed
from tasks.release.gate import Condition, Gate, interval, judge, measured, parse
from tasks.release.gate import conditions as conditions_of
from tasks.tracking.mlflow_server import EVALUATED_ON, Version
from tasks.tracking.mlflow_server import NUMBERS as TAG

METRICS = {"eval/before": 0.5, "eval/after": 0.7, "eval/compared": 200.0, "loss": 1.5}
EXACT = "eval.exact_match"


def gate(text: str, champion: Version | None = None, rows: str = "r", name: str = EXACT) -> Gate:
    numbers = measured(METRICS, {"smoke_eval": {"mean_kl": 1e-5}})
    return judge([parse(name, text)], METRICS, numbers, champion, rows)


def champion(exact: float, rows: str = "r") -> Version:
    tags = {TAG: f'{{"{EXACT}": {exact}}}', EVALUATED_ON: rows}
    return Version("m", 3, ("champion",), "/served", "d", tags)


LIMITS = [
    (">= 0.7", True), ("> 0.7", False), ("<= 0.7", True), ("< 0.7", False), (">=0.71", False),
    (">= base + 0.2", True),  # 0.7 - 0.5 is less than 0.2 in floating point
    ("> base + 0.2", False), (">= base * 1.4", True), (">= base * 1.41", False),
    ("<= base - 1e-2", False), (">= base", True),
]  # fmt: skip


def test_a_limit_is_absolute_or_relative_to_the_base() -> None:
    assert [gate(text).passed for text, _ in LIMITS] == [passed for _, passed in LIMITS]


def test_a_limit_relative_to_the_champion() -> None:
    assert gate(">= champion - 0.01", champion(0.71)).passed
    assert not gate(">= champion - 0.01", champion(0.7101)).passed
    (first,) = gate(">= champion - 0.01").verdicts
    assert (first.ok, first.verdict) == (True, "ok, no champion yet")


def test_a_number_that_cannot_be_compared_does_not_pass() -> None:
    without = Version("m", 3, ("champion",), "/served", "d")
    for refused, words in (
        (gate(">= champion", champion(0.1, rows="another file")), "evaluated on other rows"),
        (gate(">= champion", without), "no such number"),
        (gate("<= 1", name="eval.sampled_reward"), "not measured"),
    ):
        (reason,) = refused.reasons
        assert words in reason
        with pytest.raises(ContractError, match=words):
            require_passed(refused)
    require_passed(Gate())


def test_min_eval_gain_is_a_condition_in_percentage_points() -> None:
    for minimum, passed in ((20.0, True), (20.1, False), (0.0, True)):
        asked = conditions_of({}, minimum, {"chat"})
        assert judge(asked, METRICS, measured(METRICS, {}), None).passed is passed
    assert conditions_of({}, 5, {"reward"}) == [
        Condition("eval.pair_accuracy", ">=", "base", "+", 0.05)
    ]
    assert judge(conditions_of({}, None, {"chat"}), {}, {}, None) == Gate()
    assert not judge(conditions_of({}, 0.0, {"chat"}), {}, {}, None).passed


def test_a_quantised_model_is_judged_by_its_own_numbers() -> None:
    numbers = measured(METRICS | {"quantized/eval/before": 0.7, "quantized/eval/after": 0.6}, {})
    assert (numbers[EXACT], numbers[f"base:{EXACT}"]) == (0.6, 0.5)


def test_the_interval_of_a_share_is_that_of_wilson() -> None:
    low, high = interval(EXACT, 0.7, METRICS) or (0, 0)
    assert (round(low, 4), round(high, 4)) == (0.6332, 0.7593)  # R: binom::binom.wilson(140, 200)
    assert interval("eval.kl", 1.0, {"drawn/kl_error": 0.1}) == pytest.approx(
        (0.804, 1.196), abs=1e-3
    )
    assert interval("train.loss", 1.5, METRICS) is None
    (near,) = gate(">= 0.72").verdicts
    assert (near.ok, near.verdict) == (False, "failed, within noise")


def test_a_condition_that_no_run_can_judge_is_refused_before_any_work() -> None:
    settings = compose_config(["+exp=sft_qlora"]).settings
    for conditions, words in (
        ({"eval.exact_mach": ">= 0.8"}, "-> eval.exact_match"),
        ({"eval/after": ">= 0.8"}, "not measured"),
        ({"eval.pair_accuracy": ">= 0.8"}, "not measured"),
        ({"eval.exact_match": "0.8"}, "'0.8'"),
        ({"eval.exact_match": ">= champ - 1"}, "champ - 1"),
        ({"train.loss": "<= base"}, "before training"),
        ({"drift.mean_kl": "<= 1"}, "-> drift.merge.mean_kl or drift.gather.mean_kl"),
    ):
        section = {**settings["gate"], "conditions": conditions}
        (problem,) = findings({**settings, "gate": section})
        assert problem.what.startswith("gate.conditions.")
        assert words in str(problem)
