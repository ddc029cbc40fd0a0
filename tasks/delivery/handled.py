"""The errors of an audit that do not stop a delivery, and the reasons. All others stop it.

handled(finding, report, check_base=True)      "split off, ..."; "" if it stops the delivery
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tasks.audit.check import Finding
from tasks.audit.checks.files import TRAINER_STATE
from tasks.audit.run import Report
from tasks.audit.source import ADAPTER_CONFIG, CONFIG, Kind
from tasks.weights.heads import WRAPPER


def _always(_: Finding, __: Report) -> bool:
    return True


def _with_head(_: Finding, report: Report) -> bool:
    return report.kind in (Kind.REWARD, Kind.VALUE)


def _wrapped(finding: Finding, report: Report) -> bool:
    """Return True for a wrapper that the plan takes off: TRL's only from a model with its head."""
    return not finding.tensor.startswith(WRAPPER) or report.kind == Kind.VALUE


def _of_config(finding: Finding, _: Report) -> bool:
    return finding.file == CONFIG


def _of_adapter(finding: Finding, _: Report) -> bool:
    return finding.file == ADAPTER_CONFIG


def _of_the_trainer(finding: Finding, _: Report) -> bool:
    return TRAINER_STATE.fullmatch(finding.file.rpartition("/")[2]) is not None


class Handling(NamedTuple):
    """Reason why an error does not stop a delivery, and the condition for it."""

    why: str
    when: Callable[[Finding, Report], bool] = _always


HANDLED: Mapping[str, Handling] = {
    "HEAD_PLACE": Handling("split off, and kept as an artifact of its own"),
    "HEAD_LABELS": Handling("served with the labels that the head has"),
    "HEAD_UNUSABLE": Handling("the saved head is used, under the name that it has", _of_config),
    "WRAPPER_RESIDUE": Handling("the prefix is taken off: nothing is lost", _wrapped),
    "VLLM_ARCHITECTURE": Handling("served as the family's *ForSequenceClassification", _with_head),
    "WRONG_BASE": Handling("refused in the next step, by the same test", _of_adapter),
    "MANIFEST_DIFFERS": Handling("refused later: every byte is compared with the manifest first"),
    "PICKLE_CALLS": Handling("the trainer's state is neither read nor served", _of_the_trainer),
    "PICKLE_OPAQUE": Handling("the trainer's state is neither read nor served", _of_the_trainer),
    "EOS_DISAGREES": Handling("served with the EOS ids of all files"),
}
"""Handling by finding code. Repairs happen in OUT; SOURCE is never changed."""

_OF_THE_BASE = frozenset({"WRONG_BASE", "MERGED_EQUALS_BASE"})


def handled(finding: Finding, report: Report, *, check_base: bool) -> str:
    """Return the reason why an error does not stop the delivery; "" if it stops it.

    Args:
        finding: the error.
        report: the audit with this error.
        check_base: True if a wrong base is refused.
    """
    if finding.code in _OF_THE_BASE and not check_base:
        return "check_base=false"
    handling = HANDLED.get(finding.code)
    if handling is None or not handling.when(finding, report):
        return ""
    return handling.why
