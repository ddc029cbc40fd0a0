"""The checks on real GPUs: `make test-gpu`. Their list is in `suite.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.suite import CHECKS, Check, Setting, run_apart


def listed(*, several: bool) -> list[Any]:
    """Parameters of the checks on one GPU, or on several."""
    chosen = [check for check in CHECKS if (check.gpus > 1) == several]
    return [
        pytest.param(check, id=check.name, marks=pytest.mark.timeout(3 * check.seconds + 60))
        for check in chosen
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("check", listed(several=False))
def test_one(check: Check, setting: Setting, record_property: Callable[[str, object], None]):
    for name, value in run_apart(check, setting).items():
        record_property(name, value)


@pytest.mark.gpus
@pytest.mark.parametrize("check", listed(several=True))
def test_several(check: Check, setting: Setting, record_property: Callable[[str, object], None]):
    for name, value in run_apart(check, setting).items():
        record_property(name, value)
