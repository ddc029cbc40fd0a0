"""The audit's errors that do not stop a delivery, and why. Every other error does.

handled(finding, report, check_base=True)      "split off, ..."; "" where it stops the delivery
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tasks.audit.finding import Finding
from tasks.audit.recognise import ADAPTER_CONFIG, Kind
from tasks.audit.run import Report
from tasks.weights.heads.folder import SIDE_FILES


def _always(_: Finding, __: Report) -> bool:
    return True


def _with_head(_: Finding, report: Report) -> bool:
    return report.kind in (Kind.REWARD, Kind.VALUE)


def _is_head(finding: Finding, _: Report) -> bool:
    return finding.file in SIDE_FILES


def _wrapped(_: Finding, report: Report) -> bool:
    """Whether every name begins with the prefix of TRL's value model, which the plan takes off."""
    codes = {one.code for one in report.findings}
    return report.kind == Kind.VALUE and "TRL_RESIDUE" in codes and "WRAPPER_RESIDUE" not in codes


def _of_adapter(finding: Finding, _: Report) -> bool:
    return finding.file == ADAPTER_CONFIG


class Way(NamedTuple):
    """How a delivery deals with an error: what it does about it, and when that is so."""

    why: str
    when: Callable[[Finding, Report], bool] = _always


HANDLED: Mapping[str, Way] = {
    "STRAY_WEIGHT_FILE": Way("kept as an artifact of its own, away from what is served", _is_head),
    "HEAD_IN_MODEL": Way("split off, and kept as an artifact of its own"),
    "HEAD_LABELS": Way("served with the labels that the head has"),
    "HEAD_PREFIX": Way("the head that was saved is taken, by the name that it has"),
    "TRL_RESIDUE": Way("TRL's prefix is taken off", _wrapped),
    "TENSOR_MISSING": Way("it is there, with TRL's prefix; the plan compares it again", _wrapped),
    "TENSOR_UNEXPECTED": Way("it has TRL's prefix; the plan compares it again", _wrapped),
    "VLLM_ARCHITECTURE": Way("served as the family's *ForSequenceClassification", _with_head),
    "WRONG_BASE": Way("refused next, by the same test", _of_adapter),
    "MANIFEST_DIFFERS": Way("refused later, with the base's files: every byte is compared first"),
    "EOS_DISAGREES": Way("served with every id that one of the files ends a text with"),
}
"""By code. What is repaired is repaired in OUT; SOURCE stays as it is."""

_OF_THE_BASE = frozenset({"WRONG_BASE", "MERGED_EQUALS_BASE"})


def handled(finding: Finding, report: Report, *, check_base: bool) -> str:
    """Why an error does not stop the delivery; "" where it does.

    Args:
        finding: the error.
        report: the audit that it is of.
        check_base: whether a wrong base is refused.
    """
    if finding.code in _OF_THE_BASE and not check_base:
        return "check_base=false"
    way = HANDLED.get(finding.code)
    return way.why if way is not None and way.when(finding, report) else ""
