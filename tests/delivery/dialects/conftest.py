"""One training that every tool saves in its own way, and what has to come out of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.delivery.test_deliver import merged_by_peft
from tests.weights.making import Spread, trained_model


@pytest.fixture(scope="session")
def trained(base: Path) -> Any:
    """The live PEFT model behind `adapter`."""
    return trained_model(base, Spread(), 1)


@pytest.fixture(scope="session")
def merged(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """peft's own merge of it."""
    return merged_by_peft(base, adapter)
